"""What the tests that need a GPU share: their sizes, the cases of the ops, and inputs that are made on the device.

Under the stand-in for CUDA (`cuda_stand_in`) the same tests run at the smaller sizes, so that every line of theirs
is executed without a GPU.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import op_cases
import torch
from torch import Tensor

import torch_specops
from torch_specops import testing
from torch_specops.testing.cases import CASES, case_names

STAND_IN = "TORCH_SPECOPS_CUDA_STAND_IN" in os.environ

# Of each op, the case with the most in it that is cheap to check: greedy and sampled rows, filters where there are any.
TYPICAL = dict.fromkeys(op_cases.OPS, "filters_temperature") | dict.fromkeys(op_cases.VERIFY_OPS[1:3], "bf16_fp16")

# Of a test or of a kind of tests: what it takes on a device, and under the stand-in, where Triton's interpreter
# executes the kernels.
SIZES: dict[str, tuple[Any, Any]] = {
    "limits of a case": ({}, {"max_rows": 2, "max_drafts": 1}),
    "vocabulary of two tiles": (1025, 67),
    "vocabulary of many tiles": (50_257, 131),
    "vocabulary of a language model": (128_256, 131),
    "rows and drafts of a large batch": ((64, 5), (2, 1)),
    "repetitions": (100, 2),
    "rows and drafts of a graph": ((8, 5), (2, 1)),
    "replays": (5, 2),
    "elements that 32 bits cannot count": (2**31, 2**10),
    "tokens of a long text": (4096, 40),
    "trials of a law": (2**20, 2**4),
    "new tokens of three rows": ([20, 30, 9], [5, 7, 2]),
    "drafts of a loop": (4, 2),
    "new tokens of a request": (18, 4),
    "requests in turn": (([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 1, 3]), ([0, 3], [3, 0])),
}


def size(name: str) -> Any:
    on_device, under_stand_in = SIZES[name]
    return under_stand_in if STAND_IN else on_device


@dataclass(frozen=True)
class CaseSet:
    """Cases of every op (None = all) over one vocabulary, with at most so many rows and drafts."""

    vocab_size: int
    names: str | None = None
    max_rows: int | None = None
    max_drafts: int | None = None

    def __post_init__(self) -> None:
        assert set((self.names or "").split()) <= CASES.keys(), self.names

    @property
    def limits(self) -> dict[str, Any]:
        return {"max_rows": self.max_rows, "max_drafts": self.max_drafts}

    def names_of(self, op: str) -> list[str]:
        return [name for name in case_names(op) if self.names is None or name in self.names.split()]


# What is left of a row's two ends.
ONE_ENTRY = "k3 k0 bf16 fp16 batch_sliced pad_ragged target_nan draft_nan mixed_nonfinite masked greedy_mixed one_hot"
# Where the number of tiles, their size or a row's place in memory may matter.
MANY_TILES = (
    "k3 bf16 fp16_fp32 bf16_fp16 batch_sliced vocab_sliced_bf16 transposed_fp16 sequence_sliced pad_ragged target_nan "
    "mixed_nonfinite masked overflow greedy_plateaus opposite float64_uniforms tie_below_one tie_same one_hot_cold "
    "mixed_one_hot mixed_one_hot_late mixed_one_hot_lse "
    "lse_k8_bf16 lse_temperature lse_nonfinite lenience_0.3 argmax_lenience_mixed long scale_narrow"
)
# A row's filters are sorted out in Python by the oracle, 0.1 s for a row of 50,257 entries.
FILTERS = (
    "top_k top_p min_p filters_temperature filters_plateaus filters_masked filters_strided filters_lse "
    "mixed_one_hot_filters"
)
ON_DEVICE = (
    CaseSet(1, ONE_ENTRY),
    # One tile of 1,024 entries; two, of which the second has one entry of a row.
    CaseSet(17),
    CaseSet(1025),
    CaseSet(50_257, MANY_TILES),
    CaseSet(50_257, FILTERS, max_rows=3, max_drafts=1),
    # The largest tiles.
    CaseSet(151_936, "k3 fp32_bf16 vocab_sliced_bf16 greedy_mixed one_hot lse_k8_bf16"),
    CaseSet(151_936, "filters_temperature", max_rows=2, max_drafts=1),
)
UNDER_STAND_IN = (
    CaseSet(1, "k0 pad_ragged"),
    CaseSet(
        17, "b0 bf16_fp16 vocab_sliced_bf16 transposed_fp16 mixed_nonfinite one_hot lse_temperature mixed_one_hot_lse"
    ),
    CaseSet(67, "bf16_fp16"),
    CaseSet(67, "filters_temperature", max_rows=2, max_drafts=1),
)
CASE_SETS = UNDER_STAND_IN if STAND_IN else ON_DEVICE
# (op, vocabulary, name) of the smoke part: those of TYPICAL where the oracle is cheap, over many tiles those without
# filters.
SMOKE_VOCAB_SIZES = (17, 67) if STAND_IN else (17, 1025, 50_257)


def is_smoke(op: str, vocab_size: int, name: str) -> bool:
    smoke_name = TYPICAL[op] if not op.startswith("verify") else "bf16_fp16"
    return vocab_size in SMOKE_VOCAB_SIZES and name == smoke_name


def case_of(
    op: str, vocab_size: int, name: str | None = None, *, device: str = "cuda", limits: dict[str, int] | None = None
) -> testing.Case:
    """The case of that name, or the typical one of the op. `limits`: the most rows and drafts."""
    limits = size("limits of a case") if limits is None else limits
    (case,) = testing.sample_inputs(op, device=device, vocab_sizes=[vocab_size], names=[name or TYPICAL[op]], **limits)
    return case


def verify_inputs(
    batch: int, num_drafts: int, vocab_size: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda"
) -> dict[str, Any]:
    """Arguments of `verify_exact`, with drafts that were sampled from a draft near the target."""
    generator = torch.Generator(device=device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    target = (3 * random(batch, num_drafts + 1, vocab_size)).to(dtype)
    draft = (target[:, :num_drafts] + 0.5 * random(batch, num_drafts, vocab_size)).to(dtype)
    seeds = torch.arange(batch, device=device)
    positions = torch.zeros_like(seeds)
    propose = torch_specops.uniforms(seeds, positions, num_drafts, "propose")
    tokens, lse = torch_specops.sample(draft.flatten(0, 1), propose.flatten())
    return {
        "target_logits": target,
        "draft_tokens": tokens.view(batch, num_drafts),
        "draft_logits": draft,
        "accept_uniforms": torch_specops.uniforms(seeds, positions, num_drafts, "accept"),
        "sample_uniforms": torch_specops.uniforms(seeds, positions, 1, "sample")[:, 0],
        "draft_lse": lse.view(batch, num_drafts),
    }


def filters(rows: int, names: str = "top_k top_p min_p") -> dict[str, Tensor]:
    """Of all three: rows with each filter alone, with two, and with all."""
    given = {"top_k": (50, 0, 0, 1000, 5), "top_p": (1.0, 0.9, 1.0, 0.5, 0.95), "min_p": (0.0, 0.0, 0.05, 0.0, 0.02)}
    dtypes = {"top_k": torch.int64, "top_p": torch.float32, "min_p": torch.float32}
    return {
        name: torch.tensor([given[name][r % 5] for r in range(rows)], dtype=dtypes[name], device="cuda")
        for name in names.split()
    }


def call(case: testing.Case) -> tuple[Tensor, ...]:
    return op_cases.call(case.op, case.args)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Inside, whatever makes the host wait for the device raises RuntimeError."""

    def set_mode(mode: str) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode(mode)

    torch.cuda.synchronize()
    try:
        set_mode("error")
        yield
    finally:
        set_mode("default")
