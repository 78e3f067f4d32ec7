"""Every op without private names of torch and Triton: what tests/ops/test_private_names.py runs where none is found."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from op_cases import OPS, assert_equal, call, check, equal, op_arguments
from oracle import case_names, sample_inputs
from report import Report
from torch import Tensor
from torch.library import opcheck

import torch_specops
from torch_specops import compilation, vocab_parallel
from torch_specops.ops import private
from torch_specops.ops.arguments import Filters
from torch_specops.ops.cuda.launch import hint
from torch_specops.ops.cuda.sample import sample as launch_sample
from torch_specops.ops.tracing import is_eager_cpu


class Call(torch.nn.Module):
    def __init__(self, op: str, rest: dict[str, Any]) -> None:
        super().__init__()
        self.op, self.rest = op, rest

    def forward(self, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return call(self.op, tensors | self.rest)


def run_op(op: str) -> None:
    """Eager against the oracle; compiled, exported and mapped against eager."""
    cases = sample_inputs(op, vocab_sizes=[17], names=case_names(op)[::8])
    check(((case, call(op, case.args)) for case in cases), Report())
    arguments = op_arguments(op, batch=3)
    expected = call(op, arguments)
    for backend in ("inductor", "aot_eager") if op == "verify_exact" else ("aot_eager",):
        torch._dynamo.reset()
        compiled = torch.compile(getattr(torch_specops, op), fullgraph=True, backend=backend)
        assert equal(_tuple(compiled(**arguments)), expected), (op, backend)
    behind_a_break = torch.compiler.disable(getattr(torch.ops.specops, op), recursive=False)
    assert_equal(torch.compile(lambda: _tuple(behind_a_break(**arguments)), backend="eager")(), expected)
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    rest = {name: value for name, value in arguments.items() if name not in tensors}
    for strict in (False, True) if op == "verify_exact" else (False,):
        program = torch.export.export(Call(op, rest), (tensors,), strict=strict)
        assert [node.target for node in program.graph.nodes if "specops" in str(node.target)] == [
            getattr(torch.ops.specops, op).default
        ]
        assert equal(program.module()(tensors), expected), (op, strict)
    mapped = torch.vmap(lambda values: call(op, values | rest))({name: x[None] for name, x in tensors.items()})
    assert equal(tuple(each[0] for each in mapped), expected)
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    # It traces as torch.compile does above, for symbolic sizes.
    utilities += ("test_aot_dispatch_dynamic",) if op == "sample" else ()
    outcome = opcheck(getattr(torch.ops.specops, op).default, (), arguments, test_utils=utilities)
    assert outcome == dict.fromkeys(utilities, "SUCCESS")


def _tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else outputs


def run_sharded() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    arguments = op_arguments("verify_exact", filtered=False)
    names = ("target_logits", "draft_tokens", "draft_logits", "accept_uniforms", "sample_uniforms", "temperature")
    given = {name: arguments[name] for name in names} | {"group": dist.group.WORLD}
    expected = torch_specops.verify_exact(**{name: arguments[name] for name in names})
    assert equal(vocab_parallel.verify_exact(**given), expected)
    assert equal(torch.compile(vocab_parallel.verify_exact, fullgraph=True, backend="aot_eager")(**given), expected)
    dist.destroy_process_group()


def run_the_rest() -> None:
    arguments = op_arguments("sample", filtered=False)
    logits, uniforms, temperature = arguments.values()
    assert_equal(launch_sample(logits, uniforms, Filters(temperature)), call("sample", arguments))
    assert hint(7) == 7 and private.hint(object()) == 1
    # The compiler's own error, unnamed.
    with pytest.raises(RuntimeError, match="graph_break") as caught, compilation.compile_errors_named():
        torch.compile(torch._dynamo.graph_break, fullgraph=True, backend="eager")()
    assert not str(caught.value).startswith("compile:")
    with pytest.raises(ImportError, match=f"torch._inductor.config, torch {re.escape(torch.__version__)} has none"):
        importlib.import_module("torch_specops.inductor")


def run_all() -> None:
    # A tracer cannot be told from an eager call, so no call reads data.
    assert private.TRACED == () and not is_eager_cpu(torch.zeros(1))
    for op in OPS:
        run_op(op)
    run_sharded()
    run_the_rest()
