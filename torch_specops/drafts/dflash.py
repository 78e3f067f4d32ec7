"""DFlash: a drafter that fills a block of masks in one forward (Chen et al. 2026, arXiv:2602.06036)."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..checks import check_bool, check_number
from ..models.base import FeatureModel, LanguageModel, feature_model
from ..sampling import SamplingTensors
from .base import Draft
from .dflash_files import read_drafter
from .dflash_head import DFlashHead
from .feature import PublishedDraft, check_target
from .layers import Attention


class DFlash(PublishedDraft):
    """Drafts a block in one forward of a small network that reads the hidden states of the target.

    Keys and values of the sequence are computed from features alone. The block is the newest token and `block_size` - 1
    masks, which attend to the sequence and to each other; embeddings and head are the drafter's, or the target's. The
    block's keys and values are overwritten once its tokens are known. The forward always reads the whole block. Each
    mask gives a draft, and where the drafter was trained so, the newest token too.

    A DFlash2 drafter (z-lab 2026) has convolutions around the sublayers of its network, and a selector: draft j is one
    of the likeliest tokens, and the score of each depends on the draft before and the hidden state at j. A DSpark
    drafter (DeepSeek-AI 2026) has a Markov head: it adds W2 z to the logits of draft j, where z depends on the draft
    before (r numbers), and on the hidden state at j and a state of the block for some kinds. Both take K small
    products, and no forward. Their drafts depend on each other, so they are sampled. A DFlash drafter gives the
    likeliest tokens, at any temperature: drawn independently, fewer are accepted.

    `from_pretrained` reads drafters in z-lab's layout (`architectures: ["DFlashDraftModel"]`, `["DFlash2DraftModel"]`),
    transformers' (`MuseGlimmerAssistantModel`), the speculators library's (`speculators_model_type: "dflash"`,
    `"dflash2"` and `"dspark"`), and DeepSpec's and SpecForge's (`["Qwen3DSparkModel"]`, `["DSparkDraftModel"]`).

    Args:
        head: the network, as `from_pretrained` reads it.
        sampled: True = drafts are sampled, False = they are the likeliest tokens; None = sampled if the drafter has a
            Markov head or a selector. The default of `verify` follows.
        confidence: in [0, 1). A row's drafts end before the first that the target accepts with a smaller probability,
            as the drafter's confidence head estimates it from the drafts before; 0 = never. Raises ValueError outside
            this range, and above 0 for a drafter without this head; TypeError for another type.

    Examples:
        >>> import torch, transformers, torch_specops
        >>> from torch_specops.drafts.dflash_head import DFlashConfig, DFlashHead
        >>> config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=4, n_head=4, eos_token_id=None)
        >>> target = transformers.GPT2LMHeadModel(config).eval()
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_heads=4, num_key_value_heads=2, head_dim=8)
        >>> block = dict(block_size=5, mask_token_id=63, feature_layers=(1, 4), sees=((None, None),))
        >>> draft = torch_specops.drafts.DFlash(DFlashHead(DFlashConfig(**sizes, **block)))
        >>> output = torch_specops.generate(target, torch.tensor([[5, 6, 7]]), draft=draft, max_new_tokens=8, seed=0)
        >>> output.lengths
        tensor([11])
    """

    head: DFlashHead
    _read_head, _network = staticmethod(read_drafter), DFlashHead

    def __init__(self, head: DFlashHead, *, sampled: bool | None = None, confidence: float = 0.0) -> None:
        super().__init__(head)
        config = head.config
        if not 0 <= check_number("confidence", confidence) < 1:
            raise ValueError(f"confidence: expected a number in [0, 1), got {confidence!r}")
        if confidence > 0 and head.confidence_head is None:
            raise ValueError(f"confidence: expected 0, because this drafter has no confidence head, got {confidence}")
        sampled = head.is_conditional if sampled is None else sampled
        check_bool("sampled", sampled)
        self.deterministic = not sampled
        self.confidence = confidence
        self.max_draft_tokens = config.most_drafts
        self.default_draft_tokens = config.num_drafts or config.most_drafts
        self.feature_layers = config.feature_layers
        self._num_caches = len(config.sees)
        # Room for a block after the longest sequence.
        self._num_behind = config.block_size

    @classmethod
    def from_pretrained(
        cls,
        folder_or_id: str | os.PathLike[str] | nn.Module,
        target: LanguageModel | nn.Module,
        *,
        dtype: torch.dtype | None = None,
        sampled: bool | None = None,
        confidence: float = 0.0,
    ) -> DFlash:
        """Read a published drafter, in the layouts that the class names; its config tells them apart.

        Args:
            folder_or_id: a folder with config.json and *.safetensors, or the id of a repository on the Hugging Face hub
                (HF_HUB_OFFLINE is respected). Nothing else is read: no pickles and no code. May also be a model of
                transformers, whose weights are shared where device and dtype allow it.
            target: the model that it was trained for; the drafter is loaded to its device.
            dtype: of the drafter; None = the target's.
            sampled, confidence: as in the class.

        Raises:
            TypeError: a target that does not expose its hidden states; an argument of another type.
            ValueError: no such folder; a `dtype` that is not floating-point of 16 to 64 bits; a config with an unknown
                value, with two values of a field, or of another method; a weight that is missing, unknown, quantised,
                of another shape, or contradicted by another; a drafter for another target; a `confidence` that it
                cannot have. The message names it.
        """
        return cls._published(folder_or_id, target, dtype, sampled=sampled, confidence=confidence)

    def bind(self, target: LanguageModel) -> None:
        head, config = self.head, self.head.config
        shared = [] if head.embed_tokens is not None else ["embeddings"]
        model = feature_model(target, *shared, *([] if head.lm_head is not None else ["head"]))
        sizes = {
            "hidden_size": (config.hidden_size, model.hidden_size),
            "vocab_size": (config.vocab_size, model.vocab_size),
            "num_target_layers": (config.num_target_layers, model.num_layers),
        }
        check_target(sizes, config.feature_layers, model.num_layers - (not config.reads_last_norm))
        if config.mask_token_id >= len(self._embeddings(model)):
            raise ValueError(f"draft: mask_token_id {config.mask_token_id} is none of the target's tokens")
        super().bind(target)

    def propose(
        self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, sampling: SamplingTensors, seeds: Tensor
    ) -> Draft:
        """K tokens [B, K], after processors. If sampled, with the logits [B, K, V] they were sampled from and their
        logsumexp [B, K] unless drafts share the target's noise."""
        ends, positions = lengths.unsqueeze(1), self._new_positions(lengths)
        read = self._piece(self._read_block, num_draft_tokens, positions.shape[1])
        logits, hidden, state = read(tokens, ends, positions, num_draft_tokens)
        are_independent = not self.head.is_conditional and self.confidence == 0
        if self.deterministic and are_independent and sampling.processors is None:
            return Draft(self.head.target_logits(logits).argmax(-1))

        def step(index: int, *others: Any) -> tuple[Any, ...]:
            return self._piece(self._draw)(logits[:, index : index + 1], hidden[:, index], *others)

        drawn_from = None if self.head.is_conditional or self.head.draft_of_target is not None else logits
        return self._draw_in_turn(step, state, tokens, lengths, num_draft_tokens, sampling, seeds, drawn_from)

    def _draw(
        self,
        logits: Tensor,
        hidden: Tensor,
        previous: Tensor,
        state: Tensor | None,
        ends: Tensor,
        numbers: Tensor,
        sampling: SamplingTensors,
        text: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """A draft, from the logits [B, 1, D] and hidden states [B, H] at its place, as `_draw_in_turn` says."""
        head, previous = self.head, previous.squeeze(1)
        if head.markov_head is not None:
            bias, state = head.markov_head(previous, hidden, state)
            logits = logits + bias.unsqueeze(1).to(logits.dtype)
        logits = head.target_logits(logits)
        if head.candidate_selector is not None:
            logits = head.candidate_selector(logits, previous, hidden)
        token, of_token, lse = self._pick(logits, ends, numbers, sampling, text)
        if self.confidence > 0:
            token = torch.where(head.confidence_of(previous, hidden) < self.confidence, -1, token)
        return token, of_token, lse, state

    def _read_block(
        self, tokens: Tensor, ends: Tensor, positions: Tensor, num_drafts: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Read the features at positions [B, n]. Return for the places that give drafts the logits [B, K, D], before
        the Markov head or the selector, and the hidden states [B, K, H]; and the first state [B, r] of the Markov
        head."""
        head, config, target = self.head, self.head.config, self._target
        self._read_text(tokens, ends, positions)
        newest = tokens.gather(1, ends - 1)
        block = F.pad(newest, (0, config.block_size - 1), value=config.mask_token_id)
        places = ends - 1 + torch.arange(config.block_size, device=ends.device)
        attentions = [self._layer_attention(index, places) for index in range(self._num_caches)]
        embedded = F.embedding(block, self._embeddings(target)) * config.embedding_scale
        hidden = head(embedded.to(self._weight.dtype), places, attentions)
        state = None
        if head.markov_head is not None:
            state = hidden.new_zeros(len(tokens), config.markov_rank)
            if config.first_place > 0:
                # In training it has read the newest token's place, which gives no draft.
                _, state = head.markov_head(newest.squeeze(1), hidden[:, 0], state)
        hidden = hidden[:, config.first_place : config.first_place + num_drafts]
        logits = target.head(hidden.to(target.dtype)) if head.lm_head is None else head.lm_head(hidden)
        logits = logits.float() if logits.dtype == torch.float64 else logits
        if config.output_multiplier != 1:
            logits = logits * config.output_multiplier
        capped = logits if config.softcap is None else torch.tanh(logits / config.softcap) * config.softcap
        return capped, hidden, state

    def _embeddings(self, target: FeatureModel) -> Tensor:
        """The drafter's [V, H] if it has them, otherwise the target's."""
        embed_tokens = self.head.embed_tokens
        return target.embeddings if embed_tokens is None else embed_tokens.weight

    def _layer_attention(self, index: int, places: Tensor) -> Attention:
        """The attention of a layer over the sequence and the block at positions `places` [B, n]."""
        config = self.head.config
        before, after = config.sees[index]
        origin = places[:, :1].expand_as(places) if config.window_of_block else places
        first = torch.zeros_like(places) if before is None else (origin - before).clamp(min=0)
        last = places[:, -1:].expand_as(places)
        last = last if after is None else last.minimum(places + after)
        return self._attention(self._caches[index], torch.stack([first, last], -1), places)

    def _read_text(self, tokens: Tensor, ends: Tensor, positions: Tensor, rows: Tensor | None = None) -> None:
        context = self.head.context(self._features(ends, positions, rows), positions)
        for cache, (keys, values) in zip(self._caches, context, strict=True):
            cache.write(keys.to(cache.keys.dtype), values.to(cache.keys.dtype), positions, rows)
