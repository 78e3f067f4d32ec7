"""How the sharded functions are called: DTensors, compiled, with bad arguments, and with ranks that disagree."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import Report
from functorch.compile import make_boxed_func
from op_cases import check
from oracle import Case
from sharded import NUM_RANKS, Result, Split, agreed, base_case, in_ranks
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from torch_specops import parallel
from torch_specops.parallel import exact, shard_sizes, wire_bytes


def run_dtensors(vocab_size: int) -> list[tuple[Tensor, ...]]:
    """Every pair of placements, on a mesh of one dimension and on one of two."""
    args = base_case(vocab_size, draft_lse=None)
    line = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    shard, whole = (Shard(-1),), (Replicate(),)
    results = []
    for mesh, target, draft, extra in (
        (line, shard, shard, {}),
        (line, shard, whole, {"group": line}),
        (line, whole, shard, {"group": dist.group.WORLD}),
        (line, whole, whole, {"shard_sizes": shard_sizes(vocab_size, 4)}),
        (square, whole + shard, whole + shard, {}),
        (square, whole + shard, whole + whole, {}),
        (square, whole + whole, whole + whole, {"group": square["model"]}),
        (line, shard, None, {"temperature": 0.7}),
    ):
        placements = {"target_logits": target, "draft_logits": draft, "draft_tokens": whole * mesh.ndim}
        placed = {
            name: args[name] if placement is None else distribute_tensor(args[name], mesh, placement)
            for name, placement in placements.items()
        }
        results.append(parallel.verify_exact(**args | placed | extra))
    whole_logits = distribute_tensor(args["target_logits"][:, 0], line, shard)
    results.append(parallel.sample(whole_logits, args["sample_uniforms"], args["temperature"]))
    results.append(parallel.sample(whole_logits, args["sample_uniforms"], 0.7))
    return results


def test_dtensors(report: Report) -> None:
    """5 tokens over 4 ranks leave the last without a column."""
    vocab_size = 5
    args = base_case(vocab_size, draft_lse=None)
    same = torch.full_like(args["temperature"], 0.7)
    cases = [Case(f"DTensor {i}", "verify_exact", args) for i in range(7)]
    cases.append(Case("a number as temperature", "verify_exact", args | {"temperature": same}))
    sampled = {"logits": args["target_logits"][:, 0], "uniforms": args["sample_uniforms"]}
    cases += [Case("DTensor", "sample", sampled | {"temperature": each}) for each in (args["temperature"], same)]
    check(zip(cases, agreed(in_ranks(run_dtensors, vocab_size)), strict=True), report)


def compiled_step(options: dict[str, Any]) -> Callable[..., Result]:
    def step(args: dict[str, Any]) -> Result:
        return parallel.verify_exact(**args, **options)

    return step


# A graph that is found in the cache of a run before is not recorded.
@functorch_config.patch(enable_autograd_cache=False)
def run_compiled(backend: str, dtensor: bool, split: Split) -> tuple[list[list[str]], list[tuple[Tensor, ...]]] | None:
    """The collectives of every graph, and the results of two calls compiled and in eager."""
    group = split.group()
    if group is None:
        return None
    graphs: list[list[str]] = []

    def record(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if "c10d" in str(node.target)])
        return make_boxed_func(graph.forward) if backend == "record" else compile_fx_inner(graph, inputs, **options)

    recorder = aot_autograd(fw_compiler=record) if backend == "record" else partial(compile_fx, inner_compile=record)
    args = [split.cut(base_case(17, accept_uniforms=torch.full((64, 3), u)), group) for u in (0.5, 0.9)]
    options: dict[str, Any] = {"group": group, "shard_sizes": split.sizes}
    args = [{name: value for name, value in each.items() if name not in options} for each in args]
    if dtensor:
        mesh = init_device_mesh("cpu", (NUM_RANKS,))
        options = {}
        for each in args:
            for name in ("target_logits", "draft_logits"):
                local = each[name]
                shape = torch.Size([*local.shape[:-1], 17])
                stride = (17 * shape[1], 17, 1)
                each[name] = DTensor.from_local(local, mesh, [Shard(-1)], shape=shape, stride=stride)
    eager = compiled_step(options)
    compiled = torch.compile(eager, fullgraph=True, backend=recorder)
    results = []
    try:
        for i, each in enumerate(args):
            with torch._dynamo.config.patch(error_on_recompile=i > 0):
                results += [compiled(each), eager(each)]
    finally:
        torch._dynamo.reset()
    return graphs, results


FOUR, TWO = Split((5, 5, 5, 2)), Split((9, 8))


@pytest.mark.parametrize(
    "backend, dtensor, split",
    [
        ("record", False, FOUR),
        ("record", True, FOUR),
        ("record", False, TWO),
        pytest.param("inductor", False, TWO, marks=pytest.mark.slow),
    ],
    ids=["shards", "DTensors", "two", "inductor"],
)
def test_one_graph_with_three_collectives(backend: str, dtensor: bool, split: Split) -> None:
    expected = ["_c10d_functional.all_gather_into_tensor.default", "_c10d_functional.wait_tensor.default"] * 3
    every = [result for result in in_ranks(run_compiled, backend, dtensor, split) if result is not None]
    assert len(every) == len(split.sizes)
    for graphs, (first, first_eager, second, second_eager) in every:
        assert graphs == [expected]
        for compiled, eager in ((first, first_eager), (second, second_eager)):
            assert all(torch.equal(a, b) for a, b in zip(compiled, eager, strict=True))
        assert not torch.equal(first[1], second[1])
    agreed([results for _, results in every])


def count_apart() -> tuple[Result, list[int]]:
    """A call in which the odd ranks come to another n: nothing in the arithmetic does that, so the walk is replaced."""
    args = Split((4, 4, 4, 4)).cut(base_case(16), dist.group.WORLD)
    lengths = []

    def walk(accepted: Tensor) -> Tensor:
        n = accepted.long().cumprod(1).sum(1)
        lengths.append(n if dist.get_rank() % 2 == 0 else 3 - n)
        return lengths[0]

    with mock.patch.object(exact, "num_leading", walk):
        return parallel.verify_exact(**args), lengths[0].tolist()


def test_ranks_return_the_same_whatever_they_count() -> None:
    results, lengths = zip(*in_ranks(count_apart), strict=True)
    assert lengths[0] == lengths[2] != lengths[1]
    assert agreed([[result] for result in results])[0][1].tolist() == lengths[0]


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def bad_calls() -> list[tuple[str, str]]:
    """What a call raised, and the message that was expected, where the two differ."""
    args = Split((4, 4, 4, 4)).cut(base_case(16), dist.group.WORLD)
    line = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    local, drafts, draft_logits = args["target_logits"], args["draft_tokens"], args["draft_logits"]
    logits, uniforms = local[:, 0], args["sample_uniforms"]

    def placed(mesh: Any, *placements: Any, value: Tensor = local) -> DTensor:
        return DTensor.from_local(value, mesh, placements, run_check=False)

    sharded = placed(line, Shard(-1))
    verifications: list[tuple[dict[str, Any], str]] = [
        ({"target_logits": local.tolist()}, r"TypeError: target_logits: expected a tensor, got <class 'list'>"),
        ({"lenience": 2.0}, r"ValueError: lenience: expected a number in \(0, 1\], got 2.0"),
        ({"target_logits": local[0]}, r"ValueError: target_logits: expected 3 dimensions, got shape \[4, 4\]"),
        (
            {"target_logits": base_case(16)["target_logits"]},
            r"ValueError: target_logits: expected 4 columns, the shard of rank \d of \[4, 4, 4, 4\], got shape",
        ),
        (
            {"draft_logits": draft_logits[..., :3]},
            r"ValueError: draft_logits: expected 4 columns, .* or 16, the whole vocabulary, got shape",
        ),
        ({"draft_tokens": drafts.float()}, r"TypeError: draft_tokens: expected int64 or int32"),
        ({"shard_sizes": (8, 8)}, r"ValueError: shard_sizes: expected 4 numbers of columns, one a rank, got \[8, 8\]"),
        ({"shard_sizes": (8, 8, 4, -4)}, r"ValueError: shard_sizes: expected 4 numbers"),
        ({"shard_sizes": (0, 0, 0, 0)}, r"ValueError: shard_sizes: expected 4 numbers"),
        ({"shard_sizes": (5, 5, 5, 1)}, r"ValueError: target_logits: expected [51] columns, the shard of rank \d of"),
        ({"group": "world"}, r"TypeError: group: expected a ProcessGroup, a DeviceMesh or None, got <class 'str'>"),
        ({"group": square}, r"ValueError: group: expected a mesh of one dimension, got 2"),
        ({"target_logits": placed(line, Shard(0))}, r"ValueError: target_logits: expected placements Shard\(-1\) or"),
        ({"target_logits": placed(line, Partial())}, r"ValueError: target_logits: expected placements Shard\(-1\) or"),
        (
            {"target_logits": placed(square, Shard(-1), Shard(-1)), "group": None},
            r"ValueError: target_logits: expected Shard\(-1\) on one dimension of the mesh",
        ),
        (
            {"target_logits": placed(square, Replicate(), Shard(-1))},
            r"ValueError: target_logits: expected a DTensor sharded over the group of the call",
        ),
        (
            {"draft_tokens": placed(line, Shard(0), value=drafts)},
            r"ValueError: draft_tokens: expected placements Replicate\(\)",
        ),
        (
            {"target_logits": sharded, "shard_sizes": (4, 4, 4, 5)},
            r"ValueError: target_logits: expected a vocabulary of 17, as the shards have, got 16",
        ),
        (
            {"target_logits": sharded, "draft_logits": placed(line, Replicate(), value=draft_logits)},
            r"ValueError: draft_logits: expected a vocabulary of 16, as the shards have, got 4",
        ),
    ]
    samples: list[tuple[tuple[Any, ...], str]] = [
        ((local, uniforms), r"ValueError: logits: expected 2 dimensions"),
        ((logits, uniforms[:3]), r"ValueError: uniforms: expected \[N\] = \[64\]"),
        ((logits, uniforms, [1.0]), r"TypeError: temperature: expected a tensor or a number"),
    ]
    got = [(raised(partial(parallel.verify_exact, **args | changes)), said) for changes, said in verifications]
    got += [(raised(partial(parallel.sample, *values)), said) for values, said in samples]
    return [(message, said) for message, said in got if not re.match(said, message)]


def test_bad_arguments() -> None:
    assert in_ranks(bad_calls) == [[]] * NUM_RANKS


def test_no_process_group() -> None:
    """Here in the tests' own process there is none."""
    with pytest.raises(ValueError, match="group: expected a ProcessGroup or a DeviceMesh, or an initialised default"):
        parallel.sample(torch.zeros(2, 3), torch.zeros(2))


def disagreeing_calls() -> dict[str, str]:
    """Arguments that rank 2 has otherwise."""
    args = Split((4, 4, 4, 4)).cut(base_case(16), dist.group.WORLD)
    args |= {"shard_sizes": None, "check_ranks": True}
    odd = dist.get_rank() == 2
    changes: dict[str, dict[str, Any]] = {
        "nothing": {},
        "sample_uniforms": {"sample_uniforms": args["sample_uniforms"].flip(0)},
        "accept_uniforms": {"accept_uniforms": args["accept_uniforms"].double()},
        "draft_tokens": {"draft_tokens": args["draft_tokens"] + 1},
        "temperature": {"temperature": None},
        "lenience": {"lenience": 0.5},
        "draft_logits": {"draft_logits": None, "draft_lse": None},
        "shard_sizes": {"target_logits": args["target_logits"][..., :3], "draft_logits": args["draft_logits"][..., :3]},
        "target_logits": {name: value[:32] for name, value in args.items() if isinstance(value, Tensor)},
    }
    got = {
        name: raised(lambda change=change: parallel.verify_exact(**args | (change if odd else {})))
        for name, change in changes.items()
    }
    logits, uniforms = args["target_logits"][:, 0], args["sample_uniforms"]
    got["uniforms"] = raised(lambda: parallel.sample(logits, uniforms + 0.1 * odd, check_ranks=True))
    compiled = torch.compile(parallel.sample, backend="eager", fullgraph=True)
    try:
        compiled(logits, uniforms, check_ranks=True)
        got["compiled"] = "nothing"
    except Exception as error:
        got["compiled"] = str(error)
    torch._dynamo.reset()
    return got


def test_check_ranks() -> None:
    for got in in_ranks(disagreeing_calls):
        assert got.pop("nothing") == "nothing"
        assert "check_ranks: expected False in a compiled call" in got.pop("compiled")
        for name, message in got.items():
            assert message == f"ValueError: {name}: expected the same on every rank, got another value on ranks [2]"


def test_sizes() -> None:
    for vocab_size, num_ranks in itertools.product([1, 5, 16, 50257], [1, 2, 4, 8]):
        chunks = [len(chunk) for chunk in torch.zeros(vocab_size).chunk(num_ranks)]
        assert shard_sizes(vocab_size, num_ranks) == (*chunks, *[0] * (num_ranks - len(chunks)))
    assert wire_bytes(64, 5, 8) == 64 * 7 * wire_bytes(1, 5, 2)
    for call, message in (
        (lambda: shard_sizes(0, 4), "vocab_size, num_ranks: expected numbers above 0, got 0, 4"),
        (lambda: shard_sizes(4, 0), "vocab_size, num_ranks: expected numbers above 0, got 4, 0"),
        (lambda: wire_bytes(1, 1, 2, "soft"), "draft: expected one of logits, lse, one_hot, got 'soft'"),
        (lambda: wire_bytes(1, -1, 2), "expected at least 0, 0 and 1, got 1, -1, 2"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
