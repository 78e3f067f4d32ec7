"""Changes to the tensors of a case: memory layouts, padded drafts, and special logits."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

INF, NAN = math.inf, math.nan


def batch_sliced(x: Tensor) -> Tensor:
    """A view of every second row of a larger batch."""
    larger = x.new_zeros(2 * x.shape[0] + 1, *x.shape[1:])
    larger[1::2] = x
    return larger[1::2]


def vocab_sliced(x: Tensor) -> Tensor:
    """A view of the middle of longer rows. The row stride and the storage offset are odd, so that most rows do not
    start at a 16-byte boundary."""
    longer = x.new_zeros(*x.shape[:-1], (x.shape[-1] + 4) | 1)
    longer[..., 1 : 1 + x.shape[-1]] = x
    return longer[..., 1 : 1 + x.shape[-1]]


def transposed(x: Tensor) -> Tensor:
    """The same values in a layout in which the last dimension has the largest stride."""
    return x.movedim(-1, 0).contiguous().movedim(0, -1)


def expanded(x: Tensor) -> Tensor:
    """The first row, repeated over the batch by a stride of zero."""
    return x[:1].expand_as(x)


def sequence_sliced(x: Tensor) -> Tensor:
    """A view of the first positions of longer sequences."""
    if x.dim() == 1:
        return x
    longer = x.new_zeros(x.shape[0], x.shape[1] + 2, *x.shape[2:])
    longer[:, : x.shape[1]] = x
    return longer[:, : x.shape[1]]


def pad_head(tokens: Tensor, vocab_size: int) -> None:
    tokens[::2, :1] = -(2**63)
    tokens[1::2, :1] = 2**63 - 1


def pad_middle(tokens: Tensor, vocab_size: int) -> None:
    tokens[::2, 1:2] = vocab_size + 7
    tokens[1::2, 1:2] = -(2**31) + 1


def pad_ragged(tokens: Tensor, vocab_size: int) -> None:
    for b in range(tokens.shape[0]):
        tokens[b, b % (tokens.shape[1] + 1) :] = -1


def pad_all(tokens: Tensor, vocab_size: int) -> None:
    tokens[:] = -1
    tokens[:1] = vocab_size
    tokens[1:2] = 2**31 - 1


def token_zero(tokens: Tensor, vocab_size: int) -> None:
    tokens[:] = 0


def token_zero_later(tokens: Tensor, vocab_size: int) -> None:
    """Put token 0 at all positions except the first."""
    tokens[:, 1:] = 0


def fill_target(value: float) -> Callable[[Tensor, Tensor], None]:
    return lambda target, draft: _fill(target, value)


def fill_draft(value: float) -> Callable[[Tensor, Tensor], None]:
    return lambda target, draft: _fill(draft, value)


def _fill(logits: Tensor, value: float) -> None:
    """Fill row 0 at every position, row 1 at the first position, row 2 at the last position, and every second logit of
    row 3."""
    logits[:1] = value
    logits[1:2, :1] = value
    logits[2:3, -1:] = value
    logits[3:4, :, ::2] = value


def fill_mixed(target: Tensor, draft: Tensor) -> None:
    for x in (target, draft):
        x[:1, :, 0::3], x[:1, :, 1::3], x[:1, :, 2::3] = NAN, INF, -INF
        x[1:2, :, 0::2], x[1:2, :, 1::2] = NAN, -INF
        x[2:3, :1, -1], x[3:4, :, 0] = INF, NAN
    target[4:5], draft[4:5] = -INF, NAN
    target[5:6, :1], draft[5:6, -1:] = INF, -INF


def mask(target: Tensor, draft: Tensor) -> None:
    """Mask different tokens in target and draft: the draft masks tokens 1, 4, 7 and so on, the target 2, 5, 8 and so
    on. In the first three rows, target or draft masks nearly all tokens."""
    target[..., 2::3] = -INF
    draft[..., 1::3] = -INF
    target[:2, :, 1:-1] = -INF
    draft[2:3, :, 1:] = -INF


def mask_last(target: Tensor, draft: Tensor) -> None:
    """The target masks the last token, if there is another token."""
    target[..., 1:][..., -1:] = -INF


def overflow(target: Tensor, draft: Tensor) -> None:
    target[:3] = (target[:3] * 1e38).clamp(-3e38, 3e38)
    draft[2:] = (draft[2:] * 1e38).clamp(-3e38, 3e38)


def same(target: Tensor, draft: Tensor) -> None:
    """p == q, and both mask token 0 if there is another token. If a draft is token 0 anyway, its residual is zero."""
    if target.shape[-1] > 1:
        target[..., 0] = -INF
    draft[:] = target[:, :-1]


def ten_equal(target: Tensor, draft: Tensor) -> None:
    """Ten tokens have equal logits, and all others are masked."""
    for x in (target, draft):
        x[..., :10], x[..., 10:] = 0.0, -INF


def barely_more(target: Tensor, draft: Tensor) -> None:
    """The draft masks token 0, which has a share of 2**-115 of the target's mass. It then has all the mass of the
    residual."""
    for x, first in ((target, -80.0), (draft, -INF)):
        x[..., 0], x[..., 1:2], x[..., 2:] = first, 0.0, -INF


def halves(target: Tensor, draft: Tensor) -> None:
    """p(x) = 1/4 and q(x) = 1/2 for every draft x, so that products and sums are exact."""
    for x, kept in ((target, 4), (draft, 2)):
        x[..., :kept], x[..., kept:] = 0.0, -INF


def opposite(target: Tensor, draft: Tensor) -> None:
    draft[:] = -target[:, :-1]


def far_below(target: Tensor, draft: Tensor) -> None:
    """Logits so low that their sigmoids would underflow in float32, and in half of the rows also in float64."""
    for x in (target, draft):
        x[::2] -= 1000.0
        x[1::2] -= 9000.0


def raise_by(shift: float) -> Callable[[Tensor, Tensor], None]:
    """Add a constant to the draft's logits, and to every second target row."""

    def edit(target: Tensor, draft: Tensor) -> None:
        draft += shift
        target[::2] += shift

    return edit


def plateaus(target: Tensor, draft: Tensor) -> None:
    """Round the logits to few distinct values, so that many maxima and many probabilities are equal."""
    for x in (target, draft):
        x.div_(4.0).round_()


def zero_maxima(target: Tensor, draft: Tensor) -> None:
    """Make many maxima equal: they are negative zeros, and in every second sequence zeros of both signs."""
    for x in (target, draft):
        x.div_(4.0).round_().abs_().neg_()
        x[1::2, :, ::2] += 0.0
