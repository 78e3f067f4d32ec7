"""Imports the scripts of benchmarks/, which are files and not a package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

# An sdist has the scripts alone.
needs_benchmarks = pytest.mark.skipif(
    not (BENCHMARKS / "results").exists(), reason="only a checkout has the benchmarks with their results"
)


def script(name: str) -> ModuleType:
    """A module of benchmarks/, benchmarks/papers/ or benchmarks/lossless/."""
    for folder in (BENCHMARKS, BENCHMARKS / "papers", BENCHMARKS / "lossless"):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    return importlib.import_module(name)
