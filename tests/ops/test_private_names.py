"""The private names of torch: all are found today, and an error says which one a release lacks."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest
import torch

from torch_specops.ops import private

SOURCE = Path(private.__file__)


def test_no_name_is_missing() -> None:
    """Also of those that are imported where they are used: few runs would get there."""
    found: dict[str, object] = {}
    for node in ast.walk(ast.parse(SOURCE.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            exec(ast.unparse(node), found)
    assert {"CustomGraphPass", "TorchDynamoException", "V", "is_fake"} <= set(found)


def test_a_missing_name_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_len_torch_dispatch_stack")
    message = rf"expected torch 2.11 to 2.15, got {re.escape(torch.__version__)}: .*'_len_torch_dispatch_stack'"
    with pytest.raises(ImportError, match=message):
        runpy.run_path(str(SOURCE))
