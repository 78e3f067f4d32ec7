"""The CUDA side of the ops as far as fake CUDA tensors show it: shapes, devices, and how many kernels are launched."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import torch_specops

pytest.importorskip("triton")

from torch_specops.kernels import launch, sample
from torch_specops.kernels.filter import bounds, logits
from torch_specops.kernels.verify import block, exact, sigmoid

LAUNCHERS = (block, bounds, exact, logits, sample, sigmoid)

BATCH, NUM_DRAFTS, VOCAB_SIZE = 4, 5, 50257


def arguments(op: str, option: str) -> dict[str, Any]:
    def cuda(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="cuda")

    temperature = {"temperature": cuda(BATCH)} if option == "temperature" else {}
    if op == "sample":
        return {"logits": cuda(BATCH, VOCAB_SIZE), "uniforms": cuda(BATCH), **temperature}
    given = {
        "target_logits": cuda(BATCH, NUM_DRAFTS + 1, VOCAB_SIZE, dtype=torch.bfloat16),
        "draft_tokens": cuda(BATCH, NUM_DRAFTS, dtype=torch.int64),
        "draft_logits": None if option == "one-hot" else cuda(BATCH, NUM_DRAFTS, VOCAB_SIZE, dtype=torch.bfloat16),
        "accept_uniforms": cuda(BATCH, NUM_DRAFTS),
        "sample_uniforms": cuda(BATCH),
        **temperature,
    }
    return given | ({"draft_lse": cuda(BATCH, NUM_DRAFTS)} if option == "draft_lse" else {})


def record_launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...], list[torch.Tensor]]]:
    """Fills a list with the name, the grid and the tensors of every kernel launched from now on, and launches none."""
    launched = []

    class Recorded:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*args: Any, **constants: Any) -> None:
                # Every argument of the kernel is given, none twice.
                names = self.kernel.arg_names
                assert len(args) + len(set(constants) & set(names[len(args) :])) == len(names)
                tensors = [x for x in (*args, *constants.values()) if isinstance(x, torch.Tensor)]
                launched.append((self.kernel.fn.__name__, grid, tensors))

            return launch

    for module in LAUNCHERS:
        monkeypatch.setattr(module, "wrap_triton", Recorded)
    return launched


def filters(given: str, rows: int) -> dict[str, torch.Tensor]:
    dtypes = {"top_k": torch.int64, "top_p": torch.float32, "min_p": torch.float32}
    return {name: torch.empty(rows, dtype=dtypes[name], device="cuda") for name in given.split()}


@pytest.mark.parametrize(
    "op, option, limit",
    [
        ("verify_exact", "none", 3),
        ("verify_exact", "draft_lse", 3),
        ("verify_exact", "one-hot", 3),
        ("verify_exact", "temperature", 3),
        ("verify_block", "none", 6),
        ("verify_block", "draft_lse", 6),
        ("verify_block", "one-hot", 6),
        ("verify_block", "temperature", 6),
        ("verify_sigmoid", "none", 2),
        ("verify_sigmoid", "temperature", 2),
        ("sample", "none", 2),
        ("sample", "temperature", 2),
    ],
)
def test_fake_cuda_tensors_reach_the_launchers(
    op: str, option: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = record_launches(monkeypatch)
    with FakeTensorMode():
        first, second = getattr(torch_specops, op)(**arguments(op, option))
    assert first.device.type == second.device.type == "cuda"
    assert first.shape == ((BATCH,) if op == "sample" else (BATCH, NUM_DRAFTS + 1))
    assert second.shape == (BATCH,)
    assert 1 < len(launched) <= limit
    assert all(size > 0 for _, grid, _ in launched for size in grid)


@pytest.mark.parametrize("op", ["verify_exact", "verify_block", "verify_sigmoid", "sample"])
def test_fake_tensors_pass_through_wrap_triton(op: str) -> None:
    with FakeTensorMode():
        first, _ = getattr(torch_specops, op)(**arguments(op, "temperature"))
    assert first.dtype == torch.int64


@pytest.mark.parametrize("op", ["verify_exact", "verify_block", "verify_sigmoid", "sample"])
def test_no_sequence_no_launch(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(kernel: Any) -> Any:
        raise AssertionError("a kernel was launched over an empty grid")

    for module in LAUNCHERS:
        monkeypatch.setattr(module, "wrap_triton", refuse)
    with FakeTensorMode():
        empty = {
            name: torch.empty(0, *value.shape[1:], dtype=value.dtype, device="cuda") if value is not None else None
            for name, value in arguments(op, "none").items()
        }
        first, second = getattr(torch_specops, op)(**empty)
    assert len(first) == len(second) == 0


@pytest.mark.parametrize(
    "given, dtype, passes",
    [
        ("top_k", torch.bfloat16, 4),
        ("top_p", torch.float16, 4),
        ("top_k top_p", torch.bfloat16, 8),
        ("top_k top_p min_p", torch.bfloat16, 8),
        ("min_p", torch.bfloat16, 1),
        ("top_k", torch.float32, 8),
        ("top_p min_p", torch.float32, 8),
        ("top_k top_p", torch.float32, 16),
        ("min_p", torch.float32, 1),
    ],
)
def test_passes_over_the_rows_of_a_filter(
    given: str, dtype: torch.dtype, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = record_launches(monkeypatch)
    rows = 700
    with FakeTensorMode():
        x = torch.empty(rows, VOCAB_SIZE, dtype=dtype, device="cuda")
        output = torch_specops.filter_logits(x, **filters(given, rows))
    assert (output.shape, output.dtype, output.device) == (x.shape, x.dtype, x.device)
    names = [name for name, _, _ in launched]
    assert names == ["narrow_kernel"] * passes + ["finish_kernel", "mask_kernel"]
    # A row is split over programs in all of them but the last step of the search, and the scratch is small.
    assert all(math.prod(grid) > rows for name, grid, _ in launched if name != "finish_kernel")
    scratch = {id(t): t.nbytes for _, _, tensors in launched for t in tensors if t.numel() != x.numel()}
    assert sum(scratch.values()) <= 0.02 * x.nbytes


@pytest.mark.parametrize(
    "option, dtypes, searches",
    [
        ("none", (torch.bfloat16, torch.bfloat16), 9),
        ("draft_lse", (torch.bfloat16, torch.bfloat16), 9),
        ("one-hot", (torch.bfloat16, torch.bfloat16), 9),
        ("none", (torch.float32, torch.float32), 17),
        ("none", (torch.float32, torch.bfloat16), 17 + 9),
        ("none", (torch.float16, torch.bfloat16), 9 + 9),
    ],
)
def test_target_and_draft_rows_of_one_dtype_share_a_search(
    option: str, dtypes: tuple[torch.dtype, torch.dtype], searches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = record_launches(monkeypatch)
    with FakeTensorMode():
        given = arguments("verify_exact", option) | filters("top_k top_p min_p", BATCH)
        given["target_logits"] = given["target_logits"].to(dtypes[0])
        if given["draft_logits"] is not None:
            given["draft_logits"] = given["draft_logits"].to(dtypes[1])
        torch_specops.verify_exact(**given)
    names = [name for name, _, _ in launched]
    assert names[searches:] == ["stats_kernel", "residual_kernel", "draw_kernel"]
    assert set(names[:searches]) == {"narrow_kernel", "finish_kernel"}
    searched = sum(math.prod(grid) for name, grid, _ in launched if name == "finish_kernel")
    assert searched == BATCH * (NUM_DRAFTS + 1 + (NUM_DRAFTS if option != "one-hot" else 0))


@pytest.mark.parametrize("op", ["verify_exact", "sample"])
def test_filters_pass_through_wrap_triton(op: str) -> None:
    with FakeTensorMode():
        given = arguments(op, "temperature") | filters("top_k top_p min_p", BATCH)
        first, _ = getattr(torch_specops, op)(**given)
    assert first.dtype == torch.int64


def test_tiles_of_a_program() -> None:
    """One, until there are enough programs; never so many that programs are few."""
    few = launch.RESIDENT_PROGRAMS
    assert [launch.tiles_per_program(n) for n in (1, few, 2 * few - 1, 2 * few, 4 * few, 10**6)] == [1, 1, 1, 2, 4, 8]


@pytest.mark.parametrize("op", ["verify_exact", "verify_block", "verify_sigmoid", "sample"])
def test_only_the_first_axis_of_a_grid_is_long(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other two take 65,535 programs at most, and a batch may be larger."""
    monkeypatch.setitem(globals(), "BATCH", 70_000)
    launched = record_launches(monkeypatch)
    with FakeTensorMode():
        given = {} if op == "verify_sigmoid" else filters("top_k", 70_000)
        getattr(torch_specops, op)(**arguments(op, "temperature"), **given)
    assert all(grid[0] == 70_000 and max(grid) == 70_000 for _, grid, _ in launched)


@pytest.mark.parametrize("op", ["verify_exact", "verify_block", "verify_sigmoid", "sample", "filter_logits"])
def test_kernels_are_launched_on_the_device_of_the_tensors(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device. Fake CUDA tensors that the ops are told are real, and mocks of
    `torch.cuda.device` and of the launches, of which the last one fails."""
    current, launches = [0], []

    class Device:
        def __init__(self, device: torch.device) -> None:
            self.index = device.index

        def __enter__(self) -> None:
            current.append(self.index)

        def __exit__(self, *error: object) -> None:
            current.pop()

    class Recorded:
        def __init__(self, kernel: Any) -> None:
            self.name = kernel.fn.__name__

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*args: Any, **constants: Any) -> None:
                launches.append((self.name, current[-1], args[0].device.index))
                if self.name in ("draw_kernel", "mask_kernel"):
                    raise RuntimeError("the launch failed")

            return launch

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr("torch_specops.ops.is_fake", lambda tensor: False)
    for module in LAUNCHERS:
        monkeypatch.setattr(module, "wrap_triton", Recorded)
    with FakeTensorMode():
        given = arguments("sample" if op == "filter_logits" else op, "none")
        given |= {} if op == "verify_sigmoid" else filters("top_k", BATCH)
        if op == "filter_logits":
            del given["uniforms"]
        given = {name: torch.empty_like(value, device="cuda:1") for name, value in given.items()}
        with pytest.raises(RuntimeError, match="the launch failed"):
            getattr(torch_specops, op)(**given)
    assert len(launches) > 1
    assert {(on, of) for _, on, of in launches} == {(1, 1)}
    assert current == [0]


@pytest.mark.parametrize("op", ["verify_exact", "verify_block", "verify_sigmoid", "sample", "filter_logits"])
def test_rows_and_vocabularies_beyond_a_grid_are_refused(op: str) -> None:
    """By shapes alone: fake CUDA tensors. The second and third axis of a grid take 65,535 programs."""
    name = "logits" if op in ("sample", "filter_logits") else "target_logits"

    def call(num_drafts: int, vocab_size: int) -> None:
        def cuda(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device="cuda")

        logits = {"logits": cuda(1, vocab_size), "target_logits": cuda(1, num_drafts + 1, vocab_size)}[name]
        given = {name: logits}
        if op == "sample":
            given["uniforms"] = cuda(1)
        elif name == "target_logits":
            given |= {
                "draft_tokens": cuda(1, num_drafts, dtype=torch.int64),
                "draft_logits": cuda(1, num_drafts, vocab_size),
                "accept_uniforms": cuda(1, num_drafts),
                "sample_uniforms": cuda(1),
            }
        getattr(torch_specops, op)(**given)

    with FakeTensorMode():
        longest = 65_535 * launch.MAX_TILE - 3
        call(1, longest)
        with pytest.raises(ValueError, match=rf"{name}: expected at most 65535 tiles of a row on CUDA, got 65536"):
            call(1, longest + 1)
        if op in ("verify_exact", "verify_block"):
            call(32_767, 16)
            with pytest.raises(ValueError, match=f"{name}: expected at most 65535 rows of a sequence, .* got 65537"):
                call(32_768, 16)
        elif op == "verify_sigmoid":
            # Its rows are not an axis.
            call(32_768, 16)


def test_tiles_beyond_a_grid_are_refused_for_the_tile_that_was_chosen() -> None:
    with FakeTensorMode(), pytest.raises(ValueError, match="logits: expected at most 65535 tiles of a row"):
        sample.sample(torch.empty(1, 2**28, device="cuda"), torch.empty(1, device="cuda"), tile=1024)
