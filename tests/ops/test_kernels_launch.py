"""The CUDA side of the ops as far as fake CUDA tensors show it: shapes, devices, and how many kernels are launched."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from gpu_suite import filters
from op_cases import OPS, VERIFY_OPS, call_traced, empty_arguments
from torch import Tensor
from torch._subclasses import FakeTensorMode

import torch_specops
from torch_specops.ops.arguments import Filters

pytest.importorskip("triton")

from torch_specops.ops.cuda import launch, sample

BATCH, NUM_DRAFTS, VOCAB_SIZE = 4, 5, 50257


def cuda(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def outputs(op: str, given: dict[str, Any]) -> tuple[Tensor, ...]:
    result = getattr(torch_specops, op)(**given)
    return result if isinstance(result, tuple) else (result,)


@pytest.fixture(autouse=True)
def fake() -> Iterator[None]:
    """Tensors have no data."""
    with FakeTensorMode():
        yield


Launch = tuple[str, tuple[int, ...], dict[str, Any]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Name, grid and arguments of every kernel that the test launches; none runs."""
    found: list[Launch] = []

    class Recorded:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def record(*args: Any, num_warps: int, enable_fp_fusion: bool) -> None:
                values = dict(zip(self.kernel.arg_names, args, strict=True))
                found.append((self.kernel.fn.__name__, grid, values))

            return record

    monkeypatch.setattr(launch, "wrap_triton", Recorded)
    return found


def test_kernels_are_given_contiguous_numbers(launched: list[Launch]) -> None:
    """They know strides of logits alone."""
    given = empty_arguments("verify_exact", "temperature, draft_lse, filters")
    strided = {
        name: x if name.endswith("logits") else torch.empty(*x.shape, 2, dtype=x.dtype, device="cuda").select(-1, 0)
        for name, x in given.items()
    }
    torch_specops.verify_exact(**strided)
    for _, _, values in launched:
        for name, value in values.items():
            if isinstance(value, Tensor):
                assert value.is_contiguous(), name


def test_no_sequence_no_launch(launched: list[Launch]) -> None:
    for op in OPS:
        assert all(len(output) == 0 for output in outputs(op, empty_arguments(op, batch=0)))
    assert launched == []


@pytest.mark.parametrize(
    "given, dtype", [("top_k top_p min_p", torch.bfloat16), ("min_p", torch.bfloat16), ("top_k top_p", torch.float32)]
)
def test_two_launches_find_the_bounds_of_a_filter(given: str, dtype: torch.dtype, launched: list[Launch]) -> None:
    rows = 700
    x = cuda(rows, VOCAB_SIZE, dtype=dtype)
    output = torch_specops.filter_logits(x, **filters(rows, given))
    assert (output.shape, output.dtype, output.device) == (x.shape, x.dtype, x.device)
    assert [name for name, _, _ in launched] == ["group_kernel", "cut_kernel", "mask_kernel"]
    # A row is split over programs where all of it is read.
    assert [math.prod(grid) // rows for _, grid, _ in launched] == [13, 1, 13]
    tensors = [t for _, _, values in launched for t in values.values() if isinstance(t, Tensor)]
    scratch = {id(t): t.nbytes for t in tensors if t.numel() != x.numel()}
    assert sum(scratch.values()) <= 0.34 * x.nbytes


@pytest.mark.parametrize("op", VERIFY_OPS[:2])
def test_rows_of_one_dtype_share_a_search(op: str, launched: list[Launch]) -> None:
    """Rows of an unfiltered draft are not searched."""
    target_rows, all_rows = NUM_DRAFTS + 1, 2 * NUM_DRAFTS + 1
    for option, dtype, filter_draft, searches, rows in (
        ("draft_lse", torch.bfloat16, True, 1, all_rows),
        ("one-hot", torch.bfloat16, True, 1, target_rows),
        ("", torch.float32, True, 2, all_rows),
        ("", torch.float32, False, 1, target_rows),
    ):
        launched.clear()
        given = empty_arguments(op, f"{option}, filters", dtype=dtype)
        getattr(torch_specops, op)(**given, filter_draft=filter_draft)
        names = [name for name, _, _ in launched]
        assert names[: 2 * searches] == ["group_kernel", "cut_kernel"] * searches
        assert names[2 * searches] == "stats_kernel"
        assert sum(math.prod(grid) for name, grid, _ in launched if name == "cut_kernel") == BATCH * rows


@pytest.mark.parametrize("op", VERIFY_OPS[:2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_draft_rows_with_bounds_are_not_searched(op: str, dtype: torch.dtype, launched: list[Launch]) -> None:
    given = empty_arguments(op, "filters", dtype=dtype) | {"draft_lse": cuda(BATCH, NUM_DRAFTS, 3)}
    getattr(torch_specops, op)(**given)
    assert [name for name, _, _ in launched][:3] == ["group_kernel", "cut_kernel", "stats_kernel"]
    (_, group, _), (_, cut, _), (_, stats, _) = launched[:3]
    assert (group[2], cut[1], stats[2]) == (NUM_DRAFTS + 1, 2 * NUM_DRAFTS + 1, NUM_DRAFTS + 1)


@pytest.mark.parametrize("option, rest", [("temperature", 7), ("draft_lse", 4), ("one-hot", 4)])
def test_large_batch_sums_two_rows_first(option: str, rest: int, launched: list[Launch]) -> None:
    """And a small one all rows, in a launch less."""
    for batch in (1, 8, 64):
        launched.clear()
        torch_specops.verify_exact(**empty_arguments("verify_exact", option, batch, vocab_size=128_256))
        names = [name for name, _, _ in launched]
        if batch == 64:
            assert names == ["stats_kernel", "rest_kernel", "draw_kernel"]
            first, others = launched[0][1], launched[1][1]
            assert (first[2], others[2]) == (4 if rest == 7 else 2, rest)
            assert others[1] * launched[1][2]["tiles_per_program"] >= first[1]
        else:
            assert names == ["stats_kernel", "draw_kernel"]


@pytest.mark.parametrize("batch, grid", [(1, (1, 126, 5)), (64, (64, 8, 1))])
def test_few_verify_block_programs_are_idle(batch: int, grid: tuple[int, ...], launched: list[Launch]) -> None:
    """One for each row pair of a small batch; those of a large one look for the rows that are left."""
    torch_specops.verify_block(**empty_arguments("verify_block", "temperature", batch, vocab_size=128_256))
    assert [(name, of) for name, of, _ in launched][2] == ("draw_kernel", grid)


def test_tiles_of_a_program() -> None:
    """One, until there are enough programs; never so many that programs are few."""
    few = launch.RESIDENT_PROGRAMS
    assert [launch.tiles_per_program(n) for n in (1, few, 2 * few - 1, 2 * few, 4 * few, 10**6)] == [1, 1, 1, 2, 4, 8]


@pytest.mark.parametrize("op", OPS)
def test_only_the_first_axis_of_a_grid_is_long(op: str, launched: list[Launch]) -> None:
    """The other two take 65,535 programs at most, and a batch may be larger."""
    outputs(op, empty_arguments(op, "temperature, filters", 70_000))
    assert all(grid[0] == 70_000 and max(grid) == 70_000 for _, grid, _ in launched)


@pytest.mark.parametrize("op", OPS)
def test_kernels_launch_on_the_tensors_device(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device. Fake CUDA tensors are given to what real ones reach; nothing runs."""
    current, launches = [0], []

    @contextmanager
    def device(of: torch.device) -> Iterator[None]:
        current.append(of.index)
        yield
        current.pop()

    def run(kernel: Any, grid: Any, values: dict[str, Any], num_warps: int) -> None:
        of = values.get("target_ptr", values.get("logits_ptr"))
        launches.append((current[-1], of.device.index))

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(launch, "run", run)
    call_traced(op, empty_arguments(op, "filters", device="cuda:1"))
    assert len(launches) > 1
    assert set(launches) == {(1, 1)}
    assert current == [0]


@pytest.mark.parametrize("op", OPS)
def test_rows_and_vocabularies_beyond_a_grid_are_refused(op: str) -> None:
    """By shapes alone: fake CUDA tensors. The second and third axis of a grid take 65,535 programs."""
    name = "target_logits" if op in VERIFY_OPS else "logits"

    def call(num_drafts: int, vocab_size: int) -> None:
        outputs(op, empty_arguments(op, "", 1, num_drafts, vocab_size, dtype=torch.float32))

    # Of 16-bit draft rows the first may begin 7 entries behind a boundary, of float32 rows 3.
    longest = 65_535 * launch.MAX_TILE - (7 if op in VERIFY_OPS[:2] else 3)
    call(1, longest)
    with pytest.raises(ValueError, match=rf"{name}: expected at most 65535 tiles of a row on CUDA, got 65536"):
        call(1, longest + 1)
    if op in ("verify_exact", "verify_block", "verify_gumbel"):
        # Target and draft rows are one axis.
        most = 65_534 if op == "verify_gumbel" else 32_767
        call(most, 16)
        with pytest.raises(ValueError, match=f"{name}: expected at most 65535 rows of a sequence, .* got 6553[67]"):
            call(most + 1, 16)
    elif op == "verify_sigmoid":
        # Its rows are not an axis.
        call(32_768, 16)
    elif op == "sample":
        with pytest.raises(ValueError, match="logits: expected at most 65535 tiles of a row"):
            sample.sample(cuda(1, 2**28), cuda(1), Filters(), tile=1024)
