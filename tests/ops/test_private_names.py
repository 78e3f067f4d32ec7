"""The private names of torch and Triton: all are found today, and where they are not, results stay the same."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

from torch_specops.ops import private

NAMES = {
    node.value
    for node in ast.walk(ast.parse(Path(private.__file__).read_text()))
    if isinstance(node, ast.Constant) and re.fullmatch(r"(torch|triton)[\w.]*:[\w.]+", str(node.value))
}

# unittest.mock, which torch uses itself, resolves names without a colon.
BLOCK = """
import os, pkgutil

asked, resolve = [], pkgutil.resolve_name

def resolve_name(name):
    if ":" not in name:
        return resolve(name)
    asked.append(name)
    raise AttributeError(name)

pkgutil.resolve_name = resolve_name
os.environ["TRITON_INTERPRET"] = "1"
import without_private
without_private.run_all()
print(*asked)
"""


def test_no_name_is_missing() -> None:
    """In the releases that are tested: without one the package would be slow, and nobody would see why."""
    assert "torch._C:_len_torch_dispatch_stack" in NAMES
    assert [name for name in sorted(NAMES) if private.find(name) is None] == []
    assert private.find("torch:no_such_name") is None


def test_without_any_of_them() -> None:
    helpers = Path(__file__).parents[1] / "helpers"
    command = [sys.executable, "-c", BLOCK]
    done = subprocess.run(command, cwd=helpers, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    # What only a rule for AOTAutograd asks, which no op has there.
    inlining = {name for name in NAMES if name.startswith(("torch._functorch", "torch._inductor.virtualized"))}
    later = {"torch._inductor.custom_graph_pass:CustomGraphPass", "torch.utils._pytree:tree_leaves"}
    assert set(done.stdout.split()) == NAMES - inlining - later
