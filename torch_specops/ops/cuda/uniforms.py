"""`specops::uniforms` and `specops::step_uniforms` on CUDA. An op takes one launch; the torch operations would take
200."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch

# The number of random numbers that a program computes, and its number of warps.
LANES, WARPS = 128, 4


@triton.jit
def philox(seed, position, block, stream):
    """The four words of a block of Philox 4x32-10, with the same counter as in `ops/uniforms.py`."""
    low, high = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    zero = low ^ low
    return tl.philox(seed, zero + block, zero + stream, low, high)


@launch.jit
def numbers_kernel(
    seeds_ptr,  # [B]
    positions_ptr,  # [B]
    numbers_ptr,  # [B, width]
    size,  # B * width
    width,
    count,  # the number of columns with numbers of the first stream
    stream_id,
    last_stream_id,  # the next column has the first number of this stream
    LANES: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    live = entry < size
    b, column = entry // width, entry % width
    seed = tl.load(seeds_ptr + b, mask=live, other=0)
    position = tl.load(positions_ptr + b, mask=live, other=0)
    is_last = column == count
    index = tl.where(is_last, 0, column).to(tl.uint32)
    words = philox(seed, position, index // 4, tl.where(is_last, last_stream_id, stream_id).to(tl.uint32))
    lane = index % 4
    word = tl.where(lane < 2, tl.where(lane == 0, words[0], words[1]), tl.where(lane == 2, words[2], words[3]))
    tl.store(numbers_ptr + entry, (word >> 8).to(tl.float32) * 2.0**-24, mask=live)


def numbers(seeds: Tensor, positions: Tensor, count: int, stream: int, last_stream: int | None = None) -> Tensor:
    """[B, count] float32, the numbers of a stream. With `last_stream` [B, count + 1]: the first number of that stream
    follows."""
    batch, width = seeds.shape[0], count if last_stream is None else count + 1
    output = torch.empty(batch, width, dtype=torch.float32, device=seeds.device)
    values = {
        "seeds_ptr": launch.contiguous(seeds),
        "positions_ptr": launch.contiguous(positions),
        "numbers_ptr": output,
        "size": batch * width,
        "width": width,
        "count": count,
        "stream_id": stream,
        "last_stream_id": last_stream or 0,
        "LANES": LANES,
    }
    launch.run(numbers_kernel, (triton.cdiv(batch * width, LANES),), values, WARPS)
    return output
