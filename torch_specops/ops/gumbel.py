"""`sample_gumbel` and `verify_gumbel`: sampling with Gumbel noise that is a function of seed, position and token. A
drawn token depends only on its row of logits, a seed and its position (Daliri, Musco and Suresh 2024, arXiv
2408.07978).

Both ops call the same function, because sampling is verification without drafts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checks import check_tensor
from . import arguments
from .arguments import Filters, GumbelArguments, PerRow
from .cpu import gumbel
from .registration import register_op


def sample_gumbel(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: PerRow = None,
    top_k: PerRow = None,
    top_p: PerRow = None,
    min_p: PerRow = None,
) -> Tensor:
    """Draw one token per row of softmax(logits / T), with noise that depends only on the row's seed and position.

    The token is the argmax of z(v) / T + g(v) over the tokens that the filters keep, where g(v) = -log(-log u(v)), and
    u is a hash of seed, position and token. Two models that draw with the same seed and position share the noise, and
    often draw the same token: `verify_gumbel` accepts drafts that this op has sampled. The hash, the distribution and
    the effects of rounding are described in docs/math.md, section 17.

    Args:
        logits: [N, V] float32, bfloat16 or float16; any strides. -inf masks a token, NaN counts as -inf, +inf as the
            largest float32.
        seeds: [N] int64, a seed for each sequence.
        positions: [N] int64, the index of each token in its sequence, which is the number of tokens before it.
        temperature: [N] float32 >= 0, or a number for all rows; None = 1, 0 = argmax (lowest index of the maximum). A
            tensor may contain inf, which makes all tokens equally likely.
        top_k, top_p, min_p: [N], or a number, as in `filter_logits`.

    Returns:
        [N] int64. The token is -1 for a row without a finite entry, with a negative or NaN temperature, or with a NaN
        top_p or min_p.

    Raises:
        TypeError: an argument is not a tensor or number, or has another dtype.
        ValueError: a shape does not fit, tensors are on different devices, or a number is out of range.

    Examples:
        >>> import torch, torch_specops
        >>> logits, seeds, positions = torch.zeros(3, 50), torch.tensor([7, 7, 8]), torch.tensor([0, 1, 0])
        >>> torch_specops.sample_gumbel(logits, seeds, positions)
        tensor([11, 38, 10])
        >>> torch_specops.sample_gumbel(logits[1:2], seeds[1:2], positions[1:2])
        tensor([38])
    """
    filters = arguments.filters_of("logits", logits, temperature, top_k, top_p, min_p)
    for name, tensor in (("seeds", seeds), ("positions", positions)):
        check_tensor(name, tensor)
    arguments.check_kinds(filters)
    if torch.compiler.is_compiling():
        arguments.check_sample_gumbel(logits, seeds, positions, filters)
    return _sample_gumbel(logits, seeds, positions, *filters)


def verify_gumbel(
    target_logits: Tensor,
    draft_tokens: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: PerRow = None,
    top_k: PerRow = None,
    top_p: PerRow = None,
    min_p: PerRow = None,
) -> tuple[Tensor, Tensor]:
    """Draw the target's token at every position, and accept drafts as long as they equal that token. This is lossless.

    Let y_i be the token that `sample_gumbel` draws from row i at position `positions` + i. Drafts are accepted up to
    the first i with x_i != y_i, and the output is y_0 .. y_n, where n is the number of accepted drafts (Daliri et al.
    2024). The output is therefore the same as if the target were sampled with this seed without drafts. No draft
    probabilities are needed. A deterministic draft is accepted as often as by `verify_exact`. A sampled draft should
    come from `sample_gumbel` with the same seeds and positions; such a draft is accepted a little less often than by
    `verify_exact`. docs/math.md, section 17, has the proof and both acceptance rates.

    Args:
        target_logits: [B, K+1, V], as in `verify_exact`. At a row without a finite entry, no draft is accepted.
        draft_tokens: [B, K] int64 or int32. A token outside [0, V) is padding, which equals no token.
        seeds: [B] int64, a seed for each sequence.
        positions: [B] int64, the position of row 0: the number of tokens in the sequence so far.
        temperature, top_k, top_p, min_p: [B] or a number, as in `sample_gumbel`.

    Returns:
        output_tokens [B, K+1] int64: y_0 .. y_n, of which all but the last are the accepted drafts, then -1.
        num_accepted [B] int64 in 0..K: n.

    Raises:
        TypeError: an argument is not a tensor or number, or has another dtype.
        ValueError: a shape does not fit, tensors are on different devices, or a number is out of range.

    Examples:
        >>> import torch, torch_specops
        >>> logits, seeds, positions = torch.zeros(1, 3, 50), torch.tensor([7]), torch.tensor([0])
        >>> torch_specops.verify_gumbel(logits, torch.tensor([[11, 3]]), seeds, positions)
        (tensor([[11, 38, -1]]), tensor([1]))
    """
    filters = arguments.filters_of("target_logits", target_logits, temperature, top_k, top_p, min_p)
    args = GumbelArguments(target_logits, draft_tokens, seeds, positions, *filters)
    arguments.check_kinds(args)
    if torch.compiler.is_compiling():
        arguments.check_verify_gumbel(args)
    return _verify_gumbel(*args)


def _is_long(logits: Tensor) -> bool:
    """True if compiled code on a CPU should call the op instead of inlining it. The called op computes only a few
    scores of a long row, and none after the first mismatch. For short rows the call would cost more than it saves."""
    # A comparison of a symbolic length would add a guard, and so another graph, so call the op in that case.
    return not (isinstance(logits.shape[-1], int) and logits.shape[-1] <= 1024)


@register_op(sample_gumbel, is_opaque=lambda logits, **_: _is_long(logits))
def _sample_gumbel(logits: Tensor, seeds: Tensor, positions: Tensor, *args: Any) -> Tensor:
    filters = Filters(*args)
    arguments.check_sample_gumbel(logits, seeds, positions, filters)
    no_drafts = positions.new_empty(logits.shape[0], 0)
    tokens, _ = _verify(GumbelArguments(logits.unsqueeze(1), no_drafts, seeds, positions, *filters))
    return tokens.squeeze(1)


@register_op(verify_gumbel, is_opaque=lambda target_logits, **_: _is_long(target_logits))
def _verify_gumbel(*values: Any) -> tuple[Tensor, Tensor]:
    args = GumbelArguments(*values)
    arguments.check_verify_gumbel(args)
    return _verify(args)


def _verify(args: GumbelArguments) -> tuple[Tensor, Tensor]:
    if args.target_logits.device.type != "cuda":
        return gumbel.verify_gumbel(args)
    from .cuda.gumbel import verify_gumbel as launch

    return launch(args)
