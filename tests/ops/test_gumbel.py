"""`sample_gumbel` and `verify_gumbel`: the law of what they emit, the same text with every draft, how many drafts are
accepted, and long rows, of which an eager call computes few scores."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from chains import LENGTH, START, V, chain_p_values, expect_caught, expect_laws, probabilities, tables
from marks import slow
from report import Report
from torch import Tensor

from torch_specops import sample, sample_gumbel, uniforms, verify_gumbel
from torch_specops.ops.cpu import gumbel
from torch_specops.ops.uniforms import noise_key_bytes
from torch_specops.testing import chi_square

N = 3_000
SEEDS = torch.arange(N)
FILTERS = {"top_k": 9, "top_p": 0.8, "min_p": 0.05}
Verify = Callable[..., tuple[Tensor, Tensor]]


def emit(
    target: Tensor,
    draft: Tensor | None,
    num_drafts: int,
    *,
    seeds: Tensor = SEEDS,
    draft_seeds: Tensor | None = None,
    verify: Verify = verify_gumbel,
    **options: Any,
) -> tuple[Tensor, float]:
    """[N, LENGTH] tokens of as many steps as every text needs, and how many drafts of the first step are accepted.
    Without logits, the draft is the token after the last one; it samples with the noise of `draft_seeds`."""
    tokens = torch.full((len(seeds), LENGTH * (num_drafts + 1)), -1)
    lengths, last = torch.zeros_like(seeds), torch.full_like(seeds, START)
    accepted = []
    for _ in range(LENGTH):
        states = [last]
        for i in range(num_drafts):
            if draft is None:
                states.append((states[-1] + 1) % V)
            else:
                own = seeds if draft_seeds is None else draft_seeds
                states.append(sample_gumbel(draft[states[-1]], own, lengths + i, **options))
        drafts = torch.stack(states, 1)[:, 1:] if num_drafts > 0 else seeds.new_empty(len(seeds), 0)
        output, n = verify(target[torch.stack(states, 1)], drafts, seeds, lengths, **options)
        tokens.scatter_(1, lengths.unsqueeze(1) + torch.arange(num_drafts + 1), output)
        last, lengths = output.gather(1, n.unsqueeze(1)).squeeze(1), lengths + n + 1
        accepted.append(n)
    return tokens[:, :LENGTH], float(accepted[0].double().mean())


@pytest.mark.parametrize("temperature, filters", [(1.0, {}), (0.6, {}), (1.3, FILTERS)])
def test_gumbel_tokens_follow_the_target(temperature: float, filters: dict[str, float], report: Report) -> None:
    target, draft = tables(1, "close")
    options = {"temperature": temperature, **filters}
    tokens, _ = emit(target, None, 0, **options)
    expect_laws(report, f"verify_gumbel, T = {temperature}, {filters}", chain_p_values(tokens, target, **options))
    few, others = SEEDS[:1000], SEEDS[:1000] + N
    for logits, num_drafts, own in ((None, 2, few), (draft, 1, few), (draft, 3, few), (-target, 2, others)):
        again, _ = emit(target, logits, num_drafts, seeds=few, draft_seeds=own, **options)
        assert torch.equal(again, tokens[:1000])


def test_gumbel_rows_with_other_settings(report: Report) -> None:
    target, draft = tables(11, "close")
    kinds = [(0.5, FILTERS), (1.0, {"top_k": 0, "top_p": 1.0, "min_p": 0.0}), (0.0, FILTERS), (2.0, FILTERS)]
    kind = torch.arange(N) % len(kinds)
    options = {name: torch.tensor([values[name] for _, values in kinds])[kind] for name in FILTERS}
    options["temperature"] = torch.tensor([t for t, _ in kinds])[kind]
    tokens, _ = emit(target, draft, 2, **options)
    for k, (t, values) in enumerate(kinds):
        if t > 0:
            p_values = chain_p_values(tokens[kind == k], target, t, **values)
            expect_laws(report, f"verify_gumbel, row kind {k} of a mixed batch", p_values)
    first = int(target[START].argmax())
    second = int(target[first].argmax())
    greedy = torch.tensor([[first, second, int(target[second].argmax())]])
    assert torch.equal(tokens[kind == 2].unique(dim=0), greedy)


def by_rows(position: Callable[[Tensor, int], Tensor], again: bool = False) -> Verify:
    """Verification by one call of `sample_gumbel` for each row, with positions of one's own. With `again`, the token
    that does not equal its draft is drawn anew."""

    def verify(target: Tensor, drafts: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        rows = [sample_gumbel(target[:, i], seeds, position(positions, i)) for i in range(target.shape[1])]
        y = torch.stack(rows, 1)
        n = (y[:, :-1] == drafts).long().cumprod(1).sum(1)
        if again:
            fresh = sample_gumbel(target[torch.arange(len(n)), n], seeds + N, positions)
            is_rejected = (n < drafts.shape[1]).unsqueeze(1) & (torch.arange(y.shape[1]) == n.unsqueeze(1))
            y = torch.where(is_rejected, fresh.unsqueeze(1), y)
        return torch.where(torch.arange(y.shape[1]) <= n.unsqueeze(1), y, -1), n

    return verify


def test_the_op_is_sampling_in_every_row() -> None:
    """The control of the wrong samplers below."""
    target, draft = tables(1, "close")
    right = by_rows(lambda positions, i: positions + i)
    texts = [emit(target, draft, 2, seeds=SEEDS[:1000], verify=verify)[0] for verify in (right, verify_gumbel)]
    assert torch.equal(*texts)


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("noise shared between positions", by_rows(lambda positions, i: 0 * positions)),
        ("the position of the row before", by_rows(lambda positions, i: positions + max(i - 1, 0))),
        ("the position of the step", by_rows(lambda positions, i: positions)),
        ("fresh noise after a mismatch", by_rows(lambda positions, i: positions + i, again=True)),
    ],
)
@pytest.mark.parametrize("draft_kind", ["close", slow("one-hot")])
def test_wrong_sampler_is_caught(name: str, wrong: Verify, draft_kind: str, report: Report) -> None:
    target, draft = tables(1, "close")
    # Few drafts of the second kind are accepted, and a mistake is rare.
    kind: dict[str, Any] = {"draft": draft, "seeds": SEEDS}
    if draft_kind == "one-hot":
        kind = {"draft": None, "seeds": torch.arange(2 * N)}
    tokens, _ = emit(target, num_drafts=2, verify=wrong, **kind)
    expect_caught(report, f"verify_gumbel, {name}, {draft_kind} draft", chain_p_values(tokens, target))


def coupled(p: Tensor, q: Tensor) -> Tensor:
    """P(match) = sum_v 1 / sum_w max(p_w / p_v, q_w / q_v)."""
    ratios = torch.maximum(p / p.unsqueeze(1), q / q.unsqueeze(1))
    return (1 / ratios.sum(1)).sum()


@pytest.mark.parametrize("draft_kind", ["close", slow("opposite")])
def test_how_many_drafts_are_accepted(draft_kind: str) -> None:
    """With the noise of the target, with noise of one's own, which is lossless and accepts less, and of deterministic
    drafts."""
    target, draft = tables(1, draft_kind)
    p, q = (probabilities(table)[START] for table in (target, draft))
    expected = {"coupled": coupled(p, q), "own noise": (p * q).sum(), "one-hot": p[(START + 1) % V]}
    measured = {
        "coupled": emit(target, draft, 1)[1],
        "own noise": emit(target, draft, 1, draft_seeds=SEEDS + N)[1],
        "one-hot": emit(target, None, 1)[1],
    }
    for name, rate in expected.items():
        accepted = round(measured[name] * N)
        assert chi_square(torch.tensor([N - accepted, accepted]), torch.stack([1 - rate, rate])) > 1e-3, name
    assert torch.minimum(p, q).sum() > expected["coupled"] > 1.2 * expected["own noise"]
    # The bound of Daliri, Musco and Suresh.
    distance = 1 - torch.minimum(p, q).sum()
    assert expected["coupled"] >= (1 - distance) / (1 + distance)


def test_gumbel_noise_by_row_seed_and_position() -> None:
    """One text in other company, longer steps and other forms; seeds and positions of all 64 bits."""
    target, _ = tables(3, "close")
    rows, seeds = target[torch.arange(5)].unsqueeze(1).expand(5, 4, V), torch.tensor([3, -3, 2**40, 2**62, -(2**63)])
    positions = torch.tensor([0, 2**32 - 2, 5, 2**60, -7])
    tokens = torch.stack([sample_gumbel(rows[:, i], seeds, positions + i) for i in range(4)], 1)
    assert len(tokens.unique(dim=0)) == 5 and all(len(row.unique()) > 1 for row in tokens)
    output, n = verify_gumbel(rows, tokens[:, :3], seeds, positions)
    assert torch.equal(output, tokens) and n.tolist() == [3] * 5
    for b in range(5):
        row = slice(b, b + 1)
        assert torch.equal(verify_gumbel(rows[row], tokens[row, :3], seeds[row], positions[row])[0], tokens[row])


def test_a_seed_shares_no_number_with_the_uniforms() -> None:
    """A text that is drawn by both has tokens that are independent of each other."""
    logits = torch.zeros(N, V)
    one = sample_gumbel(logits, SEEDS, torch.zeros_like(SEEDS))
    for stream in ("propose", "sample"):
        other, _ = sample(logits, uniforms(SEEDS, torch.zeros_like(SEEDS), 1, stream)[:, 0])
        assert chi_square(torch.bincount(V * one + other, minlength=V * V), torch.full((V * V,), V**-2.0)) > 1e-3


def long_rows(vocab_size: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(vocab_size)
    noise = torch.randn(vocab_size, generator=g)
    rows = {"flat": torch.zeros(vocab_size), "near": noise, "peaked": 6 * noise, "tied": (2 * noise).round()}
    rows |= {"one likely": torch.where(torch.arange(vocab_size) == 2000, 60.0, noise)}
    rows |= {"masked": torch.where(torch.rand(vocab_size, generator=g) < 0.999, -math.inf, noise)}
    rows |= {"one left": torch.where(torch.arange(vocab_size) == vocab_size - 1, -50.0, -math.inf)}
    rows |= {"far": (1e38 * noise).clamp(-3e38, 3e38), "none": torch.full((vocab_size,), -math.inf)}
    # Many tokens just beyond what is near the largest.
    return rows | {"beyond": torch.where(torch.arange(vocab_size) % 500 == 3, 0.0, -gumbel.NEAR_TOP - 0.01)}


@pytest.mark.parametrize("vocab_size", [gumbel.MAX_SCORED_VOCAB + 1, 4099, 50_257])
def test_gumbel_scores_of_a_long_row(vocab_size: int) -> None:
    for (name, row), t in itertools.product(long_rows(vocab_size).items(), (1.0, math.inf, 1e-30, 0.3, 20.0, 7e37)):
        z, top = row.numpy(), float(row.max())
        inverse = 0.0 if t == math.inf else 1 / t
        for seed in range(8):
            key = np.frombuffer(noise_key_bytes([seed], [0]), np.uint32)
            with np.errstate(over="ignore"):
                found = gumbel._likeliest_of_many(z, top, inverse, key)
                scores = gumbel._scores(z, max(top, -3e38), np.float32(inverse), gumbel.hashes(key, vocab_size))
            expected = -1 if top == -math.inf else int(scores.argmax())
            assert found == expected, (name, t, seed)
            drawn = sample_gumbel(row.unsqueeze(0), torch.tensor([seed]), torch.tensor([0]), torch.tensor([t]))
            assert drawn.tolist() == [expected], (name, t, seed)


@pytest.mark.parametrize("vocab_size", [50, 2500])
def test_logits_that_are_a_lazy_negative(vocab_size: int) -> None:
    """numpy refuses a tensor whose negation torch has put off."""
    logits = torch.randn(3, vocab_size, dtype=torch.cfloat, generator=torch.Generator().manual_seed(0)).conj().imag
    assert logits.is_neg()
    seeds, positions = torch.arange(3), torch.zeros(3, dtype=torch.int64)
    found = sample_gumbel(logits, seeds, positions)
    assert torch.equal(found, sample_gumbel(logits.resolve_neg(), seeds, positions))
