"""The Triton kernels, run by Triton's interpreter on CPU tensors and poisoned memory, against the float64 oracle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attention_cases import CASES
from op_cases import NOISE_PLACES

from torch_specops import reference

pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[1] / "helpers" / "interpret_kernels.py"
# The search is tested by `sample` and `filter_logits`; here, that every load is masked by the bounds of its own row.
FILTERED_VERIFY = (
    "filters_temperature,filters_plateaus,filters_lse,filters_one_hot,filters_without_law,"
    "target_filters,target_filters_temperature,lse_wrong_filters,target_filters_lse,target_filters_nonfinite,target_filters_without_law"
)
# verify_block reads and sums rows with the kernels of verify_exact, which meet all cases; here, what its own ones do.
BLOCK = (
    "uniforms_out_of_range_masked,"
    "k1,k3,k8,k0,b0,bf16,fp16,fp32_bf16,batch_sliced,vocab_sliced_bf16,transposed_fp16,expanded,int32,pad_head,"
    "pad_ragged,target_nan,draft_inf,mixed_nonfinite,masked,overflow_fp16,greedy_mixed,bad_temperature,opposite,"
    "plateaus,tie_u_zero,tie_s_zero,one_hot,one_hot_padded,one_hot_masked,lse_k8_bf16,lse_nonfinite,long,long_one_hot,"
    "lse_wrong,lse_wrong_large,lse_wrong_largest,lse_wrong_masked,lse_wrong_same"
)
# A vocabulary of one token: what is left of a row's two ends.
ONE_TOKEN = "k3,k0,bf16,fp16,batch_sliced,pad_ragged,target_nan,draft_nan,mixed_nonfinite,masked,greedy_mixed,one_hot"
# One of every kind of input: what `make test` has time for.
FEW = "three rows of fp32_bf16,vocab_sliced_bf16,mixed_nonfinite,greedy_mixed,greedy_plateaus,tie_s_zero"
FEW_FILTERS = (
    "three rows of bf16,filters_temperature,filters_plateaus,filters_plateaus_hot,filters_zero_maxima,"
    "filters_strided,filters_nonfinite,min_p,tie_top_p_met"
)
FEW_VERIFY = FEW + ",pad_ragged,exact_u_is_p_over_q,tie_u_zero,masked_token,uniforms_out_of_range_masked"
FEW_GUMBEL = (
    "three rows of fp32_bf16,vocab_sliced_bf16,mixed_nonfinite,greedy_mixed,greedy_plateaus,masked_token,pad_ragged,"
    "k0,k8,hot_overflow,cold,filters_temperature"
)
# (op, kind of cases, tile, vocabulary sizes): smaller than a tile, not a multiple of one, and of several tiles; odd
# sizes put rows off the 16-byte boundary.
QUICK_RUNS = [
    (
        "verify_exact",
        FEW_VERIFY + ",one_hot,lse_wrong_large,argmax_lenience_mixed,filters_temperature,target_filters_lse",
        32,
        (45,),
    ),
    (
        "verify_block",
        FEW_VERIFY + ",k0,one_hot,lse_wrong_large,lse_wrong_same,long,filters_one_hot,target_filters_temperature",
        32,
        (45,),
    ),
    ("verify_sigmoid", FEW_VERIFY, 32, (67,)),
    ("verify_gumbel", FEW_GUMBEL, 32, (67,)),
    ("sample", FEW + ",filters_temperature", 32, (67,)),
    ("filter_logits", FEW_FILTERS, 32, (67,)),
]
SLOW_RUNS = [
    pytest.param(*run, marks=pytest.mark.slow)
    for run in (
        ("verify_exact", "plain", 32, (67,)),
        ("verify_exact", ONE_TOKEN, 64, (1,)),
        ("verify_exact", FILTERED_VERIFY, 64, (37,)),
        ("verify_block", BLOCK, 64, (67,)),
        ("verify_block", FILTERED_VERIFY, 64, (37,)),
        ("verify_sigmoid", "plain", 32, (67,)),
        ("verify_gumbel", "plain", 32, (1, 131)),
        ("verify_gumbel", "filtered", 64, (37,)),
        ("sample_gumbel", "plain", 32, (131,)),
        ("sample", "plain", 32, (1, 64, 131)),
        ("sample", "plain", 256, (37, 600)),
        ("sample", "filtered", 32, (37,)),
        ("filter_logits", "filtered", 64, (1, 131)),
    )
]


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


@pytest.mark.slow
def test_attention_agrees_with_the_oracle(interpret: Interpret) -> None:
    errors = interpret("attention")
    assert errors.pop("wrong") > 1
    assert len(errors) == 2 * len(CASES) and max(errors.values()) <= 1, errors


def test_early_exit_reads_no_row_behind_two_drafts_unless_both_are_accepted(interpret: Interpret) -> None:
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
