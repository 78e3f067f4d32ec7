"""The private names of torch and Triton: all are found today, and where they are not, results stay the same."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from op_cases import assert_equal, call, equal, op_arguments

import torch_specops
from torch_specops import compilation, vocab_parallel
from torch_specops.ops import private
from torch_specops.ops.arguments import Filters
from torch_specops.ops.tracing import is_eager_cpu

TESTS = Path(__file__).parents[1]
NAMES = {
    node.value
    for node in ast.walk(ast.parse(Path(private.__file__).read_text()))
    if isinstance(node, ast.Constant) and re.fullmatch(r"(torch|triton)[\w.]*:[\w.]+", str(node.value))
}
# Python runs it at the start of a process. unittest.mock, which torch uses itself, resolves names without a colon.
SITECUSTOMIZE = """
import os, pkgutil

resolve = pkgutil.resolve_name

def resolve_name(name):
    if ":" not in name:
        return resolve(name)
    with open(os.environ["TORCH_SPECOPS_ASKED"], "a") as asked:
        print(name, file=asked)
    raise AttributeError(name)

pkgutil.resolve_name = resolve_name
"""
# Eager against the oracle; compiled, exported, mapped, sharded, through opcheck. One function registers all ops, so
# that one of them shows what a compiler makes of it.
WITHOUT_NAMES = (
    "ops/test_invariants.py::test_ops_equal_the_oracle[verify_exact]",
    "ops/test_compile.py::test_dynamic[sample-aot_eager-False]",
    "ops/test_compile.py::test_nothing_in_an_op_is_compiled",
    "ops/test_export.py::test_export_keeps_one_op[sample-True-False]",
    "ops/test_vmap.py::test_over_a_leading_axis",
    "ops/test_opcheck.py::test_few_arguments_and_edges_of_size[verify_exact]",
    "ops/test_private_names.py::test_sharded_without_them",
    "ops/test_private_names.py::test_what_else_changes_without_them",
)


def test_no_name_is_missing() -> None:
    """In the releases that are tested: without one the package would be slow, and nobody would see why."""
    assert "torch._C:_len_torch_dispatch_stack" in NAMES
    assert [name for name in sorted(NAMES) if private.find(name) is None] == []
    assert private.find("torch:no_such_name") is None


@pytest.mark.slow
def test_without_any_of_them(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    asked = tmp_path / "asked"
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"TORCH_SPECOPS_ASKED": str(asked), "PYTHONPATH": paths, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-m", "not slow", *(str(TESTS / name) for name in WITHOUT_NAMES)]
    done = subprocess.run(command, env=inherited | own, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout[-5000:]
    # What only a rule for AOTAutograd asks, which no op has there.
    inlining = {name for name in NAMES if name.startswith(("torch._functorch", "torch._inductor.virtualized"))}
    later = {"torch._inductor.custom_graph_pass:CustomGraphPass", "torch.utils._pytree:tree_leaves"}
    assert set(asked.read_text().split()) == NAMES - inlining - later


WITHOUT_THEM = pytest.mark.skipif("TORCH_SPECOPS_ASKED" not in os.environ, reason="run by test_without_any_of_them")


@WITHOUT_THEM
def test_sharded_without_them() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    names = ("target_logits", "draft_tokens", "draft_logits", "accept_uniforms", "sample_uniforms", "temperature")
    given = {name: op_arguments("verify_exact")[name] for name in names}
    expected = torch_specops.verify_exact(**given)
    compiled = torch.compile(vocab_parallel.verify_exact, fullgraph=True, backend="aot_eager")
    for verify in (vocab_parallel.verify_exact, compiled):
        assert equal(verify(**given, group=dist.group.WORLD), expected)
    dist.destroy_process_group()


@WITHOUT_THEM
def test_what_else_changes_without_them() -> None:
    import triton_interpreter

    from torch_specops.ops.cuda.launch import hint
    from torch_specops.ops.cuda.sample import sample as launch_sample

    # A tracer cannot be told from an eager call, so no call reads data.
    assert private.TRACED == () and not is_eager_cpu(torch.zeros(1))
    arguments = op_arguments("sample", filtered=False)
    logits, uniforms, temperature = arguments.values()
    triton_interpreter.prepare()
    assert_equal(launch_sample(logits, uniforms, Filters(temperature)), call("sample", arguments))
    assert hint(7) == 7 and private.hint(object()) == 1
    assert private.global_hooks() == [] and not private.is_limit_of_graphs(RuntimeError())
    # The compiler's own error, unnamed.
    with pytest.raises(RuntimeError, match="graph_break") as caught, compilation.compile_errors_named():
        torch.compile(torch._dynamo.graph_break, fullgraph=True, backend="eager")()
    assert not str(caught.value).startswith("compile:")
    with pytest.raises(ImportError, match=f"torch._inductor.config, torch {re.escape(torch.__version__)} has none"):
        importlib.import_module("torch_specops.inductor")
