"""Verification and sampling on sharded logits, in four gloo processes: numbers, bytes on the wire, laws, and calls with
DTensors, compiled, and with bad arguments."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from chains import TRIALS, Uniforms, V, chain_p_values, emit, expect_caught, expect_laws, tables
from marks import slow
from op_cases import check, equal
from report import Report
from sharded import NUM_RANKS, Result, Split, agreed, base_case, in_ranks, run_cases
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torch_specops import vocab_parallel
from torch_specops.ops.cpu import walk
from torch_specops.testing import Case, sample_inputs

all_gather = vocab_parallel._all_gather


def shared_cases(vocab_size: int, names: str | None) -> list[Case]:
    """The cases of every backend, but for those with filters, which these functions do not have."""
    filters, options = {"top_k", "top_p", "min_p"}, {"vocab_sizes": [vocab_size], "names": names and names.split()}
    cases = [case for op in ("verify_exact", "sample") for case in sample_inputs(op, **options)]
    return [case for case in cases if not filters & case.args.keys()]


# One or two of every kind.
SOME_CASES = (
    "k3 k8 k0_greedy b0 fp16_fp32 vocab_sliced_bf16 transposed_fp16 expanded int32 float64_uniforms pad_ragged "
    "target_nan target_inf draft_nan mixed_nonfinite mixed_nonfinite_greedy masked_token overflow overflow_fp16 "
    "greedy_mixed greedy_plateaus cold hot_overflow bad_temperature opposite exact_u_is_p_over_q "
    "exact_residual_below_least tie_u_zero tie_s_zero tie_below_one uniforms_out_of_range_masked tie_same one_hot "
    "one_hot_nonfinite mixed_one_hot_padded mixed_one_hot_lse lse_k8_bf16 lse_nonfinite lse_wrong_large lse_wrong_same "
    "lenience_0.3 lenience_lse argmax_lenience_plateaus argmax_lenience_padded"
)
TWO = Split(17, num_ranks=2)
# 9 and 8 columns; 33, 33, 33 and 31; one rank with a column and three without.
SPLITS = [(TWO, SOME_CASES), slow(TWO, None), slow(Split(130, draft_is_whole=True), None), slow(Split(1), None)]


@pytest.mark.parametrize(("split", "names"), SPLITS, ids=["some of 17", "17", "130", "1"])
def test_sharded_equals_whole(split: Split, names: str | None, report: Report) -> None:
    """The cases of the other backends: dtypes, strides, masks, NaN, temperatures, padding, one-hot, lse, lenience."""
    cases = shared_cases(split.vocab_size, names)
    assert len(cases) > 60
    check(zip(cases, agreed(in_ranks(run_cases, cases, split)), strict=True), report)


def special_cases() -> list[Case]:
    """What a split makes special: shards without a finite entry, and residuals that lie in one shard or in none."""
    args = base_case(16)
    cases = []
    for shard in range(4):
        columns = slice(4 * shard, 4 * shard + 4)
        target, draft = args["target_logits"].clone(), args["draft_logits"].clone()
        target[..., columns], draft[..., columns] = -torch.inf, torch.nan
        without_lse = args | {"draft_logits": draft, "draft_lse": None}
        cases.append(Case(f"target -inf in shard {shard}", "verify_exact", args | {"target_logits": target}))
        cases.append(Case(f"draft NaN in shard {shard}", "verify_exact", without_lse))
        cases.append(Case(f"both in shard {shard}", "verify_exact", without_lse | {"target_logits": target}))
        # The target beats the draft in this shard alone, and the drafts are of the others.
        draft = args["target_logits"][:, :3].clone()
        draft[..., columns] -= 3.0
        drafts = torch.full((64, 3), 4 * ((shard + 1) % 4))
        in_one = args | {"draft_logits": draft, "draft_lse": None, "draft_tokens": drafts}
        rejecting = in_one | {"accept_uniforms": torch.full((64, 3), 1 - 2.0**-24)}
        cases.append(Case(f"residual in shard {shard}", "verify_exact", rejecting))
    # Equal logits and an lse too small: q exceeds p everywhere, drafts are rejected, and no shard has a residual. With
    # the right lse, p - q is rounding.
    same = args["target_logits"][:, :3].clone()
    for shift in (-0.5, 0.0, 0.5):
        lse = torch.logsumexp(same / args["temperature"].clamp(min=1e-3).view(-1, 1, 1), -1) + shift
        zero = args | {"draft_logits": same, "draft_lse": lse, "accept_uniforms": torch.full((64, 3), 1 - 2.0**-24)}
        cases.append(Case(f"tie_no residual, lse + {shift}", "verify_exact", zero))
    # One maximum in every shard: the lowest index wins, across shards too.
    tied = args["target_logits"].clone()
    tied[..., [3, 6, 9, 15]] = 50.0
    tied[::2, :, 3] = 0.0
    cases.append(Case("tied maxima", "verify_exact", args | {"target_logits": tied}))
    # Maxima so far apart that a shard's mass vanishes relative to another's.
    apart = args["target_logits"] + 200.0 * torch.arange(16).div(4, rounding_mode="floor")
    cases.append(Case("shards far apart", "verify_exact", args | {"target_logits": apart}))
    for logits in (tied, apart):
        sampled = {"logits": logits[:, 0], "uniforms": args["sample_uniforms"], "temperature": args["temperature"]}
        cases.append(Case("sample", "sample", sampled))
    return cases


def test_shards_without_mass(report: Report) -> None:
    cases, args = special_cases(), base_case(16)
    results = agreed(in_ranks(run_cases, cases, Split(16)))
    check(zip(cases, results, strict=True), report)
    got = dict(zip([case.name for case in cases], results, strict=True))
    for shard in range(4):
        output, n = got[f"residual in shard {shard}"]
        next_token = output[torch.arange(64), n]
        rejected = (n < 3) & (args["temperature"] > 0) & ~args["draft_is_one_hot"]
        assert rejected.sum() > 20 and (next_token[rejected] // 4 == shard).all()
    rejected = got["tie_no residual, lse + -0.5"][1] < 3
    # Where nothing is padding, all are accepted.
    is_sampled = (args["temperature"] > 0) & (args["draft_tokens"] >= 0).all(1) & ~args["draft_is_one_hot"]
    accepted = got["tie_no residual, lse + 0.5"][1][is_sampled]
    assert rejected.sum() > 20 and (accepted == 3).all()


class CountCollectives(TorchDispatchMode):
    """The name of every collective that an eager call makes, and the bytes that this rank receives by it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.received = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func.name().split("::")
        if "c10d" in namespace and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            self.names.append(name)
            self.received += args[0].nbytes * (args[1] - 1)
        return func(*args, **(kwargs or {}))


COUNTED = ["k3", "k8", "k0", "k0_greedy", "greedy_mixed", "one_hot", "one_hot_cold", "lse", "lse_temperature"]


def count_collectives() -> list[tuple[list[str], int]]:
    counts = []
    for case in sample_inputs("verify_exact", vocab_sizes=[17], names=COUNTED):
        with CountCollectives() as counted:
            vocab_parallel.verify_exact(**Split(17).cut(case.args, dist.group.WORLD))
        counts.append((counted.names, counted.received))
    return counts


def test_collectives_and_bytes() -> None:
    """The table of docs/design.md."""
    expected = []
    for args in (case.args for case in sample_inputs("verify_exact", vocab_sizes=[17], names=COUNTED)):
        batch, k = args["draft_tokens"].shape
        of_draft = 0 if args["draft_logits"] is None else k if "draft_lse" in args else 3 * k
        first = 3 * k + 2 + (k + 1 if "temperature" in args else 0) + of_draft
        received = 8 * batch * (first + (3 if k > 0 else 1) + 2) * (NUM_RANKS - 1)
        expected.append((["all_gather_into_tensor"] * 3, received))
    assert len(expected) == len(COUNTED)
    assert in_ranks(count_collectives) == [expected] * NUM_RANKS


def emit_sharded(seed: int, kind: str | None, num_drafts: int, is_wrong: bool = False) -> Tensor:
    """Tokens by steps whose verification is sharded; without a `kind`, drafts are one-hot."""
    target, draft = tables(seed, kind or "close")

    def verify(propose: Tensor, **args: Any) -> Result:
        return vocab_parallel.verify_exact(**Split(V).cut(args, dist.group.WORLD))

    with mock.patch.object(vocab_parallel, "_all_gather", residual_normalised_per_shard if is_wrong else all_gather):
        return emit(target, draft if kind else None, num_drafts, Uniforms(seed=seed + 1), verify=verify)


def residual_normalised_per_shard(x: Tensor, shards: Any) -> Tensor:
    """A shard is drawn by its mass of p, the token in it from its residual."""
    every = all_gather(x, shards)
    if x.shape == (3, TRIALS):
        every[:, 1] = every[:, 0] * (every[:, 1] > 0)
    return every


@pytest.mark.parametrize("kind, num_drafts", [("opposite", 2), slow("close", 1), slow(None, 2)])
def test_tokens_follow_the_target(kind: str | None, num_drafts: int, report: Report) -> None:
    """16 tokens over four ranks: the marginals and joint laws of three tokens, as in test_laws."""
    first, *others = in_ranks(emit_sharded, 21, kind, num_drafts)
    assert all(torch.equal(first, other) for other in others)
    assert first.unique().tolist() == list(range(V))
    expect_laws(report, f"sharded, {kind} draft", chain_p_values(first, tables(21, kind or "close")[0]))


def test_wrong_verification_is_caught(report: Report) -> None:
    tokens = in_ranks(emit_sharded, 21, "opposite", 1, True)[0]
    expect_caught(report, "sharded, residual per shard", chain_p_values(tokens, tables(21, "opposite")[0]))


def run_placements(vocab_size: int) -> list[tuple[Tensor, ...]]:
    """Every pair of placements, on a mesh of one dimension and on one of two, and whole logits on every rank."""
    args = base_case(vocab_size, draft_lse=None)
    line = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    shard, whole = (Shard(-1),), (Replicate(),)
    results = [vocab_parallel.verify_exact(**args, vocab_size=vocab_size)]
    for mesh, target, draft, extra in (
        (line, shard, shard, {}),
        (line, shard, whole, {"group": line}),
        (line, whole, shard, {"group": dist.group.WORLD}),
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
        results.append(vocab_parallel.verify_exact(**args | placed | extra))
    sharded_logits = distribute_tensor(args["target_logits"][:, 0], line, shard)
    for temperature in (args["temperature"], 0.7):
        results.append(vocab_parallel.sample(sharded_logits, args["sample_uniforms"], temperature))
    return results


def test_placements(report: Report) -> None:
    """5 tokens over 4 ranks leave the last without a column."""
    vocab_size = 5
    args = base_case(vocab_size, draft_lse=None)
    same = torch.full_like(args["temperature"], 0.7)
    cases = [Case(f"placements {i}", "verify_exact", args) for i in range(7)]
    cases.append(Case("a number as temperature", "verify_exact", args | {"temperature": same}))
    sampled = {"logits": args["target_logits"][:, 0], "uniforms": args["sample_uniforms"]}
    cases += [Case("DTensor", "sample", sampled | {"temperature": each}) for each in (args["temperature"], same)]
    check(zip(cases, agreed(in_ranks(run_placements, vocab_size)), strict=True), report)


def run_compiled(backend: str, dtensor: bool, split: Split) -> list[Result] | None:
    """The results of two calls, each compiled and in eager; the second is one of the same graph. The rank whose columns
    do not begin at 0 compiles. The other makes eager calls alone, and must come to the same."""
    group = split.group()
    if group is None:
        return None
    options: dict[str, Any] = {} if dtensor else {"group": group, "vocab_size": split.vocab_size}
    args = [split.cut(base_case(17, accept_uniforms=torch.full((64, 3), u)), group) for u in (0.5, 0.9)]
    for each in args:
        del each["group"], each["vocab_size"]
        for name in ("target_logits", "draft_logits") if dtensor else ():
            shape = torch.Size([*each[name].shape[:-1], 17])
            placed = DeviceMesh.from_group(group, "cpu"), [Shard(-1)]
            each[name] = DTensor.from_local(each[name], *placed, shape=shape, stride=(17 * shape[1], 17, 1))

    def eager(args: dict[str, Any]) -> Result:
        return vocab_parallel.verify_exact(**args, **options)

    torch._dynamo.reset()
    compiled = torch.compile(eager, fullgraph=True, backend=backend) if group.rank() == 1 else eager
    results = []
    for each, stance in zip(args, ("default", "fail_on_recompile"), strict=True):
        with torch.compiler.set_stance(stance):
            results += [compiled(each), eager(each)]
    return results


@pytest.mark.parametrize(
    "backend, dtensor, split",
    [
        slow("aot_eager", False, TWO),
        ("aot_eager", True, TWO),
        pytest.param("inductor", False, TWO, marks=pytest.mark.slow),
    ],
    ids=["shards", "DTensors", "inductor"],
)
def test_one_graph_returns_the_same(backend: str, dtensor: bool, split: Split) -> None:
    first, first_eager, second, second_eager = agreed(in_ranks(run_compiled, backend, dtensor, split))
    assert equal(first, first_eager) and equal(second, second_eager)
    assert not torch.equal(first[1], second[1])


def count_apart() -> tuple[Result, list[int]]:
    """A call in which the odd ranks come to another n: nothing in the arithmetic does that, so the walk is replaced."""
    args = Split(16).cut(base_case(16), dist.group.WORLD)
    lengths = []

    def prefix_lengths(accepted: Tensor) -> Tensor:
        n = accepted.long().cumprod(1).sum(1)
        lengths.append(n if dist.get_rank() % 2 == 0 else 3 - n)
        return lengths[0]

    with mock.patch.object(walk, "prefix_lengths", prefix_lengths):
        return vocab_parallel.verify_exact(**args), lengths[0].tolist()


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
    args = Split(16).cut(base_case(16), dist.group.WORLD)
    line = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    names = ("target_logits", "draft_tokens", "draft_logits", "sample_uniforms")
    target, drafts, draft, uniforms = (args[name] for name in names)

    def placed(mesh: Any, *placements: Any, value: Tensor = target) -> DTensor:
        return DTensor.from_local(value, mesh, placements, run_check=False)

    placements = r"ValueError: target_logits: expected placements Replicate\(\), and at most one Shard\(-1\), got"
    verifications: list[tuple[dict[str, Any], str]] = [
        ({"target_logits": target.tolist()}, "TypeError: target_logits: expected a tensor, got <class 'list'>"),
        ({"lenience": 2.0}, r"ValueError: lenience: expected a number in \(0, 1\], got 2.0"),
        ({"target_logits": target[0]}, r"ValueError: target_logits: expected 3 dimensions, got shape \[4, 4\]"),
        (
            {"draft_logits": draft[..., :3]},
            r"ValueError: draft_logits: expected 4 columns, the shard of rank \d of 4 of",
        ),
        ({"draft_tokens": drafts.float()}, "TypeError: draft_tokens: expected int64 or int32"),
        ({"vocab_size": 18}, "ValueError: target_logits: expected [53] columns"),
        ({"vocab_size": 16.0}, "TypeError: vocab_size: expected an int, got <class 'float'>"),
        ({"vocab_size": 0}, "ValueError: vocab_size: expected a number >= 1, got 0"),
        ({"group": "world"}, "TypeError: group: expected a ProcessGroup, a DeviceMesh or None, got <class 'str'>"),
        ({"group": square}, "ValueError: group: expected a mesh of one dimension, got 2"),
        ({"target_logits": placed(line, Shard(0))}, placements),
        ({"target_logits": placed(line, Partial())}, placements),
        ({"target_logits": placed(square, Shard(-1), Shard(-1)), "group": None}, placements),
        ({"target_logits": placed(square, Replicate(), Shard(-1))}, "ValueError: target_logits: expected a DTensor sh"),
        ({"draft_tokens": placed(line, Shard(0), value=drafts)}, r"ValueError: draft_tokens: expected placements Repl"),
        (
            {"draft_logits": placed(line, Replicate(), value=draft)},
            "ValueError: draft_logits: expected a vocabulary of",
        ),
    ]
    samples: list[tuple[tuple[Any, ...], str]] = [
        ((target, uniforms), "ValueError: logits: expected 2 dimensions"),
        ((target[:, 0], uniforms[:3]), r"ValueError: uniforms: expected \[N\] = \[64\]"),
        ((target[:, 0], uniforms, [1.0]), "TypeError: temperature: expected a tensor or a number"),
    ]
    got = [(raised(partial(vocab_parallel.verify_exact, **args | changes)), said) for changes, said in verifications]
    got += [(raised(partial(vocab_parallel.sample, *values)), said) for values, said in samples]
    return [(message, said) for message, said in got if not re.match(said, message)]


def test_bad_arguments() -> None:
    assert in_ranks(bad_calls) == [[]] * NUM_RANKS


def test_no_process_group() -> None:
    """Here in the tests' own process there is none."""
    with pytest.raises(ValueError, match="group: expected a ProcessGroup or a DeviceMesh, or an initialised default"):
        vocab_parallel.sample(torch.zeros(2, 3), torch.zeros(2))
