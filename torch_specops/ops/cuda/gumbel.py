"""`specops::sample_gumbel` and `specops::verify_gumbel` on CUDA: draw y_i from every row, and accept drafts up to the
first x_i != y_i.

Bytes per sequence: V * (K + 1) * s with s bytes per logit, each row once. Rows after a padded draft are not read. The
noise is computed when logits are loaded, so nothing of size [.., V] is written. Two launches:
1. `score_kernel`, one program per (row, tile): the token with the largest score (z - max) / T + g in the tile, and its
   logit.
2. `match_kernel`, one program per sequence: computes the scores of these tokens again, relative to the largest of their
   logits, and compares the drafts with the tokens of the largest scores.
Scratch: 8 bytes per (row, tile). A maximum does not depend on the order of its inputs, so results are bitwise
repeatable. With filters, the search for the bounds of the rows comes first (`filter/bounds.py`). The first kernel then
reads only the parts of a row in which a token is kept, and masks them by the bounds.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..arguments import GumbelArguments
from . import launch
from .accept import accepted_prefix_length, count_valid, walk_width
from .filter import filter_bounds, top_values
from .tiles import (
    FLOAT32_MAX,
    combine_argmax,
    inverse_temperature,
    load_kept_parts,
    load_partials,
    load_temperature,
    row_lead,
    scale,
    store_pair,
    tile_argmax,
    tile_tokens,
)
from .uniforms import philox

# The id of the stream "noise" in `uniforms.py`, from which the keys are computed.
NOISE = tl.constexpr(4)
# The constants of the hash and the largest w, as in `cpu/gumbel.py`.
WEYL = tl.constexpr(0x9E3779B9)
FACTOR = tl.constexpr(0x735A2D97)
LARGEST = tl.constexpr(1.0 - 2.0**-24)
# For w (`noise`) up to this number, -log(1 - w) is computed by a power series, because 1 - w would lose digits of w.
LARGEST_IN_SERIES = tl.constexpr(0.0625)


@triton.jit
def noise_keys(seeds_ptr, positions_ptr, b, i):
    """The two noise keys of sequence b at position positions[b] + i."""
    key_0, key_1, _, _ = philox(tl.load(seeds_ptr + b), tl.load(positions_ptr + b) + i, 0, NOISE)
    return key_0, key_1


@triton.jit
def token_hash(v, key_0, key_1):
    x = (v.to(tl.uint32) * WEYL) ^ key_0
    x = (x ^ (x >> 16)) * (key_1 | 1)
    return (x ^ (x >> 15)) * FACTOR


@triton.jit
def noise(v, key_0, key_1):
    """The noise g = -log(-log(1 - w)), where w comes from the hash of token ids v."""
    w = tl.minimum((token_hash(v, key_0, key_1).to(tl.float32) + 0.5) * 2.0**-32, LARGEST)
    series = w * (1.0 + w * (1.0 / 2 + w * (1.0 / 3 + w * (1.0 / 4 + w * (1.0 / 5)))))
    return -tl.log(tl.where(w <= LARGEST_IN_SERIES, series, -tl.log(1.0 - w)))


@triton.jit
def score(z, top, v, key_0, key_1, inverse_t):
    """The score (z - top) / T + g; -inf where z is -inf. `top` is finite."""
    gap = tl.maximum(tl.maximum(z - top, -FLOAT32_MAX) * inverse_t, -FLOAT32_MAX)
    return tl.where(z > float("-inf"), gap + noise(v, key_0, key_1), float("-inf"))


@triton.jit
def inverse_of(temperature_ptr, temperature):
    """1 / T; 0 for an infinite T."""
    inverse_t = inverse_temperature(temperature_ptr, temperature)
    if temperature_ptr is not None:
        inverse_t = tl.where(temperature == float("inf"), 0.0, inverse_t)
    return inverse_t


@launch.jit
def score_kernel(
    target_ptr,  # [B, K+1, V]
    draft_tokens_ptr,  # [B, K]
    seeds_ptr,  # [B]
    positions_ptr,  # [B]
    temperature_ptr,  # [B] or None
    bounds_ptr,  # [B, K+1, 2] or None
    top_ptr,  # [B, K+1, num_parts] maxima of parts, or None
    partial_ptr,  # [B, K+1, num_tiles, 2]
    stride_b,
    stride_k,
    stride_v,
    num_drafts,
    vocab_size,
    num_tiles,
    num_parts,
    TILE: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    i = tl.program_id(2)
    temperature = load_temperature(temperature_ptr, b)
    num_valid = count_valid(draft_tokens_ptr + b * num_drafts, num_drafts, vocab_size, BLOCK_K)
    if (i <= num_valid) & (temperature >= 0):
        row_ptr = target_ptr + b * stride_b + i.to(tl.int64) * stride_k
        row = b * (num_drafts + 1) + i
        lead = row_lead(row_ptr, stride_v)
        tops = (top_ptr, num_drafts + 1, num_parts)
        x = load_kept_parts(row_ptr, stride_v, lead, vocab_size, tile, bounds_ptr, row, tops, b, i, TILE, PART)
        z = scale(x, 1.0)
        v = tile_tokens(lead, tile, TILE)
        if temperature == 0:
            z_best, token = tile_argmax(z, v)
        else:
            key_0, key_1 = noise_keys(seeds_ptr, positions_ptr, b, i)
            top = tl.maximum(tl.max(z, 0), -FLOAT32_MAX)
            _, token = tile_argmax(score(z, top, v, key_0, key_1, inverse_of(temperature_ptr, temperature)), v)
            z_best = tl.max(tl.where(v == token.to(tl.int32, bitcast=True), z, float("-inf")), 0)
        store_pair(partial_ptr + (row * num_tiles + tile) * 2, z_best, token)


@launch.jit
def match_kernel(
    draft_tokens_ptr,  # [B, K]
    seeds_ptr,  # [B]
    positions_ptr,  # [B]
    temperature_ptr,  # [B] or None
    partial_ptr,  # [B, K+1, num_tiles, 2]
    num_accepted_ptr,  # [B]
    output_tokens_ptr,  # [B, K+1]
    num_drafts,
    vocab_size,
    num_tiles,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WALK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    temperature = load_temperature(temperature_ptr, b)
    inverse_t = inverse_of(temperature_ptr, temperature)
    num_valid = count_valid(draft_tokens_ptr + b * num_drafts, num_drafts, vocab_size, BLOCK_K)
    n = tl.zeros((), tl.int64)
    # The last row that may be used. After a mismatch no later row is used.
    last = tl.where(temperature >= 0, num_valid, -1)
    for start in tl.range(0, num_drafts + 1, WALK):
        i = (start + tl.arange(0, WALK)).to(tl.int64)
        live = i <= last
        z, token = load_partials(partial_ptr, b * (num_drafts + 1) + i, num_tiles, live, BLOCK_T)
        if temperature == 0:
            y = combine_argmax(z, token)
        else:
            key_0, key_1 = noise_keys(seeds_ptr, positions_ptr, b, i)
            top = tl.maximum(tl.max(z, 1), -FLOAT32_MAX)
            v = token.to(tl.int32, bitcast=True)
            y = combine_argmax(score(z, top[:, None], v, key_0[:, None], key_1[:, None], inverse_t), token)
        x = tl.load(draft_tokens_ptr + b * num_drafts + i, mask=i < num_drafts, other=-1).to(tl.int64)
        y = tl.where(live, y, -1).to(tl.int64)
        run = accepted_prefix_length((x == y) & (y >= 0))
        tl.store(output_tokens_ptr + b * (num_drafts + 1) + i, tl.where(i <= start + run, y, -1), mask=i <= num_drafts)
        n += tl.where(start <= last, run, 0)
        last = tl.where(run == WALK, last, -1)
    tl.store(num_accepted_ptr + b, n)


def verify_gumbel(args: GumbelArguments, *, tile: int | None = None) -> tuple[Tensor, Tensor]:
    """Launch the kernels of `specops::verify_gumbel`, which has checked the arguments. Tests and benchmarks set
    `tile`."""
    target, filters = args.target_logits, args.filters
    batch, num_rows, vocab_size = target.shape
    tile = tile or launch.tile_size(vocab_size, batch * num_rows)
    num_tiles = launch.num_tiles(target, tile)
    launch.check_grid("target_logits", target, num_rows, num_tiles)
    block_t, device = launch.padded_power_of_2(num_tiles), target.device
    output_tokens = torch.empty(batch, num_rows, dtype=torch.int64, device=device)
    num_accepted = torch.empty(batch, dtype=torch.int64, device=device)
    bounds = top = None
    if filters.removes_tokens:
        bounds, top = filter_bounds(target, filters, tile=tile)
    values = {
        "target_ptr": target,
        "draft_tokens_ptr": launch.contiguous(args.draft_tokens),
        "seeds_ptr": launch.contiguous(args.seeds),
        "positions_ptr": launch.contiguous(args.positions),
        "temperature_ptr": launch.contiguous(args.temperature),
        "bounds_ptr": bounds,
        **top_values(top, tile),
        "partial_ptr": torch.empty(batch, num_rows, num_tiles, 2, dtype=torch.float32, device=device),
        "num_accepted_ptr": num_accepted,
        "output_tokens_ptr": output_tokens,
        **launch.logits_strides(("stride_b", "stride_k", "stride_v"), target),
        "num_drafts": num_rows - 1,
        "vocab_size": vocab_size,
        "num_tiles": num_tiles,
        "TILE": tile,
        "BLOCK_K": launch.padded_power_of_2(num_rows),
        "BLOCK_T": block_t,
        "WALK": walk_width(block_t),
    }
    launch.run(score_kernel, (batch, num_tiles, num_rows), values, launch.num_warps(tile))
    launch.run(match_kernel, (batch,), values, launch.num_warps(tile))
    return output_tokens, num_accepted
