"""Runs the Triton launchers under Triton's interpreter, on poisoned memory.

A script of its own because TRITON_INTERPRET must be set before a kernel is defined. It reads one command a line, its
words between tabs, and answers each with a line of JSON, {"found": ..} or {"error": traceback}:
    ops  OP  KIND  TILE  VOCAB_SIZE  [VOCAB_SIZE ...]
    attention
    reads
    times read
    hashes
    numbers
    plans
    printf 'ops\\tsample\\tk3,bf16\\t32\\t67\\n' | TRITON_INTERPRET=1 python tests/helpers/interpret_kernels.py
KIND is "plain" for the cases without top_k, top_p and min_p, "filtered" for those with any of them, or names of cases
with commas between; after "three rows of " each case has no more of them, and no more than 13 drafts, and one in four
cases is run both ways.
"""

import ctypes
import functools
import importlib
import itertools
import json
import os
import sys
import traceback
from dataclasses import replace
from typing import Any
from unittest import mock

import attention_cases
import numpy as np
import op_cases
import torch
import triton
import triton.language as tl
import triton_interpreter
from torch import Tensor
from triton.compiler import CompiledKernel

import torch_specops
from torch_specops import testing
from torch_specops.ops.arguments import Filters, GumbelArguments, VerifyArguments
from torch_specops.ops.cuda import attention, exact, filter, gumbel, launch, plans, sample, stats, uniforms
from torch_specops.ops.uniforms import STREAMS

FILTERS = {"top_k", "top_p", "min_p"}
THREE_ROWS = "three rows of "


def run(op: str, args: dict[str, Any], tile: int, both_ways: bool) -> tuple[Tensor, ...]:
    """The launcher of an op, given the op's arguments: of `verify_exact` with early exit, and without it if asked for
    both ways."""
    if op == "verify_exact":
        # Both search for the same bounds.
        with mock.patch.object(stats, "filter_bounds", functools.cache(stats.filter_bounds)):
            with mock.patch.object(exact, "EARLY_EXIT_TILES", 1):
                result = run_once(op, args, tile)
            same = not both_ways or op_cases.equal(run_once(op, args, tile), result)
        assert same, "not bit for bit the same with early exit"
        return result
    result = run_once(op, args, tile)
    if op == "sample":
        op_cases.assert_bounds(args, *result, *run_once(op, args | {"with_bounds": True}, tile))
    return result


def run_once(op: str, args: dict[str, Any], tile: int) -> tuple[Tensor, ...]:
    if op == "sample_gumbel":
        rest = dict(args)
        given = GumbelArguments(
            rest.pop("logits").unsqueeze(1), args["seeds"].new_empty(args["seeds"].shape[0], 0), **rest
        )
        return (gumbel.verify_gumbel(given, tile=tile)[0].squeeze(1),)
    if op.startswith("verify"):
        launcher = getattr(importlib.import_module(f"torch_specops.ops.cuda.{op.removeprefix('verify_')}"), op)
        return launcher(launcher.__annotations__["args"](**args), tile=tile)
    filters = Filters(**{name: args[name] for name in args.keys() & set(Filters._fields)})
    if op == "sample":
        return sample.sample(args["logits"], args["uniforms"], filters, args.get("with_bounds", False), tile=tile)
    return (filter.filter_logits(args["logits"], filters, tile=tile),)


def shift_rows(args: dict[str, Any]) -> None:
    """Add another constant to every row of logits: no distribution changes, but the bounds of one row are of no use to
    any other."""
    for name in ("target_logits", "draft_logits"):
        if args.get(name) is None:
            continue
        batch, rows, _ = args[name].shape
        shift = 8.0 * torch.arange(batch * rows).view(batch, rows).remainder(5) - (
            16.0 if name == "draft_logits" else 0.0
        )
        args[name] = args[name] + shift.unsqueeze(-1).to(args[name].dtype)
        if name == "draft_logits" and "draft_lse" in args:
            temperature = args.get("temperature", torch.ones(batch)).unsqueeze(-1)
            lse = args["draft_lse"][..., 0] if args["draft_lse"].dim() == 3 else args["draft_lse"]
            lse += torch.where(temperature > 0, shift / temperature, 0.0)
            if args["draft_lse"].dim() == 3:
                # Rounding the shifted logits may change ties.
                filters = {
                    each: args[each].repeat_interleave(rows) for each in FILTERS | {"temperature"} if each in args
                }
                found = args["draft_logits"].flatten(0, 1), torch.zeros(batch * rows)
                shifted = torch_specops.reference.sample(*found, **filters, with_bounds=True)[1].view(batch, rows, 3)
                args["draft_lse"][..., 1:] = shifted[..., 1:]


def compare_ops(op: str, kind: str, tile: int, vocab_sizes: list[int]) -> dict[str, Any]:
    # So that a program takes several tiles although there are few.
    launch.RESIDENT_PROGRAMS = 5
    # So that lists are long and there is not room for all.
    filter.bounds.ROOM = 1
    filter.candidates.CHUNK, filter.candidates.SEARCHED = tl.constexpr(32), tl.constexpr(4)
    filter.search.SAMPLE = tl.constexpr(8)
    totals = {"cases": 0, "rows": 0, "rounding": 0}
    wrong = []
    named = kind.removeprefix(THREE_ROWS)
    names = None if named in ("plain", "filtered") else named.split(",")
    # `verify_block` looks at the residuals of eight drafts at a time: with 13 it accepts ten of "long_one_hot".
    most: dict[str, int] = {"max_rows": 3, "max_drafts": 13} if kind != named else {}
    for number, case in enumerate(testing.sample_inputs(op, vocab_sizes=vocab_sizes, names=names, **most)):
        if names is None and FILTERS.isdisjoint(case.args) != (kind == "plain"):
            continue
        if op.startswith("verify") and not FILTERS.isdisjoint(case.args):
            shift_rows(case.args)
        with testing.poison_memory():
            result = run(op, case.args, tile, both_ways=not most or number % 4 == 0)
        comparison = testing.compare(case, result)
        totals["cases"] += 1
        totals["rows"] += comparison.rows
        totals["rounding"] += comparison.rounding
        if comparison.wrong:
            wrong.append({"case": case.name, "rows": comparison.wrong, "got": [part.tolist() for part in result]})
    return {**totals, "wrong": wrong}


def compare_attention() -> dict[str, float]:
    """The errors of `specops::attend` over its cases."""
    errors = {}
    for (index, case), several in itertools.product(enumerate(attention_cases.CASES), (False, True)):
        # Of several parts some are without a slot.
        attention.RESIDENT_PROGRAMS = 8 * (index + 1) if several else 1
        arguments = case.arguments()
        with testing.poison_memory():
            output = attention.attend(*arguments)
        errors[f"{case}, several parts: {several}"] = case.error(output)
        if case.dtype == torch.float32:
            assert torch.equal(output, attention.attend(*arguments))
    # A wrong kernel would be seen: the first query of each row as if it saw one slot less.
    case = replace(case, window=8)
    *tensors, spans, scale = case.arguments()
    spans[:, 0, 0] += spans[:, 0, 0] < spans[:, 0, 1]
    errors["wrong"] = case.error(attention.attend(*tensors, spans, scale))
    return errors


NUM_DRAFTS, VOCAB_SIZE, TILE = 4, 37, 32
# Of each sequence: drafts before the padding, and how many of these are accepted.
SEQUENCES = [(4, 0), (4, 1), (4, 2), (4, 3), (4, 4), (3, 3), (3, 1), (2, 2), (1, 1), (1, 0), (0, 0)]


def walks(kind: str) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    batch = len(SEQUENCES)
    target = torch.randn(batch, NUM_DRAFTS + 1, VOCAB_SIZE, generator=g)
    draft = torch.randn(batch, NUM_DRAFTS, VOCAB_SIZE, generator=g)
    tokens = target[:, :-1].argmax(-1)
    for b, (num_valid, accepted) in enumerate(SEQUENCES):
        if accepted < num_valid:
            target[b, accepted, tokens[b, accepted]] = -torch.inf
        tokens[b, num_valid:] = -1
    return {
        "target_logits": target,
        "draft_logits": None if kind == "one-hot" else draft,
        "draft_tokens": tokens,
        "accept_uniforms": torch.zeros(batch, NUM_DRAFTS),
        "sample_uniforms": torch.full((batch,), 0.5),
        "temperature": torch.full((batch,), float(kind != "greedy")),
        "draft_lse": draft.logsumexp(-1) if kind == "draft_lse" else None,
    }


def rows_read(logits: Tensor | None, loaded: np.ndarray) -> list[list[int]]:
    """Of each sequence the rows of which more was loaded than the draft's own logit."""
    if logits is None:
        return [[] for _ in SEQUENCES]
    counts = np.histogram(loaded, logits.data_ptr() + 4 * VOCAB_SIZE * np.arange(logits[..., 0].numel() + 1))[0]
    assert set(counts) <= {0, 1, VOCAB_SIZE}
    return [np.flatnonzero(rows == VOCAB_SIZE).tolist() for rows in counts.reshape(logits.shape[:2])]


def reads_of(kind: str) -> dict[str, Any]:
    given = walks(kind)
    with triton_interpreter.record_loads() as addresses:
        _, num_accepted = exact.verify_exact(VerifyArguments(**given), tile=TILE)
    assert num_accepted.tolist() == [accepted for _, accepted in SEQUENCES]
    loaded = np.unique(np.concatenate(addresses).astype(np.int64))
    return {side: rows_read(given[f"{side}_logits"], loaded) for side in ("target", "draft")}


def reads() -> dict[str, Any]:
    """The rows that `verify_exact` reads when it sums two of each side first."""
    launch.RESIDENT_PROGRAMS = 5
    exact.EARLY_EXIT_TILES = 1
    kinds = ("draft rows", "draft_lse", "one-hot", "greedy")
    return {"sequences": SEQUENCES, "rows": {kind: reads_of(kind) for kind in kinds}}


def times_read() -> dict[str, list[int]]:
    """How often kernels load the entries of rows that keep one token, in tiles without this token."""
    exact.EARLY_EXIT_TILES = 1
    logits = torch.randn(2, NUM_DRAFTS + 1, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    logits[..., 0] = 9.0
    drafts, ones = torch.zeros(2, NUM_DRAFTS, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
    uniforms = (torch.zeros(2, NUM_DRAFTS), torch.zeros(2))
    draft_logits, first = logits[:, 1:].clone(), logits[:, 0].clone()
    found = {}
    for op, rows, args in (
        ("verify_exact", (logits, draft_logits), (logits, drafts, draft_logits, *uniforms)),
        ("verify_gumbel", (logits,), (logits, drafts, ones, ones)),
        ("sample", (first,), (first, uniforms[1])),
    ):
        names = [each.name for each in getattr(torch.ops.specops, op).default._schema.arguments]
        with triton_interpreter.record_loads() as addresses:
            run_once(op, dict(zip(names, args, strict=False)) | {"top_k": ones}, TILE)
        loaded = torch.from_numpy(np.concatenate(addresses).astype(np.int64))
        far = torch.cat([(x.data_ptr() + 4 * torch.arange(x.numel()).view_as(x))[..., TILE:].flatten() for x in rows])
        found[op] = (loaded.unsqueeze(1) == far).sum(0).unique().tolist()
    return found


@triton.jit
def hash_kernel(seeds_ptr, positions_ptr, output_ptr, V: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    key_0, key_1 = gumbel.noise_keys(seeds_ptr, positions_ptr, b, 0)
    v = tl.arange(0, V)
    tl.store(output_ptr + b * V + v, gumbel.token_hash(v, key_0, key_1).to(tl.int64))


def hashes() -> list[list[int]]:
    """Of the first tokens at every one of `NOISE_PLACES`."""
    seeds, positions = torch.tensor(op_cases.NOISE_PLACES).T.contiguous()
    output = torch.empty(len(seeds), 64, dtype=torch.int64)
    hash_kernel[(len(seeds),)](seeds, positions, output, output.shape[1])
    return output.tolist()


def numbers() -> dict[str, list[list[float]]]:
    """At `NOISE_PLACES`: of every stream, by one program and by several, and of a step."""
    seeds, positions = torch.tensor(op_cases.NOISE_PLACES).T
    found = {
        f"{stream} {n}": uniforms.numbers(seeds, positions, n, index)
        for stream, index in STREAMS.items()
        for n in (1, 70)
    }
    accept, last = STREAMS["accept"], STREAMS["sample"]
    found |= {f"step {n}": uniforms.numbers(seeds, positions, n, accept, last) for n in (0, 6)}
    return {call: output.tolist() for call, output in found.items()}


class Built(CompiledKernel):
    """What a launch on a device returns, run by the interpreter: it takes addresses for tensors like the first ones."""

    def __init__(self, run: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.interpreted, self.arguments, self.options = run, arguments, options

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *values: self.interpreted[grid](*map(tensor_at, values, self.arguments), **self.options)


class Building:
    """A kernel whose launches return what they built, and run nothing."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: Built(self.kernel, arguments, options)


def tensor_at(value: Any, like: Any) -> Any:
    if not isinstance(like, Tensor):
        assert (type(value), value) == (type(like), like)
        return value
    assert type(value) is int
    if like.numel() == 0:
        return like
    size = sum((n - 1) * stride for n, stride in zip(like.shape, like.stride(), strict=True)) + 1
    data = (ctypes.c_byte * (size * like.element_size())).from_address(value)
    return torch.from_numpy(np.frombuffer(data, np.uint8)).view(like.dtype)


def compare_plans() -> dict[str, bool]:
    """Of each op: has a call on other data, of which the first left a plan, the same result as without plans?"""

    def of_op(op: str, names: tuple[str, ...], *values: Any) -> Any:
        result = run_once(op, dict(zip(names, values, strict=True)), TILE)
        return result if len(result) > 1 else result[0]

    calls: dict[str, tuple[Any, list[tuple[Any, ...]]]] = {}
    for op in op_cases.OPS:
        for filtered in (False, True) if op == "verify_exact" else (op == "filter_logits",):
            given = [op_cases.op_arguments(op, 2, 2, seed=seed, filtered=filtered) for seed in (0, 1)]
            body = functools.partial(of_op, op, tuple(given[0]))
            calls[f"{op}, filtered: {filtered}"] = body, [tuple(each.values()) for each in given]
    seeds = torch.tensor(op_cases.NOISE_PLACES).T.contiguous()
    calls["uniforms"] = uniforms.numbers, [(*seeds, 5, 1), (*(seeds + 1), 5, 1)]
    attention.RESIDENT_PROGRAMS = 8
    case = attention_cases.CASES[0]
    calls["attend"] = attention.attend, [case.arguments() for _ in range(2)]
    found = {}
    for name, (body, (first, second)) in calls.items():
        with mock.patch.object(launch, "wrap_triton", Building):
            plans.call(body, first)
        assert plans.plans[plans.key_of(body, second)[0]] is not None, name
        with testing.poison_memory():
            got, expected = plans.call(body, second), body(*second)
        is_one = isinstance(expected, Tensor)
        found[name] = op_cases.equal((got,), (expected,)) if is_one else op_cases.equal(got, expected)
    return found


def answer(command: str, *rest: str) -> dict[str, Any]:
    try:
        if command == "ops":
            op, kind, tile, *vocab_sizes = rest
            return {"found": compare_ops(op, kind, int(tile), [int(size) for size in vocab_sizes])}
        commands = {"attention": compare_attention, "reads": reads, "hashes": hashes, "numbers": numbers}
        return {"found": (commands | {"plans": compare_plans, "times read": times_read})[command]()}
    except Exception:
        return {"error": traceback.format_exc()}


if __name__ == "__main__":
    triton_interpreter.prepare()
    for line in sys.stdin:
        # Commands change what kernels read: each has a process of its own, which begins with all that was imported.
        if os.fork() == 0:
            print(json.dumps(answer(*line.rstrip("\n").split("\t"))), flush=True)
            os._exit(0)
        os.wait()
