"""Verification and sampling on sharded logits, in four gloo processes: numbers, bytes on the wire, and the law."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from chains import TRIALS, Uniforms, V, chain_p_values, emit, expect_caught, expect_laws, tables
from conftest import Report
from op_cases import check
from oracle import Case, sample_inputs
from sharded import NUM_RANKS, Result, Split, agreed, base_case, in_ranks, run_cases
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torch_specops import parallel
from torch_specops.laws import chi_square
from torch_specops.parallel import exact, wire_bytes
from torch_specops.parallel.exchange import all_gather


def run_shared_cases(split: Split) -> list[tuple[Tensor, ...]] | None:
    return run_cases(shared_cases(sum(split.sizes)), split)


def shared_cases(vocab_size: int) -> list[Case]:
    """The cases of every backend, but for those with filters, which these functions do not have."""
    filters = {"top_k", "top_p", "min_p"}
    cases = [case for op in ("verify_exact", "sample") for case in sample_inputs(op, vocab_sizes=[vocab_size])]
    return [case for case in cases if not filters & case.args.keys()]


SPLITS = [Split((5, 0, 1, 124), draft_is_whole=True), Split((16, 1)), Split((0, 1, 0, 0))]


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: "-".join(map(str, split.sizes)))
def test_sharded_equals_whole(split: Split, report: Report) -> None:
    """Every case of the other backends: dtypes, strides, masks, NaN, temperatures, padding, one-hot, lse, lenience."""
    cases = shared_cases(sum(split.sizes))
    assert len(cases) > 60
    check(zip(cases, agreed(in_ranks(run_shared_cases, split)), strict=True), report)


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
    # Equal logits and an lse too small: q exceeds p everywhere, drafts are rejected, and no shard has a residual.
    same = args["target_logits"][:, :3].clone()
    for shift in (-0.5, 0.5):
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


def run_special_cases(split: Split) -> list[tuple[Tensor, ...]] | None:
    return run_cases(special_cases(), split)


def test_shards_without_mass(report: Report) -> None:
    cases, args = special_cases(), base_case(16)
    results = agreed(in_ranks(run_special_cases, Split((4, 4, 4, 4))))
    check(zip(cases, results, strict=True), report)
    got = dict(zip([case.name for case in cases], results, strict=True))
    for shard in range(4):
        output, n = got[f"residual in shard {shard}"]
        next_token = output[torch.arange(64), n]
        rejected = (n < 3) & (cases[0].args["temperature"] > 0)
        assert rejected.sum() > 20 and (next_token[rejected] // 4 == shard).all()
    rejected = got["tie_no residual, lse + -0.5"][1] < 3
    # Where nothing is padding, all are accepted.
    accepted = got["tie_no residual, lse + 0.5"][1][(args["temperature"] > 0) & (args["draft_tokens"] >= 0).all(1)]
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
            sent, num_ranks = args[0], args[1]
            self.received += sent.nbytes * (num_ranks - 1)
        return func(*args, **(kwargs or {}))


COUNTED = ["k3", "k8", "k0", "k0_greedy", "greedy_mixed", "one_hot", "one_hot_cold", "lse", "lse_temperature"]


def count_collectives(split: Split) -> list[tuple[list[str], int]]:
    counts = []
    for case in sample_inputs("verify_exact", vocab_sizes=[sum(split.sizes)], names=COUNTED):
        with CountCollectives() as counted:
            parallel.verify_exact(**split.cut(case.args, dist.group.WORLD))
        counts.append((counted.names, counted.received))
    return counts


def test_wire_bytes_are_counted() -> None:
    cases = list(sample_inputs("verify_exact", vocab_sizes=[17], names=COUNTED))
    assert len(cases) == len(COUNTED)
    expected = []
    for args in (case.args for case in cases):
        draft = "one_hot" if args["draft_logits"] is None else "lse" if "draft_lse" in args else "logits"
        received = wire_bytes(*args["draft_tokens"].shape, NUM_RANKS, draft, "temperature" in args)
        expected.append((["all_gather_into_tensor"] * 3, received))
    assert in_ranks(count_collectives, Split((5, 5, 5, 2))) == [expected] * NUM_RANKS


def emit_sharded(seed: int, kind: str | None, num_drafts: int, is_wrong: bool = False) -> Tensor:
    """Tokens by steps whose verification is sharded; without a `kind`, drafts are one-hot."""
    target, draft = tables(seed, kind or "close")
    split = Split((V // NUM_RANKS,) * NUM_RANKS)

    def verify(propose: Tensor, **args: Any) -> Result:
        return parallel.verify_exact(**split.cut(args, dist.group.WORLD))

    gather = residual_normalised_per_shard if is_wrong else all_gather
    with mock.patch.object(exact, "all_gather", gather):
        return emit(target, draft if kind else None, num_drafts, Uniforms(seed=seed + 1), verify=verify)


def residual_normalised_per_shard(x: Tensor, shards: Any) -> Tensor:
    """A shard is drawn by its mass of p, the token in it from its residual."""
    every = all_gather(x, shards)
    if x.shape == (3, TRIALS):
        every[:, 1] = every[:, 0] * (every[:, 1] > 0)
    return every


@pytest.mark.parametrize("kind, num_drafts", [("opposite", 2), ("close", 1), (None, 2)])
def test_tokens_follow_the_target(kind: str | None, num_drafts: int, report: Report) -> None:
    """16 tokens over four ranks: the marginals and joint laws of three tokens, as in test_laws."""
    first, *others = in_ranks(emit_sharded, 21, kind, num_drafts)
    assert all(torch.equal(first, other) for other in others)
    assert first.unique().tolist() == list(range(V))
    expect_laws(report, f"sharded, {kind} draft", chain_p_values(first, tables(21, kind or "close")[0]))


def test_wrong_verification_is_caught(report: Report) -> None:
    tokens = in_ranks(emit_sharded, 21, "opposite", 1, True)[0]
    expect_caught(report, "sharded, residual per shard", chain_p_values(tokens, tables(21, "opposite")[0]))


def sample_sharded() -> Result:
    logits, _ = tables(23, "close")
    uniforms = torch.rand(TRIALS, generator=torch.Generator().manual_seed(24))
    own = logits[0].expand(TRIALS, V)[:, 4 * dist.get_rank() :][:, :4]
    return parallel.sample(own, uniforms, torch.full((TRIALS,), 0.7))


def test_sample_follows_softmax(report: Report) -> None:
    tokens, lse = agreed([[result] for result in in_ranks(sample_sharded)])[0]
    z = tables(23, "close")[0][0].double() / 0.7
    p_value = chi_square(torch.bincount(tokens, minlength=V), torch.softmax(z, 0))
    expect_laws(report, "sharded sample", {"token": p_value})
    torch.testing.assert_close(lse, torch.logsumexp(z, 0).float().expand(TRIALS))
