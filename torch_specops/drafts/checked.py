"""Wraps a user's draft source for the loop."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..sampling import SamplingTensors
from ..tracing import can_read_data
from .base import Draft, DraftSource, LanguageModel, static_tensors_of

__all__ = ["CheckedDraft"]


def _of_source(name: str, default: object) -> Any:
    """An attribute of the source, read each time, because the source may learn it when it is bound."""
    return property(lambda self: getattr(self.source, name, default))


class CheckedDraft(DraftSource):
    """Forwards to another source and checks its proposals; members that it lacks default to those of `DraftSource`.

    A wrong proposal would otherwise show as an error far from its cause, or as wrong text.

    Args:
        source: an object with `propose`.

    Raises:
        TypeError: from `propose`, for something other than a `Draft`, or tokens that are not integers.
        ValueError: from `propose`, for tensors of other shapes; for writing into tokens or lengths, which is checked
            where it costs nothing (eager steps on a CPU).
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        self._vocab_size: int | None = None

    deterministic = _of_source("deterministic", DraftSource.deterministic)
    vocab_size = _of_source("vocab_size", DraftSource.vocab_size)
    device = _of_source("device", DraftSource.device)
    max_length = _of_source("max_length", DraftSource.max_length)
    compiles_itself = _of_source("compiles_itself", DraftSource.compiles_itself)
    feature_layers = _of_source("feature_layers", DraftSource.feature_layers)
    # The model that the source reads, if it has one under this name.
    model = _of_source("model", None)

    def bind(self, target: LanguageModel) -> None:
        self._vocab_size = target.vocab_size
        getattr(self.source, "bind", super().bind)(target)

    def expect(self, num_draft_tokens: int) -> None:
        getattr(self.source, "expect", super().expect)(num_draft_tokens)

    def start(self, tokens: Tensor, lengths: Tensor, capacity: int, inputs: Mapping[str, Tensor] | None = None) -> None:
        getattr(self.source, "start", super().start)(tokens, lengths, capacity, inputs)

    def compile(self, shape: Hashable | None) -> None:
        # The `compile` of other sources may be that of `nn.Module`.
        if self.compiles_itself:
            getattr(self.source, "compile", super().compile)(shape)

    def catch_up(self, tokens: Tensor, lengths: Tensor, num_steps: int) -> None:
        getattr(self.source, "catch_up", super().catch_up)(tokens, lengths, num_steps)

    def restart(self, tokens: Tensor, lengths: Tensor, rows: Tensor) -> None:
        getattr(self.source, "restart", super().restart)(tokens, lengths, rows)

    def replace_inputs(self, row: int, inputs: Mapping[str, Tensor]) -> None:
        getattr(self.source, "replace_inputs", super().replace_inputs)(row, inputs)

    @property
    def can_restart(self) -> bool:
        if isinstance(self.source, DraftSource):
            return self.source.can_restart
        return hasattr(self.source, "restart") or not hasattr(self.source, "start")

    def end(self, tokens: Tensor, lengths: Tensor) -> None:
        getattr(self.source, "end", super().end)(tokens, lengths)

    def static_tensors(self) -> Sequence[Tensor] | None:
        return static_tensors_of(self.source)

    def propose(
        self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, sampling: SamplingTensors, seeds: Tensor
    ) -> Draft:
        text, ends = tokens.clone(), lengths.clone()
        draft = self.source.propose(text, ends, num_draft_tokens, sampling, seeds)
        self._check(draft, tokens.shape[0], num_draft_tokens)
        if can_read_data(tokens, lengths):
            for name, copied, given in (("tokens", text, tokens), ("lengths", ends, lengths)):
                if not torch.equal(copied, given):
                    raise ValueError(f"draft: {self._name} wrote into {name}; it may only read them")
        return draft

    @property
    def _name(self) -> str:
        return f"{type(self.source).__name__}.propose"

    def _check(self, draft: object, batch: int, most: int) -> None:
        if not isinstance(draft, Draft):
            raise TypeError(f"draft: expected a Draft from {self._name}, got {type(draft)}")
        tokens, logits, lse = draft.tokens, draft.logits, draft.lse
        if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int64, torch.int32):
            found = getattr(tokens, "dtype", type(tokens))
            raise TypeError(f"draft: expected int64 tokens [B, K] from {self._name}, got {found}")
        shape = list(tokens.shape)
        if len(shape) != 2 or shape[0] != batch or shape[1] > most:
            raise ValueError(f"draft: expected tokens [{batch}, {most}] or fewer from {self._name}, got shape {shape}")
        for name, value, expected in (("logits", logits, [*shape, self._vocab_size]), ("lse", lse, shape)):
            if value is not None and list(value.shape) != expected:
                raise ValueError(f"draft: expected {name} {expected} from {self._name}, got shape {list(value.shape)}")
