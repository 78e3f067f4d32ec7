"""What the tests that ask the same of every op know of each: its schema, what its launches write, the cases of its
kernels, and a call; and calls that are compared with the oracle."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from report import Report
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torch_specops
from torch_specops import ops
from torch_specops.ops import private
from torch_specops.ops.registration import bodies
from torch_specops.testing import Case, compare, poison_memory

# In the order of their registration.
OPS = tuple(name.removeprefix("specops::") for name in bodies if name.removeprefix("specops::") in ops.__all__)
VERIFY_OPS = tuple(op for op in OPS if op.startswith("verify"))
FILTERS = ("top_k", "top_p", "min_p")
# Seeds and positions, of which all words count.
NOISE_PLACES = [(0, 0), (7, 2**32 - 1), (-1, 5), (2**62 + 12345, 2**40 + 3), (-(2**63), 2**63 - 1)]

# Names, order and defaults: what callers rely on.
_DRAFTS = "Tensor target_logits, Tensor draft_tokens, Tensor{} draft_logits"
_UNIFORMS = "Tensor accept_uniforms, Tensor sample_uniforms"
_FILTERS = "Tensor? top_k=None, Tensor? top_p=None, Tensor? min_p=None"
_TEMPERATURE, _RESULT = "Tensor? temperature=None", "-> (Tensor, Tensor)"
SCHEMAS = {
    "verify_exact": f"specops::verify_exact({_DRAFTS.format('?')}, {_UNIFORMS}, {_TEMPERATURE}, "
    f"Tensor? draft_lse=None, float lenience=1., {_FILTERS}, float argmax_lenience=1., "
    f"bool filter_draft=True, Tensor? draft_is_one_hot=None) {_RESULT}",
    "verify_block": f"specops::verify_block({_DRAFTS.format('?')}, {_UNIFORMS}, {_TEMPERATURE}, "
    f"Tensor? draft_lse=None, float lenience=1., {_FILTERS}, bool filter_draft=True, "
    f"Tensor? draft_is_one_hot=None) {_RESULT}",
    "verify_sigmoid": f"specops::verify_sigmoid({_DRAFTS.format('')}, {_UNIFORMS}, "
    f"float alpha=-1000., float beta=1000., {_TEMPERATURE}) {_RESULT}",
    "verify_gumbel": "specops::verify_gumbel(Tensor target_logits, Tensor draft_tokens, Tensor seeds, "
    f"Tensor positions, {_TEMPERATURE}, {_FILTERS}) {_RESULT}",
    "sample": f"specops::sample(Tensor logits, Tensor uniforms, {_TEMPERATURE}, {_FILTERS}, bool with_bounds=False) "
    f"{_RESULT}",
    "sample_gumbel": f"specops::sample_gumbel(Tensor logits, Tensor seeds, Tensor positions, {_TEMPERATURE}, "
    f"{_FILTERS}) -> Tensor",
    "filter_logits": f"specops::filter_logits(Tensor logits, {_TEMPERATURE}, {_FILTERS}) -> Tensor",
}

_SEARCH = [{"top_ptr", "sum_ptr"}, {"part_ptr", "token_ptr", "value_ptr", "bounds_ptr"}]
_STATS = {"partial_ptr", "count_ptr"}
_OUTPUTS = {"num_accepted_ptr", "output_tokens_ptr"}
# What each launch of an op writes.
WRITTEN = {
    "verify_exact": [*_SEARCH, _STATS, _OUTPUTS | {"mass_ptr", "state_ptr", "count_ptr"}],
    "verify_block": [
        *_SEARCH,
        _STATS,
        {"state_ptr", "ratio_ptr", "reach_ptr", "count_ptr", "num_accepted_ptr"},
        _OUTPUTS | {"mass_ptr", "count_ptr"},
    ],
    "verify_sigmoid": [{"partial_ptr", "num_accepted_ptr"}, _OUTPUTS],
    "verify_gumbel": [*_SEARCH, {"partial_ptr"}, _OUTPUTS],
    "sample_gumbel": [*_SEARCH, {"partial_ptr"}, _OUTPUTS],
    "sample": [*_SEARCH, {"partial_ptr"}, {"tokens_ptr", "lse_ptr"}],
    "filter_logits": [*_SEARCH, {"output_ptr"}],
}

# The search is tested by `sample` and `filter_logits`; here, that every load is masked by the bounds of its own row.
FILTERED_VERIFY = (
    "filters_temperature,filters_plateaus,filters_lse,filters_one_hot,filters_without_law,"
    "mixed_one_hot_filters,mixed_one_hot_filters_lse,mixed_one_hot_target_filters,"
    "filters_bounds,filters_bounds_without_law,filters_bounds_removed_token,mixed_one_hot_filters_bounds,"
    "target_filters_bounds,lse_bounds,target_filters,target_filters_temperature,lse_wrong_filters,target_filters_lse,target_filters_nonfinite,target_filters_without_law"
)
# verify_block reads and sums rows with the kernels of verify_exact, which meet all cases; here, what its own ones do.
BLOCK = (
    "uniforms_out_of_range_masked,"
    "k1,k3,k8,k0,b0,bf16,fp16,fp32_bf16,batch_sliced,vocab_sliced_bf16,transposed_fp16,expanded,int32,pad_head,"
    "pad_ragged,target_nan,draft_inf,mixed_nonfinite,masked,overflow_fp16,greedy_mixed,bad_temperature,opposite,"
    "plateaus,tie_u_zero,tie_s_zero,one_hot,one_hot_padded,one_hot_masked,lse_k8_bf16,lse_nonfinite,long,long_one_hot,"
    "lse_wrong,lse_wrong_large,lse_wrong_largest,lse_wrong_masked,lse_wrong_same,"
    "mixed_one_hot,mixed_one_hot_late,mixed_one_hot_padded,mixed_one_hot_lse"
)
# A vocabulary of one token: what is left of a row's two ends.
ONE_TOKEN = "k3,k0,bf16,fp16,batch_sliced,pad_ragged,target_nan,draft_nan,mixed_nonfinite,masked,greedy_mixed,one_hot"
# One of every kind of input: what `make test` has time for.
FEW = "three rows of fp32_bf16,vocab_sliced_bf16,mixed_nonfinite,greedy_mixed,greedy_plateaus,tie_s_zero"
FEW_FILTERS = (
    "three rows of bf16,filters_temperature,filters_plateaus,filters_plateaus_hot,filters_zero_maxima,"
    "filters_strided,filters_nonfinite,min_p,tie_top_p_met"
)
FEW_VERIFY = FEW + ",pad_ragged,exact_u_is_p_over_q,tie_u_zero,masked_token,uniforms_out_of_range_masked"
FEW_GUMBEL = (
    "three rows of fp32_bf16,vocab_sliced_bf16,mixed_nonfinite,greedy_mixed,greedy_plateaus,masked_token,pad_ragged,"
    "k0,k8,hot_overflow,cold,filters_temperature"
)
# (op, kind of cases, tile, vocabulary sizes): smaller than a tile, not a multiple of one, and of several tiles; odd
# sizes put rows off the 16-byte boundary.
QUICK_RUNS = [
    (
        "verify_exact",
        FEW_VERIFY + ",one_hot,lse_wrong_large,argmax_lenience_mixed,filters_temperature,target_filters_lse,"
        "mixed_one_hot_lse,mixed_one_hot_filters_lse,mixed_one_hot_filters_bounds",
        32,
        (45,),
    ),
    (
        "verify_block",
        # Rows are read and summed by the kernels of verify_exact.
        "three rows of greedy_mixed,tie_s_zero,pad_ragged,masked_token,uniforms_out_of_range_masked,mixed_nonfinite,"
        "k0,one_hot,lse_wrong_large,lse_wrong_same,long_one_hot,filters_one_hot,target_filters_temperature,"
        "mixed_one_hot_late,filters_bounds",
        32,
        (45,),
    ),
    ("verify_sigmoid", FEW_VERIFY, 32, (67,)),
    ("verify_gumbel", FEW_GUMBEL, 32, (67,)),
    ("sample", FEW + ",filters_temperature", 32, (67,)),
    ("filter_logits", FEW_FILTERS, 32, (67,)),
]
SLOW_RUNS = [
    pytest.param(*run, marks=pytest.mark.slow)
    for run in (
        ("verify_exact", "plain", 32, (67,)),
        ("verify_exact", ONE_TOKEN, 64, (1,)),
        ("verify_exact", FILTERED_VERIFY, 64, (37,)),
        ("verify_block", BLOCK, 64, (67,)),
        ("verify_block", FILTERED_VERIFY, 64, (37,)),
        ("verify_sigmoid", "plain", 32, (67,)),
        ("verify_gumbel", "plain", 32, (1, 131)),
        ("verify_gumbel", "filtered", 64, (37,)),
        ("sample_gumbel", "plain", 32, (131,)),
        ("sample", "plain", 32, (1, 64, 131)),
        ("sample", "plain", 256, (37, 600)),
        ("sample", "filtered", 32, (37,)),
        ("filter_logits", "filtered", 64, (1, 131)),
    )
]


def op_arguments(
    op: str,
    batch: int = 4,
    num_drafts: int = 3,
    vocab_size: int = 37,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    filtered: bool = True,
) -> dict[str, Any]:
    """Every argument that the op has, in its order: rows with and without a law, greedy and sampled, padded drafts.

    Drafts are sampled near the target, so that every number of accepted drafts occurs.
    """
    g = torch.Generator().manual_seed(seed)
    target_logits = 3 * torch.randn(batch, num_drafts + 1, vocab_size, generator=g)
    draft_logits = target_logits[:, :-1] + torch.randn(batch, num_drafts, vocab_size, generator=g)
    noise = torch.rand(batch, num_drafts, vocab_size, generator=g)
    draft_tokens = (draft_logits - 0.5 * (-noise.log()).log()).argmax(-1)
    draft_tokens[torch.rand(batch, num_drafts, generator=g) < 0.1] = -1
    uniforms = torch.rand(batch, num_drafts + 1, generator=g)
    temperature = torch.tensor([0.7, 0.0, 1.3, -1.0]).repeat(batch // 4 + 1)[:batch].roll(seed)
    seeds, positions = torch.arange(batch) + 100 * seed, 7 * torch.arange(batch)
    if op == "verify_gumbel":
        every = positions.unsqueeze(1) + torch.arange(num_drafts)
        rows = (draft_logits.flatten(0, 1), seeds.repeat_interleave(num_drafts), every.flatten())
        draft_tokens = torch_specops.sample_gumbel(*rows, temperature.repeat_interleave(num_drafts)).view_as(every)
    scaled = draft_logits / torch.where(temperature > 0, temperature, 1.0).view(-1, 1, 1)
    values: dict[str, Any] = {
        "logits": target_logits[:, 0].to(dtype, copy=True, memory_format=torch.contiguous_format),
        "uniforms": uniforms[:, 0].contiguous(),
        "target_logits": target_logits.to(dtype),
        "draft_tokens": draft_tokens,
        "draft_logits": draft_logits.to(dtype),
        "accept_uniforms": uniforms[:, :-1].contiguous(),
        "sample_uniforms": uniforms[:, -1].contiguous(),
        "seeds": seeds,
        "positions": positions,
        "temperature": temperature,
        "draft_lse": scaled.to(dtype).float().logsumexp(-1),
        "lenience": 0.9 if op == "verify_exact" else 1.0,
        "argmax_lenience": 0.8,
        "alpha": -4.0,
        "beta": 3.0,
        # Some rows keep every token.
        "top_k": torch.arange(batch) % 3 * (vocab_size // 4),
        "top_p": torch.tensor([0.9, 0.5, 1.0, 0.7]).repeat(batch // 4 + 1)[:batch],
        "min_p": torch.tensor([0.0, 0.02, 0.1, 0.0]).repeat(batch // 4 + 1)[:batch],
        "filter_draft": op == "verify_exact",
        "with_bounds": False,
        "draft_is_one_hot": torch.arange(batch) % 3 == 2,
    }
    schema = getattr(torch.ops.specops, op).default._schema
    left_out = () if filtered else (*FILTERS, "filter_draft")
    return {each.name: values[each.name] for each in schema.arguments if each.name not in left_out}


def call(op: str, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    """The public function, its result always a tuple."""
    outputs = getattr(torch_specops, op)(**arguments)
    return (outputs,) if isinstance(outputs, Tensor) else outputs


def tensor_arguments(op: str, *sizes: int, **options: Any) -> dict[str, Tensor]:
    """Those of `op_arguments` that are tensors."""
    return {name: value for name, value in op_arguments(op, *sizes, **options).items() if isinstance(value, Tensor)}


class Call(nn.Module):
    """An op as a module that is given the tensors; numbers are constants of the module."""

    def __init__(self, op: str, **numbers: Any) -> None:
        super().__init__()
        self.op, self.numbers = op, numbers

    def forward(self, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return call(self.op, tensors | self.numbers)


# A class of its own: torch wraps such a method of a mode itself for Dynamo, which takes longer than most operators.
class _Watch:
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert torch.Tag.data_dependent_output not in func.tags, f"a traced op calls {func}"
        return func(*args, **(kwargs or {}))


class _WithoutValues(_Watch, TorchDispatchMode):
    """What a compiler records: no operator may read a value."""


_watched: set[tuple[Any, ...]] = set()


def call_traced(op: str, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    """The same by the dense form that is traced, which has to do without looking at values."""
    bound = inspect.signature(getattr(torch_specops, op)).bind(**arguments)
    bound.apply_defaults()
    # What is traced depends on which arguments there are, and on sizes: to watch takes as long as the call.
    kind = op, bound.args[0].shape[1:], *(value is None for value in bound.args)
    is_new = kind not in _watched
    _watched.add(kind)
    with _WithoutValues() if is_new else mock.patch.object(private, "num_modes", partial(int, 1)):
        outputs = bodies[f"specops::{op}"](*bound.args)
    return (outputs,) if isinstance(outputs, Tensor) else outputs


def check(results: Iterable[tuple[Case, tuple[Tensor, ...]]], report: Report) -> None:
    """Every result is the oracle's, and few rows differ from it by rounding."""
    rounding = rows = 0
    for case, got in results:
        comparison = compare(case, got)
        report.add(case, comparison)
        assert comparison.wrong == [], f"{case.name}: rows {comparison.wrong} differ from the oracle"
        rounding, rows = rounding + comparison.rounding, rows + comparison.rows
    assert rounding <= 0.01 * rows


def results(cases: Iterable[Case]) -> Iterator[tuple[Case, tuple[Tensor, ...]]]:
    """What the eager form returns, and what the traced one does where it differs. Memory that is read before it is
    written shows."""
    for case in cases:
        with poison_memory():
            eager, traced = call(case.op, case.args), call_traced(case.op, case.args)
        yield case, eager
        if not equal(eager, traced):
            yield case, traced


def equal(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def assert_bounds(args: dict[str, Any], tokens: Tensor, lse: Tensor, same_tokens: Tensor, found: Tensor) -> None:
    """With the bounds that `sample` returns, its other results are the same, and a row with a distribution keeps the
    tokens that the oracle keeps."""
    assert equal((same_tokens, found[:, 0]), (tokens, lse))
    cut, first = found[:, 1:2], found[:, 2:].contiguous().view(torch.int32)
    x, index = args["logits"].float(), torch.arange(args["logits"].shape[1])
    kept = ((x > cut) | ((x == cut) & (index >= first))) & (x > -torch.inf)
    names = {"temperature", *FILTERS} & args.keys()
    expected = torch_specops.reference.filter_logits(args["logits"], **{name: args[name] for name in names})
    assert torch.equal(kept[lse > -torch.inf], expected[lse > -torch.inf] > -torch.inf)


def assert_equal(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Integers to the bit; a compiled logsumexp may differ in its last one."""
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6 if a.is_floating_point() else 0, atol=0)


def empty_arguments(
    op: str,
    options: str = "temperature",
    batch: int = 4,
    num_drafts: int = 5,
    vocab_size: int = 50_257,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
) -> dict[str, Tensor | None]:
    """Arguments without values, for fake tensors of a device that need not be there. `options` may name temperature,
    filters, draft_lse and one-hot. `dtype` is that of the target's logits; those of a draft are bfloat16."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    is_one_hot = "one-hot" in options
    every = {
        "logits": empty(batch, vocab_size, dtype=dtype),
        "uniforms": empty(batch),
        "target_logits": empty(batch, num_drafts + 1, vocab_size, dtype=dtype),
        "draft_tokens": empty(batch, num_drafts, dtype=torch.int64),
        "draft_logits": None if is_one_hot else empty(batch, num_drafts, vocab_size, dtype=torch.bfloat16),
        "accept_uniforms": empty(batch, num_drafts),
        "sample_uniforms": empty(batch),
        **{name: empty(batch, dtype=torch.int64) for name in ("seeds", "positions")},
    }
    if "temperature" in options:
        every["temperature"] = empty(batch)
    if "filters" in options:
        every |= {"top_k": empty(batch, dtype=torch.int64), "top_p": empty(batch), "min_p": empty(batch)}
    if "draft_lse" in options:
        every["draft_lse"] = empty(batch, num_drafts)
    names = {argument.name for argument in getattr(torch.ops.specops, op).default._schema.arguments}
    return {name: value for name, value in every.items() if name in names}
