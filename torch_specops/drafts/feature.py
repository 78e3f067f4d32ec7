"""What drafts share that read the target's hidden states."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..ops.kv_cache import RaggedKeyValues
from ..ops.tracing import is_eager_cpu
from .base import FeatureModel, LanguageModel, feature_model
from .model import SampledDraft

__all__ = ["FeatureDraft"]


class FeatureDraft(SampledDraft):
    """A source with a network that reads features: what layers of the target read of each token.

    In a text of N tokens, the features of positions 0 to N - 2 are known, because the target reads the newest token
    after the drafts. `start` and `restart` read all of a prompt but the last of them. A step reads those that it finds
    new, and overwrites what was read for drafts.

    Args:
        head: the network.
    """

    # How many positions a step reads again, besides those that are new.
    num_reread = 0

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head
        self._target: FeatureModel | None = None
        # The number of positions that each row had read at the last look. Only steps on a CPU look.
        self._num_read: Tensor | None = None
        self._most_drafts = 0

    def bind(self, target: LanguageModel) -> None:
        self._target = feature_model(target)

    def expect(self, num_draft_tokens: int) -> None:
        self._most_drafts = num_draft_tokens

    def start(self, tokens: Tensor, lengths: Tensor, capacity: int, inputs: Mapping[str, Tensor] | None = None) -> None:
        self._start_caches(tokens.shape[0], capacity)
        self._num_read = lengths - 2
        self.restart(tokens, lengths, torch.arange(tokens.shape[0], device=tokens.device))

    def restart(self, tokens: Tensor, lengths: Tensor, rows: Tensor) -> None:
        assert self._num_read is not None
        tokens, ends = tokens[rows], lengths[rows].unsqueeze(1)
        width = max(int(ends.max()) - 2, 0)
        if width > 0:
            self._read_text(tokens, ends, torch.arange(width, device=tokens.device).expand(len(rows), -1), rows)
        self._num_read = self._num_read.index_copy(0, rows, lengths[rows] - 2)

    def catch_up(self, tokens: Tensor, lengths: Tensor, num_steps: int) -> None:
        self._read_text(tokens, lengths.unsqueeze(1), self._new_positions(lengths, num_steps))

    def static_tensors(self) -> Sequence[Tensor]:
        cache = [tensor for each in self._caches() for tensor in (each.keys, each.values)]
        return [*self.head.parameters(), *self.head.buffers(), *cache]

    def _is_eager_cpu(self, lengths: Tensor) -> bool:
        """True = a step looks at its lengths, to read no more than it has to."""
        return self._shape is None and is_eager_cpu(lengths)

    def _new_positions(self, lengths: Tensor, num_steps: int = 0) -> Tensor:
        """[B, n] the newest positions with features, among them all since the last call; n is constant if the step
        cannot look at its lengths: enough for `num_steps` steps without drafts, and one whose drafts were all accepted.
        Position 0 stands for those before it, also in a text of one token."""
        # A step may have fewer drafts than the one before.
        count = num_steps + self._most_drafts + 1
        if self._is_eager_cpu(lengths):
            assert self._num_read is not None
            count = max(int((lengths - 1 - self._num_read).max()), 1)
            self._num_read = lengths - 1
        index = torch.arange(-count - self.num_reread, 0, device=lengths.device)
        return (lengths.unsqueeze(1) - 1 + index).clamp(min=0)

    def _features(self, ends: Tensor, positions: Tensor, rows: Tensor | None, dtype: torch.dtype) -> Tensor:
        """[A, n, F * H] at positions [A, n] of the rows `rows` [A], None = all, whose texts are `ends` [A, 1] long. The
        target may not have read a text of one token: zeros."""
        assert self._target is not None
        rows = torch.arange(len(positions), device=positions.device) if rows is None else rows
        features = self._target.features[rows.unsqueeze(1), positions].to(dtype)
        return torch.where(ends.unsqueeze(2) > 1, features, 0.0)

    @abstractmethod
    def _start_caches(self, batch: int, capacity: int) -> None:
        """Make room for `batch` texts of `capacity` tokens, and forget what was read; in the same memory if it fits."""

    @abstractmethod
    def _caches(self) -> Sequence[RaggedKeyValues]:
        """The keys and values of the network's layers, once there are any."""

    @abstractmethod
    def _read_text(self, tokens: Tensor, ends: Tensor, positions: Tensor, rows: Tensor | None = None) -> object:
        """Read positions [A, n] of the texts [A, W] of the rows `rows` [A], None = all, which are `ends` [A, 1] long.
        Those at or after `ends` - 1 are padding."""
