"""The Triton kernels, run by Triton's interpreter on CPU tensors and poisoned memory, against the float64 oracle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import CASES
from op_cases import NOISE_PLACES, OPS, QUICK_RUNS, SLOW_RUNS

import torch_specops
from torch_specops import reference
from torch_specops.ops.uniforms import STREAMS, step_uniforms

pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[1] / "helpers" / "interpret_kernels.py"
Interpret = Callable[..., Any]


@pytest.fixture(scope="module")
def interpret() -> Iterator[Interpret]:
    """What a command of the script finds. One process imports what they all need, which takes longer than most."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, str(SCRIPT)], env=environment, text=True, **pipes) as script:

        def answer(*arguments: object) -> Any:
            print(*arguments, sep="\t", file=script.stdin, flush=True)
            found = json.loads(script.stdout.readline())
            assert "error" not in found, found["error"]
            return found["found"]

        yield answer
        script.stdin.close()


@pytest.mark.parametrize("op, kind, tile, vocab_sizes", [*QUICK_RUNS, *SLOW_RUNS])
def test_kernels_agree_with_the_oracle(
    op: str,
    kind: str,
    tile: int,
    vocab_sizes: tuple[int, ...],
    interpret: Interpret,
    record_property: pytest.RecordProperty,
) -> None:
    report = interpret("ops", op, kind, tile, *vocab_sizes)
    for key in ("cases", "rows", "rounding"):
        record_property(f"{op} kernels, {kind}, {key}", report[key])
    assert report["wrong"] == []
    least = {"plain": 30, "filtered": 10}.get(kind, len(kind.split(",")))
    assert report["cases"] >= least * len(vocab_sizes)
    assert report["rounding"] <= 0.01 * report["rows"]


def test_the_hash_of_the_noise_is_the_oracles(interpret: Interpret) -> None:
    assert interpret("hashes") == [reference.noise_hash(*place, 64).tolist() for place in NOISE_PLACES]


def test_the_numbers_are_those_of_a_cpu(interpret: Interpret) -> None:
    seeds, positions = torch.tensor(NOISE_PLACES).T
    found = interpret("numbers")
    assert len(found) == 2 * len(STREAMS) + 2
    for call, numbers in found.items():
        stream, n = call.split()
        on_cpu = step_uniforms if stream == "step" else partial(torch_specops.uniforms, stream=stream)
        assert numbers == on_cpu(seeds, positions, int(n)).tolist(), call


def test_a_planned_call_computes_the_same(interpret: Interpret) -> None:
    found = interpret("plans")
    assert len(found) == len(OPS) + 3
    assert all(found.values()), found


@pytest.mark.slow
def test_attention_agrees_with_the_oracle(interpret: Interpret) -> None:
    errors = interpret("attention")
    assert errors.pop("wrong") > 1
    assert len(errors) == 2 * len(CASES) and max(errors.values()) <= 1, errors


def test_kernel_early_exit_reads_few_rows(interpret: Interpret) -> None:
    report = interpret("reads")
    for kind, read in report["rows"].items():
        for (num_valid, accepted), *rows in zip(report["sequences"], read["target"], read["draft"], strict=True):
            more = accepted >= 2
            target = list(range(1 + (num_valid if more else min(num_valid, 1))))
            draft = {
                "draft rows": list(range(num_valid if more else min(num_valid, 2))),
                "draft_lse": [accepted] if accepted < num_valid else [],
            }.get(kind, [])
            assert rows == [target, draft], (kind, num_valid, accepted)


def test_parts_without_a_kept_token_are_read_once(interpret: Interpret) -> None:
    """By the search."""
    assert interpret("times read") == {op: [1] for op in ("verify_exact", "verify_gumbel", "sample")}
