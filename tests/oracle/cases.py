"""The cases that every backend is tested on."""

from __future__ import annotations

import itertools
import math
import random
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_specops import reference

from . import edits

BELOW_ONE = 1.0 - 2.0**-24
BELOW_ONE_FLOAT64 = 1.0 - 2.0**-53
INF, NAN = math.inf, math.nan
# Of a case that says nothing else.
BATCH, NUM_DRAFTS = 6, 3


@dataclass(frozen=True)
class Case:
    """One call of an op: `getattr(torch_specops, case.op)(**case.args)`. A name that starts with "tie_" says that the
    input was built so that rounding may decide.
    """

    name: str
    op: str
    args: dict[str, Any]


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
    """The cases every backend is tested on; the same numbers on every device.

    Args:
        op: "verify_exact", "verify_block", "verify_sigmoid", "sample" or "filter_logits".
        device: where the tensors go, with their strides.
        vocab_sizes: every case is built once per size.
        seed: another seed gives other numbers, not other kinds of cases.
        names: only these cases (of `case_names`); all by default.
        max_rows, max_drafts: smaller batches and fewer drafts, where a large vocabulary would make the float64 oracle
            slow; other numbers than without.

    Yields:
        Cases of 0 to 8 rows; drafts are sampled from the draft's distribution where the case does not say otherwise.
    """
    build, table = _builder(op)
    for vocab_size in vocab_sizes:
        for name, options in table.items():
            if names is not None and name not in names:
                continue
            smaller = dict(options)
            if max_rows is not None:
                smaller["batch"] = min(options.get("batch", BATCH), max_rows)
            if max_drafts is not None and op.startswith("verify"):
                smaller["num_drafts"] = min(options.get("num_drafts", NUM_DRAFTS), max_drafts)
            # A generator per case: adding a case changes no other.
            generator = torch.Generator().manual_seed(zlib.crc32(f"{op} {name} {vocab_size} {seed}".encode()))
            args = build(generator, vocab_size, name, **smaller)
            yield Case(f"{name}-V{vocab_size}", op, {key: _to_device(value, device) for key, value in args.items()})


def mixed_inputs(op: str, count: int) -> Iterator[Case]:
    """Cases that mix the options of three cases each, on few tokens."""
    build, table = _builder(op)
    for number in range(count):
        choice = random.Random(f"{op} {number}")
        names = choice.sample(sorted(table), 3)
        options = {key: value for name in names for key, value in table[name].items()}
        if options.get("one_hot"):
            options.pop("lse", None)
        vocab_size = choice.choice((1, 2, 3, 7, 33))
        generator = torch.Generator().manual_seed(number)
        name = f"{'+'.join(names)}-V{vocab_size}"
        yield Case(name, op, build(generator, vocab_size, name, **options))


def case_names(op: str) -> list[str]:
    """The cases of an op, without the vocabulary's size."""
    return list(_builder(op)[1])


def _builder(op: str) -> tuple[Callable[..., dict[str, Any]], dict[str, dict[str, Any]]]:
    """What builds the arguments of an op, and the options of its cases."""
    builders: dict[str, tuple[Callable[..., dict[str, Any]], dict[str, dict[str, Any]]]] = {
        "verify_exact": (_verify_args, VERIFY_OPTIONS | EXACT_OPTIONS | ARGMAX_OPTIONS),
        "verify_block": (_verify_args, VERIFY_OPTIONS | BLOCK_OPTIONS),
        "verify_sigmoid": (_sigmoid_args, VERIFY_OPTIONS | SIGMOID_OPTIONS),
        "sample": (_sample_args, SAMPLE_OPTIONS | SAMPLE_FILTER_OPTIONS),
        "filter_logits": (_filter_args, SAMPLE_OPTIONS | SAMPLE_FILTER_OPTIONS),
    }
    if op not in builders:
        raise ValueError(f"op: expected one of {', '.join(builders)}, got {op!r}")
    return builders[op]


def _verify_args(
    generator: torch.Generator,
    vocab_size: int,
    name: str,
    *,
    batch: int = BATCH,
    num_drafts: int = NUM_DRAFTS,
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
    noise: Sequence[float] = (0.3, 1.0, 2.0),
    edit: Callable[[Tensor, Tensor], None] | None = None,
    temperature: Sequence[float] | None = None,
    layout: Callable[[Tensor], Tensor] | None = None,
    uniform_dtype: torch.dtype = torch.float32,
    accept: Sequence[float] | None = None,
    sample: Sequence[float] | None = None,
    tokens: Callable[[Tensor, int], None] | None = None,
    token_dtype: torch.dtype = torch.int64,
    one_hot: bool = False,
    lse: bool = False,
    bad_lse: Sequence[float] | None = None,
    lenience: float = 1.0,
    argmax_lenience: float = 1.0,
    filters: dict[str, Sequence[float]] | None = None,
) -> dict[str, Any]:
    # Larger vocabularies get larger logits, as those of models are, so that the likely tokens stay few.
    spread = 2.0 + math.log10(vocab_size)
    target = spread * torch.randn(batch, num_drafts + 1, vocab_size, generator=generator)
    noise_rows = _cycle(noise, batch).view(-1, 1, 1)
    draft = target[:, :num_drafts] + noise_rows * torch.randn(batch, num_drafts, vocab_size, generator=generator)
    if edit is not None:
        edit(target, draft)
    target, draft = target.to(dtypes[0]), draft.to(dtypes[1])
    t = None if temperature is None else _cycle(temperature, batch).float()

    row_filters = {
        key: _cycle(values, batch).to(torch.int64 if key == "top_k" else torch.float32)
        for key, values in (filters or {}).items()
    }
    flat_t = None if t is None else t.repeat_interleave(num_drafts)
    uniforms = torch.rand(batch * num_drafts, generator=generator)
    drafted, draft_lse = reference.sample(
        (target[:, :num_drafts] if one_hot else draft).reshape(-1, vocab_size),
        uniforms,
        flat_t,
        **{key: values.repeat_interleave(num_drafts) for key, values in row_filters.items()},
    )
    # A row that cannot be sampled still gets a token of the vocabulary: its row must reject it, not its being padding.
    anything = torch.randint(vocab_size, drafted.shape, generator=generator)
    draft_tokens = torch.where(drafted < 0, anything, drafted).view(batch, num_drafts)
    if tokens is not None:
        tokens(draft_tokens, vocab_size)

    u = torch.rand(batch, num_drafts, generator=generator, dtype=uniform_dtype)
    s = torch.rand(batch, generator=generator, dtype=uniform_dtype)
    if accept is not None:
        u = _cycle(accept, batch * num_drafts).to(uniform_dtype).view(batch, num_drafts)
    if sample is not None:
        s = _cycle(sample, batch).to(uniform_dtype)
    args: dict[str, Any] = {
        "target_logits": target,
        "draft_tokens": draft_tokens.to(token_dtype),
        "draft_logits": None if one_hot else draft,
        "accept_uniforms": u,
        "sample_uniforms": s,
    }
    if t is not None:
        args["temperature"] = t
    if lse:
        bad = _cycle(bad_lse, batch * num_drafts).float() if bad_lse else None
        args["draft_lse"] = (draft_lse if bad is None else torch.where(bad == 0, draft_lse, bad)).view(
            batch, num_drafts
        )
    if lenience != 1.0:
        args["lenience"] = lenience
    if argmax_lenience != 1.0:
        args["argmax_lenience"] = argmax_lenience
    args |= row_filters
    if layout is not None:
        args = {key: layout(value) if isinstance(value, Tensor) else value for key, value in args.items()}
    return args


def _sigmoid_args(generator: torch.Generator, vocab_size: int, name: str, **options: Any) -> dict[str, Any]:
    pairs = ((-5.0, 5.0), (-1e3, 1e3), (-2.0, 7.0), (-1e4, 1e4))
    alpha, beta = options.pop("scale", pairs[zlib.crc32(name.encode()) % len(pairs)])
    args = _verify_args(generator, vocab_size, name, **options)
    if (alpha, beta) != (-1e3, 1e3):
        args |= {"alpha": alpha, "beta": beta}
    return args


def _sample_args(
    generator: torch.Generator,
    vocab_size: int,
    name: str,
    *,
    layout: Callable[[Tensor], Tensor] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Rows of `sample` are the first rows of a verify case."""
    verify = _verify_args(generator, vocab_size, name, num_drafts=1, **options)
    args = {"logits": verify["target_logits"][:, 0].contiguous(), "uniforms": verify["sample_uniforms"]}
    args |= {key: verify[key] for key in ("temperature", "top_k", "top_p", "min_p") if key in verify}
    return args if layout is None else {key: layout(value) for key, value in args.items()}


def _filter_args(generator: torch.Generator, vocab_size: int, name: str, **options: Any) -> dict[str, Any]:
    args = _sample_args(generator, vocab_size, name, **options)
    del args["uniforms"]
    return args


def _cycle(values: Sequence[float], count: int) -> Tensor:
    return torch.tensor(list(itertools.islice(itertools.cycle(values), count)), dtype=torch.float64)


def _to_device(value: Any, device: torch.device | str) -> Any:
    """A copy elsewhere keeps its strides, offset and alignment, which `Tensor.to` does not."""
    if not isinstance(value, Tensor) or torch.device(device) == value.device:
        return value
    storage = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage()).to(device)
    return storage.as_strided(value.shape, value.stride(), value.storage_offset())


HALVES = (torch.bfloat16, torch.float16)
MIXED_TEMPERATURE = (0.0, 1.0, 0.7, 0.0, 1.5, 0.3)

VERIFY_OPTIONS: dict[str, dict[str, Any]] = {
    "k1": {"num_drafts": 1, "batch": 8},
    "k3": {},
    "k8": {"num_drafts": 8, "noise": (0.1, 0.3, 0.6)},
    "k0": {"num_drafts": 0},
    "k0_greedy": {"num_drafts": 0, "temperature": MIXED_TEMPERATURE},
    "b0": {"batch": 0},
    "bf16": {"dtypes": (torch.bfloat16, torch.bfloat16)},
    "fp16": {"dtypes": (torch.float16, torch.float16)},
    "fp32_bf16": {"dtypes": (torch.float32, torch.bfloat16)},
    "bf16_fp16": {"dtypes": HALVES, "temperature": MIXED_TEMPERATURE},
    "fp16_fp32": {"dtypes": (torch.float16, torch.float32), "num_drafts": 8, "noise": (0.1, 0.3, 0.6)},
    "batch_sliced": {"layout": edits.batch_sliced, "temperature": MIXED_TEMPERATURE},
    "vocab_sliced": {"layout": edits.vocab_sliced},
    "vocab_sliced_bf16": {"layout": edits.vocab_sliced, "dtypes": (torch.bfloat16, torch.bfloat16)},
    "transposed": {"layout": edits.transposed, "temperature": (0.7, 1.0)},
    "transposed_fp16": {"layout": edits.transposed, "dtypes": (torch.float16, torch.bfloat16)},
    "expanded": {"layout": edits.expanded},
    "sequence_sliced": {"layout": edits.sequence_sliced},
    "int32": {"token_dtype": torch.int32},
    "pad_head": {"tokens": edits.pad_head, "temperature": MIXED_TEMPERATURE},
    "pad_middle": {"tokens": edits.pad_middle, "token_dtype": torch.int32, "noise": (0.1, 0.3)},
    "pad_ragged": {"tokens": edits.pad_ragged, "num_drafts": 8, "batch": 8, "noise": (0.1, 0.3)},
    "pad_all": {"tokens": edits.pad_all, "temperature": MIXED_TEMPERATURE},
    "target_nan": {"edit": edits.fill_target(NAN)},
    "target_minus_inf": {"edit": edits.fill_target(-INF), "temperature": MIXED_TEMPERATURE},
    "target_inf": {"edit": edits.fill_target(INF), "dtypes": (torch.bfloat16, torch.float32)},
    "draft_nan": {"edit": edits.fill_draft(NAN), "dtypes": (torch.float32, torch.bfloat16)},
    "draft_minus_inf": {"edit": edits.fill_draft(-INF)},
    "draft_inf": {"edit": edits.fill_draft(INF), "temperature": (0.7, 1.3)},
    "mixed_nonfinite": {"edit": edits.fill_mixed, "temperature": (0.7, 1.0, 0.3)},
    "mixed_nonfinite_greedy": {"edit": edits.fill_mixed, "temperature": (0.0,)},
    "masked": {"edit": edits.mask},
    "masked_token": {"edit": edits.mask, "tokens": edits.token_zero, "temperature": (1.0, 0.0, 0.5)},
    "overflow": {"edit": edits.overflow, "temperature": (0.25, 1e-3, 1.0)},
    "overflow_fp16": {"dtypes": (torch.float16, torch.float16), "temperature": (1e-36, 1e-30, 1e-37)},
    "greedy": {"temperature": (0.0,), "noise": (0.1, 0.3)},
    "greedy_mixed": {"temperature": MIXED_TEMPERATURE},
    "greedy_plateaus": {"temperature": (0.0,), "edit": edits.plateaus, "dtypes": (torch.bfloat16, torch.bfloat16)},
    "cold": {"temperature": (1e-3, 0.05)},
    "hot": {"temperature": (100.0, 7.0)},
    "bad_temperature": {"temperature": (-1.0, NAN, 1.0, 0.0, -INF, 0.5)},
    "opposite": {"edit": edits.opposite},
    "float64_uniforms": {"uniform_dtype": torch.float64},
    "plateaus": {"edit": edits.plateaus},
    "tie_u_zero": {"accept": (0.0,), "edit": edits.mask},
    "tie_s_zero": {"sample": (0.0,), "edit": edits.opposite},
    "tie_below_one": {"accept": (BELOW_ONE,), "sample": (BELOW_ONE,)},
    "tie_below_one_float64": {
        "accept": (BELOW_ONE_FLOAT64, 0.0),
        "sample": (BELOW_ONE_FLOAT64, 0.0, 0.5),
        "uniform_dtype": torch.float64,
    },
    "tie_same": {"edit": edits.same, "accept": (BELOW_ONE, 0.0, 0.5)},
    "tie_same_excluded_token": {"edit": edits.same, "tokens": edits.token_zero, "temperature": (1.0, 0.7)},
}

# Rows with and without each filter share a batch, six rows and more.
TOP_K = {"top_k": (1, 0, 5, 3, 10**6, 20)}
TOP_P = {"top_p": (0.9, 0.5, 1.0, 0.0, 0.97, 2.0)}
MIN_P = {"min_p": (0.1, 0.0, 0.5, 1.0, 0.02, -1.0)}
ALL_FILTERS = {"top_k": (50, 0, 5, 8, 3), "top_p": (0.9, 0.6, 1.0, 0.95), "min_p": (0.0, 0.2, 0.05)}
FILTER_OPTIONS: dict[str, dict[str, Any]] = {
    "top_k": {"filters": TOP_K, "noise": (0.1, 0.3)},
    "top_p": {"filters": TOP_P, "noise": (0.1, 0.3)},
    "min_p": {"filters": MIN_P, "noise": (0.1, 0.3)},
    "filters": {"filters": ALL_FILTERS, "num_drafts": 8, "noise": (0.1, 0.3), "batch": 8},
    "filters_temperature": {"filters": ALL_FILTERS, "temperature": MIXED_TEMPERATURE, "dtypes": HALVES},
    "filters_plateaus": {"filters": ALL_FILTERS, "edit": edits.plateaus, "dtypes": (torch.bfloat16, torch.bfloat16)},
    "filters_plateaus_hot": {"filters": TOP_P, "edit": edits.plateaus, "temperature": (3.0, 0.5, 100.0)},
    "filters_masked": {"filters": ALL_FILTERS, "edit": edits.mask},
    "filters_nonfinite": {"filters": ALL_FILTERS, "edit": edits.fill_mixed, "temperature": (1.0, 0.7)},
    "filters_overflow": {"filters": ALL_FILTERS, "edit": edits.overflow, "temperature": (0.25, 1e-3, 1.0)},
    "filters_opposite": {"filters": ALL_FILTERS, "edit": edits.opposite},
    "filters_strided": {"filters": ALL_FILTERS, "layout": edits.batch_sliced, "temperature": MIXED_TEMPERATURE},
    "filters_without_law": {
        "filters": {"top_p": (NAN, 0.9, 1.0), "min_p": (0.1, NAN, 0.0, 0.0)},
        "temperature": (1.0, 1.0, 0.7, 0.0, -1.0),
    },
}

EXACT_OPTIONS: dict[str, dict[str, Any]] = FILTER_OPTIONS | {
    "filters_lse": {"filters": ALL_FILTERS, "lse": True, "temperature": (0.7, 0.0, 1.5), "noise": (0.1, 0.3)},
    "filters_one_hot": {"filters": ALL_FILTERS, "one_hot": True, "temperature": MIXED_TEMPERATURE},
    "filters_padded": {
        "filters": ALL_FILTERS,
        "tokens": edits.pad_ragged,
        "num_drafts": 8,
        "batch": 8,
        "noise": (0.1, 0.3),
    },
    "filters_removed_token": {"filters": ALL_FILTERS, "tokens": edits.token_zero, "accept": (0.0,), "noise": (0.1,)},
    "one_hot": {"one_hot": True},
    "one_hot_cold": {"one_hot": True, "temperature": (0.3, 0.0), "dtypes": HALVES},
    "one_hot_padded": {"one_hot": True, "tokens": edits.pad_ragged, "batch": 8, "temperature": (0.5,)},
    "one_hot_masked": {"one_hot": True, "edit": edits.mask, "tokens": edits.token_zero},
    "one_hot_nonfinite": {"one_hot": True, "edit": edits.fill_mixed},
    "lse": {"lse": True},
    "lse_k8_bf16": {"lse": True, "num_drafts": 8, "dtypes": HALVES, "noise": (0.1, 0.3, 0.6)},
    "lse_temperature": {"lse": True, "temperature": (0.7, 0.0, 1.5), "layout": edits.vocab_sliced},
    "lse_nonfinite": {"lse": True, "edit": edits.fill_mixed},
    "lse_not_finite": {"lse": True, "bad_lse": (NAN, 0.0, INF, 0.0, -INF, 0.0), "accept": (0.0, 0.5)},
    "lse_masked": {"lse": True, "edit": edits.mask, "tokens": edits.pad_middle},
    "lenience_0.3": {"lenience": 0.3, "num_drafts": 8},
    "lenience_one_hot": {"lenience": 0.3, "one_hot": True},
    "lenience_lse": {"lenience": 0.3, "lse": True, "temperature": MIXED_TEMPERATURE},
}

ARGMAX_OPTIONS: dict[str, dict[str, Any]] = {
    "argmax_lenience": {"argmax_lenience": 0.3, "temperature": (0.0,), "noise": (0.3, 1.0), "num_drafts": 8},
    "argmax_lenience_mixed": {"argmax_lenience": 0.01, "temperature": MIXED_TEMPERATURE, "lenience": 0.5},
    "argmax_lenience_plateaus": {"argmax_lenience": 0.9, "temperature": (0.0,), "edit": edits.plateaus},
    "argmax_lenience_masked": {
        "argmax_lenience": 1e-6,
        "temperature": (0.0,),
        "edit": edits.mask,
        "tokens": edits.token_zero,
    },
    "argmax_lenience_nonfinite": {"argmax_lenience": 0.5, "temperature": (0.0, 1.0), "edit": edits.fill_mixed},
    "argmax_lenience_nonfinite_greedy": {"argmax_lenience": 0.5, "temperature": (0.0,), "edit": edits.fill_mixed},
    "argmax_lenience_padded": {"argmax_lenience": 0.2, "temperature": (0.0,), "tokens": edits.pad_middle},
}

BLOCK_OPTIONS: dict[str, dict[str, Any]] = {
    name: options for name, options in EXACT_OPTIONS.items() if "lenience" not in options
} | {
    "long": {"num_drafts": 20, "noise": (0.05, 0.1, 0.3)},
    "long_one_hot": {"num_drafts": 20, "one_hot": True, "temperature": (0.05, 0.2)},
}

# Nearly equal scores reject only when the uniforms come close to one.
LATE = tuple(1.0 - 2.0 ** -(3 + i % 9) for i in range(13))
SIGMOID_OPTIONS: dict[str, dict[str, Any]] = {
    "scale_narrow": {"scale": (-5.0, 5.0), "num_drafts": 8},
    "scale_asymmetric": {"scale": (-0.5, 30.0), "accept": LATE, "temperature": MIXED_TEMPERATURE},
    "scale_1e3": {"scale": (-1e3, 1e3), "accept": LATE, "num_drafts": 8},
    "scale_1e4": {"scale": (-1e4, 1e4), "accept": LATE, "dtypes": HALVES},
    "far_below": {"scale": (-5.0, 5.0), "edit": edits.far_below},
    "scale_1e4_far": {"scale": (-1e4, 1e4), "accept": (BELOW_ONE,), "noise": (3.0,), "num_drafts": 1},
}

SAMPLE_OPTIONS: dict[str, dict[str, Any]] = {
    name: {key: value for key, value in options.items() if key in ("dtypes", "edit", "temperature", "layout", "sample")}
    for name, options in VERIFY_OPTIONS.items()
    if not name.startswith(("pad_", "k", "int32", "b0", "draft_", "masked_token", "tie_u", "tie_same"))
} | {"k3": {}, "b0": {"batch": 0}, "float64_uniforms": {"uniform_dtype": torch.float64}}
# A sample has one row a sequence, no drafts.
SAMPLE_FILTER_OPTIONS: dict[str, dict[str, Any]] = {
    name: {key: value for key, value in options.items() if key not in ("noise", "num_drafts")}
    for name, options in FILTER_OPTIONS.items()
}
SAMPLE_OPTIONS = {"k3": SAMPLE_OPTIONS.pop("k3")} | SAMPLE_OPTIONS
