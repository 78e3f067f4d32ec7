"""Linear layers, activations and attention whose results for a token depend on that token alone, to the last bit.

On a CPU the kernels of torch add in another order for another number of rows, and the vectorised loops of some
activations compute what is left over at their end, or at the end of a thread's share, with another exponential. So here
- a product has one of a few numbers of rows, each of which gave the same bits when it was first used in this process;
- attention also reads whole blocks of slots by their position in the text: a block that a token does not see changes
  nothing;
- an activation gets its numbers in pieces that fill whole vectors and that no two threads share.

Embeddings, norms, softmax, `exp`, `sin` and `cos` need none of this. The functions are compositions of torch ops, so
gradients work.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

# The numbers of rows that a product may have. With few rows a CPU's libraries use other routines, which begin at 2, 16
# or 33 rows and depend on the weight and the number of threads, so a number is used only if it has been compared.
COUNTS = (4, *range(8, 136, 8), 256)
# Up to this many rows are padded to one of these numbers; more rows are split first.
MOST_PADDED = 128
# Numbers of rows are compared with this one, which no routine for few rows takes.
REFERENCE = 48
# The same for attention, whose kernel takes 32 queries at a time. From 64 queries on it may pack the keys, depending on
# the numbers of heads and threads, and so in a way that no comparison shows.
ATTENTION_COUNTS, ATTENTION_REFERENCE = tuple(count for count in COUNTS if count < 64), 16
# The kernel of scaled_dot_product_attention reads this many slots at a time, or all slots if there are fewer. Then
# attention reads one of a few numbers of slots, which are compared too.
BLOCK = 512
WIDTHS = (64, 128, 256, BLOCK)
# An activation gets at most PIECE numbers at a time, which torch leaves to one thread, and a multiple of LANES.
PIECE, LANES = 2**15, 64
NONE_AGREES = "have other bits with another number of rows, whichever is tried"

# Some rows, their product as it should be, and the product that is to be compared.
Sample = tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]

# A kind of product, with torch's settings -> number of rows -> whether it gives the bits of the reference.
_agreeing: dict[Hashable, dict[int, bool]] = {}


def settings() -> tuple[int, str]:
    """The settings of torch on which the routines for products depend."""
    return torch.get_num_threads(), torch.get_float32_matmul_precision()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`: x [..., I], weight [O, I], bias [O] -> [..., O], in float32 or bfloat16.

    Raises:
        RuntimeError: with this weight, a row's bits depend on the number of rows, whichever are tried.
    """
    rows = x.reshape(-1, x.shape[-1])
    sizes = _linear_sizes(rows.shape[0], weight, bias)
    output = _in_parts(lambda part: F.linear(part, weight, bias), rows, sizes)
    return output.view(*x.shape[:-1], weight.shape[0])


def by_rows(function: Callable[[Tensor], tuple[Tensor, ...]], rows: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Apply a function of rows [R, I] that is a product with `weight` [O, I] and then works row by row.

    Raises:
        RuntimeError: as `linear` does.
    """
    count = rows.shape[0]
    sizes = _linear_sizes(count, weight, None)
    parts = map(function, F.pad(rows, (0, 0, 0, max(sum(sizes) - count, 0))).split(sizes))
    return tuple(torch.cat(outputs)[:count] for outputs in zip(*parts, strict=True))


def _linear_sizes(count: int, weight: Tensor, bias: Tensor | None) -> list[int]:
    def sample() -> Sample:
        some = _cancelling(min(weight.shape[0], 512), weight.shape[1], 1)
        copies = torch.empty_like(weight).copy_(some.repeat(-(-weight.shape[0] // 512), 1)[: weight.shape[0]])
        zeros = None if bias is None else torch.zeros_like(bias)
        rows = _cancelling(REFERENCE, weight.shape[1], -1).to(weight.dtype)
        return rows, F.linear(rows, copies, zeros), lambda given: F.linear(given, copies, zeros)

    kind = "linear", weight.shape, weight.stride(), weight.dtype, bias is None
    sizes = _sizes(count, kind, sample)
    if sizes is None:
        raise RuntimeError(f"invariant: on this machine products with {list(weight.shape)} weights {NONE_AGREES}")
    return sizes


def pointwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function of single numbers, such as SiLU, to x of any shape."""
    flat = x.reshape(-1)
    pieces, rest = divmod(flat.shape[0], PIECE)
    sizes = [PIECE] * pieces + [rest + -rest % LANES] * (rest > 0)
    return _in_parts(function, flat, sizes).view(x.shape)


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention, softmax(scale * queries @ keys^T) @ values.

    Args:
        queries: [B, G * H, n, D] float32 or bfloat16.
        keys, values: [B, H, W, D] in the same dtype, finite. Query heads g * G to (g + 1) * G - 1 share head g. Slot j
            holds the token at position j of its text. They are copied unless W is a `whole_width`.
        mask: [B or 1, 1, n, W] bool, the slots that each query attends to.
        scale: the factor that scores are multiplied by.

    Returns:
        [B, n, G * H, D]; 0 for a query that attends to no slot.

    Raises:
        RuntimeError: with this D, a query's bits depend on the number of queries, whichever are tried.
    """
    batch, num_heads, count, size = queries.shape
    heads = keys.shape[1]
    group = num_heads // heads
    width, sizes = _attention_sizes(group * count, keys.shape[2], size, queries.dtype)
    if padding := width - keys.shape[2]:
        keys, values = (F.pad(each, (0, 0, 0, padding)) for each in (keys, values))
        mask = F.pad(mask, (0, padding))
    # The query heads of a group are further queries of their key head.
    rows = queries.reshape(batch, heads, group, count, size).transpose(2, 3).flatten(2, 3)
    outputs, first = [], 0
    for number in sizes:
        # Padding sees what the last token sees.
        tokens = (torch.arange(first, first + number, device=rows.device) // group).clamp(max=count - 1)
        seen = mask[:, :, tokens]
        if len(sizes) > 1 and keys.shape[2] > BLOCK:
            # Leave out the blocks after the last slot that these queries of a prompt see.
            last = max(seen.flatten(0, 2).any(0).nonzero().flatten().tolist(), default=0)
            width = (last // BLOCK + 1) * BLOCK
        part = rows[:, :, first : first + number], keys[:, :, :width], values[:, :, :width]
        outputs.append(_attend(*part, seen[..., :width], scale))
        first += number
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
    return output.view(batch, heads, count, group, -1).permute(0, 2, 1, 3, 4).flatten(2, 3)


def _attend(rows: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The attention of queries [B, H, R, D] in a call with as many queries as the mask [B or 1, 1, N, W] has rows."""
    batch, heads, count, _ = rows.shape
    if padding := mask.shape[2] - count:
        rows = F.pad(rows, (0, 0, 0, padding))
    mask = mask.expand(batch, -1, -1, -1)
    if batch * heads == 1:
        # All threads would share the products of a single head.
        rows, keys, values, mask = (each.expand(2, -1, -1, -1) for each in (rows, keys, values, mask))
    output = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale)
    return output[:batch, :, :count]


def whole_width(num_slots: int) -> int:
    """The smallest number of slots that `attend` reads if a text has `num_slots` tokens."""
    return next((width for width in WIDTHS if width >= num_slots), -(-num_slots // BLOCK) * BLOCK)


def _attention_sizes(count: int, num_slots: int, size: int, dtype: torch.dtype) -> tuple[int, list[int]]:
    """The number of slots to read, and the numbers of queries of successive calls."""
    least = whole_width(num_slots)
    for width in (least, *(each for each in WIDTHS if each > least)):
        kind = "attention", size, dtype, min(width, 3 * BLOCK)
        sizes = _sizes(count, kind, partial(_attention_sample, *kind[1:]), ATTENTION_COUNTS)
        if sizes is not None:
            return width, sizes
    raise RuntimeError(f"invariant: on this machine attention with heads of {size} {NONE_AGREES}")


def _attention_sample(size: int, dtype: torch.dtype, width: int) -> Sample:
    """Compares with few queries, which read a whole block where `width` is less."""
    most, num_seen = max(width, BLOCK), width - width // 5

    def cache(of_seen: Tensor) -> Tensor:
        return F.pad(of_seen.to(dtype), (0, 0, 0, most - num_seen)).expand(1, 2, -1, -1)

    caches = cache(_cancelling(num_seen, size, 1)), cache(_random(num_seen, size))
    opposites = cache(_cancelling(size, num_seen, -1).t())

    def product(rows: Tensor, width: int = width) -> Tensor:
        queries = rows.expand(1, 2, -1, -1)
        mask = (torch.arange(width) < num_seen).expand(1, 1, rows.shape[0], -1)
        keys, values, others = (each[:, :, :width] for each in (*caches, opposites))
        # Of these scores only rounding is left, which the scale makes large; then of the sums of values.
        scores = _attend(queries, keys, values, mask, 1e7)
        sums = _attend(torch.zeros_like(queries), keys, others, mask, 1.0)
        return torch.cat([scores, sums], 3)[0, 1]

    rows = _cancelling(ATTENTION_REFERENCE, size, -1).to(dtype)
    return rows, product(rows, most), product


def _cancelling(count: int, size: int, sign: int) -> Tensor:
    """Random rows [count, size]. The products of rows with sign 1 and rows with sign -1 are 0 up to rounding, so that
    the order of their sums shows, also in bfloat16."""
    half = _random(count, size // 2)
    return torch.cat([half, half.new_zeros(count, size % 2), sign * half.flip(1)], 1)


def _random(count: int, size: int) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(count))


def _in_parts(function: Callable[[Tensor], Tensor], rows: Tensor, sizes: list[int]) -> Tensor:
    """Apply a function to parts of these sizes, the last of which gets padding."""
    count = rows.shape[0]
    padding = sum(sizes) - count
    if padding > 0:
        rows = F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, padding))
    output = function(rows) if len(sizes) <= 1 else torch.cat([function(part) for part in rows.split(sizes)])
    return output[:count] if padding > 0 else output


def _sizes(
    count: int, kind: Hashable, sample: Callable[[], Sample], counts: tuple[int, ...] = COUNTS
) -> list[int] | None:
    """The numbers of rows of successive products, for `count` rows in all and padding after them; None = no number of
    rows gives the bits of the sample."""
    known = _agreeing.setdefault((kind, settings()), {})
    sizes: list[int] = []
    while count > 0:
        fitting = [n for n in counts if count <= n <= MOST_PADDED] + [n for n in counts[::-1] if n < count]
        size = next((n for n in fitting if (known[n] if n in known else _compare(n, known, sample))), None)
        if size is None:
            return None
        sizes.append(size)
        count -= size
    return sizes


@torch.no_grad()
def _compare(count: int, known: dict[int, bool], sample: Callable[[], Sample]) -> bool:
    """Whether a product of `count` rows gives each row, wherever it stands, the bits that it should have."""
    rows, expected, product = sample()
    copies = -(-count // rows.shape[0])
    # In reverse, every row stands at another place.
    given, wanted = (each.flip(0).repeat(copies, 1)[:count] for each in (rows, expected))
    known[count] = torch.equal(product(given), wanted)
    return known[count]
