"""The cases that every backend is tested on: a table of options, and functions that create the arguments of a call from
them."""

from __future__ import annotations

import inspect
import itertools
import math
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .. import reference
from . import edits

BELOW_ONE = 1.0 - 2.0**-24
BELOW_ONE_FLOAT64 = 1.0 - 2.0**-53
INF, NAN = math.inf, math.nan
# The batch size and the number of drafts of a case that does not set them.
BATCH, NUM_DRAFTS = 6, 3

ROWS = ("temperature", "top_k", "top_p", "min_p")

Options = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One call of an op: `getattr(torch_specops, case.op)(**case.args)`. In cases named "tie_..", rounding may decide
    the result; in cases named "exact_..", it never does."""

    name: str
    op: str
    args: dict[str, Any]

    @cached_property
    def expected(self) -> tuple[Tensor, ...]:
        """The result of the oracle for this call."""
        return oracle(self.op, on_cpu(self.args))


def on_cpu(args: dict[str, Any]) -> dict[str, Any]:
    return {key: value.cpu() if isinstance(value, Tensor) else value for key, value in args.items()}


def oracle(op: str, args: dict[str, Any]) -> tuple[Tensor, ...]:
    outputs = getattr(reference, op)(**args)
    return (outputs,) if isinstance(outputs, Tensor) else outputs


def sample_inputs(
    op: str,
    *,
    device: torch.device | str = "cpu",
    vocab_sizes: Sequence[int] = (1, 2, 17, 600),
    seed: int = 0,
    names: Collection[str] | None = None,
    max_rows: int | None = None,
    max_drafts: int | None = None,
) -> Iterator[Case]:
    """Yield the cases that every backend is tested on, with the same numbers on every device.

    Args:
        op: "verify_exact", "verify_block", "verify_sigmoid", "verify_gumbel", "sample", "sample_gumbel" or
            "filter_logits".
        device: the device of the tensors; moving a tensor there does not change its strides.
        vocab_sizes: every case is created once for each size.
        seed: the seed of the random numbers. The kinds of cases do not depend on it.
        names: the cases to yield; None = all. The name of a `Case` is such a name plus the vocabulary size: "k3-V17".
        max_rows, max_drafts: limits for the batch size and the number of drafts, useful for a large vocabulary. They
            change the random numbers.

    Yields:
        Cases with 0 to 16 rows. Drafts are sampled from the draft's distribution unless the options of the case change
        them. In cases of `verify_gumbel`, four in five drafts equal the token that the oracle draws.

    Raises:
        ValueError: there are no cases for the op.

    Examples:
        >>> import torch_specops
        >>> from torch_specops.testing import compare, sample_inputs
        >>> for case in sample_inputs("verify_exact", vocab_sizes=[17], names=["k3", "lse"]):
        ...     found = compare(case, torch_specops.verify_exact(**case.args))   # or an op of your own
        ...     assert not found.wrong, (case.name, found.wrong)
    """
    for vocab_size, name in itertools.product(vocab_sizes, case_names(op)):
        if names is not None and name not in names:
            continue
        options = dict(CASES[name])
        for key, default, limit in (("batch", BATCH, max_rows), ("num_drafts", NUM_DRAFTS, max_drafts)):
            options[key] = min(options.get(key, default), limit or math.inf)
        # Use a new generator for each case, so that adding a case does not change the numbers of other cases.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{op} {name} {vocab_size} {seed}".encode()))
        args = arguments_of(op, generator, vocab_size, options)
        yield Case(f"{name}-V{vocab_size}", op, {key: _to_device(value, device) for key, value in args.items()})


def case_names(op: str) -> list[str]:
    """The names of all cases whose options apply to the op."""
    if op not in OPTIONS:
        raise ValueError(f"op: expected one of {', '.join(OPTIONS)}, got {op!r}")
    return [name for name, options in CASES.items() if options.keys() <= OPTIONS[op]]


def arguments_of(op: str, generator: torch.Generator, vocab_size: int, options: Options) -> dict[str, Any]:
    """Create the arguments of a call with these options. Removes the entries "layout" and "scale" from `options`."""
    layout, scale = options.pop("layout", None), options.pop("scale", None)
    if op.startswith("verify"):
        args = _verify_arguments(generator, vocab_size, **options)
        args = _with_noise(generator, args, options.get("tokens", lambda *_: None)) if op == "verify_gumbel" else args
    else:
        # Use the first target row of each sequence of a verify case.
        verify = _verify_arguments(generator, vocab_size, **options | {"num_drafts": 1})
        args = {"logits": verify["target_logits"][:, 0].contiguous(), "uniforms": verify["sample_uniforms"]}
        args |= _noise_arguments(generator, verify) | {key: verify[key] for key in ROWS if key in verify}
    if op == "verify_sigmoid":
        scale = SCALES[int(torch.randint(len(SCALES), (), generator=generator))] if scale is None else scale
        args |= dict(zip(("alpha", "beta"), scale, strict=False))
    parameters = inspect.signature(getattr(reference, op)).parameters
    args = {key: value for key, value in args.items() if key in parameters}
    return args if layout is None else {key: layout(x) if isinstance(x, Tensor) else x for key, x in args.items()}


def _verify_arguments(
    generator: torch.Generator,
    vocab_size: int,
    *,
    batch: int = BATCH,
    num_drafts: int = NUM_DRAFTS,
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
    noise: Sequence[float] = (0.3, 1.0, 2.0),
    edit: Callable[[Tensor, Tensor], None] | None = None,
    temperature: Sequence[float] | None = None,
    uniform_dtype: torch.dtype = torch.float32,
    accept: Sequence[float] | None = None,
    sample: Sequence[float] | None = None,
    tokens: Callable[[Tensor, int], None] | None = None,
    token_dtype: torch.dtype = torch.int64,
    one_hot: bool | Sequence[bool] = False,
    lse: Sequence[float] | None = None,
    bounds: bool = False,
    filters: dict[str, Sequence[float]] | None = None,
    filter_draft: bool | None = None,
    **numbers: float,
) -> dict[str, Any]:
    """Create the arguments of a verify op. Options that are sequences of numbers are repeated over the rows. `lse` is
    added to the draft's logsumexp, to which `bounds` adds the bounds. With a sequence `one_hot`, the draft's logits and
    logsumexp of the one-hot rows are NaN, because the op must not use them."""
    # Use larger logits for a larger vocabulary, so that only a few tokens are likely, as in real models.
    spread = 2.0 + math.log10(vocab_size)
    target = spread * torch.randn(batch, num_drafts + 1, vocab_size, generator=generator)
    noise_rows = _cycle(noise, batch).float().view(-1, 1, 1)
    draft = target[:, :num_drafts] + noise_rows * torch.randn(batch, num_drafts, vocab_size, generator=generator)
    if edit is not None:
        edit(target, draft)
    target, draft = target.to(dtypes[0]), draft.to(dtypes[1])

    values = ({} if temperature is None else {"temperature": temperature}) | (filters or {})
    rows = {key: _cycle(x, batch).to(torch.int64 if key == "top_k" else torch.float32) for key, x in values.items()}
    draft_rows = {key: x for key, x in rows.items() if key == "temperature"} if filter_draft is False else rows
    is_one_hot = _cycle((one_hot,) if isinstance(one_hot, bool) else one_hot, batch).bool()
    drafted, found = reference.sample(
        torch.where(is_one_hot.view(-1, 1, 1), target[:, :num_drafts], draft).flatten(0, 1),
        torch.rand(batch * num_drafts, generator=generator),
        **{key: x.repeat_interleave(num_drafts) for key, x in draft_rows.items()},
        with_bounds=True,
    )
    # A row without a distribution gets a random token of the vocabulary. This token is rejected because of its row; -1
    # would be rejected as padding.
    anything = torch.randint(vocab_size, drafted.shape, generator=generator)
    draft_tokens = torch.where(drafted < 0, anything, drafted).view(batch, num_drafts)
    if tokens is not None:
        tokens(draft_tokens, vocab_size)

    u = torch.rand(batch, num_drafts, generator=generator, dtype=uniform_dtype)
    s = torch.rand(batch, generator=generator, dtype=uniform_dtype)
    args: dict[str, Any] = {
        "target_logits": target,
        "draft_tokens": draft_tokens.to(token_dtype),
        "draft_logits": None if one_hot is True else draft,
        "accept_uniforms": u if accept is None else _cycle(accept, batch * num_drafts).to(uniform_dtype).view_as(u),
        "sample_uniforms": s if sample is None else _cycle(sample, batch).to(uniform_dtype),
    }
    if lse is not None:
        found[:, 0] += _cycle(lse, batch * num_drafts).float()
        args["draft_lse"] = (found if bounds else found[:, 0].clone()).unflatten(0, (batch, num_drafts))
    if not isinstance(one_hot, bool):
        args["draft_is_one_hot"] = is_one_hot
        for ignored in {"draft_logits", "draft_lse"} & args.keys():
            args[ignored][is_one_hot] = NAN
    if filter_draft is not None:
        args["filter_draft"] = filter_draft
    return args | rows | numbers


def _with_noise(generator: torch.Generator, args: dict[str, Any], tokens: Any) -> dict[str, Any]:
    """Convert arguments of `verify_exact` to arguments of `verify_gumbel`."""
    noise, rows = _noise_arguments(generator, args), {key: args[key] for key in ROWS if key in args}
    target, drafts = args["target_logits"], args["draft_tokens"]
    for i in range(drafts.shape[1]):
        drawn = reference.sample_gumbel(target[:, i], noise["seeds"], noise["positions"] + i, **rows)
        is_drawn = (torch.rand(len(drawn), generator=generator) < 0.8) & (drawn >= 0)
        drafts[:, i] = torch.where(is_drawn, drawn, drafts[:, i])
    tokens(drafts, target.shape[2])
    return {"target_logits": target, "draft_tokens": drafts, **noise, **rows}


def _noise_arguments(generator: torch.Generator, args: dict[str, Any]) -> dict[str, Tensor]:
    """Random seeds and positions that use all 64 bits. The positions of one sequence pass 2**32, so that their upper 32
    bits change."""
    seeds, positions = torch.randint(-(2**62), 2**62, (2, len(args["target_logits"])), generator=generator)
    positions[1:2] = 2**32 - 2
    return {"seeds": seeds, "positions": positions}


def _cycle(values: Sequence[float], count: int) -> Tensor:
    return torch.tensor(list(itertools.islice(itertools.cycle(values), count)), dtype=torch.float64)


def _to_device(value: Any, device: torch.device | str) -> Any:
    """Copy a tensor to the device with the same strides, offset and alignment; `Tensor.to` may change these."""
    if not isinstance(value, Tensor) or torch.device(device) == value.device:
        return value
    storage = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage()).to(device)
    return storage.as_strided(value.shape, value.stride(), value.storage_offset())


HALF, BFLOAT16, FLOAT32 = torch.float16, torch.bfloat16, torch.float32
HALVES = (BFLOAT16, HALF)
MIXED_TEMPERATURE = (0.0, 1.0, 0.7, 0.0, 1.5, 0.3)
# The values of (alpha, beta) for sigmoid cases without the option "scale"; () = the op's defaults.
SCALES: tuple[tuple[float, ...], ...] = ((-5.0, 5.0), (), (-2.0, 7.0), (-1e4, 1e4))
# Uniform numbers close to 1. If all scores are nearly equal, only such numbers reject a draft.
LATE = tuple(1.0 - 2.0 ** -(3 + i % 9) for i in range(13))
# With these values, each batch of six rows or more has rows with and rows without each filter.
TOP_K = {"top_k": (1, 0, 5, 3, 10**6, 20)}
TOP_P = {"top_p": (0.9, 0.5, 1.0, 0.0, 0.97, 2.0)}
MIN_P = {"min_p": (0.1, 0.0, 0.5, 1.0, 0.02, -1.0)}
ALL_FILTERS = {"top_k": (50, 0, 5, 8, 3), "top_p": (0.9, 0.6, 1.0, 0.95), "min_p": (0.0, 0.2, 0.05)}
NO_LAW = {"top_p": (NAN, 0.9, 1.0), "min_p": (0.1, NAN, 0.0, 0.0)}
# Numbers that are added to the lse of draft rows. The result is wrong as if it were computed from other logits, with
# another temperature, or from logits with NaN.
WRONG_LSE = (-95.0, NAN, 0.5, 95.0, INF, -0.3, -INF, 0.0, -1e3, 1e30, 2.0)

CASES: dict[str, Options] = {
    "k3": {},
    "k1": {"num_drafts": 1, "batch": 8},
    "k8": {"num_drafts": 8, "noise": (0.1, 0.3, 0.6)},
    "long": {"num_drafts": 20, "noise": (0.05, 0.1, 0.3)},
    "k0": {"num_drafts": 0},
    "k0_greedy": {"num_drafts": 0, "temperature": MIXED_TEMPERATURE},
    "b0": {"batch": 0},
    "bf16": {"dtypes": (BFLOAT16, BFLOAT16)},
    "fp16": {"dtypes": (HALF, HALF)},
    "fp32_bf16": {"dtypes": (FLOAT32, BFLOAT16)},
    "bf16_fp16": {"dtypes": HALVES, "temperature": MIXED_TEMPERATURE},
    "fp16_fp32": {"dtypes": (HALF, FLOAT32), "num_drafts": 8, "noise": (0.1, 0.3, 0.6)},
    "batch_sliced": {"layout": edits.batch_sliced, "temperature": MIXED_TEMPERATURE},
    "vocab_sliced": {"layout": edits.vocab_sliced},
    "vocab_sliced_bf16": {"layout": edits.vocab_sliced, "dtypes": (BFLOAT16, BFLOAT16)},
    "transposed": {"layout": edits.transposed, "temperature": (0.7, 1.0)},
    "transposed_fp16": {"layout": edits.transposed, "dtypes": (HALF, BFLOAT16)},
    "expanded": {"layout": edits.expanded},
    "sequence_sliced": {"layout": edits.sequence_sliced},
    "int32": {"token_dtype": torch.int32},
    "float64_uniforms": {"uniform_dtype": torch.float64},
    "pad_head": {"tokens": edits.pad_head, "temperature": MIXED_TEMPERATURE},
    "pad_middle": {"tokens": edits.pad_middle, "token_dtype": torch.int32, "noise": (0.1, 0.3)},
    "pad_ragged": {"tokens": edits.pad_ragged, "num_drafts": 8, "batch": 8, "noise": (0.1, 0.3)},
    "pad_all": {"tokens": edits.pad_all, "temperature": MIXED_TEMPERATURE},
    "target_nan": {"edit": edits.fill_target(NAN)},
    "target_minus_inf": {"edit": edits.fill_target(-INF), "temperature": MIXED_TEMPERATURE},
    "target_inf": {"edit": edits.fill_target(INF), "dtypes": (BFLOAT16, FLOAT32)},
    "draft_nan": {"edit": edits.fill_draft(NAN), "dtypes": (FLOAT32, BFLOAT16)},
    "draft_minus_inf": {"edit": edits.fill_draft(-INF)},
    "draft_inf": {"edit": edits.fill_draft(INF), "temperature": (0.7, 1.3)},
    "mixed_nonfinite": {"edit": edits.fill_mixed, "temperature": (0.7, 1.0, 0.3)},
    "target_minus_inf_greedy": {"edit": edits.fill_target(-INF), "temperature": (0.0,)},
    "mixed_nonfinite_greedy": {"edit": edits.fill_mixed, "temperature": (0.0,)},
    "masked": {"edit": edits.mask},
    "masked_token": {"edit": edits.mask, "tokens": edits.token_zero, "temperature": (1.0, 0.0, 0.5)},
    "overflow": {"edit": edits.overflow, "temperature": (0.25, 1e-3, 1.0)},
    "overflow_fp16": {"dtypes": (HALF, HALF), "temperature": (1e-36, 1e-30, 1e-37)},
    "greedy": {"temperature": (0.0,), "noise": (0.1, 0.3)},
    "greedy_mixed": {"temperature": MIXED_TEMPERATURE},
    "greedy_plateaus": {"temperature": (0.0,), "edit": edits.plateaus, "dtypes": (BFLOAT16, BFLOAT16)},
    "cold": {"temperature": (1e-3, 0.05)},
    "hot": {"temperature": (100.0, 7.0)},
    "hot_overflow": {"temperature": (2.0**127, 3e38, 2.0**126, INF), "edit": edits.overflow},
    "bad_temperature": {"temperature": (-0.5, NAN, 1.0, 0.0, -INF, 0.5)},
    "opposite": {"edit": edits.opposite},
    "plateaus": {"edit": edits.plateaus},
    "exact_u_is_p_over_q": {"accept": (0.5, 0.25, 0.125, 0.5 - 2.0**-25, 0.125 - 2.0**-27), "edit": edits.halves},
    "exact_residual_below_least": {"edit": edits.barely_more, "tokens": edits.token_zero},
    "exact_pad_minus_inf": {"edit": edits.fill_target(-INF), "tokens": edits.pad_ragged, "temperature": (0.0,)},
    "tie_u_zero": {"accept": (0.0,), "edit": edits.mask},
    "tie_s_zero": {"sample": (0.0,), "edit": edits.opposite},
    "tie_below_one": {"accept": (BELOW_ONE,), "sample": (BELOW_ONE,)},
    "tie_below_one_float64": {
        "edit": edits.mask_last,
        "accept": (BELOW_ONE_FLOAT64, 0.0),
        "sample": (BELOW_ONE_FLOAT64, 0.0, 0.5),
        "uniform_dtype": torch.float64,
    },
    "uniforms_out_of_range_masked": {
        "edit": edits.mask,
        "accept": (-1.0, -INF, -1e-30),
        "sample": (-1.0, NAN, 1.0, INF, -INF, 2.0),
        "num_drafts": 8,
    },
    "uniforms_out_of_range_filters": {
        "filters": ALL_FILTERS,
        "filter_draft": False,
        "accept": (-1.0, -INF, -1e-30),
        "sample": (-1.0, NAN, 1.0, INF, -INF, 2.0),
        "num_drafts": 8,
    },
    "tie_same": {"edit": edits.same, "accept": (BELOW_ONE, 0.0, 0.5)},
    "tie_same_excluded_token": {"edit": edits.same, "tokens": edits.token_zero, "temperature": (1.0, 0.7)},
    "top_k": {"filters": TOP_K, "noise": (0.1, 0.3)},
    "top_p": {"filters": TOP_P, "noise": (0.1, 0.3)},
    "min_p": {"filters": MIN_P, "noise": (0.1, 0.3)},
    "filters": {"filters": ALL_FILTERS, "num_drafts": 8, "noise": (0.1, 0.3), "batch": 8},
    "filters_temperature": {"filters": ALL_FILTERS, "temperature": MIXED_TEMPERATURE, "dtypes": HALVES},
    "filters_plateaus": {"filters": ALL_FILTERS, "edit": edits.plateaus, "dtypes": (BFLOAT16, BFLOAT16)},
    "filters_zero_maxima": {"filters": ALL_FILTERS, "edit": edits.zero_maxima, "dtypes": (BFLOAT16, BFLOAT16)},
    "tie_top_p_met": {"filters": {"top_p": (0.2, 0.3, 0.4, 0.6, 0.8, 0.7)}, "edit": edits.ten_equal},
    "filters_plateaus_hot": {"filters": TOP_P, "edit": edits.plateaus, "temperature": (3.0, 0.5, 100.0)},
    "filters_masked": {"filters": ALL_FILTERS, "edit": edits.mask},
    "filters_nonfinite": {"filters": ALL_FILTERS, "edit": edits.fill_mixed, "temperature": (1.0, 0.7)},
    "filters_overflow": {"filters": ALL_FILTERS, "edit": edits.overflow, "temperature": (0.25, 1e-3, 1.0)},
    "filters_opposite": {"filters": ALL_FILTERS, "edit": edits.opposite},
    "filters_strided": {"filters": ALL_FILTERS, "layout": edits.batch_sliced, "temperature": MIXED_TEMPERATURE},
    "filters_without_law": {"filters": NO_LAW, "temperature": (1.0, 1.0, 0.7, 0.0, -1.0)},
    "filters_lse": {"filters": ALL_FILTERS, "lse": (0.0,), "temperature": (0.7, 0.0, 1.5), "noise": (0.1, 0.3)},
    "filters_bounds": {
        "filters": ALL_FILTERS,
        "lse": (0.0,),
        "bounds": True,
        "dtypes": HALVES,
        "temperature": (0.7, 0.0),
    },
    "filters_bounds_without_law": {"filters": NO_LAW, "lse": (0.0,), "bounds": True, "temperature": (1.0, 0.7, -1.0)},
    "filters_bounds_removed_token": {
        "filters": ALL_FILTERS,
        "lse": (0.0,),
        "bounds": True,
        "tokens": edits.token_zero,
        "accept": (0.0,),
    },
    "filters_one_hot": {"filters": ALL_FILTERS, "one_hot": True, "temperature": MIXED_TEMPERATURE},
    "filters_padded": {"filters": ALL_FILTERS, "tokens": edits.pad_ragged, "num_drafts": 8, "noise": (0.1, 0.3)},
    "filters_removed_token": {"filters": ALL_FILTERS, "tokens": edits.token_zero, "accept": (0.0,), "noise": (0.1,)},
    "target_filters": {"filters": ALL_FILTERS, "filter_draft": False, "num_drafts": 8, "noise": (0.1, 0.3)},
    "target_filters_temperature": {
        "filters": ALL_FILTERS,
        "filter_draft": False,
        "temperature": MIXED_TEMPERATURE,
        "dtypes": HALVES,
    },
    "target_filters_lse": {
        "filters": {"top_k": (4, 8, 2), "top_p": (1.0, 0.7), "min_p": (0.0, 0.0, 0.0, 0.5)},
        "filter_draft": False,
        "lse": (0.0,),
        "temperature": (3.0, 1.5),
        "noise": (1.0, 2.0),
        "accept": (0.9, 0.3),
        "batch": 16,
    },
    "target_filters_bounds": {"filters": ALL_FILTERS, "filter_draft": False, "lse": (0.0,), "bounds": True},
    "target_filters_plateaus": {"filters": ALL_FILTERS, "filter_draft": False, "edit": edits.plateaus},
    "target_filters_nonfinite": {"filters": ALL_FILTERS, "filter_draft": False, "edit": edits.fill_mixed},
    "target_filters_without_law": {"filters": NO_LAW, "filter_draft": False, "temperature": (1.0, 1.0, 0.7, 0.0, -1.0)},
    "tie_target_filters_same": {"filters": ALL_FILTERS, "filter_draft": False, "edit": edits.same},
    "one_hot": {"one_hot": True},
    "one_hot_cold": {"one_hot": True, "temperature": (0.3, 0.0), "dtypes": HALVES},
    "one_hot_padded": {"one_hot": True, "tokens": edits.pad_ragged, "batch": 8, "temperature": (0.5,)},
    "one_hot_masked": {"one_hot": True, "edit": edits.mask, "tokens": edits.token_zero},
    "one_hot_nonfinite": {"one_hot": True, "edit": edits.fill_mixed},
    "mixed_one_hot": {"one_hot": (True, False, False), "temperature": MIXED_TEMPERATURE},
    "mixed_one_hot_late": {"one_hot": (False, True), "accept": LATE, "num_drafts": 8, "dtypes": HALVES},
    "mixed_one_hot_padded": {"one_hot": (True, True, False), "tokens": edits.pad_ragged, "batch": 8},
    "mixed_one_hot_lse": {"one_hot": (False, True, True), "lse": (0.0,), "temperature": (0.7, 1.0)},
    "mixed_one_hot_filters": {"one_hot": (True, False), "filters": ALL_FILTERS, "temperature": (0.7, 1.5, 0.0, 1.0)},
    "mixed_one_hot_filters_lse": {
        "one_hot": (True, False),
        "filters": ALL_FILTERS,
        "lse": (0.0,),
        "dtypes": HALVES,
        "noise": (0.1, 0.3),
    },
    "mixed_one_hot_filters_bounds": {
        "one_hot": (True, False, False),
        "filters": ALL_FILTERS,
        "lse": (0.0,),
        "bounds": True,
    },
    "mixed_one_hot_target_filters": {"one_hot": (False, True), "filters": ALL_FILTERS, "filter_draft": False},
    "long_one_hot": {"num_drafts": 20, "one_hot": True, "temperature": (0.05, 0.2)},
    "lse": {"lse": (0.0,)},
    "lse_bounds": {"lse": (0.0,), "bounds": True},
    "lse_k8_bf16": {"lse": (0.0,), "num_drafts": 8, "dtypes": HALVES, "noise": (0.1, 0.3, 0.6)},
    "lse_temperature": {"lse": (0.0,), "temperature": (0.7, 0.0, 1.5), "layout": edits.vocab_sliced},
    "lse_nonfinite": {"lse": (0.0,), "edit": edits.fill_mixed},
    "lse_not_finite": {"lse": (NAN, 0.0, INF, 0.0, -INF, 0.0), "accept": (0.0, 0.5)},
    "lse_masked": {"lse": (0.0,), "edit": edits.mask, "tokens": edits.pad_middle},
    "lse_wrong": {"lse": WRONG_LSE, "num_drafts": 8, "accept": (0.3, 0.0, 0.9), "noise": (0.1, 1.0)},
    "lse_wrong_large": {
        "lse": WRONG_LSE,
        "edit": edits.raise_by(90.0),
        "dtypes": HALVES,
        "temperature": (0.7, 1.0, 0.0, 1.0),
    },
    "lse_wrong_largest": {"lse": WRONG_LSE, "edit": edits.raise_by(3e38), "accept": (0.5, 0.0)},
    "lse_wrong_masked": {"lse": WRONG_LSE, "edit": edits.mask, "batch": 12, "accept": (0.5, 0.0, 0.1)},
    "lse_wrong_same": {"lse": WRONG_LSE, "edit": edits.same, "num_drafts": 8, "accept": (0.5, 0.0, 0.9, 0.2)},
    "lse_wrong_same_excluded_tokens": {
        "lse": (-0.3, math.log(2.0)),
        "edit": edits.same,
        "tokens": edits.token_zero_later,
        "num_drafts": 2,
        "accept": (0.3,),
    },
    "lse_wrong_filters": {
        "lse": WRONG_LSE,
        "filters": ALL_FILTERS,
        "filter_draft": False,
        "temperature": MIXED_TEMPERATURE,
        "accept": (0.5, 0.0),
    },
    "lenience_0.3": {"lenience": 0.3, "num_drafts": 8},
    "lenience_one_hot": {"lenience": 0.3, "one_hot": True},
    "lenience_lse": {"lenience": 0.3, "lse": (0.0,), "temperature": MIXED_TEMPERATURE},
    "argmax_lenience": {"argmax_lenience": 0.3, "temperature": (0.0,), "noise": (0.3, 1.0), "num_drafts": 8},
    "argmax_lenience_mixed": {"argmax_lenience": 0.01, "temperature": MIXED_TEMPERATURE, "lenience": 0.5},
    "argmax_lenience_plateaus": {"argmax_lenience": math.exp(-1.0), "temperature": (0.0,), "edit": edits.plateaus},
    "argmax_lenience_masked": {
        "argmax_lenience": 1e-6,
        "temperature": (0.0,),
        "edit": edits.mask,
        "tokens": edits.token_zero,
    },
    "argmax_lenience_nonfinite": {"argmax_lenience": 0.5, "temperature": (0.0, 1.0), "edit": edits.fill_mixed},
    "argmax_lenience_nonfinite_greedy": {"argmax_lenience": 0.5, "temperature": (0.0,), "edit": edits.fill_mixed},
    "argmax_lenience_padded": {"argmax_lenience": 0.2, "temperature": (0.0,), "tokens": edits.pad_middle},
    "scale_narrow": {"scale": (-5.0, 5.0), "num_drafts": 8},
    "scale_asymmetric": {"scale": (-0.5, 30.0), "accept": LATE, "temperature": MIXED_TEMPERATURE},
    "scale_1e3": {"scale": (-1e3, 1e3), "accept": LATE, "num_drafts": 8},
    "scale_1e4": {"scale": (-1e4, 1e4), "accept": LATE, "dtypes": HALVES},
    "scale_largest": {"scale": (-0.99e36, 0.99e36), "accept": LATE, "edit": edits.overflow},
    "scale_smallest": {"scale": (-1.01e-36, 1.01e-36), "edit": edits.plateaus, "num_drafts": 8},
    "scale_1e4_far": {"scale": (-1e4, 1e4), "accept": (BELOW_ONE,), "noise": (3.0,), "num_drafts": 1},
    "far_below": {"scale": (-5.0, 5.0), "edit": edits.far_below},
}

# Op -> the options that its cases may have.
ROW_OPTIONS = {"batch", "dtypes", "noise", "edit", "temperature", "layout", "uniform_dtype", "accept", "sample"}
VERIFY_OPTIONS = ROW_OPTIONS | {"num_drafts", "tokens", "token_dtype"}
NOISE_OPTIONS = (ROW_OPTIONS | {"filters"}) - {"uniform_dtype", "accept", "sample"}
OPTIONS = {
    "verify_exact": VERIFY_OPTIONS
    | {"filters", "filter_draft", "one_hot", "lse", "bounds", "lenience", "argmax_lenience"},
    "verify_block": VERIFY_OPTIONS | {"filters", "filter_draft", "one_hot", "lse", "bounds"},
    "verify_sigmoid": VERIFY_OPTIONS | {"scale"},
    "verify_gumbel": NOISE_OPTIONS | {"num_drafts", "tokens", "token_dtype"},
    "sample": ROW_OPTIONS | {"filters"},
    "sample_gumbel": NOISE_OPTIONS,
    "filter_logits": ROW_OPTIONS | {"filters"},
}
