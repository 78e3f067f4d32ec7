"""What export, AOTAutograd and torch.compile make of CUDA calls, with fake CUDA tensors; Triton, which asks its driver
for the target when torch looks for what a kernel writes, finds a stand-in. Nothing here may touch a device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_cases import OPS, call
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torch_specops

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402

# torch's own: its exporter copies what it deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")

BATCH, NUM_DRAFTS, VOCAB_SIZE = 4, 6, 50257


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    def refuse(device: Any) -> None:
        raise AssertionError(f"a traced call set the device {device}")

    monkeypatch.setattr(torch.cuda, "device", refuse)
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())


def cuda(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda:1")


def arguments(op: str, batch: int = BATCH, num_drafts: int = NUM_DRAFTS, **given: Any) -> dict[str, Tensor]:
    """Tensors of every kind that the op takes, filters among them unless they are not wanted."""
    dtype = given.get("dtype", torch.bfloat16)
    rows = {"temperature": cuda(batch)}
    if op != "verify_sigmoid" and given.get("filters", True):
        rows |= {"top_k": cuda(batch, dtype=torch.int64), "top_p": cuda(batch), "min_p": cuda(batch)}
    if op in ("sample", "filter_logits"):
        uniforms = {"uniforms": cuda(batch)} if op == "sample" else {}
        return {"logits": cuda(batch, VOCAB_SIZE, dtype=dtype), **uniforms, **rows}
    return {
        "target_logits": cuda(batch, num_drafts + 1, VOCAB_SIZE, dtype=dtype),
        "draft_tokens": cuda(batch, num_drafts, dtype=torch.int64),
        "draft_logits": cuda(batch, num_drafts, VOCAB_SIZE, dtype=torch.bfloat16),
        "accept_uniforms": cuda(batch, num_drafts),
        "sample_uniforms": cuda(batch),
        **rows,
        **({"draft_lse": cuda(batch, num_drafts)} if given.get("with_lse") else {}),
    }


class Call(nn.Module):
    def __init__(self, op: str) -> None:
        super().__init__()
        self.op = getattr(torch_specops, op)

    def forward(self, given: dict[str, Tensor]) -> Any:
        return self.op(**given)


def exported(op: str, given: dict[str, Tensor], num_drafts: bool = False) -> torch.export.ExportedProgram:
    """With a dynamic batch, and a dynamic number of drafts if asked for."""
    batch, drafts = torch.export.Dim("batch", min=1, max=4096), torch.export.Dim("drafts", min=1, max=30)
    rows = {"target_logits": drafts + 1} | dict.fromkeys(
        ("draft_tokens", "draft_logits", "accept_uniforms", "draft_lse"), drafts
    )
    dims = {name: {0: batch, **({1: rows[name]} if num_drafts and name in rows else {})} for name in given}
    return torch.export.export(Call(op), (given,), dynamic_shapes=(dims,), strict=False)


@pytest.mark.parametrize("op", OPS)
def test_export_with_a_dynamic_batch(op: str) -> None:
    """The tiles that fit the example's batch bind no other."""
    for with_lse in (False, True) if op in ("verify_exact", "verify_block") else (False,):
        with FakeTensorMode(shape_env=ShapeEnv()):
            program = exported(op, arguments(op, with_lse=with_lse))
        assert [(values.lower, values.upper) for values in program.range_constraints.values()] == [(1, 4096)]


@pytest.mark.parametrize("op", OPS[:3])
def test_export_with_a_dynamic_number_of_drafts(op: str) -> None:
    with FakeTensorMode(shape_env=ShapeEnv()):
        program = exported(op, arguments(op), num_drafts=True)
    # Of the batch, of the drafts and of the target's rows.
    ranges = {(int(values.lower), int(values.upper)) for values in program.range_constraints.values()}
    assert ranges == {(1, 4096), (1, 30), (2, 31)}


@pytest.mark.parametrize("op", OPS)
def test_a_graph_writes_outputs_alone_and_asks_for_no_more_than_the_exported_one(
    op: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What AOTInductor does first: the op becomes its launches. Were torch to fail to see what a kernel writes, it
    would warn, take every input for changed, and copy the logits."""
    with FakeTensorMode(shape_env=ShapeEnv()):
        given = arguments(op)
        nodes = [node for node in exported(op, given).graph.nodes if node.op == "placeholder"]
        given = {name: node.meta["val"] for name, node in zip(given, nodes, strict=True)}
    fake = nodes[0].meta["val"].fake_mode
    guards = len(fake.shape_env.guards)

    with fake, caplog.at_level(logging.WARNING):
        graph = aot_export_joint_simple(
            lambda *values: call(op, dict(zip(given, values, strict=True))), list(given.values()), trace_joint=False
        )
    assert not caplog.records
    assert fake.shape_env.guards[guards:] == []
    assert len(launches(graph)) > 1
    assert not [node for node in graph.graph.nodes if "clone" in str(node.target) or "copy" in str(node.target)]


def launches(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [node for node in graph.graph.nodes if "triton_kernel_wrapper" in str(node.target)]


@pytest.mark.parametrize("num_drafts", [0, 1])
@pytest.mark.parametrize("op", OPS[:3])
def test_few_drafts_and_mixed_dtypes_are_seen_through_too(
    op: str, num_drafts: int, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeTensorMode(shape_env=ShapeEnv()), caplog.at_level(logging.WARNING):
        given = arguments(op, 1, num_drafts, dtype=torch.float32, filters=False)
        aot_export_joint_simple(
            lambda *values: call(op, dict(zip(given, values, strict=True))), list(given.values()), trace_joint=False
        )
    assert not caplog.records


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("op", OPS)
def test_one_compiled_graph_for_every_batch(op: str) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(
        getattr(torch_specops, op), dynamic=True, fullgraph=True, backend=aot_autograd(fw_compiler=keep)
    )
    with FakeTensorMode(shape_env=ShapeEnv()):
        for batch in (4, 9, 300, 2000):
            result = compiled(**arguments(op, batch, filters=op == "filter_logits"))
            assert len(result[0] if isinstance(result, tuple) else result) == batch
    assert len(graphs) == 1
    assert len(launches(graphs[0])) > 1


@pytest.mark.parametrize("op", OPS)
def test_a_batch_known_to_no_one(op: str) -> None:
    """Of a size that depends on data there is no example: any tile is right."""
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        batch = env.create_unbacked_symint()
        torch._check(batch >= 0)
        torch._check(batch <= 1000)
        outputs = call(op, arguments(op, batch))
    assert str(outputs[0].shape[0]) == str(batch)
