"""`specops::verify_block` on CUDA: accept as many drafts as the block allows, then draw from the residual (docs/math.md
has the law).

With P_0 = 1 and P_i = min(P_{i-1} p(x_i) / q(x_i), 1), n is the largest i with u_i < h_i. At the end of the block
h_i = P_i. Before it h_i = S_i / (S_i + 1 - P_i) with S_i = sum max(P_i p_i - q_i, 0), where p_i and q_i are the rows
after x_1 .. x_i. This sum reads the rows a second time, but only where the block may still end:
- nowhere, if u < P at the end of the block;
- not where u_i >= P_i, because h_i <= P_i;
- not before the last i with P_i = 1, because h_i = 1 there.

Bytes per sequence, with s_p and s_q bytes a logit and C rows left, 0 <= C <= K:
    without draft_lse   V * ((K + 1 + C) * s_p + (K + C) * s_q)
    with draft_lse      V * ((K + 1 + C) * s_p + C * s_q)
    one-hot drafts      V * (K + 1 + C) * s_p
and one tile of a row pair once more. With filters, the search for the bounds of all rows comes first. As in
`verify_exact`, rows behind a padded draft, draft rows of greedy sequences and sequences without a lawful temperature
are not read. Nothing of size [.., V] is written. The scratch is 8 bytes per (row, tile) of the rows that are read
first, 8 per (draft, tile) and (sequence, tile), and 32 per draft.

Six launches. Each program writes its own part of the output, so there are no races, atomics or counters. For K = 0
the op is `verify_exact`, and so are its launches.
1. `stats_kernel` of `verify_exact`, one program per (row, tile).
2. `ratio_kernel`, one program per draft: combines the partials of its two rows, p / q of its token.
3. `reach_kernel`, one program per sequence: P_i, and which rows are left; n, if none is.
4. `residual_kernel`, one program per (draft, tile): sums the residual weights of its tile, if its row is left.
5. `decide_kernel`, one program per sequence: n, and what the next kernel needs of row n.
6. `draw_kernel` of `verify_exact`, one program per sequence: picks the tile that s falls into, rescans it, writes the
   output row.
The second, third and fifth are in `block_end.py`.
"""

import torch
import triton.language as tl
from torch import Tensor

from ...arguments import VerifyArguments
from .. import launch
from ..rows import (
    exponential,
    inverse_temperature,
    load_scaled,
    load_scaled_beside,
    load_temperature,
    row_lead,
    store_pair,
    tile_tokens,
)
from .accept import MAX_PARTIALS
from .block_end import decide_kernel, ratio_kernel, reach_kernel
from .exact import draw_kernel, exact_values, run_stats, verify_exact
from .residual import load_state, residual_weights

__all__ = ["verify_block"]


@launch.jit
def residual_kernel(
    target_ptr,  # [B, K+1, V]
    draft_ptr,  # [B, K, V]; None: drafts are one-hot
    draft_tokens_ptr,  # [B, K]
    temperature_ptr,  # [B] or None
    bounds_ptr,  # [B, num_bounds, 2] or None
    reach_ptr,  # [B, K] float64
    state_ptr,  # [B, K, 4]
    mass_ptr,  # [B, K, num_tiles, 2] residual mass, and whether p and q differ there
    stride_target_b,
    stride_target_k,
    stride_target_v,
    stride_draft_b,
    stride_draft_k,
    stride_draft_v,
    num_drafts,
    vocab_size,
    num_tiles,
    num_bounds,
    TILE: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    i = tl.program_id(2).to(tl.int64)
    row = b * num_drafts + i
    reach = tl.load(reach_ptr + row)
    if reach > 0:
        inverse_t = inverse_temperature(temperature_ptr, load_temperature(temperature_ptr, b))
        p_shift, p_weight, q_shift, q_weight = load_state(state_ptr + row * 4)
        p_weight = p_weight * reach.to(tl.float32)
        bounds_row = b * num_bounds + i
        row_ptr = target_ptr + b * stride_target_b + i * stride_target_k
        lead = row_lead(row_ptr, stride_target_v)
        z_p = load_scaled(row_ptr, stride_target_v, lead, vocab_size, tile, inverse_t, bounds_ptr, bounds_row, TILE)
        weight = exponential(z_p - p_shift) * p_weight
        if draft_ptr is None:
            x = tl.load(draft_tokens_ptr + row).to(tl.int32)
            weight, differs = tl.where(tile_tokens(lead, tile, TILE) == x, 0.0, weight), 1.0
        else:
            draft_row_ptr = draft_ptr + b * stride_draft_b + i * stride_draft_k
            bounds_row += num_drafts + 1
            z_q = load_scaled_beside(
                draft_row_ptr, stride_draft_v, lead, vocab_size, tile, inverse_t, bounds_ptr, bounds_row, TILE
            )
            weight, differs = residual_weights(weight, z_p, z_q, q_shift, q_weight)
        store_pair(mass_ptr + (row * num_tiles + tile) * 2, tl.sum(weight, 0), differs)


def verify_block(given: VerifyArguments, *, tile: int | None = None) -> tuple[Tensor, Tensor]:
    """Launch `specops::verify_block`; the op has checked the arguments. `tile` overrides the table (tests,
    benchmarks)."""
    batch, num_rows, _ = given.target_logits.shape
    num_drafts = num_rows - 1
    if num_drafts == 0:
        return verify_exact(given, tile=tile)

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return given.target_logits.new_empty(batch, *shape, dtype=dtype)

    values = exact_values(given, tile)
    num_tiles, num_warps = values["num_tiles"], launch.num_warps(values["TILE"])
    row_state, row_mass = scratch(4), scratch(num_tiles, 2)
    values |= {
        "ratio_ptr": scratch(num_drafts, dtype=torch.float64),
        "reach_ptr": scratch(num_drafts, dtype=torch.float64),
        "state_ptr": scratch(num_drafts, 4),
        "mass_ptr": scratch(num_drafts, num_tiles, 2),
        "row_state_ptr": row_state,
        "row_mass_ptr": row_mass,
    }
    # The small kernels hold partials, not logits.
    few_warps = launch.num_warps(MAX_PARTIALS)
    run_stats(given, values)
    launch.run(ratio_kernel, (batch, num_drafts), values, few_warps)
    launch.run(reach_kernel, (batch,), values, few_warps)
    launch.run(residual_kernel, (batch, num_tiles, num_drafts), values, num_warps)
    launch.run(decide_kernel, (batch,), values, few_warps)
    launch.run(draw_kernel, (batch,), values | {"state_ptr": row_state, "mass_ptr": row_mass}, num_warps)
    return values["output_tokens_ptr"], values["num_accepted_ptr"]
