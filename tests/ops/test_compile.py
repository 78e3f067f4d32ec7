"""`torch.compile(fullgraph=True)`: one graph, no recompilation, eager's integers, nothing vocabulary-sized."""

from __future__ import annotations

import math
import re

import pytest
import torch
from marks import slow
from op_cases import OPS, VERIFY_OPS, assert_equal, call, equal, op_arguments, tensor_arguments
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch._inductor.virtualized import V

import torch_specops

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def assert_one_graph() -> None:
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


# `test_one_graph_for_every_batch` compiles verify_exact.
QUICK = ("verify_gumbel",)
SLOW = [(op, "inductor", False) for op in OPS if op != "filter_logits"]
SLOW += [(op, "inductor", True) for op in ("filter_logits", "verify_exact", "sample")]
SLOW += [(op, "aot_eager", False) for op in OPS if op not in (*QUICK, "filter_logits")]


@pytest.mark.parametrize(
    ("op", "backend", "filtered"),
    [
        *((op, "aot_eager", False) for op in QUICK),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_dynamic(op: str, backend: str, filtered: bool) -> None:
    """One compilation serves every B >= 2, K >= 2, V > 1024 and value of the filters; torch specialises sizes 0 and 1
    by rule, and a vocabulary of a single tile is another graph."""
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=backend)
    # Sizes that are equal by chance (B = K + 1) would be taken for one. Filters search rows beyond 2048 one by one.
    sizes = [(6, 3, 1100), (4, 5, 1100), (7, 2, 1100), (2, 3, 1030), (5, 6, 2500)]
    for seed, (batch, num_drafts, vocab_size) in enumerate(sizes):
        arguments = op_arguments(op, batch, num_drafts, vocab_size, seed=seed, filtered=filtered)
        with torch.compiler.set_stance("fail_on_recompile" if seed > 0 else "default"):
            assert_equal(compiled(op, arguments), call(op, arguments))
    assert_one_graph()


def largest_allocation(code: str) -> int:
    """The number of elements of the largest buffer that Inductor's CPU wrapper allocates."""
    shapes = re.findall(r"empty_strided_cpu\w*\(\(([^)]*)\)", code)
    return max(math.prod(int(size) for size in shape.split(",") if size.strip()) for shape in shapes)


INLINED = ("verify_block", "verify_sigmoid", "verify_gumbel", "sample")


@pytest.mark.parametrize("op", ["verify_exact", *(pytest.param(op, marks=pytest.mark.slow) for op in INLINED)])
def test_inductor(op: str) -> None:
    """The batches reach many outcomes, nothing accepted and all among them. [B, K, V] and [B, K+1, V] are read and by
    `verify_exact` never written: what is allocated is a small multiple of [B, V]."""
    batch, num_drafts, vocab_size = 4, 3, 1024 if op == "verify_gumbel" else 2048
    compiled = torch.compile(getattr(torch_specops, op), fullgraph=True, dynamic=False)
    arguments = op_arguments(op, batch, num_drafts, vocab_size, filtered=False)
    _, (code,) = run_and_get_code(compiled, **arguments)
    assert op != "verify_exact" or largest_allocation(code) <= batch * (vocab_size + 1024)
    seen: set[int] = set()
    for seed in range(30):
        arguments = op_arguments(op, batch, num_drafts, vocab_size, seed=seed, filtered=False)
        with torch.compiler.set_stance("fail_on_recompile"):
            expected = call(op, arguments)
            assert_equal(compiled(**arguments), expected)
        seen.update(expected[1].tolist() if op in VERIFY_OPS else ())
    assert op == "sample" or seen == {0, 1, 2, 3}
    assert_one_graph()


@pytest.mark.parametrize(
    "op, longest, kind",
    [("verify_exact", 2**15 - 1, kind) for kind in ("long", "short", "filtered", "ahead of time")]
    + [("verify_gumbel", 1024, "long"), ("verify_gumbel", 1024, "short"), slow("verify_gumbel", 1024, "ahead of time")],
)
def test_long_rows_are_left_to_an_eager_call(op: str, longest: int, kind: str) -> None:
    """Except with filters, and in programs that run without Python."""
    graphs: list[torch.fx.GraphModule] = []
    compiled = torch.compile(
        getattr(torch_specops, op),
        fullgraph=True,
        dynamic=False,
        backend=aot_autograd(fw_compiler=lambda graph, inputs: graphs.append(graph) or graph),
    )
    arguments = op_arguments(op, 2, 2, longest + (kind != "short"), filtered=kind == "filtered")
    with V.set_aot_compilation(kind == "ahead of time"):
        assert_equal(compiled(**arguments), call(op, arguments))
    called = {node.target for node in graphs[0].graph.nodes}
    assert (getattr(torch.ops.specops, op).default in called) == (kind == "long")


def test_nothing_in_an_op_is_compiled() -> None:
    """Where a compiled caller reaches it from Python, behind a graph break."""

    @torch.compiler.disable(recursive=False)
    def behind_a_break(logits: Tensor, uniforms: Tensor) -> Tensor:
        return torch.ops.specops.sample(logits, uniforms)[0]

    compiled = torch.compile(lambda *arguments: behind_a_break(*arguments) + 1, backend="eager")
    compiled(torch.zeros(2, 300), torch.rand(2))
    assert counters["stats"]["calls_captured"] == 1


def test_a_large_allocation_is_seen() -> None:
    """The control: p written out for every position, as it is without the op."""
    compiled = torch.compile(lambda logits: logits.softmax(-1).cumsum(-1), fullgraph=True)
    _, (code,) = run_and_get_code(compiled, torch.zeros(4, 3, 2048))
    assert largest_allocation(code) == 4 * 3 * 2048


def test_one_hot_drafts_and_numbers_that_are_integers() -> None:
    compiled = torch.compile(torch_specops.verify_exact, fullgraph=True, backend="aot_eager")
    arguments = op_arguments("verify_exact", filtered=False) | {"draft_logits": None, "draft_lse": None, "lenience": 1}
    del arguments["draft_is_one_hot"]
    assert equal(compiled(**arguments), call("verify_exact", arguments))
    compiled = torch.compile(torch_specops.verify_sigmoid, fullgraph=True, backend="aot_eager")
    for alpha in (-1, -2):
        arguments = op_arguments("verify_sigmoid") | {"alpha": alpha}
        assert equal(compiled(**arguments), call("verify_sigmoid", arguments))


def test_without_data() -> None:
    """Meta tensors hold no data: an op that read any would raise. `opcheck` calls the ops on fake ones."""
    for op in OPS:
        arguments, expected = op_arguments(op), call(op, op_arguments(op))
        outputs = call(op, arguments | {name: x.to("meta") for name, x in tensor_arguments(op).items()})
        described = [(output.shape, output.dtype, output.device.type) for output in outputs]
        assert described == [(output.shape, output.dtype, "meta") for output in expected], op
