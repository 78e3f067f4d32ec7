"""The ops on a GPU in CUDA graphs, and traced: `make test-gpu`. Skipped where there is none."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_suite import call, case_of, filters, size, verify_inputs
from op_cases import OPS, equal
from torch import Tensor

import torch_specops

pytestmark = pytest.mark.gpu

TWO_TILES = size("vocabulary of two tiles")


def captured(op: Callable[..., Any], arguments: dict[str, Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        op(**arguments)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = op(**arguments)
    return graph, outputs


@pytest.mark.parametrize(
    "given",
    [pytest.param("draft_lse", marks=pytest.mark.smoke), "draft rows", "one-hot", "greedy", "filters", "sigmoid"],
)
def test_graph_replay_with_fresh_uniforms(given: str) -> None:
    """One captured graph, new numbers in its inputs: equal to eager each time, and not the same tokens again."""
    rows, num_drafts = size("rows and drafts of a graph")
    arguments = verify_inputs(rows, num_drafts, size("vocabulary of many tiles"))
    op: Callable[..., tuple[Tensor, Tensor]] = torch_specops.verify_exact
    if given != "draft_lse":
        arguments.pop("draft_lse")
    if given == "one-hot":
        arguments["draft_logits"] = None
    if given == "greedy":
        arguments["temperature"] = torch.arange(rows, device="cuda") % 2.0
    if given == "filters":
        arguments |= filters(rows)
    if given == "sigmoid":
        op = torch_specops.verify_sigmoid
    graph, (output_tokens, num_accepted) = captured(op, arguments)

    seen = set()
    seeds = torch.arange(rows, device="cuda")
    steps = size("replays")
    for step in range(steps):
        positions = torch.full_like(seeds, step)
        arguments["accept_uniforms"].copy_(torch_specops.uniforms(seeds, positions, num_drafts, "accept"))
        arguments["sample_uniforms"].copy_(torch_specops.uniforms(seeds, positions, 1, "sample")[:, 0])
        graph.replay()
        assert equal((output_tokens, num_accepted), op(**arguments))
        seen.add(str(output_tokens.tolist()))
    assert len(seen) == steps


@pytest.mark.not_rehearsed("the code that Inductor makes for CUDA, and its CUDA graphs")
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("op, name", [*((op, None) for op in OPS), ("verify_exact", "lse_temperature")])
@torch._inductor.config.patch({"triton.cudagraph_or_error": True})
def test_compiled_cuda_branch_in_a_cuda_graph(op: str, name: str | None) -> None:
    """fullgraph, and Inductor's own CUDA graphs, which raise here instead of skipping."""
    case = case_of(op, TWO_TILES, name)
    compiled = torch.compile(call, fullgraph=True, mode="reduce-overhead", dynamic=False)
    expected = call(case)
    with warnings.catch_warnings():
        # Inductor's graphs begin with an empty one, which holds their memory.
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            assert equal(expected, compiled(case))


@pytest.mark.not_rehearsed("opcheck on CUDA tensors", runs=False)
@pytest.mark.parametrize("name", ["typical", "k3"])
@pytest.mark.parametrize("op", OPS)
def test_opcheck_on_cuda(op: str, name: str) -> None:
    case = case_of(op, 17, None if name == "typical" else name)
    torch.library.opcheck(getattr(torch.ops.specops, op).default, (), case.args)
