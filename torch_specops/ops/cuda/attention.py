"""`specops::attend` on CUDA: several programs share the slots of a row, and a second kernel combines their results.

Bytes: 2 * H * D * s per slot that a query of the row attends to, with s bytes per entry. These bytes are read once for
all queries and query heads of a group. Scratch: 4 * (D + 2) bytes for each query, head and part, written and read once.
Two launches:
1. `attend_kernel`, one program per (row, key head, part): for each query of the group, the maximum score, the sum of
   exponentials, and the weighted sum of values over the slots of this part. The slots of each row are divided evenly on
   the device, because the host does not know the row's length.
2. `join_kernel`, one program per (row, query, head): combine the parts in a fixed order.
If rows and heads alone fill the device, each row has one part, and there is one launch and no scratch. There are no
atomics, so results are bitwise repeatable.
"""

import math
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .tiles import rounded_product

# The most (query head, new token) pairs of a program, and for each element size the most numbers in the accumulated
# values. With more, registers would spill. The limit is lower for float32, because its products do not use tensor
# cores.
MAX_ROWS = 64
MAX_SUMS = {2: 8192, 4: 2048}
# The size of a tile of keys in bytes.
TILE_BYTES = 8192
# The number of programs to launch: about two for each multiprocessor of a large GPU.
RESIDENT_PROGRAMS = 256
MAX_PARTS = 64
ATTEND_WARPS = 4

jit = partial(launch.jit, specialize_addresses=True)


@jit
def attend_kernel(
    queries_ptr,  # [B, GROUP * H, n, D]
    keys_ptr,  # [B, H, capacity, D] contiguous
    values_ptr,  # [B, H, capacity, D] contiguous
    spans_ptr,  # [B, n, 2]
    sums_ptr,  # [B, n, GROUP * H, PARTS, D] float32; with one part, this is the output
    scales_ptr,  # [B, n, GROUP * H, PARTS, 2] float32, maximum and sum of exponentials; None with one part
    stride_b,
    stride_h,
    stride_n,
    num_queries,  # n
    capacity,
    SCALE: tl.constexpr,  # scale * log2(e), because the kernel computes powers of 2
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    part = tl.program_id(2) % PARTS
    num_heads = tl.num_programs(1)
    # Each row of the matrix product is one query of one query head of the group.
    m = tl.program_id(2) // PARTS * ROWS + tl.arange(0, ROWS)
    query = m // GROUP
    query_head = head * GROUP + m % GROUP
    exists = query < num_queries
    d = tl.arange(0, BLOCK_D)
    in_d = d < D
    span_ptr = spans_ptr + (row * num_queries + query) * 2
    first = tl.maximum(tl.load(span_ptr, exists, capacity).to(tl.int32), 0)
    last = tl.minimum(tl.load(span_ptr + 1, exists, -1).to(tl.int32), capacity - 1)
    begin = tl.min(first, 0)
    end = tl.max(last, 0) + 1
    share = tl.cdiv(tl.cdiv(end - begin, TILE), PARTS) * TILE
    begin += part * share
    end = tl.minimum(begin + share, end)

    query_ptr = queries_ptr + row * stride_b + query.to(tl.int64) * stride_n + query_head.to(tl.int64) * stride_h
    q = tl.load(query_ptr[:, None] + d[None, :], exists[:, None] & in_d[None, :], 0.0)
    base = (row * num_heads + head) * capacity * D
    keys_ptr += base
    values_ptr += base
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in range(begin, end, TILE):
        slot = start + tl.arange(0, TILE)
        inside = slot < end
        offset = slot[:, None] * D + d[None, :]
        k = tl.load(keys_ptr + offset, inside[:, None] & in_d[None, :], 0.0)
        v = tl.load(values_ptr + offset, inside[:, None] & in_d[None, :], 0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * SCALE
        seen = (slot[None, :] >= first[:, None]) & (slot[None, :] <= last[:, None]) & inside[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # If all slots so far are masked, use 0, because -inf minus -inf would be NaN.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - shift[:, None])
        kept = tl.exp2(top - shift)
        total = total * kept + tl.sum(weights, 1)
        sums = tl.dot(weights.to(v.dtype), v, sums * kept[:, None], input_precision="ieee")
        top = new_top

    place = ((row * num_queries + query) * num_heads * GROUP + query_head) * PARTS + part
    if PARTS == 1:
        # A query that attends to no slot gets zeros.
        sums /= tl.where(total == 0, 1.0, total)[:, None]
    else:
        tl.store(scales_ptr + place * 2, top, exists)
        tl.store(scales_ptr + place * 2 + 1, total, exists)
    sums_ptrs = sums_ptr + place[:, None] * D + d[None, :]
    tl.store(sums_ptrs, sums.to(sums_ptr.dtype.element_ty), exists[:, None] & in_d[None, :])


@jit
def join_kernel(
    sums_ptr,  # [N, PARTS, D] float32 with N = B * n * GROUP * H
    scales_ptr,  # [N, PARTS, 2] float32
    output_ptr,  # [N, D]
    D: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * PARTS + tl.arange(0, PARTS)
    d = tl.arange(0, BLOCK_D)
    top = tl.load(scales_ptr + place * 2)
    total = tl.load(scales_ptr + place * 2 + 1)
    sums = tl.load(sums_ptr + place[:, None] * D + d[None, :], (d < D)[None, :], 0.0)
    shift = tl.max(top, 0)
    weights = tl.exp2(top - tl.where(shift == float("-inf"), 0.0, shift))
    norm = tl.sum(rounded_product(total, weights), 0)
    output = tl.sum(rounded_product(sums, weights[:, None]), 0) / tl.where(norm == 0, 1.0, norm)
    output_ptrs = output_ptr + tl.program_id(0).to(tl.int64) * D + d
    tl.store(output_ptrs, output.to(output_ptr.dtype.element_ty), d < D)


def block_sizes(head_dim: int, size: int) -> tuple[int, int, int]:
    """BLOCK_D, TILE and the largest ROWS of a program, for heads with `head_dim` entries of `size` bytes."""
    # Tensor cores need at least 16 entries in the dimension they sum over.
    block_d = max(triton.next_power_of_2(head_dim), 16)
    return block_d, max(TILE_BYTES // (block_d * size), 16), max(min(MAX_ROWS, MAX_SUMS[size] // block_d), 16)


def join_warps(parts: int, block_d: int) -> int:
    return min(max(parts * block_d // 1024, 1), 4)


def attend(queries: Tensor, keys: Tensor, values: Tensor, spans: Tensor, scale: float) -> Tensor:
    """Launch the kernels of `specops::attend`, which has checked the arguments."""
    batch, num_heads, count, head_dim = queries.shape
    _, num_key_heads, capacity, _ = keys.shape
    group = num_heads // num_key_heads
    block_d, tile, most_rows = block_sizes(head_dim, queries.element_size())
    rows = min(max(triton.next_power_of_2(group * count), 16), most_rows)
    blocks = triton.cdiv(group * count, rows)
    parts = 1
    while parts < MAX_PARTS and launch.hint(batch) * num_key_heads * blocks * parts < RESIDENT_PROGRAMS:
        parts *= 2
    if queries.stride(3) != 1:
        queries = queries.clone(memory_format=torch.contiguous_format)
    stride_b, stride_h, stride_n, _ = queries.stride()
    output = torch.empty(batch, count, num_heads, head_dim, dtype=queries.dtype, device=queries.device)
    sums, scales = output, None
    if parts > 1:
        sums = output.new_empty(batch, count, num_heads, parts, head_dim, dtype=torch.float32)
        scales = sums.new_empty(batch, count, num_heads, parts, 2)
    arguments = {
        "queries_ptr": queries,
        "keys_ptr": launch.contiguous(keys),
        "values_ptr": launch.contiguous(values),
        "spans_ptr": launch.contiguous(spans),
        "sums_ptr": sums,
        "scales_ptr": scales,
        "output_ptr": output,
        "stride_b": stride_b,
        "stride_h": stride_h,
        "stride_n": stride_n,
        "num_queries": count,
        "capacity": capacity,
        "SCALE": scale * math.log2(math.e),
        "GROUP": group,
        "D": head_dim,
        "PARTS": parts,
        "ROWS": rows,
        "BLOCK_D": block_d,
        "TILE": tile,
    }
    launch.run(attend_kernel, (batch, num_key_heads, parts * blocks), arguments, ATTEND_WARPS)
    if parts > 1:
        launch.run(join_kernel, (batch * count * num_heads,), arguments, join_warps(parts, block_d))
    return output
