"""The public functions of the ops, and their registration as `torch.ops.specops.*`.

A public function packs its arguments into one object (`arguments.py`), checks that each is a plain tensor or a number,
and calls the op. The op checks shapes, dtypes and ranges, and then calls the code for its device. For CPU tensors this
is `cpu/`, whose dense form Inductor inlines and fuses. For CUDA tensors it is the Triton launchers in `cuda/`, which
AOTInductor inlines as kernels.

Under Dynamo the public functions make all checks themselves. If an op raised while it is traced, Dynamo would wrap the
error in pages of other output. If a public function raises, Dynamo breaks the graph instead, and the eager call raises
the error itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checks import check_bool, check_tensor
from . import arguments
from .arguments import Filters, PerRow, SigmoidArguments, VerifyArguments
from .cpu import block, exact, sigmoid
from .cpu import filters as cpu_filters
from .cpu import sample as cpu_sample
from .registration import register_op


def verify_exact(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    accept_uniforms: Tensor,
    sample_uniforms: Tensor,
    temperature: PerRow = None,
    draft_lse: Tensor | None = None,
    lenience: float = 1.0,
    top_k: PerRow = None,
    top_p: PerRow = None,
    min_p: PerRow = None,
    argmax_lenience: float = 1.0,
    filter_draft: bool = True,
    draft_is_one_hot: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Verify K draft tokens per sequence and draw the next token. This is lossless speculative sampling.

    Draft i is accepted iff `u_i * lenience * q_i(x_i) < p_i(x_i)`. Drafts are tested in order up to the first
    rejection. The next token is then drawn from the residual max(p - q, 0) of that position, or from p if all K drafts
    were accepted (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023, Algorithm 2). With lenience 1 and draft i drawn
    from q_i, the emitted tokens have exactly the target's distribution. Arithmetic is float32 or better. docs/math.md
    defines the results completely, including NaN, masked and padded input.

    With filters, p and q are the softmax over the logits that `filter_logits` keeps, so p is the distribution that
    sampling with the same filters draws from. If the drafts were sampled without filters, pass `filter_draft=False`: q
    is then the softmax of all draft logits, as it was when they were drawn. With the wrong setting, the emitted tokens
    have another distribution, and no error is raised. In both cases, no filtered copy of the logits is written.

    Args:
        target_logits: [B, K+1, V] float32, bfloat16 or float16; any strides. -inf masks a token, NaN counts as -inf,
            +inf as the largest float32. A row with no finite entry yields the token -1.
        draft_tokens: [B, K] int64 or int32. A value outside [0, V) is padding: it is never accepted, and the next token
            is drawn from p at its position. Rows with different numbers of drafts can therefore share a batch.
        draft_logits: [B, K, V] float32, bfloat16 or float16 (the dtype may differ from the target's): exactly the
            logits that the drafts were sampled from. None = deterministic drafts (q is one-hot).
        accept_uniforms: [B, K] float32 or float64 in [0, 1).
        sample_uniforms: [B] float32 or float64 in [0, 1); independent of the other uniforms and of the draft's.
        temperature: [B] float32 >= 0, or a number for all rows; applied to both sides. None = 1, 0 = greedy row. Where
            it is negative or NaN, nothing is accepted and the next token is -1.
        draft_lse: [B, K] float32, logsumexp(draft_logits / temperature) as `sample` returned it: over the tokens that
            the filters keep, or over all tokens with `filter_draft=False`. If it is given and the draft is not
            filtered, only one draft row per sequence is read. Where it is not finite, q is zero. [B, K, 3], as `sample`
            returned it with `with_bounds`, also has the bounds of the rows: a filtered draft is then read as little as
            an unfiltered one. Bounds of other logits or filters, like a wrong lse, give another q; no error is raised.
        lenience: l in (0, 1]. 1 is lossless; with l < 1, no token is emitted with probability above p / l (Leviathan et
            al. appendix A.5). Greedy rows ignore it.
        top_k: [B] int64 or int32, or an int, as in `filter_logits`. Like the other filters, it applies to target and
            draft, unless `filter_draft` is False.
        top_p, min_p: [B] float32, or a number, as in `filter_logits`. NaN has the same effect as a NaN temperature.
        argmax_lenience: l in (0, 1], for greedy rows. 1 accepts only the argmax and is lossless. With l < 1, a draft x
            is accepted if p(x) >= l max p, where p is the softmax at temperature 1 (Leviathan et al. appendix A.5). The
            output may then differ from the target's greedy tokens. Sampled rows ignore it.
        filter_draft: True if the drafts were sampled with the same top_k, top_p and min_p. False if they were sampled
            without filters: the filters then apply to the target only, and q = softmax(draft_logits / temperature).
        draft_is_one_hot: [B] bool, True for sequences whose drafts are deterministic although `draft_logits` is given.
            Their draft_logits and draft_lse are ignored. None = none of them, or all if `draft_logits` is None.

    Returns:
        output_tokens [B, K+1] int64: the accepted drafts, the next token, then -1.
        num_accepted [B] int64 in 0..K: accepted drafts only.

    Raises:
        TypeError: an argument is not a tensor, number or bool, or has another dtype.
        ValueError: a shape does not fit, tensors are on different devices, or a number is out of range.

    Examples:
        >>> import torch, torch_specops
        >>> target = torch.full((1, 3, 4), -torch.inf)
        >>> target[0, 0, 2] = target[0, 1, 3] = target[0, 2, 1] = 0.0      # the target says 2, 3, 1
        >>> torch_specops.verify_exact(target, torch.tensor([[2, 0]]), None, torch.rand(1, 2), torch.rand(1))
        (tensor([[ 2,  3, -1]]), tensor([1]))
    """
    filters = arguments.filters_of("target_logits", target_logits, temperature, top_k, top_p, min_p)
    step = (target_logits, draft_tokens, draft_logits, accept_uniforms, sample_uniforms)
    values = (*step, filters.temperature, draft_lse, lenience, filters.top_k, filters.top_p, filters.min_p)
    args = VerifyArguments(*values, argmax_lenience, filter_draft, draft_is_one_hot)
    arguments.check_kinds(args)
    if torch.compiler.is_compiling():
        arguments.check_verify_exact(args)
    return _verify_exact(*args)


def verify_block(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    accept_uniforms: Tensor,
    sample_uniforms: Tensor,
    temperature: PerRow = None,
    draft_lse: Tensor | None = None,
    lenience: float = 1.0,
    top_k: PerRow = None,
    top_p: PerRow = None,
    min_p: PerRow = None,
    filter_draft: bool = True,
    draft_is_one_hot: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Verify K draft tokens per sequence as one block. This is lossless, and on average accepts at least as many drafts
    as `verify_exact`.

    Let P_0 = 1 and P_i = min(P_{i-1} p(x_i) / q(x_i), 1). The number of accepted drafts is the largest i with u_i <
    h_i. Here h_K = P_K, and for i < K h_i = S_i / (S_i + 1 - P_i), where S_i = sum max(P_i p - q, 0) over the row after
    x_1 .. x_i. A rejected position does not end the block: a later token that is more likely under p than under q can
    compensate for it. With n accepted drafts, the next token is drawn from max(P_n p - q, 0), or from p if n = K (Sun
    et al. 2024, Algorithm 2). If draft i was drawn from q_i, the emitted tokens have exactly the target's distribution.
    For every k, the probability that k or more drafts are accepted is at least as large as in `verify_exact`. For K = 1
    both functions are the same. docs/math.md has the proofs.

    The op reads more memory than `verify_exact`: every row once, and then again the target and draft rows of each
    position at which the block may still end.

    Args:
        target_logits: [B, K+1, V], as in `verify_exact`; a row with no finite entry ends the block.
        draft_tokens: [B, K], as in `verify_exact`; padding ends the block, and tokens after it are ignored.
        draft_logits, accept_uniforms, sample_uniforms: [B, K, V] or None, [B, K] and [B], as in `verify_exact`.
        temperature: [B] or a number, as in `verify_exact`; greedy rows (0) are verified token by token, as in
            `verify_exact`. draft_lse: [B, K], as in `verify_exact`. If it is given, draft rows are read once, otherwise
            twice.
        lenience: 1.0. No other value is supported; the argument exists so that `verify_block` has the signature of
            `verify_exact`.
        top_k, top_p, min_p, filter_draft, draft_is_one_hot: as in `verify_exact`.

    Returns:
        output_tokens [B, K+1] int64 and num_accepted [B] int64, as `verify_exact` returns them.

    Raises:
        TypeError: an argument is not a tensor, number or bool, or has another dtype.
        ValueError: a shape does not fit, tensors are on different devices, a number is out of range, or lenience is not
            1.

    Examples:
        >>> import torch, torch_specops
        >>> p, q = torch.tensor([1 / 3, 2 / 3]).log(), torch.tensor([2 / 3, 1 / 3]).log()
        >>> rows = (p.expand(1, 3, 2), torch.tensor([[0, 1]]), q.expand(1, 2, 2))
        >>> block = (*rows, torch.tensor([[0.9, 0.9]]), torch.tensor([0.5]))
        >>> torch_specops.verify_exact(*block)             # 0 is rejected: p / q = 1/2
        (tensor([[ 1, -1, -1]]), tensor([0]))
        >>> torch_specops.verify_block(*block)             # 0 and 1 together are as likely for p as for q
        (tensor([[0, 1, 1]]), tensor([2]))
    """
    filters = arguments.filters_of("target_logits", target_logits, temperature, top_k, top_p, min_p)
    step = (target_logits, draft_tokens, draft_logits, accept_uniforms, sample_uniforms)
    values = (*step, filters.temperature, draft_lse, lenience, filters.top_k, filters.top_p, filters.min_p)
    args = VerifyArguments(*values, filter_draft=filter_draft, draft_is_one_hot=draft_is_one_hot)
    arguments.check_kinds(args)
    if torch.compiler.is_compiling():
        arguments.check_verify_block(args)
    return _verify_block(*values, filter_draft, draft_is_one_hot)


def verify_sigmoid(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor,
    accept_uniforms: Tensor,
    sample_uniforms: Tensor,
    alpha: float = -1e3,
    beta: float = 1e3,
    temperature: PerRow = None,
) -> tuple[Tensor, Tensor]:
    """Verify with sigmoid scores instead of probabilities. This is LOSSY, but it reads two logits per draft instead of
    two rows.

    The score p^ = sigmoid((z_p / T - alpha) / (beta - alpha)) replaces p in `verify_exact`, and q^, computed in the
    same way, replaces q (Wagner et al. 2024, section 3.2.2, equation 5). Scores do not sum to 1, so the emitted tokens
    do not have the target's distribution. With a large beta - alpha the scores are nearly constant, and nearly every
    draft is accepted. The bonus token (all K accepted) is drawn from softmax(target_logits[:, K] / T).

    Args:
        target_logits: [B, K+1, V], as in `verify_exact`; a masked or NaN logit has score 0.
        draft_tokens, accept_uniforms, sample_uniforms: [B, K], [B, K] and [B], as in `verify_exact`.
        draft_logits: [B, K, V], as in `verify_exact` but required.
        alpha, beta: in (-1e36, -1e-36) and (1e-36, 1e36), in units of a scaled logit.
        temperature: [B] or a number, as in `verify_exact`; greedy rows (0) are verified exactly.

    Returns:
        output_tokens [B, K+1] int64 and num_accepted [B] int64, as `verify_exact` returns them.

    Raises:
        TypeError: an argument is not a tensor or number, or has another dtype.
        ValueError: a shape does not fit, tensors are on different devices, or a number is out of range.

    Examples:
        >>> import torch, torch_specops
        >>> logits = torch.zeros(1, 3, 4)
        >>> out, n = torch_specops.verify_sigmoid(
        ...     logits, torch.tensor([[2, -1]]), logits[:, :2], torch.zeros(1, 2), torch.zeros(1))
        >>> out, n                                         # equal scores: 2 is accepted, -1 is padding
        (tensor([[ 2,  0, -1]]), tensor([1]))
    """
    filters = arguments.filters_of("target_logits", target_logits, temperature)
    step = (target_logits, draft_tokens, draft_logits, accept_uniforms, sample_uniforms)
    args = SigmoidArguments(*step, alpha, beta, filters.temperature)
    arguments.check_kinds(args)
    if torch.compiler.is_compiling():
        arguments.check_verify_sigmoid(args)
    return _verify_sigmoid(*args)


def sample(
    logits: Tensor,
    uniforms: Tensor,
    temperature: PerRow = None,
    top_k: PerRow = None,
    top_p: PerRow = None,
    min_p: PerRow = None,
    with_bounds: bool = False,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row of softmax(logits / T) by inverse CDF, and return the row's logsumexp.

    Sample the draft with this op, and pass the same logits, the same filters and the returned `lse` to `verify_exact`.
    The q of `verify_exact` is then the distribution that the drafts were sampled from (M_q in Leviathan et al. 2023,
    Algorithm 1). With filters, softmax and logsumexp cover only the tokens that `filter_logits` keeps; no filtered copy
    is written.

    Args:
        logits: [N, V] float32, bfloat16 or float16; any strides. -inf masks a token, NaN counts as -inf, +inf as the
            largest float32.
        uniforms: [N] float32 or float64 in [0, 1).
        temperature: [N] float32 >= 0, or a number for all rows; None = 1, 0 = argmax (lowest index of the maximum).
        top_k, top_p, min_p: [N], or a number, as in `filter_logits`.
        with_bounds: True = return lse [N, 3]: the logsumexp, and two numbers that say which tokens the filters kept. As
            `draft_lse`, it saves `verify_exact` and `verify_block` the search for these tokens on CUDA.

    Returns:
        tokens [N] int64: the smallest v with sum_{j <= v} w_j > uniform * sum(w), never a token of weight zero. It is
        -1 for a row without a finite entry, with a negative or NaN temperature, or with a NaN top_p or min_p. lse [N]
        float32: logsumexp(logits / T) over the kept tokens; 0 for a greedy row, -inf where the token is -1.

    Raises:
        TypeError: an argument is not a tensor or number, or has another dtype.
        ValueError: a shape does not fit, tensors are on different devices, or a number is out of range.

    Examples:
        >>> import torch, torch_specops
        >>> logits = torch.tensor([[0.0, 0.0, -torch.inf], [1.0, 5.0, 2.0]])
        >>> torch_specops.sample(logits, torch.tensor([0.75, 0.5]), temperature=torch.tensor([1.0, 0.0]))
        (tensor([1, 1]), tensor([0.6931, 0.0000]))
        >>> torch_specops.sample(logits, torch.tensor([0.75, 0.5]), temperature=2.0, top_k=1)[0]
        tensor([1, 1])
    """
    filters = arguments.filters_of("logits", logits, temperature, top_k, top_p, min_p)
    check_tensor("uniforms", uniforms)
    arguments.check_kinds(filters)
    check_bool("with_bounds", with_bounds)
    if torch.compiler.is_compiling():
        arguments.check_sample(logits, uniforms, filters)
    return _sample(logits, uniforms, *filters, with_bounds)


def filter_logits(
    logits: Tensor,
    temperature: PerRow = None,
    top_k: PerRow = None,
    top_p: PerRow = None,
    min_p: PerRow = None,
) -> Tensor:
    """Mask the tokens that top-k, top-p and min-p remove. The filters are applied in this order, with one value of each
    per row.

    The filters equal those of transformers' `generate`, including ties. `sample` and `verify_exact` take the filters as
    arguments and write no filtered copy. Use this op with other samplers, or if the drafts have different filters. The
    definition is in docs/math.md, section 15.

    Args:
        logits: [N, V] float32, bfloat16 or float16; any strides.
        temperature: [N] float32 >= 0, or a number for all rows; None = 1. It changes which tokens top_p and min_p keep;
            the returned logits are not divided by it. Greedy rows (0) keep every token.
        top_k: [N] int64 or int32, or an int: keep the k largest logits and all ties with the k-th; <= 0 or >= V keeps
            all.
        top_p: [N] float32, or a number. Sort the tokens that top_k kept in descending order (ties: higher index first),
            and keep each token if the probabilities before it sum to less than top_p, by more than the rounding of
            top_p to float32. >= 1 keeps all, <= 0 only the first.
        min_p: [N] float32, or a number: keep tokens with at least min_p times the largest probability; <= 0 keeps all,
            >= 1 only the tokens with the largest.

    Returns:
        [N, V] in the dtype of the logits: -inf where a token was removed or was NaN, else the logit unchanged. A
        negative or NaN temperature, or a NaN top_p or min_p, removes the whole row.

    Raises:
        TypeError: an argument is not a tensor or number, or has another dtype.
        ValueError: a shape does not fit, tensors are on different devices, or a number is out of range.

    Examples:
        >>> import torch, torch_specops
        >>> logits = torch.tensor([[1.0, 3.0, 2.0, 2.0], [1.0, 3.0, 2.0, 2.0]])
        >>> torch_specops.filter_logits(logits, top_k=torch.tensor([2, 0]), top_p=torch.tensor([1.0, 0.7]))
        tensor([[-inf, 3., 2., 2.],
                [-inf, 3., -inf, 2.]])
    """
    filters = arguments.filters_of("logits", logits, temperature, top_k, top_p, min_p)
    arguments.check_kinds(filters)
    if torch.compiler.is_compiling():
        arguments.check_filter_logits(logits, filters)
    return _filter_logits(logits, *filters)


def _skips_rows(logits: Tensor, least: int, top_k: Any = None, top_p: Any = None, min_p: Any = None, **_: Any) -> bool:
    """True if compiled code on a CPU should call the op. The called op skips rows after a rejection, and an inlined op
    is fused with its neighbours. Skipping saves more for rows of at least `least` logits. With filters both cost the
    same, so the op is inlined."""
    is_long = isinstance(logits.shape[-1], int) and logits.shape[-1] >= least
    return is_long and top_k is None and top_p is None and min_p is None


@register_op(verify_exact, lambda target_logits, **args: _skips_rows(target_logits, 2**15, **args))
def _verify_exact(*values: Any) -> tuple[Tensor, Tensor]:
    args = VerifyArguments(*values)
    arguments.check_verify_exact(args)
    if args.target_logits.device.type != "cuda":
        return exact.verify_exact(args.without_bounds())
    from .cuda.exact import verify_exact as launch

    return launch(args)


@register_op(verify_block, lambda target_logits, **args: _skips_rows(target_logits, 2**15, **args))
def _verify_block(*values: Any) -> tuple[Tensor, Tensor]:
    # `values` has no `argmax_lenience`, and the dispatcher leaves out last values that equal the defaults.
    last = dict(zip(("filter_draft", "draft_is_one_hot"), values[11:], strict=False))
    args = VerifyArguments(*values[:11])._replace(**last)
    arguments.check_verify_block(args)
    if args.target_logits.device.type != "cuda":
        return block.verify_block(args.without_bounds())
    from .cuda.block import verify_block as launch

    return launch(args)


@register_op(verify_sigmoid)
def _verify_sigmoid(*values: Any) -> tuple[Tensor, Tensor]:
    args = SigmoidArguments(*values)
    arguments.check_verify_sigmoid(args)
    if args.target_logits.device.type != "cuda":
        return sigmoid.verify_sigmoid(args)
    from .cuda.sigmoid import verify_sigmoid as launch

    return launch(args)


@register_op(sample, lambda logits, **args: _skips_rows(logits, 2**16, **args))
def _sample(logits: Tensor, uniforms: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    # The dispatcher leaves out last values that equal the defaults.
    filters, with_bounds = Filters(*args[:4]), any(args[4:])
    arguments.check_sample(logits, uniforms, filters)
    if logits.device.type != "cuda":
        tokens, lse = cpu_sample.sample(logits, uniforms, filters)
        return tokens, cpu_filters.join_bounds(lse, logits, filters) if with_bounds else lse
    from .cuda.sample import sample as launch

    return launch(logits, uniforms, filters, with_bounds)


@register_op(filter_logits)
def _filter_logits(logits: Tensor, *args: Any) -> Tensor:
    filters = Filters(*args)
    arguments.check_filter_logits(logits, filters)
    if logits.device.type != "cuda":
        return cpu_filters.filter_logits(logits, filters)
    from .cuda.filter import filter_logits as launch

    return launch(logits, filters)
