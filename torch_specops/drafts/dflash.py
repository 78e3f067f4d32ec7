"""DFlash: a drafter that fills a block of masks in one forward (Chen et al. 2026, arXiv:2602.06036)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..models.base import LanguageModel, feature_model
from ..sampling import SamplingTensors
from .base import Draft
from .dflash_head import DFlashHead, read_drafter
from .feature import PublishedDraft, check_target
from .layers import Attention


class DFlash(PublishedDraft):
    """Drafts a block in one forward of a small network that reads the hidden states of the target.

    Keys and values of the sequence are computed from features alone. The block is the newest token and `block_size` - 1
    masks, which attend to the sequence and to each other; embeddings and head are the target's. The block's keys and
    values are overwritten once its tokens are known. The forward always reads the whole block, and its first K masks
    give the drafts: the most likely token at each, at any temperature.

    `from_pretrained` reads drafters in z-lab's layout (`architectures: ["DFlashDraftModel"]`) and in transformers'
    (`MuseGlimmerAssistantModel`).

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

    deterministic = True
    head: DFlashHead
    _read_head = staticmethod(read_drafter)

    def __init__(self, head: DFlashHead) -> None:
        super().__init__(head)
        self.default_draft_tokens = self.max_draft_tokens = head.config.block_size - 1
        self.feature_layers = head.config.feature_layers
        self._num_caches = len(head.config.sees)
        # Room for a block after the longest sequence.
        self._num_behind = head.config.block_size

    def bind(self, target: LanguageModel) -> None:
        model, config = feature_model(target, "embeddings", "head"), self.head.config
        sizes = {
            "hidden_size": (config.hidden_size, model.hidden_size),
            "vocab_size": (config.vocab_size, model.vocab_size),
            "num_target_layers": (config.num_target_layers, model.num_layers),
        }
        check_target(sizes, config.feature_layers, model.num_layers)
        if config.mask_token_id >= len(model.embeddings):
            raise ValueError(f"draft: mask_token_id {config.mask_token_id} is none of the target's tokens")
        super().bind(target)

    def propose(
        self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, sampling: SamplingTensors, seeds: Tensor
    ) -> Draft:
        """K tokens [B, K], the most likely at each position after processors."""
        ends, positions = lengths.unsqueeze(1), self._new_positions(lengths)
        piece = self._piece(self._logits, num_draft_tokens, positions.shape[1])
        logits = piece(tokens, ends, positions, num_draft_tokens)
        if sampling.processors is None:
            return Draft(logits.argmax(-1))
        text = F.pad(tokens, (0, num_draft_tokens))
        for index in range(num_draft_tokens):
            token = sampling.process(logits[:, index : index + 1], text, ends + index).argmax(-1)
            text = text.scatter(1, ends + index, token)
        return Draft(text.gather(1, ends + torch.arange(num_draft_tokens, device=text.device)))

    def _logits(self, tokens: Tensor, ends: Tensor, positions: Tensor, num_drafts: int) -> Tensor:
        """Read the features at positions [B, n]; return the logits [B, K, V] of the block's first K masks."""
        config, target = self.head.config, self._target
        self._read_text(tokens, ends, positions)
        block = F.pad(tokens.gather(1, ends - 1), (0, config.block_size - 1), value=config.mask_token_id)
        places = ends - 1 + torch.arange(config.block_size, device=ends.device)
        attentions = [self._layer_attention(index, places) for index in range(self._num_caches)]
        embedded = F.embedding(block, target.embeddings) * config.embedding_scale
        hidden = self.head(embedded.to(self._weight.dtype), places, attentions)[:, 1 : num_drafts + 1]
        logits = target.head(hidden.to(target.dtype)) * config.output_multiplier
        return logits if config.softcap is None else torch.tanh(logits / config.softcap) * config.softcap

    def _layer_attention(self, index: int, places: Tensor) -> Attention:
        """The attention of a layer over the sequence and the block at positions `places` [B, n]."""
        before, after = self.head.config.sees[index]
        first = torch.zeros_like(places) if before is None else (places - before).clamp(min=0)
        last = places[:, -1:].expand_as(places)
        last = last if after is None else last.minimum(places + after)
        return self._attention(self._caches[index], torch.stack([first, last], -1), places)

    def _read_text(self, tokens: Tensor, ends: Tensor, positions: Tensor, rows: Tensor | None = None) -> None:
        context = self.head.context(self._features(ends, positions, rows), positions)
        for cache, (keys, values) in zip(self._caches, context, strict=True):
            cache.write(keys.to(cache.keys.dtype), values.to(cache.keys.dtype), positions, rows)
