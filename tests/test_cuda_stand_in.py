"""The stand-in for CUDA (`cuda_stand_in`) raises where a GPU would go wrong. Runs where it is installed."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator

import cuda_stand_in
import pytest
import torch
from torch import Tensor

import torch_specops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda_stand_in.installed(), reason="TORCH_SPECOPS_CUDA_STAND_IN is not set"),
]


@pytest.fixture
def syncs_raise() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
        yield
        torch.cuda.set_sync_debug_mode("default")


def captured(function: Callable[[], object], mode: str = "thread_local") -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        function()
    return graph


def test_a_tensor_is_where_it_says() -> None:
    x = torch.arange(6, device="cuda:1").view(2, 3)
    assert x.device == torch.device("cuda:1") and x.is_cuda and (x + 1).device == x.device
    assert (x + 1).cpu().tolist() == [[1, 2, 3], [4, 5, 6]]
    y = x[:, 1:]
    y.add_(10)
    assert x.tolist() == [[0, 11, 12], [3, 14, 15]]
    assert isinstance(torch.nn.Linear(2, 2).to("cuda").weight, torch.nn.Parameter)


def test_a_tensor_bounds_a_slice(syncs_raise: None) -> None:
    x, two = torch.arange(4, device="cuda"), torch.full((), 2, device="cuda")
    with pytest.raises(RuntimeError, match="synchron"):
        x[:two]
    torch.cuda.set_sync_debug_mode("default")
    assert x[:two].tolist() == [0, 1]


def test_devices_do_not_mix() -> None:
    for other in ("cuda:1", "cpu"):
        with pytest.raises(RuntimeError, match="same device"):
            torch.ones(2, device="cuda:0") + torch.ones(2, device=other)


def test_a_kernel_runs_on_the_current_device() -> None:
    from torch_specops.arguments import Filters
    from torch_specops.kernels.sample import sample

    logits, uniforms = torch.randn(2, 17, device="cuda:1"), torch.rand(2, device="cuda:1")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        sample(logits, uniforms, Filters())
    with torch.cuda.device(1):
        tokens, _ = sample(logits, uniforms, Filters())
    assert torch.equal(tokens.cpu(), torch_specops.sample(logits.cpu(), uniforms.cpu())[0])


def test_a_capture_runs_nothing_and_a_replay_everything() -> None:
    x = torch.zeros(3, device="cuda")
    made: list[Tensor] = []

    def step() -> None:
        x.add_(1)
        made[:] = [2 * x]

    graph = captured(step)
    assert x.tolist() == [0, 0, 0]
    assert made[0].tolist() != [0, 0, 0]
    for count in (1, 2):
        graph.replay()
        assert x.tolist() == [count] * 3
        assert made[0].tolist() == [2 * count] * 3


def test_a_replay_on_freed_memory_raises() -> None:
    held = [torch.zeros(3, device="cuda")]
    graph = captured(lambda: held[0].add_(1))
    graph.replay()
    held.clear()
    gc.collect()
    with pytest.raises(RuntimeError, match="freed"):
        graph.replay()


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool(x[0] > 0),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.tensor([1.0], device="cuda"),
        lambda x: torch.ones(2).to("cuda"),
    ],
)
def test_host_synchronisation_is_seen(wait: Callable[[Tensor], object], syncs_raise: None) -> None:
    x = torch.ones(2, device="cuda")
    with pytest.raises(RuntimeError, match="synchronizing"):
        wait(x)
    with pytest.raises(RuntimeError, match="capturing"):
        captured(lambda: wait(x))
    (x + torch.zeros(2, device="cuda")).masked_fill_(x > 0, 1.0)


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_a_global_capture_breaks_other_threads(mode: str) -> None:
    x = torch.ones(2, device="cuda")
    errors: list[str] = []

    def elsewhere() -> None:
        try:
            x.tolist()
        except RuntimeError as error:
            errors.append(str(error))

    def step() -> None:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    captured(step, mode)
    assert bool(errors) == (mode == "global")


def test_a_copy_to_pinned_memory_takes_until_its_stream_was_waited_for() -> None:
    x = torch.arange(3, device="cuda:1")
    pinned = torch.empty(3, dtype=torch.int64, pin_memory=True)
    pinned.copy_(x, non_blocking=True)
    event = torch.cuda.Event()
    # On the stream of the current device, which the copy is not on.
    event.record()
    event.synchronize()
    assert pinned.tolist() != [0, 1, 2]
    with torch.cuda.device(1):
        event.record()
    event.synchronize()
    assert pinned.tolist() == [0, 1, 2]


def test_memory_is_counted() -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    x = torch.zeros(100, device="cuda")
    y = x + 1
    del y
    assert torch.cuda.memory_allocated() - before == 400
    assert torch.cuda.max_memory_allocated() - before == 800
