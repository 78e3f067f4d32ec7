"""The stand-in for CUDA (`cuda_stand_in`) raises where a GPU would go wrong. Runs where it is installed."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import cuda_stand_in
import pytest
import torch
from gpu_suite import no_synchronisation
from torch import Tensor

import torch_specops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda_stand_in.installed(), reason="TORCH_SPECOPS_CUDA_STAND_IN is not set"),
]


def captured(function: Callable[[], object], mode: str = "thread_local") -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        function()
    return graph


def test_a_kernel_runs_on_the_current_device() -> None:
    from torch_specops.ops.arguments import Filters
    from torch_specops.ops.cuda.sample import sample

    logits, uniforms = torch.randn(2, 17, device="cuda:1"), torch.rand(2, device="cuda:1")
    for other in ("cuda:0", "cpu"):
        with pytest.raises(RuntimeError, match="same device"):
            uniforms + torch.ones(2, device=other)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        sample(logits, uniforms, Filters())
    with torch.cuda.device(1):
        tokens, _ = sample(logits, uniforms, Filters())
    assert torch.equal(tokens.cpu(), torch_specops.sample(logits.cpu(), uniforms.cpu())[0])


def test_stand_in_capture_and_replay() -> None:
    held = [torch.zeros(3, device="cuda")]
    graph = captured(lambda: held[0].add_(1))
    assert held[0].tolist() == [0, 0, 0]
    graph.replay()
    assert held[0].tolist() == [1, 1, 1]
    held.clear()
    gc.collect()
    with pytest.raises(RuntimeError, match="freed"):
        graph.replay()


WAITS: tuple[Callable[[Tensor], object], ...] = (
    lambda x: x.sum().item(),
    lambda x: x.tolist(),
    lambda x: bool(x[0] > 0),
    lambda x: x.cpu(),
    lambda x: x.nonzero(),
    lambda x: x[x > 0],
    lambda x: x[: x[0].long()],
    lambda x: torch.tensor([1.0], device="cuda"),
    lambda x: torch.ones(2).to("cuda"),
)


def test_host_synchronisation_is_seen() -> None:
    x = torch.ones(2, device="cuda")
    for wait in WAITS:
        with no_synchronisation(), pytest.raises(RuntimeError, match="synchronizing"):
            wait(x)
        with pytest.raises(RuntimeError, match="capturing"):
            captured(lambda wait=wait: wait(x))
    with no_synchronisation():
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


def test_stand_in_copy_to_pinned_memory() -> None:
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
