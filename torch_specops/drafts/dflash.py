"""DFlash: a drafter that fills a block of masks in one forward (Chen et al. 2026, arXiv:2602.06036)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..ops.attention import attention_dtype
from ..ops.kv_cache import RaggedKeyValues, emptied
from ..sampling import SamplingTensors
from .base import Draft, LanguageModel, as_language_model, feature_model
from .dflash_head import DFlashHead, read_drafter
from .feature import FeatureDraft, check_target
from .layers import Attention

__all__ = ["DFlash"]


class DFlash(FeatureDraft):
    """Drafts a block in one forward of a small network that reads the hidden states of the target.

    Keys and values of the text come from features alone. The block is the newest token and `block_size` - 1 masks,
    which see the text and each other; embeddings and head are the target's. Its keys and values are overwritten once
    the tokens in their places are known. The whole block is read whatever K is, and its first K tokens are the drafts:
    at each place the likeliest token, at any temperature.
    """

    deterministic = True
    head: DFlashHead

    def __init__(self, head: DFlashHead) -> None:
        super().__init__(head)
        self.default_draft_tokens = self.max_draft_tokens = head.config.block_size - 1
        self.feature_layers = head.config.feature_layers
        self._layer_caches: list[RaggedKeyValues] = []

    @classmethod
    def from_pretrained(
        cls,
        folder_or_id: str | os.PathLike[str] | nn.Module,
        target: LanguageModel | nn.Module,
        *,
        dtype: torch.dtype | None = None,
    ) -> DFlash:
        """A drafter as z-lab publishes it (`architectures: ["DFlashDraftModel"]`), or a `MuseGlimmerAssistantModel`.

        Args:
            folder_or_id: as `Eagle3.from_pretrained` takes it; or a model of transformers, whose weights are shared
                where device and dtype allow it.
            target: the model that it was trained for, on the device where the drafter is to be.
            dtype: of the drafter; None = the target's.

        Raises:
            TypeError: a target that does not expose its hidden states.
            ValueError: as `Eagle3.from_pretrained`; a drafter of another method, or quantised.
        """
        model = feature_model(as_language_model("target", target))
        draft = cls(read_drafter(folder_or_id, model.device, dtype or model.dtype))
        draft.bind(model)
        return draft

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
        """K tokens [B, K], the likeliest of each place after processors."""
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
        """The logits [B, K, V] of the first places of the block, after the features at positions [B, n] are read."""
        assert self._target is not None
        config, target, weight = self.head.config, self._target, self.head.fc.weight
        self._read_text(tokens, ends, positions)
        block = F.pad(tokens.gather(1, ends - 1), (0, config.block_size - 1), value=config.mask_token_id)
        places = ends - 1 + torch.arange(config.block_size, device=ends.device)
        attentions = [self._layer_attention(index, places) for index in range(len(config.sees))]
        embedded = F.embedding(block, target.embeddings) * config.embedding_scale
        hidden = self.head(embedded.to(weight.dtype), places, attentions)[:, 1 : num_drafts + 1]
        logits = target.head(hidden.to(target.dtype)) * config.output_multiplier
        return logits if config.softcap is None else torch.tanh(logits / config.softcap) * config.softcap

    def _layer_attention(self, index: int, places: Tensor) -> Attention:
        """The attention of a layer over the text and the block at places [B, n]."""
        before, after = self.head.config.sees[index]
        first = torch.zeros_like(places) if before is None else (places - before).clamp(min=0)
        last = places[:, -1:].expand_as(places)
        last = last if after is None else last.minimum(places + after)
        return self._attention(self._layer_caches[index], torch.stack([first, last], -1), places)

    def _start_caches(self, batch: int, capacity: int) -> None:
        config, weight = self.head.config, self.head.fc.weight
        shape = (batch, config.num_key_value_heads, 0, config.head_dim)
        empty = weight.new_zeros(shape, dtype=attention_dtype(weight))
        # The block of the longest text ends behind it.
        old: Sequence[Any] = self._layer_caches or [None] * len(config.sees)
        self._layer_caches = [emptied(each, empty, capacity + config.block_size) for each in old]

    def _caches(self) -> Sequence[RaggedKeyValues]:
        return self._layer_caches

    def _read_text(self, tokens: Tensor, ends: Tensor, positions: Tensor, rows: Tensor | None = None) -> None:
        features = self._features(ends, positions, rows, self.head.fc.weight.dtype)
        for cache, (keys, values) in zip(self._layer_caches, self.head.context(features, positions), strict=True):
            cache.write(keys.to(cache.keys.dtype), values.to(cache.keys.dtype), positions, rows)
