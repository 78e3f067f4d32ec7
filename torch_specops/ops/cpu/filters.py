"""top_k, top_p and min_p in plain torch.

Sort a row by descending logit, ties by descending index: each filter keeps a prefix of this order. The kept tokens are
therefore described by two bounds: the lowest kept logit (`cut`), and the lowest kept index among the tokens with that
logit (`first`).

In compiled code a separate op computes the bounds, and Inductor calls it without tracing it. The op processes long rows
one at a time, so that a row stays in the CPU's cache, and it sorts only a few hundred logits of each. A traced form
would have to sort whole rows, which is eight times slower, or to unroll a search of 32 passes, which is as fast but
takes 10 seconds to compile.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import Filters
from ..tracing import is_eager_cpu
from .softmax import FLOAT32_MAX, inverse_temperature, scale

# Rows up to this length are sorted, all rows in one call.
SHORT_ROW = 2048
# top_p first looks at the HEAD largest logits of a row. If their mass is below top_p, all logits of the row are divided
# into intervals. The last interval has all tokens that are less likely than exp(-32) times the most likely token.
HEAD = 256
INTERVALS_PER_UNIT = 128
NUM_INTERVALS = 32 * INTERVALS_PER_UNIT
# A mass counts as top_p if it reaches this share of it. float32(0.8), for example, is above 0.8: without the factor,
# eight of ten equal tokens would not reach it, and a ninth would be kept.
TOP_P_REACHED = 1.0 - 2.0**-24


class Bounds(NamedTuple):
    """The bounds [...] of rows. A row keeps its entries with x > cut, and those with x == cut from index `first` on
    (None = 0). (-inf, 0) keeps every entry that is not masked, and cut = NaN keeps none."""

    cut: Tensor
    first: Tensor | None

    def at(self, *index: Tensor | slice) -> Bounds:
        return Bounds(self.cut[index], None if self.first is None else self.first[index])


def row_bounds(logits: Tensor, filters: Filters) -> Bounds | None:
    """Logits [B, ..., V] and filters [B] -> the bounds [B, ...] of the rows; None if there is no filter."""
    if not filters.removes_tokens:
        return None
    find = filter_bounds if is_eager_cpu(logits) else _filter_bounds_op
    cut, first = find(logits, *filters)
    return Bounds(cut, None if filters.top_p is None else first)


def join_bounds(lse: Tensor, logits: Tensor, filters: Filters) -> Tensor:
    """[N, 3]: lse [N], and the bounds of logits [N, V] as CUDA kernels have them: the cut, and the bits of `first`, an
    int32."""
    bounds = row_bounds(logits, filters) or Bounds(torch.full_like(lse, -math.inf), None)
    first = torch.zeros_like(lse) if bounds.first is None else bounds.first.int().view(torch.float32)
    return torch.stack([lse, bounds.cut, first], 1)


def scale_kept(logits: Tensor, inverse: Tensor | None, bounds: Bounds | None) -> Tensor:
    """[B, ..., V], the result of `scale` with -inf for removed tokens."""
    z = scale(logits, inverse)
    return z if bounds is None else torch.where(is_kept(logits, bounds), z, -math.inf)


def scale_kept_tokens(logits: Tensor, tokens: Tensor, inverse: Tensor | None, bounds: Bounds | None) -> Tensor:
    """`scale_kept` for a single logit of each row, the logit of the token in `tokens`."""
    z = scale(logits, inverse)
    if bounds is None:
        return z
    kept = is_kept(logits.unsqueeze(-1), bounds, tokens.unsqueeze(-1))
    return torch.where(kept.squeeze(-1), z, -math.inf)


def is_kept(logits: Tensor, bounds: Bounds, tokens: Tensor | None = None) -> Tensor:
    """[B, ..., V] bool: True for entries that are neither removed nor NaN. `tokens` are the token ids of the entries;
    None = the entries are whole rows."""
    # Comparisons with NaN are false, so NaN counts as removed.
    x, cut = logits.float(), bounds.cut.unsqueeze(-1)
    if bounds.first is None:
        return x >= cut
    index = torch.arange(logits.shape[-1], device=logits.device) if tokens is None else tokens
    return (x > cut) | ((x == cut) & (index >= bounds.first.unsqueeze(-1)))


def filter_logits(logits: Tensor, filters: Filters) -> Tensor:
    """[N, V] -> [N, V], with -inf for removed tokens and NaN."""
    temperature, bounds = filters.temperature, row_bounds(logits, filters)
    if bounds is not None:
        kept = is_kept(logits, bounds)
    else:
        kept = ~logits.isnan()
        if temperature is not None:
            kept = kept & (temperature >= 0).unsqueeze(-1)
    return torch.where(kept, logits, -math.inf)


def filter_bounds(
    logits: Tensor, temperature: Tensor | None, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> tuple[Tensor, Tensor]:
    vocab_size, shape = logits.shape[-1], logits.shape[:-1]
    repeats = shape[1:].numel()
    num_rows = shape.numel()

    def per_row(values: Tensor | None, default: float) -> Tensor:
        if values is None:
            return logits.new_full((num_rows,), default, dtype=torch.float32)
        return values.repeat_interleave(repeats)

    t, k = per_row(temperature, 1.0), per_row(top_k, 0).long()
    p, m = per_row(top_p, 1.0), per_row(min_p, 0.0)
    rows = logits.reshape(num_rows, vocab_size)
    if vocab_size <= SHORT_ROW:
        cut, first = _bounds_of_short_rows(_comparable(rows), t, k, p, m)
    else:
        # Convert the filters to Python numbers, because each operation on an entry of a tensor would take microseconds.
        settings = zip(rows, t.unsqueeze(1), (t > 0).tolist(), k.tolist(), p.tolist(), m.tolist(), strict=True)
        bounds = [
            _bounds(_comparable(row), row_t, row_k, row_p, row_m) if is_sampled else (-math.inf, 0)
            for row, row_t, is_sampled, row_k, row_p, row_m in settings
        ]
        cut, first = t.new_tensor([cut for cut, _ in bounds]), k.new_tensor([first for _, first in bounds])
    has_law = (t > 0) & ~p.isnan() & ~m.isnan()
    cut = torch.where(t == 0, -math.inf, torch.where(has_law, cut, math.nan))
    return cut.view(shape), torch.where(has_law, first, 0).view(shape)


def _comparable(logits: Tensor) -> Tensor:
    return torch.nan_to_num(logits.float(), nan=-math.inf, posinf=math.inf, neginf=-math.inf)


_filter_bounds_op = torch.library.custom_op(
    "specops::filter_bounds", filter_bounds, mutates_args=(), device_types="cpu"
)


@_filter_bounds_op.register_fake
def _(
    logits: Tensor, temperature: Tensor | None, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> tuple[Tensor, Tensor]:
    shape = logits.shape[:-1]
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)


def _bounds_of_short_rows(
    x: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Find the bounds of each row of logits [N, V] from `_comparable` by sorting: `cut` [N] and `first` [N]."""
    vocab_size = x.shape[-1]
    # Sort in ascending order, stably, and reverse, so that among equal logits the higher index comes first.
    x, order = (sorted_.flip(-1) for sorted_ in x.sort(dim=-1, stable=True))
    z = scale(x, inverse_temperature(temperature))
    gap = z - z[:, :1].clamp(min=-FLOAT32_MAX)
    k, p, m = top_k.unsqueeze(-1), top_p.unsqueeze(-1), min_p.unsqueeze(-1)

    kept = x > -math.inf
    kept &= (k <= 0) | (k >= vocab_size) | (x >= x.gather(1, (k - 1).clamp(0, vocab_size - 1)))
    cdf = torch.where(kept, gap.exp(), 0.0).cumsum(-1, dtype=torch.float64)
    before = torch.nn.functional.pad(cdf[:, :-1], (1, 0))
    is_first = torch.arange(vocab_size, device=x.device) == 0
    kept &= (p >= 1) | (before < p.clamp(min=0) * (TOP_P_REACHED * cdf[:, -1:])) | is_first
    kept &= (m <= 0) | (gap >= m.clamp(0, 1).log())
    # The kept entries are a prefix of the sorted row.
    last = (kept.sum(-1, keepdim=True) - 1).clamp(min=0)
    return x.gather(1, last).squeeze(1), order.gather(1, last).squeeze(1)


def _bounds(x: Tensor, temperature: Tensor, k: int, p: float, m: float) -> tuple[float, int]:
    """(cut, first) of one row of logits from `_comparable`."""
    cut, first = -math.inf, 0
    index = None
    if 0 < k < len(x):
        largest = x.topk(k, sorted=False)
        cut = float(largest.values.min())
        if p < 1 or m > 0:
            # Continue with the tokens that top-k kept.
            index = _at_least(x, cut, largest.indices)
            x = x[index]
    if not (p < 1 or m > 0):
        return cut, first
    z = scale(x.unsqueeze(0), inverse_temperature(temperature)).squeeze(0)
    z_max = float(z.max())
    if z_max == -math.inf:
        return cut, first
    if p < 1:
        cut, last = _top_p(x, z - z_max, p)
        first = last if index is None else int(index[last])
    if m > 0:
        likely = z - z_max >= min(math.log(m), 0.0)
        lowest = float(torch.where(likely, x, math.inf).min())
        if lowest > cut:
            cut, first = lowest, 0
    return cut, first


def _at_least(x: Tensor, cut: float, largest: Tensor) -> Tensor:
    """The indices of all x >= cut in ascending order: the k largest, and ties with the k-th."""
    kept = x >= cut
    return largest.sort().values if int(kept.sum()) == len(largest) else kept.nonzero().squeeze(1)


def _top_p(x: Tensor, gap: Tensor, p: float) -> tuple[float, int]:
    """The logit and the index of the last token that top-p keeps."""
    weight = gap.exp()
    mass = p * TOP_P_REACHED * float(weight.sum(dtype=torch.float64))
    among, before = torch.arange(len(x), device=x.device), 0.0
    if len(x) > HEAD:
        largest = x.topk(HEAD, sorted=False)
        among = _at_least(x, float(largest.values.min()), largest.indices)
        if float(weight[among].sum(dtype=torch.float64)) < mass:
            among, before = _crossing(gap, weight, mass)
    # Sort in ascending order, stably, and reverse, so that among equal logits the higher index comes first.
    among = among[x[among].sort(stable=True).indices.flip(0)]
    cdf = before + weight[among].cumsum(0, dtype=torch.float64)
    # By rounding, even the whole sum may be below the mass.
    last = int(among[min(int((cdf < mass).sum()), len(among) - 1)])
    return float(x[last]), last


def _crossing(gap: Tensor, weight: Tensor, mass: float) -> tuple[Tensor, float]:
    """Divide the logits into intervals of equal width, in descending order. Returns the indices of the tokens in the
    interval in which the cumulative sum reaches the mass, and the sum of all intervals before it."""
    interval = (gap * -INTERVALS_PER_UNIT).clamp(max=NUM_INTERVALS - 1).long()
    cdf = weight.new_zeros(NUM_INTERVALS, dtype=torch.float64).scatter_add_(0, interval, weight.double()).cumsum(0)
    reached = min(int((cdf < mass).sum()), int(interval.max()))
    return (interval == reached).nonzero().squeeze(1), float(cdf[reached - 1]) if reached > 0 else 0.0
