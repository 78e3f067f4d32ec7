"""EAGLE-3: a small head that reads the target's hidden states (Li et al. 2025, arXiv:2503.01840)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..models.base import LanguageModel, feature_model
from ..ops.attention import spans_of
from ..ops.kv_cache import Window
from .eagle3_files import read_head
from .eagle3_head import Eagle3Head
from .feature import PublishedDraft, check_target
from .model import SequentialDraft


class PairDraft(PublishedDraft):
    """A source whose network reads pairs: the feature of a token and the embedding of the token after it."""

    head: Eagle3Head
    _network = Eagle3Head
    _is_parallel: ClassVar[bool] = False

    def __init__(self, head: Eagle3Head) -> None:
        super().__init__(head)
        if (head.mask_hidden is not None) != self._is_parallel:
            kinds = "an EAGLE-3 head", "a P-EAGLE head, with a mask_token_id"
            raise ValueError(f"head: expected {kinds[self._is_parallel]}, got {kinds[not self._is_parallel]}")
        self.vocab_size = head.config.vocab_size
        self.default_draft_tokens = head.config.num_drafts
        self._num_caches = len(head.config.windows)

    def bind(self, target: LanguageModel) -> None:
        model, config = feature_model(target), self.head.config
        layers = config.feature_layers
        if layers is None:
            layers = (2, model.num_layers // 2, model.num_layers - 3)
        sizes = {
            "vocab_size": (config.vocab_size, model.vocab_size),
            "target_hidden_size": (config.target_hidden_size, model.hidden_size),
            "num_target_layers": (config.num_target_layers, model.num_layers),
        }
        check_target(sizes, layers, model.num_layers - 1)
        if self.head.embed_tokens is None and config.hidden_size != model.hidden_size:
            raise ValueError(
                f"draft: the head has no embed_tokens, and the target's are {model.hidden_size} wide; "
                f"expected {config.hidden_size}"
            )
        self.feature_layers = layers
        super().bind(target)

    def _read_text(self, tokens: Tensor, ends: Tensor, positions: Tensor, rows: Tensor | None = None) -> Tensor:
        """The head's output [A, n, H] at pairs [A, n]. A sequence of one token has no pair: that token is read with a
        feature of zeros."""
        following = self._following(tokens, ends, positions)
        return self._read(self.head.fuse(self._features(ends, positions, rows)), following, positions, rows)

    def _following(self, tokens: Tensor, ends: Tensor, positions: Tensor) -> Tensor:
        """The tokens [A, n] of the pairs at positions [A, n]."""
        return tokens.gather(1, torch.minimum(positions + 1, ends - 1))

    def _read(self, hidden: Tensor, tokens: Tensor, positions: Tensor, rows: Tensor | None = None) -> Tensor:
        """The head's output [A, n, H] from the features `hidden` [A, n, H] and the tokens [A, n] after them."""
        windows = (None if window is None else Window(window) for window in self.head.config.windows)
        attentions = [
            self._attention(cache, spans_of(positions, window), positions, rows)
            for cache, window in zip(self._caches, windows, strict=True)
        ]
        embed = self._target.embed if self.head.embed_tokens is None else self.head.embed_tokens
        return self.head.read(hidden, embed(tokens).to(hidden.dtype), positions, attentions)


class Eagle3(PairDraft, SequentialDraft):
    """Drafts with a decoder layer, or a few, over the hidden states of the target (an EAGLE-3 head).

    Pair i is the feature of token i (the inputs of three of the target's layers) and the embedding of token i + 1; from
    it the head predicts token i + 2. The first forward of a step reads the pairs of all tokens that the target has read
    since the last step; their keys and values overwrite those of drafts. Every further draft costs a forward of the
    head over one token, with the last layer's output as the feature.

    The head's vocabulary may be smaller than the target's. Tokens that it lacks get the logit -inf and are never
    proposed.
    Verification uses these logits, so the target's distribution is kept.

    `from_pretrained` reads heads as EAGLE and SpecForge save them (`architectures: ["LlamaForCausalLMEagle3"]`), as the
    speculators library does (`speculators_model_type: "eagle3"`), and as DeepSpec does (`["Qwen3Eagle3Model"]`).

    Examples:
        >>> import torch, transformers, torch_specops
        >>> from torch_specops.drafts.eagle3_head import Eagle3Config, Eagle3Head
        >>> config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=4, n_head=4, eos_token_id=None)
        >>> target = transformers.GPT2LMHeadModel(config).eval()
        >>> sizes = dict(vocab_size=64, draft_vocab_size=64, target_hidden_size=32, hidden_size=32,
        ...     intermediate_size=64, num_heads=4, num_key_value_heads=2, head_dim=8)
        >>> draft = torch_specops.drafts.Eagle3(Eagle3Head(Eagle3Config(**sizes)))
        >>> output = torch_specops.generate(target, torch.tensor([[5, 6, 7]]), draft=draft, max_new_tokens=8, seed=0)
        >>> output.lengths
        tensor([11])
    """

    _read_head = staticmethod(read_head)

    def _unread(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return tokens, self._new_positions(lengths)

    def _forward(
        self, tokens: Tensor, ends: Tensor, positions: Tensor, output: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The logits, and the head's output [B, 1, H] that gave them."""
        if output is None:
            # Contiguous like later outputs, so that the same graph reads it.
            output = self._read_text(tokens, ends, positions)[:, -1:].contiguous()
        else:
            output = self._read(self.head.feedback(output), tokens, positions)
        return self.head.target_logits(output), output
