"""The law of what the ops emit, by chi-square on narrow vocabularies, and wrong samplers that the same tests reject.

Every test draws TRIALS sequences over V = 16 tokens from fixed seeds, one per batch row. The tokens form a Markov
chain, so that the second row of logits depends on the first token: the marginals at three positions and the joint laws
of consecutive tokens are known exactly. A law fails below ALPHA, which is 1e-4 for the whole module (Bonferroni); a
wrong sampler has to fall below the same ALPHA. On a wide vocabulary the same wrong samplers would pass, with too few
trials per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import Report
from torch import Tensor

import torch_specops
from torch_specops.dense import rows
from torch_specops.laws import chi_square

V = 16
TRIALS = 200_000
LENGTH = 3
NUM_LAWS = 80
ALPHA = 1e-4 / NUM_LAWS
# The state before the first token.
START = V

Verify = Callable[..., tuple[Tensor, Tensor]]


@pytest.fixture(autouse=True)
def short_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 tokens in four tiles, the last one ragged: the laws then hold for both levels of the search. One tile of the
    usual length would be padding."""
    monkeypatch.setattr(rows, "TILE", 5)


def tables(seed: int, draft: str) -> tuple[Tensor, Tensor]:
    """[V + 1, V] logits of the target and of the draft for each last token."""
    generator = torch.Generator().manual_seed(seed)
    target = 1.5 * torch.randn(V + 1, V, generator=generator)
    noise = 0.5 * torch.randn(V + 1, V, generator=generator)
    return target, {"opposite": -target, "close": target + noise}[draft]


@dataclass
class Uniforms:
    """Independent numbers for each step from torch.rand, or from the counter-based function."""

    seed: int
    counter_based: bool = False

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def __call__(self, lengths: Tensor, n: int, stream: str) -> Tensor:
        if self.counter_based:
            seeds = torch.arange(len(lengths)) + self.seed * TRIALS
            return torch_specops.uniforms(seeds, lengths, n, stream)
        return torch.rand(len(lengths), n, generator=self.generator)


class FrozenUniforms(Uniforms):
    """The same numbers at every step, as a generator captured in a graph gives."""

    def __call__(self, lengths: Tensor, n: int, stream: str) -> Tensor:
        return torch_specops.uniforms(torch.arange(len(lengths)), torch.zeros_like(lengths), n, stream)


def emit(
    target: Tensor,
    draft: Tensor | None,
    num_drafts: int,
    uniforms: Uniforms,
    *,
    temperature: Tensor | None = None,
    draft_temperature: Tensor | None = None,
    lse: bool = False,
    pad: bool = False,
    verify: Verify | None = None,
) -> Tensor:
    """[TRIALS, LENGTH] tokens of as many steps as every row needs. A `verify` of one's own also gets the uniforms that
    the drafts were drawn with. Without `draft` logits the draft is the token after the last one."""
    tokens = torch.full((TRIALS, LENGTH * (num_drafts + 1)), -1)
    lengths = torch.zeros(TRIALS, dtype=torch.int64)
    last = torch.full((TRIALS,), START)
    draft_temperature = temperature if draft_temperature is None else draft_temperature
    for _ in range(LENGTH):
        propose = uniforms(lengths, num_drafts, "propose")
        states, draft_lse = [last], []
        for i in range(num_drafts):
            if draft is None:
                states.append((states[-1] + 1) % V)
            else:
                x, row_lse = torch_specops.sample(draft[states[-1]], propose[:, i], draft_temperature)
                states.append(x)
                draft_lse.append(row_lse)
        states_tensor = torch.stack(states, 1)
        draft_tokens = states_tensor[:, 1:].clone()
        if pad:
            # How many drafts a row keeps depends on the row alone.
            draft_tokens[torch.arange(num_drafts) >= (torch.arange(TRIALS) % (num_drafts + 1)).unsqueeze(-1)] = -1
        args: dict[str, Any] = {
            "target_logits": target[states_tensor],
            "draft_tokens": draft_tokens,
            "draft_logits": None if draft is None else draft[states_tensor[:, :-1]],
            "accept_uniforms": uniforms(lengths, num_drafts, "accept"),
            "sample_uniforms": uniforms(lengths, 1, "sample")[:, 0],
            "temperature": temperature,
        }
        if lse:
            args["draft_lse"] = torch.stack(draft_lse, 1)
        output, n = torch_specops.verify_exact(**args) if verify is None else verify(propose, **args)
        # The -1 after a row's tokens is overwritten by the next step.
        tokens.scatter_(1, lengths.unsqueeze(-1) + torch.arange(num_drafts + 1), output)
        last = output.gather(1, n.unsqueeze(-1)).squeeze(-1)
        lengths = lengths + n + 1
    return tokens[:, :LENGTH]


def chain_laws(target: Tensor, temperature: float = 1.0) -> dict[str, Tensor]:
    """The exact laws of the chain: the marginals of three tokens, and of two neighbours jointly."""
    p = torch.softmax(target.double() / temperature, -1)
    first, step = p[START], p[:V]
    second = first @ step
    return {
        "token 1": first,
        "token 2": second,
        "token 3": second @ step,
        "tokens 1, 2": (first.unsqueeze(-1) * step).flatten(),
        "tokens 2, 3": (second.unsqueeze(-1) * step).flatten(),
    }


def chain_p_values(tokens: Tensor, target: Tensor, temperature: float = 1.0) -> dict[str, float]:
    a, b, c = tokens.unbind(1)
    outcomes = {"token 1": a, "token 2": b, "token 3": c, "tokens 1, 2": V * a + b, "tokens 2, 3": V * b + c}
    laws = chain_laws(target, temperature)
    return {name: chi_square(torch.bincount(outcomes[name], minlength=len(law)), law) for name, law in laws.items()}


def expect_laws(report: Report, name: str, p_values: dict[str, float]) -> None:
    report.p_values |= {f"{name}, {key}": value for key, value in p_values.items()}
    # The laws of the decoding loop are counted where they are tested.
    assert (
        sum(not key.startswith(("loop, ", "custom_generate", "filters, ", "block, ")) for key in report.p_values)
        <= NUM_LAWS
    )
    assert min(p_values.values()) > ALPHA, p_values


def expect_caught(report: Report, name: str, p_values: dict[str, float]) -> None:
    report.wrong_p_values[name] = min(p_values.values())
    assert min(p_values.values()) < ALPHA, f"the tests do not see that this sampler is wrong: {p_values}"


@pytest.mark.parametrize("draft_kind", ["opposite", "close"])
@pytest.mark.parametrize("num_drafts", [0, 1, 2])
def test_tokens_follow_the_target(draft_kind: str, num_drafts: int, report: Report) -> None:
    target, draft = tables(1, draft_kind)
    tokens = emit(target, draft, num_drafts, Uniforms(seed=2))
    expect_laws(report, f"{draft_kind} draft, K = {num_drafts}", chain_p_values(tokens, target))


@pytest.mark.parametrize("num_drafts", [1, 2])
def test_tokens_follow_the_target_with_counter_based_uniforms(num_drafts: int, report: Report) -> None:
    target, draft = tables(3, "opposite")
    tokens = emit(target, draft, num_drafts, Uniforms(seed=4, counter_based=True))
    expect_laws(report, f"counter-based uniforms, K = {num_drafts}", chain_p_values(tokens, target))


def test_one_hot_drafts_follow_the_target(report: Report) -> None:
    target, _ = tables(5, "close")
    tokens = emit(target, None, 2, Uniforms(seed=6))
    expect_laws(report, "one-hot drafts", chain_p_values(tokens, target))


def test_draft_lse_follows_the_target(report: Report) -> None:
    target, draft = tables(7, "opposite")
    temperature = torch.full((TRIALS,), 0.8)
    tokens = emit(target, draft, 2, Uniforms(seed=8, counter_based=True), temperature=temperature, lse=True)
    expect_laws(report, "draft_lse", chain_p_values(tokens, target, 0.8))


def test_padded_drafts_follow_the_target(report: Report) -> None:
    target, draft = tables(9, "close")
    tokens = emit(target, draft, 2, Uniforms(seed=10), pad=True)
    expect_laws(report, "padded drafts", chain_p_values(tokens, target))


def test_mixed_temperatures_follow_the_target(report: Report) -> None:
    """Rows of four temperatures share the batch: each follows its own law, greedy ones the argmax."""
    target, draft = tables(11, "close")
    values = torch.tensor([0.0, 0.5, 1.0, 2.0])
    temperature = values[torch.arange(TRIALS) % 4]
    tokens = emit(target, draft, 2, Uniforms(seed=12), temperature=temperature)
    greedy, last = [], START
    for _ in range(LENGTH):
        last = int(target[last].argmax())
        greedy.append(last)
    assert (tokens[0::4] == torch.tensor(greedy)).all()
    for row in (1, 2, 3):
        t = float(values[row])
        expect_laws(report, f"temperature {t}", chain_p_values(tokens[row::4], target, t))


def first_tokens(
    verify: Callable[..., tuple[Tensor, Tensor]], target: Tensor, draft: Tensor, seed: int, **options: Any
):
    """[TRIALS] first tokens of one step with K = 1, the draft drawn from softmax(draft)."""
    generator = torch.Generator().manual_seed(seed)
    x, _ = torch_specops.sample(draft.expand(TRIALS, V), torch.rand(TRIALS, generator=generator))
    output, n = verify(
        target.expand(TRIALS, 2, V),
        x.unsqueeze(-1),
        draft.expand(TRIALS, 1, V),
        torch.rand(TRIALS, 1, generator=generator),
        torch.rand(TRIALS, generator=generator),
        **options,
    )
    return output[:, 0], n


@pytest.mark.parametrize("draft_kind", ["opposite", "close"])
def test_lenience_bounds_every_token(draft_kind: str, report: Report) -> None:
    """The law under lenience l is min(q, p / l) and the residual for the rest: no token above p / l."""
    lenience = 0.3
    target, draft = (table[START] for table in tables(13, draft_kind))
    p, q = torch.softmax(target.double(), -1), torch.softmax(draft.double(), -1)
    kept, residual = torch.minimum(q, p / lenience), (p - q).clamp(min=0)
    law = kept + (1 - kept.sum()) * residual / residual.sum()
    tokens, _ = first_tokens(torch_specops.verify_exact, target, draft, 14, lenience=lenience)
    counts = torch.bincount(tokens, minlength=V)
    expect_laws(report, f"lenience 0.3, {draft_kind} draft", {"token 1": chi_square(counts, law)})
    bound = (p / lenience).clamp(max=1)
    # Five standard deviations above the bound itself.
    assert (counts / TRIALS <= bound + 5 * (bound * (1 - bound) / TRIALS).sqrt()).all()
    expect_caught(report, f"lenience 0.3 as lossless, {draft_kind} draft", {"token 1": chi_square(counts, p)})


def test_sample_follows_softmax(report: Report) -> None:
    logits, _ = tables(15, "close")
    uniforms = torch.rand(TRIALS, generator=torch.Generator().manual_seed(16))
    for t in (1.0, 0.4):
        tokens, _ = torch_specops.sample(logits[START].expand(TRIALS, V), uniforms, torch.full((TRIALS,), t))
        law = torch.softmax(logits[START].double() / t, -1)
        expect_laws(report, f"sample, T = {t}", {"token": chi_square(torch.bincount(tokens, minlength=V), law)})


def test_sigmoid_verification_follows_its_law_and_is_lossy(report: Report) -> None:
    alpha, beta = -3.0, 5.0
    target, draft = (table[START] for table in tables(17, "opposite"))
    q = torch.softmax(draft.double(), -1)
    p_hat, q_hat = (torch.sigmoid((z.double() - alpha) / (beta - alpha)) for z in (target, draft))
    kept, residual = q * (p_hat / q_hat).clamp(max=1), (p_hat - q_hat).clamp(min=0)
    law = kept + (1 - kept.sum()) * residual / residual.sum()
    tokens, n = first_tokens(torch_specops.verify_sigmoid, target, draft, 18, alpha=alpha, beta=beta)
    counts = torch.bincount(tokens, minlength=V)
    expect_laws(
        report,
        "verify_sigmoid",
        {
            "token 1": chi_square(counts, law),
            "num_accepted": chi_square(torch.bincount(n, minlength=2), torch.stack([1 - kept.sum(), kept.sum()])),
        },
    )
    expect_caught(
        report, "verify_sigmoid as lossless", {"token 1": chi_square(counts, torch.softmax(target.double(), -1))}
    )


def residual_replaced_by_p(propose: Tensor, **args: Any) -> tuple[Tensor, Tensor]:
    """After a rejection the next token is drawn from p."""
    output, n = torch_specops.verify_exact(**args)
    rows = torch.arange(len(n))
    from_p, _ = torch_specops.sample(args["target_logits"][rows, n], args["sample_uniforms"], args["temperature"])
    output[rows, n] = from_p
    return output, n


def sample_uniforms_of_the_draft(propose: Tensor, **args: Any) -> tuple[Tensor, Tensor]:
    """The recovered token reuses the number that drew the draft."""
    return torch_specops.verify_exact(**args | {"sample_uniforms": propose[:, 0]})


def sample_uniforms_of_the_test(propose: Tensor, **args: Any) -> tuple[Tensor, Tensor]:
    """The recovered token reuses the number of the acceptance test."""
    return torch_specops.verify_exact(**args | {"sample_uniforms": args["accept_uniforms"][:, 0]})


def accept_uniforms_of_the_draft(propose: Tensor, **args: Any) -> tuple[Tensor, Tensor]:
    """The acceptance test reuses the number that drew the draft."""
    return torch_specops.verify_exact(**args | {"accept_uniforms": propose})


def walk_that_does_not_stop(propose: Tensor, **args: Any) -> tuple[Tensor, Tensor]:
    """Counts acceptances after a rejection too."""
    p, q = (torch.softmax(args[name].float(), -1) for name in ("target_logits", "draft_logits"))
    x = args["draft_tokens"].unsqueeze(-1)
    p_x, q_x = p[:, :-1].gather(2, x).squeeze(-1), q.gather(2, x).squeeze(-1)
    independent = args["accept_uniforms"] * q_x < p_x
    # Every test passes in the op where the count says so.
    counted = torch.arange(x.shape[1]) < independent.sum(1, keepdim=True)
    output, n = torch_specops.verify_exact(**args | {"accept_uniforms": torch.where(counted, 0.0, 1.0 - 2.0**-24)})
    return output, n


WRONG_SAMPLERS: list[Verify] = [
    residual_replaced_by_p,
    sample_uniforms_of_the_draft,
    sample_uniforms_of_the_test,
    accept_uniforms_of_the_draft,
]


@pytest.mark.parametrize("num_drafts", [1, 2])
@pytest.mark.parametrize("wrong", WRONG_SAMPLERS, ids=lambda wrong: wrong.__name__)
def test_wrong_sampler_is_caught(wrong: Verify, num_drafts: int, report: Report) -> None:
    target, draft = tables(1, "opposite")
    tokens = emit(target, draft, num_drafts, Uniforms(seed=2), verify=wrong)
    expect_caught(report, f"{wrong.__name__}, K = {num_drafts}", chain_p_values(tokens, target))


def test_walk_that_does_not_stop_is_caught(report: Report) -> None:
    target, draft = tables(1, "close")
    tokens = emit(target, draft, 2, Uniforms(seed=2), verify=walk_that_does_not_stop)
    expect_caught(report, "walk_that_does_not_stop, K = 2", chain_p_values(tokens, target))


def test_residual_replaced_by_p_is_caught_with_one_hot_drafts(report: Report) -> None:
    target, _ = tables(5, "close")
    tokens = emit(target, None, 2, Uniforms(seed=6), verify=residual_replaced_by_p)
    expect_caught(report, "residual_replaced_by_p, one-hot", chain_p_values(tokens, target))


def test_drafts_of_another_temperature_are_caught(report: Report) -> None:
    """Verified at T = 1, drafted at T = 0.7."""
    target, draft = tables(1, "close")
    tokens = emit(target, draft, 1, Uniforms(seed=2), draft_temperature=torch.full((TRIALS,), 0.7))
    expect_caught(report, "drafts of another temperature", chain_p_values(tokens, target))


def test_frozen_uniforms_are_caught(report: Report) -> None:
    """Numbers that repeat at every step leave the first token right, and only the joint law wrong."""
    target, draft = tables(1, "close")
    p_values = chain_p_values(emit(target, draft, 1, FrozenUniforms(seed=2)), target)
    assert p_values["token 1"] > ALPHA
    expect_caught(report, "frozen uniforms", p_values)


def accept_without_strictness(u: Tensor, p_x: Tensor, q_x: Tensor) -> Tensor:
    return u * q_x <= p_x


def accept_strictly(u: Tensor, p_x: Tensor, q_x: Tensor) -> Tensor:
    return u * q_x < p_x


def test_comparison_without_strictness_is_caught(report: Report) -> None:
    """u = 0 is drawn, here once in 4096, and `<=` then accepts tokens that the target excludes: u q <= p = 0."""
    target, draft = (table[START].clone() for table in tables(19, "close"))
    target[::2] = -torch.inf
    generator = torch.Generator().manual_seed(20)
    x, _ = torch_specops.sample(draft.expand(TRIALS, V), torch.rand(TRIALS, generator=generator))
    u = (torch.rand(TRIALS, 1, generator=generator) * 4096).floor() / 4096
    s = torch.rand(TRIALS, generator=generator)
    output, _ = torch_specops.verify_exact(
        target.expand(TRIALS, 2, V), x.unsqueeze(-1), draft.expand(TRIALS, 1, V), u, s
    )
    p, q = torch.softmax(target.double(), -1), torch.softmax(draft.double(), -1)
    expect_laws(report, "u = 0 and p = 0", {"token 1": chi_square(torch.bincount(output[:, 0], minlength=V), p)})

    p_values = {}
    for accept in (accept_strictly, accept_without_strictness):
        recovered, _ = torch_specops.sample((p - q).clamp(min=0).log().float().expand(TRIALS, V), s)
        tokens = torch.where(accept(u[:, 0], p[x], q[x]), x, recovered)
        p_values[accept] = chi_square(torch.bincount(tokens, minlength=V), p)
    assert p_values[accept_strictly] > ALPHA
    expect_caught(report, "<= at u = 0", {"token 1": p_values[accept_without_strictness]})
