"""Base classes of drafts that read the target's hidden states."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from ..models.base import FeatureModel, LanguageModel, feature_model
from ..models.conversion import as_language_model
from ..ops.attention import attend, attend_causal, attend_masked, attention_dtype, is_long_text, spans_serve
from ..ops.kv_cache import RaggedKeyValues, emptied
from .layers import Attention
from .model import SampledDraft

Own = TypeVar("Own", bound="PublishedDraft")


def check_target(sizes: Mapping[str, tuple[Any, Any]], feature_layers: Iterable[int] = (), last_layer: int = 0) -> None:
    """Raise if a draft's sizes (None = not known) are not the target's, or if it reads layers beyond the last."""
    for name, (own, expected) in sizes.items():
        if own not in (None, expected):
            raise ValueError(f"draft: it is for another target: {name} {own}, the target has {expected}")
    if not all(0 <= layer <= last_layer for layer in feature_layers):
        raise ValueError(
            f"draft: it is for another target: it reads layers {list(feature_layers)}, "
            f"the target has layers 0 to {last_layer}"
        )


class FeatureDraft(SampledDraft):
    """A source with a network that reads features: the inputs of some of the target's layers at each token.

    In a sequence of N tokens, the features of positions 0 to N - 2 are known, because the target reads the newest token
    after drafting. `start` and `restart` read all known features of a prompt but the last. A step reads the new
    features and overwrites the cache entries of drafts.
    """

    # How many positions a step reads again, besides the new ones.
    num_reread = 0
    head: Any
    # `bind` sets it before every `start`.
    _target: FeatureModel
    # The keys and values of the network's layers, from the first `start` on.
    _caches: Sequence[RaggedKeyValues] = ()
    # [B], how many positions of each row are read; used by eager steps on a CPU only.
    _num_read: Tensor
    _most_drafts = 0
    _of_calls: ClassVar[Sequence[str]] = ("_target", "_caches", "_num_read", "_most_drafts")

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    @property
    def _weight(self) -> Tensor:
        return next(self.head.parameters())

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._weight.device

    def bind(self, target: LanguageModel) -> None:
        self._target = feature_model(target)

    def expect(self, num_draft_tokens: int) -> None:
        self._most_drafts = num_draft_tokens

    def start(self, tokens: Tensor, lengths: Tensor, capacity: int, inputs: Mapping[str, Tensor] | None = None) -> None:
        self._start_caches(tokens.shape[0], capacity)
        self._num_read = lengths - 2
        self.restart(tokens, lengths, torch.arange(tokens.shape[0], device=tokens.device))

    def restart(self, tokens: Tensor, lengths: Tensor, rows: Tensor) -> None:
        tokens, ends = tokens[rows], lengths[rows].unsqueeze(1)
        width = max(int(ends.max()) - 2, 0)
        if width > 0:
            self._read_text(tokens, ends, torch.arange(width, device=tokens.device).expand(len(rows), -1), rows)
        self._num_read = self._num_read.index_copy(0, rows, lengths[rows] - 2)

    def catch_up(self, tokens: Tensor, lengths: Tensor, num_steps: int) -> None:
        self._read_text(tokens, lengths.unsqueeze(1), self._new_positions(lengths, num_steps))

    def static_tensors(self) -> Sequence[Tensor]:
        caches = [tensor for each in self._caches for tensor in (each.keys, each.values)]
        return [*self.head.parameters(), *self.head.buffers(), *caches]

    def _width(self, positions: Tensor, capacity: int) -> int:
        """The number of slots of a cache that tokens at these positions may attend to."""
        return int(positions.amax()) + 1 if self._is_eager_cpu(positions) else capacity

    def _new_positions(self, lengths: Tensor, num_steps: int = 0) -> Tensor:
        """[B, n], the newest positions with features, including all since the last call. Compiled steps and steps on
        CUDA do not read the values of `lengths`. There n covers `num_steps` steps without drafts and one step whose
        drafts were all accepted. Positions before the first become 0, also in a sequence of one token."""
        # Count with the most drafts of any step, because the step before may have had more drafts than this one.
        count = num_steps + self._most_drafts + 1
        if self._is_eager_cpu(lengths):
            count = max(int((lengths - 1 - self._num_read).max()), 1)
            self._num_read = lengths - 1
        index = torch.arange(-count - self.num_reread, 0, device=lengths.device)
        return (lengths.unsqueeze(1) - 1 + index).clamp(min=0)

    def _features(self, ends: Tensor, positions: Tensor, rows: Tensor | None) -> Tensor:
        """The features [A, n, F * H] at positions [A, n] of `rows` [A] (None = all), whose lengths are `ends` [A, 1].
        They are zeros for a sequence of one token, which the target may not have read."""
        rows = torch.arange(len(positions), device=positions.device) if rows is None else rows
        features = self._target.features[rows.unsqueeze(1), positions].to(self._weight.dtype)
        return torch.where(ends.unsqueeze(2) > 1, features, 0.0)

    @abstractmethod
    def _start_caches(self, batch: int, capacity: int) -> None:
        """Make room for `batch` sequences of `capacity` tokens and forget earlier ones; reuses the memory if it
        fits."""

    @abstractmethod
    def _read_text(self, tokens: Tensor, ends: Tensor, positions: Tensor, rows: Tensor | None = None) -> object:
        """Read positions [A, n] in the sequences `tokens` [A, W] of `rows` [A] (None = all), whose lengths are `ends`
        [A, 1]. Positions at or after `ends` - 1 are padding."""


class PublishedDraft(FeatureDraft):
    """A source whose network is published as a separate checkpoint, with layers of `layers.py`."""

    _read_head: ClassVar[Callable[..., Any]]
    _network: ClassVar[type[nn.Module]]
    # The number of its layers, and how many extra slots their caches have after the longest sequence.
    _num_caches, _num_behind = 1, 0

    def __init__(self, head: nn.Module) -> None:
        if not isinstance(head, self._network):
            raise TypeError(
                f"head: expected {self._network.__name__}, got {type(head)}; "
                f"{type(self).__name__}.from_pretrained(folder_or_id, target) reads a published one"
            )
        super().__init__(head)

    @classmethod
    def from_pretrained(
        cls: type[Own],
        folder_or_id: str | os.PathLike[str],
        target: LanguageModel | nn.Module,
        *,
        dtype: torch.dtype | None = None,
    ) -> Own:
        """Read a published head, in the layouts that the class names.

        Args:
            folder_or_id: a folder with config.json and *.safetensors, or the id of a repository on the Hugging Face hub
                (HF_HUB_OFFLINE is respected). Nothing else is read: no pickles and no code.
            target: the model that it was trained for; the head is loaded to its device.
            dtype: of the head; None = the target's.

        Raises:
            TypeError: a target that does not expose its hidden states; an argument of another type.
            ValueError: no such folder; a `dtype` that is not floating-point of 16 to 64 bits; a config with an unknown
                value, with two values of a field, or of another method; a weight that is missing, unknown, quantised,
                of another shape, or contradicted by another; a head for another target. The message names it.
        """
        return cls._published(folder_or_id, target, dtype)

    @classmethod
    def _published(cls: type[Own], source: Any, target: Any, dtype: torch.dtype | None, **options: Any) -> Own:
        model = feature_model(as_language_model("target", target))
        dtype = model.dtype if dtype is None else dtype
        draft = cls(cls._read_head(source, model.device, dtype), **options)
        draft.bind(model)
        return draft

    def _start_caches(self, batch: int, capacity: int) -> None:
        config, weight = self.head.config, self._weight
        shape = (batch, config.num_key_value_heads, 0, config.head_dim)
        empty = weight.new_zeros(shape, dtype=attention_dtype(weight))
        old: Sequence[Any] = self._caches or [None] * self._num_caches
        self._caches = [emptied(each, empty, capacity + self._num_behind) for each in old]

    def _attention(
        self, cache: RaggedKeyValues, spans: Tensor, positions: Tensor, rows: Tensor | None = None
    ) -> Attention:
        """Attention over a cache for positions [A, n] of `rows` [A] (None = all). It first writes their keys and
        values. Each token attends to the slots of its span [A, n, 2]."""
        capacity = cache.keys.shape[2]
        width = self._width(positions, capacity)
        by_spans = spans_serve(positions, capacity, cache.keys.dtype)
        is_causal = by_spans and is_long_text(positions) and not bool(spans[..., 0].any())
        seen = spans
        if not by_spans:
            slots = torch.arange(width, device=positions.device)
            seen = ((slots >= spans[..., :1]) & (slots <= spans[..., 1:])).unsqueeze(1)

        def attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            # Under autocast their dtypes may differ: a norm or a residual branch is computed in float32.
            queries, keys, values = (each.to(cache.keys.dtype) for each in (queries, keys, values))
            cache.write(keys, values, positions, rows)
            keys, values = cache.read(width, rows)
            scale = queries.shape[3] ** -0.5
            if is_causal:
                return attend_causal(queries, keys, values, scale).transpose(1, 2)
            read = attend if by_spans else attend_masked
            return read(queries, keys, values, seen, scale).transpose(1, 2)

        return attention
