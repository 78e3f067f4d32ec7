"""What export, AOTAutograd and torch.compile make of CUDA calls, with fake CUDA tensors; Triton, which asks its driver
for the target when torch looks for what a kernel writes, finds a stand-in. Nothing here may touch a device."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from op_cases import OPS, VERIFY_OPS, WRITTEN, Call, call, empty_arguments
from torch import Tensor
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._higher_order_ops import triton_kernel_wrap
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402

# torch's own: its exporter copies what it deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")

arguments = partial(empty_arguments, device="cuda:1")


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    def refuse(device: Any) -> None:
        raise AssertionError(f"a traced call set the device {device}")

    monkeypatch.setattr(torch.cuda, "device", refuse)
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())


def exported(op: str, given: dict[str, Tensor], num_drafts: bool = False) -> torch.export.ExportedProgram:
    """With a dynamic batch, and a dynamic number of drafts if asked for."""
    batch, drafts = torch.export.Dim("batch", min=1, max=4096), torch.export.Dim("drafts", min=1, max=30)
    rows = {"target_logits": drafts + 1} | dict.fromkeys(
        ("draft_tokens", "draft_logits", "accept_uniforms", "draft_lse"), drafts
    )
    dims = {name: {0: batch, **({1: rows[name]} if num_drafts and name in rows else {})} for name in given}
    return torch.export.export(Call(op), (given,), dynamic_shapes=(dims,), strict=False)


@pytest.mark.parametrize("op", OPS)
def test_export_with_dynamic_sizes(op: str) -> None:
    """The tiles that fit the example's batch bind no other. Of the ops that verify: the sizes of the batch, of the
    drafts and of the target's rows."""
    expected = {(1, 4096), (1, 30), (2, 31)} if op in VERIFY_OPS else {(1, 4096)}
    options = "temperature, filters, draft_lse" if op == "verify_block" else "temperature, filters"
    with FakeTensorMode(shape_env=ShapeEnv()):
        program = exported(op, arguments(op, options), num_drafts=True)
    ranges = program.range_constraints.values()
    assert {(int(values.lower), int(values.upper)) for values in ranges} == expected


def traced(op: str, given: dict[str, Tensor], to_python: bool = False) -> torch.fx.GraphModule:
    """What Inductor does first; in code that runs without Python the op becomes its launches."""
    with V.set_aot_compilation(not to_python):
        return aot_export_joint_simple(
            lambda *values: call(op, dict(zip(given, values, strict=True))), list(given.values()), trace_joint=False
        )


@pytest.fixture(scope="module")
def compiled_once() -> Iterator[None]:
    """torch compiles a kernel to see what it writes, here once for equal launches: it asks twice in a trace, and most
    ops launch the search."""
    known: dict[tuple[Any, ...], list[str]] = {}
    ask, table = triton_kernel_wrap.get_mutated_tensors, triton_kernel_wrap.kernel_side_table

    def of_value(x: Any) -> Any:
        if isinstance(x, torch.SymInt):
            return x.node.shape_env, str(x)
        return x.dtype if isinstance(x, Tensor) else (type(x), x)

    def ask_once(kernel: int, constants: int, given: dict[str, Any], *rest: Any) -> list[str]:
        values = (table.get_constant_args(constants) | given).items()
        launch = (table.get_kernel(kernel).fn, *((name, of_value(x)) for name, x in values), str(rest))
        if launch not in known:
            known[launch] = ask(kernel, constants, given, *rest)
        return known[launch]

    with mock.patch.object(triton_kernel_wrap, "get_mutated_tensors", ask_once):
        yield


def launches(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [node for node in graph.graph.nodes if "triton_kernel_wrapper" in str(node.target)]


@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize("op", OPS)
def test_cuda_graph_writes_outputs_alone(op: str, caplog: pytest.LogCaptureFixture) -> None:
    """Were torch to fail to see what a kernel writes, it would warn, take every input for changed, and copy the
    logits."""
    with FakeTensorMode(shape_env=ShapeEnv()):
        given = arguments(op, "temperature, filters")
        nodes = [node for node in exported(op, given).graph.nodes if node.op == "placeholder"]
        given = {name: node.meta["val"] for name, node in zip(given, nodes, strict=True)}
    fake = nodes[0].meta["val"].fake_mode
    guards, environment = len(fake.shape_env.guards), dict(os.environ)
    with fake, caplog.at_level(logging.WARNING):
        graph = traced(op, given)
    assert fake.shape_env.guards[guards:] == []
    assert dict(os.environ) == environment
    assert [set(node.kwargs["tensors_to_clone"]) for node in launches(graph)] == WRITTEN[op]
    assert all(node.kwargs["kwargs"]["enable_fp_fusion"] for node in launches(graph))
    others = [str(node.target) for node in graph.graph.nodes if node not in launches(graph)]
    assert not [name for name in others if any(word in name for word in ("clone", "copy", "fill", "full", "zero"))]
    # Few drafts, and logits of two dtypes.
    for num_drafts in (0, 1) if op in VERIFY_OPS else ():
        with FakeTensorMode(shape_env=ShapeEnv()), caplog.at_level(logging.WARNING):
            traced(op, arguments(op, "temperature", 1, num_drafts, dtype=torch.float32))
    assert not caplog.records


@pytest.mark.parametrize("op", OPS)
def test_code_with_python_calls_the_op(op: str) -> None:
    """Inductor would drop options of launches, and compile and analyse the kernels anew."""
    with FakeTensorMode(shape_env=ShapeEnv()):
        graph = traced(op, arguments(op, "temperature, filters"), to_python=True)
    calls = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert [name for name in calls if "getitem" not in name] == [f"specops.{op}.default"]


@pytest.mark.parametrize("op", OPS)
def test_a_batch_known_to_no_one(op: str) -> None:
    """Of a size that depends on data there is no example: any tile is right."""
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        batch = env.create_unbacked_symint()
        torch._check(batch >= 0)
        torch._check(batch <= 1000)
        outputs = call(op, arguments(op, "temperature, filters", batch))
    assert str(outputs[0].shape[0]) == str(batch)
