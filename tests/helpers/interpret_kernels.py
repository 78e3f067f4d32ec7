"""Runs the Triton launchers under the interpreter over the shared cases, on poisoned memory; prints one JSON line.

A script of its own because TRITON_INTERPRET must be set before a kernel is defined:
    TRITON_INTERPRET=1 python tests/helpers/interpret_kernels.py OP KIND TILE VOCAB_SIZE [VOCAB_SIZE ...]
KIND is "plain" for the cases without top_k, top_p and min_p, "filtered" for those with any of them, or names of cases
with commas between.
"""

import json
import sys
from typing import Any
from unittest import mock

import oracle
import torch
import triton.language as tl
import triton_interpreter
from torch import Tensor

from torch_specops.ops.arguments import Filters, SigmoidArguments, VerifyArguments
from torch_specops.ops.cuda import block, exact, filter, launch, sample, sigmoid

FILTERS = {"top_k", "top_p", "min_p"}


def run(op: str, args: dict[str, Any], tile: int) -> tuple[Tensor, ...]:
    """The launcher of an op, given the op's arguments."""
    if op.startswith("verify"):
        given = SigmoidArguments(**args) if op == "verify_sigmoid" else VerifyArguments(**args)
        module = {"verify_exact": exact, "verify_block": block, "verify_sigmoid": sigmoid}[op]
        result = getattr(module, op)(given, tile=tile)
        if op == "verify_exact":
            with mock.patch.object(exact, "EARLY_EXIT_TILES", 1):
                early = exact.verify_exact(given, tile=tile)
            assert all(map(torch.equal, early, result)), "not bit for bit the same with early exit"
        return result
    filters = Filters(**{name: args[name] for name in args.keys() & set(Filters._fields)})
    if op == "sample":
        return sample.sample(args["logits"], args["uniforms"], filters, tile=tile)
    return (filter.filter_logits(args["logits"], filters, tile=tile),)


def shift_rows(args: dict[str, Any]) -> None:
    """Add another constant to every row of logits: no distribution changes, but the bounds of one row are of no use to
    any other."""
    for name in ("target_logits", "draft_logits"):
        if args[name] is None:
            continue
        batch, rows, _ = args[name].shape
        shift = 8.0 * torch.arange(batch * rows).view(batch, rows).remainder(5) - (
            16.0 if name == "draft_logits" else 0.0
        )
        args[name] = args[name] + shift.unsqueeze(-1).to(args[name].dtype)
        if name == "draft_logits" and "draft_lse" in args:
            temperature = args.get("temperature", torch.ones(batch)).unsqueeze(-1)
            args["draft_lse"] = args["draft_lse"] + torch.where(temperature > 0, shift / temperature, 0.0)


def main(op: str, kind: str, tile: int, vocab_sizes: list[int]) -> None:
    triton_interpreter.prepare()
    # So that a program takes several tiles although there are few.
    launch.RESIDENT_PROGRAMS = 5
    # So that lists are long and there is not room for all.
    filter.bounds.ROOM = 1
    filter.candidates.CHUNK, filter.candidates.SEARCHED = tl.constexpr(32), tl.constexpr(4)
    filter.search.SAMPLE = tl.constexpr(8)
    totals = {"cases": 0, "rows": 0, "rounding": 0}
    wrong = []
    names = None if kind in ("plain", "filtered") else kind.split(",")
    for case in oracle.sample_inputs(op, vocab_sizes=vocab_sizes, names=names):
        if names is None and FILTERS.isdisjoint(case.args) != (kind == "plain"):
            continue
        if op.startswith("verify") and not FILTERS.isdisjoint(case.args):
            shift_rows(case.args)
        with oracle.poison_memory():
            result = run(op, case.args, tile)
        comparison = oracle.compare(case, result)
        totals["cases"] += 1
        totals["rows"] += comparison.rows
        totals["rounding"] += comparison.rounding
        if comparison.wrong:
            wrong.append({"case": case.name, "rows": comparison.wrong, "got": [part.tolist() for part in result]})
    print(json.dumps({**totals, "wrong": wrong}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), [int(size) for size in sys.argv[4:]])
