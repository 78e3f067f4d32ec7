"""The arguments of each op as one object, which is passed to the checks, `eager/`, `dense/` and `kernels/`.

Names, order, defaults and meaning are those of the public functions in `ops.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["Filters", "SigmoidArguments", "VerifyArguments"]


class Filters(NamedTuple):
    """Parameters that turn a row of logits into a distribution: an entry for each row, [N] or [B]; None = not used."""

    temperature: Tensor | None = None  # [N] float32
    top_k: Tensor | None = None  # [N] int64 or int32
    top_p: Tensor | None = None  # [N] float32
    min_p: Tensor | None = None  # [N] float32

    def at(self, rows: slice | list[int]) -> Filters:
        return Filters(*(None if value is None else value[rows] for value in self))

    @property
    def removes_tokens(self) -> bool:
        """True if there is a filter besides the temperature."""
        return self.top_k is not None or self.top_p is not None or self.min_p is not None


class VerifyArguments(NamedTuple):
    """The arguments of `verify_exact`; `verify_block` has all but `argmax_lenience`."""

    target_logits: Tensor  # [B, K+1, V]
    draft_tokens: Tensor  # [B, K]
    draft_logits: Tensor | None  # [B, K, V]
    accept_uniforms: Tensor  # [B, K]
    sample_uniforms: Tensor  # [B]
    temperature: Tensor | None = None  # [B]
    draft_lse: Tensor | None = None  # [B, K]
    lenience: float = 1.0
    top_k: Tensor | None = None  # [B]
    top_p: Tensor | None = None  # [B]
    min_p: Tensor | None = None  # [B]
    argmax_lenience: float = 1.0
    filter_draft: bool = True

    @property
    def filters(self) -> Filters:
        """The filters of the target's rows."""
        return Filters(self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def draft_filters(self) -> Filters:
        return self.filters if self.filter_draft else Filters(self.temperature)


class SigmoidArguments(NamedTuple):
    """The arguments of `verify_sigmoid`."""

    target_logits: Tensor  # [B, K+1, V]
    draft_tokens: Tensor  # [B, K]
    draft_logits: Tensor  # [B, K, V]
    accept_uniforms: Tensor  # [B, K]
    sample_uniforms: Tensor  # [B]
    alpha: float = -1e3
    beta: float = 1e3
    temperature: Tensor | None = None  # [B]
