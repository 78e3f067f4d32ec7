"""Which calls a plan serves, and what it launches: a driver of Triton that builds for a GPU and launches nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from torch_specops.ops.cuda import launch, plans  # noqa: E402


@partial(launch.jit, specialize_addresses=True)
def add_kernel(x_ptr, y_ptr, output_ptr, count, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(output_ptr + i, tl.load(x_ptr + i) + tl.load(y_ptr + i) + count)


def add(x: Tensor, y: Tensor, count: int) -> Tensor:
    output = torch.empty(2, 2, dtype=torch.int64, device=x.device)
    values = {"x_ptr": x, "y_ptr": launch.contiguous(y), "output_ptr": output, "count": count, "N": 4}
    launch.run(add_kernel, (1,), values, 1)
    return output.unsqueeze(0)


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Of every launch its grid and stream, the kernel's arguments, and the signature that the kernel was built for."""
    found: list[tuple[Any, ...]] = []

    class Driver:
        utils = SimpleNamespace(
            # Without a module, of which Triton 3.8 would free the memory.
            load_binary=lambda *_: (None, 0, 32, 0, 1024),
            get_device_properties=lambda _: {"max_shared_mem": 232448, "multiprocessor_count": 132},
        )
        stream = 0

        def launcher_cls(self, source: Any, _: Any) -> Callable[..., None]:
            built_for = (source.signature, source.attrs, source.constants)
            return lambda *given: found.append((given[:4], given[9:], built_for))

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int | None = None) -> int:
            return self.stream

    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    monkeypatch.setattr(plans, "plans", {})
    monkeypatch.setattr(add_kernel, "device_caches", defaultdict(add_kernel.create_binder))
    return found


def longs(*values: int) -> Tensor:
    return torch.tensor(values)


def addresses(*tensors: Tensor) -> list[int]:
    return [x.data_ptr() for x in tensors]


def test_a_repeated_call_launches_the_same_kernel(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    # One tensor for two arguments says nothing of the next call.
    x, y = longs(1, 2, 3, 4), longs(5, 6, 7, 8)
    plans.call(add, (x, x, 5))
    output = plans.call(add, (x, y, 5))
    first, second = launched
    assert (second[0], second[2], second[1][3:]) == (first[0], first[2], first[1][3:])
    assert list(second[1][:3]) == addresses(x, y, output)
    assert (output.shape, output.dtype) == ((1, 2, 2), torch.int64)

    monkeypatch.setattr(triton.runtime.driver.active, "stream", 7, raising=False)
    plans.call(add, (y, x, 5))
    assert launched[2][0] == (*first[0][:3], 7)
    assert list(launched[2][1][:2]) == addresses(y, x)

    # For another setting Triton builds another kernel, from tensors.
    monkeypatch.setattr(triton.knobs.runtime, "debug", True)
    plans.call(add, (y, x, 5))
    assert addresses(*launched[3][1][:2]) == addresses(y, x)


def test_a_plan_has_the_alignment_of_its_call(launched: list[Any]) -> None:
    """Kernels may be built for addresses that are multiples of 16."""
    memory = torch.zeros(5, dtype=torch.int64)
    for _ in range(2):
        for x in (memory[:4], memory[1:]):
            plans.call(add, (x, x, 5))
    _, _, (_, planned, _), (_, planned_shifted, _) = launched
    assert planned[:2] == 2 * (memory.data_ptr(),) and planned_shifted[:2] == 2 * (memory.data_ptr() + 8,)
    aligned, shifted, *built_for = [signature for _, _, signature in launched]
    assert aligned != shifted
    assert built_for == [aligned, shifted]


def test_every_property_is_in_the_key() -> None:
    x, flat = torch.zeros(4, 8), torch.zeros(33)
    others: list[Any] = [x, flat[1:].view(4, 8), torch.zeros(8, 4).t(), x.view(8, 4), x.int(), x.to("meta"), None]
    others += [1, 2, 1.0, True, False, 0.0, -0.0, "1", 2**40]
    keys = [plans.key_of(len, (other,))[0] for other in others]
    assert None not in keys and len(set(keys)) == len(others)
    assert plans.key_of(len, (None, x)) != plans.key_of(len, (x, None))
    assert plans.key_of(len, (x,))[0] == plans.key_of(len, (torch.ones(4, 8),))[0] != plans.key_of(max, (x,))[0]
    assert plans.key_of(len, (torch.nn.Parameter(x),))[0] is None
    assert plans.key_of(len, (x.to_sparse(),))[0] is None


@pytest.mark.parametrize("kind", ["copies", "computes", "writes", "reads", "returns its input", "is traced", "raises"])
def test_no_plan_where_more_is_done_than_a_launch(
    kind: str, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(x: Tensor, y: Tensor) -> Any:
        output = add(x, y, 5)
        if kind == "raises":
            raise ValueError("x")
        if kind == "computes":
            return output + 1
        if kind == "writes":
            output.zero_()
        if kind == "reads":
            x.tolist()
        return x if kind == "returns its input" else output

    if kind == "is traced":
        kernel = SimpleNamespace(__getitem__=None)
        monkeypatch.setattr(launch, "wrap_triton", lambda _: {(1,): lambda *_, **__: kernel})
    x, y = longs(1, 2, 3, 4), longs(*range(8))[:: 2 if kind == "copies" else 1][:4]
    for _ in range(2):
        if kind == "raises":
            with pytest.raises(ValueError, match="x"):
                plans.call(body, (x, y))
        else:
            plans.call(body, (x, y))
    assert [plan for plan in plans.plans.values() if plan is not None] == []
    assert len(launched) == (0 if kind == "is traced" else 2)


def test_plans_are_few(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    x = longs(1, 2, 3, 4)
    monkeypatch.setattr(plans, "MAX_PLANS", 3)
    for count in range(8):
        plans.call(add, (x, x, count))
        assert 1 <= len(plans.plans) <= 3
    # Of another release of Triton is not known how its kernels are launched.
    plans.plans.clear()
    monkeypatch.setattr(triton, "__version__", "4.0.0")
    plans.call(add, (x, x, 9))
    assert plans.plans == {}
    assert len(launched) == 9
