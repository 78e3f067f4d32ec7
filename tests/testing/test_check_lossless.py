"""`check_lossless`: right loops pass as often as it says, and each wrong one is caught where it breaks.

The loops are written as a user would write them, in PyTorch with a `torch.Generator`; those of the package have tests
of their own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import pytest
import torch
from torch import Tensor

import torch_specops
from torch_specops.testing import LosslessReport, MarkovModel, check_lossless, markov_pair, statistics
from torch_specops.testing.statistics import detectable_effect

V = 6
TARGET, DRAFT = markov_pair(V)
PROMPT = (1, 0, 1)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """[N] by inverse CDF from [N, V]."""
    cumulative = weights.cumsum(-1)
    return (cumulative <= uniforms.unsqueeze(-1) * cumulative[:, -1:]).sum(-1)


def law(model: MarkovModel, context: Tensor, top_k: int | None = None) -> Tensor:
    """[N, V] float64 after contexts [N, 2], of the k likeliest tokens."""
    logits = model.table[context.unbind(-1)].double()
    if top_k is not None:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    return torch.softmax(logits, -1)


@dataclass(frozen=True)
class Loop:
    """Speculative decoding with one draft a step, in rows of other lengths. The fields after `top_k` are mistakes."""

    target: MarkovModel = TARGET
    draft: MarkovModel = DRAFT
    top_k: int | None = None
    q_before_top_k: bool = False
    # "target" or "draft": the cache of that model lacks an accepted draft.
    cache_behind: str = ""
    q_recomputed: bool = False
    # "accept" or "sample": reuses the uniform that drew the draft.
    shared: str = ""
    residual_is_p: bool = False
    lenience: float = 1.0

    def __call__(self, prompts: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(int(seeds[0]))
        rows = torch.arange(len(prompts))
        tokens = torch.full((len(prompts), 8), -1)
        length, accepted = torch.zeros(2, len(prompts), dtype=torch.int64)
        text = prompts[:, -2:]
        target_cache = draft_cache = text
        for _ in range(4):
            u_propose, u_accept, u_sample = torch.rand(3, len(prompts), generator=generator, dtype=torch.float64)
            u_accept = u_propose if self.shared == "accept" else u_accept
            u_sample = u_propose if self.shared == "sample" else u_sample
            sampled = law(self.draft, draft_cache, self.top_k)
            x = draw(sampled, u_propose)
            q = law(self.draft, text, self.top_k) if self.q_recomputed else sampled
            q = law(self.draft, draft_cache) if self.q_before_top_k else q
            p = law(self.target, target_cache, self.top_k)
            after = torch.stack([text[:, 1], x], 1)
            is_accepted = u_accept * self.lenience * q[rows, x] < p[rows, x]
            residual = p if self.residual_is_p else (p - q).clamp(min=0)
            residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p)
            bonus = law(self.target, after, self.top_k)
            next_token = draw(torch.where(is_accepted.unsqueeze(-1), bonus, residual), u_sample)
            tokens[rows, length] = torch.where(is_accepted, x, next_token)
            tokens[rows[is_accepted], length[is_accepted] + 1] = next_token[is_accepted]
            length, accepted = length + 1 + is_accepted, accepted + is_accepted
            behind = torch.stack([text[:, 1], next_token], 1)
            text = torch.stack([torch.where(is_accepted, x, text[:, 1]), next_token], 1)
            target_cache = behind if self.cache_behind == "target" else text
            draft_cache = behind if self.cache_behind == "draft" else text
        return tokens, accepted, torch.full_like(accepted, 4)


def altered(change: Callable[[Tensor], object], loop: Loop = Loop()) -> Callable[[Tensor, Tensor], object]:
    """The loop with a change of its tokens [N, 8], without counts."""
    return lambda prompts, seeds: change(loop(prompts, seeds)[0])


def filtered(model: MarkovModel, top_k: int | None):
    return lambda prefixes: law(model, prefixes[:, -2:], top_k).log()


def check(loop: Loop, **options) -> LosslessReport:
    laws = filtered(loop.target, loop.top_k), filtered(loop.draft, loop.top_k)
    return check_lossless(loop, *laws, vocab_size=V, prompt=PROMPT, **options)


@pytest.mark.parametrize("top_k", [None, 3])
def test_a_right_loop_passes(top_k: int | None) -> None:
    report = check(Loop(top_k=top_k))
    assert report and report.lossless and report.first_break is None
    report.assert_lossless()
    assert [test.emitted for test in report.tests] == [1.0, 1.0, 1.0, None]
    text = str(report)
    assert text.startswith("No bias seen in 40,000 trials. A total variation (TV) of ")
    assert "lossless" not in text
    assert re.fullmatch(
        r"LosslessReport\(lossless=True, trials=40000, first_break=None, total_variation<=0.0\d+; "
        r"print\(\) shows the table\)",
        repr(report),
    )
    low, high = min(test.overlap for test in report.tests[:3]), max(test.overlap for test in report.tests[:3])
    assert low < report.beta < high


def one_step(prompts: Tensor, seeds: Tensor) -> Tensor:
    """A step of the package's op with two drafts emits one to three tokens; every row has its own numbers."""
    at = torch.zeros_like(seeds)
    text, logits = prompts, []
    for numbers in torch_specops.uniforms(seeds, at, 2, "propose").unbind(1):
        logits.append(DRAFT.next_logits(text))
        token, _ = torch_specops.sample(logits[-1], numbers)
        text = torch.cat([text, token.unsqueeze(1)], 1)
    accept = torch_specops.uniforms(seeds, at, 2, "accept")
    sample = torch_specops.uniforms(seeds, at, 1, "sample")[:, 0]
    return torch_specops.verify_exact(TARGET(text)[:, -3:], text[:, -2:], torch.stack(logits, 1), accept, sample)[0]


def test_one_step_of_variable_length_passes() -> None:
    report = check_lossless(one_step, TARGET, DRAFT, vocab_size=V)
    report.assert_lossless()
    emitted = [test.emitted for test in report.tests[:3]]
    assert emitted[0] == 1.0 > emitted[1] > emitted[2] > 0.1


def test_hidden_tokens_are_caught() -> None:
    """A position may be emitted or not depending on what came before it, not on its own token."""
    hidden = torch.tensor([V, V, 0])
    step = lambda *args: (output := one_step(*args)).masked_fill(output == hidden, -1)  # noqa: E731
    assert check_lossless(step, TARGET, DRAFT, vocab_size=V).first_break == 2


def test_a_text_that_ends_at_its_eos_passes() -> None:
    loop = altered(lambda tokens: tokens.masked_fill((tokens == 2).cumsum(1) - (tokens == 2).long() > 0, -1))
    report = check_lossless(loop, TARGET, DRAFT, vocab_size=V)
    report.assert_lossless()
    assert report.tests[1].emitted < 1


def test_an_empty_prompt_and_tables() -> None:
    """Tables of order one, with a row for the text before its first token."""
    table = torch.randn(V + 1, V, generator=torch.Generator().manual_seed(3))

    def loop(prompts: Tensor, seeds: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(int(seeds[0]))
        text = torch.full((len(seeds), 1), V)
        for _ in range(3):
            weights = torch.softmax(table[text[:, -1]], -1)
            text = torch.cat([text, torch.multinomial(weights, 1, generator=generator)], 1)
        return text[:, 1:]

    check_lossless(loop, table, vocab_size=V, prompt=()).assert_lossless()
    assert check_lossless(loop, table, vocab_size=V, prompt=(1,)).first_break == 0
    # A table without that row begins with a token.
    with pytest.raises(ValueError, match="table: expected an axis 0 of V \\+ 1 = 7"):
        check_lossless(loop, table[:V], vocab_size=V, prompt=())


# Wrong loops: the position where the law breaks first, and the mistake.
WRONG = {
    "q before top-k, draft sampled after it": (0, Loop(top_k=3, q_before_top_k=True)),
    "target cache one token behind": (2, Loop(cache_behind="target")),
    "draft cache one token behind, q of the right cache": (2, Loop(cache_behind="draft", q_recomputed=True)),
    "acceptance with the uniform of the draft": (0, Loop(shared="accept")),
    "recovered token with the uniform of the draft": (0, Loop(shared="sample")),
    "recovered token from p": (0, Loop(residual_is_p=True)),
    "lenience 0.3": (0, Loop(lenience=0.3)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_loop_is_caught(name: str) -> None:
    position, loop = WRONG[name]
    report = check(loop)
    assert not report and not report.lossless
    assert report.first_break == position, str(report)
    broken = report.broken[0]
    assert broken.total_variation > broken.detectable_total_variation
    if loop.residual_is_p:
        assert report.mistakes["a recovered token from p"] == pytest.approx(broken.total_variation, abs=0.01)
    with pytest.raises(AssertionError, match=f"not have the target's law, first at position {position}: total variat"):
        report.assert_lossless()


def test_the_report_suspects_a_target_of_another_temperature() -> None:
    """`filter_logits` does not divide. Other mistakes are not taken for a temperature."""

    def plain(temperature: float, top_k: int | None = None) -> Callable[[Tensor, Tensor], Tensor]:
        def loop(prompts: Tensor, seeds: Tensor) -> Tensor:
            weights = law(TARGET, prompts[:, -2:], top_k).log() / temperature
            numbers = torch_specops.uniforms(seeds, torch.zeros_like(seeds), 1, "sample")[:, 0]
            return draw(torch.softmax(weights, -1), numbers.double()).unsqueeze(1)

        return loop

    def suspicion(loop: Callable[[Tensor, Tensor], Tensor], draft: MarkovModel | None = None) -> str:
        report = check_lossless(loop, TARGET, draft, vocab_size=V, prompt=PROMPT, num_tokens=1, trials=5000)
        assert (f"Suspicion: {report.suspicion}" in str(report)) == bool(report.suspicion) and not report
        return report.suspicion

    for temperature in (0.6, 1.5):
        found = re.match(
            r"position 0 has the law of the target's logits divided by ([\d.]+)\.", suspicion(plain(temperature))
        )
        assert found is not None and float(found[1]) == pytest.approx(temperature, rel=0.05)
    assert "divided by 0. Does the loop sample" in suspicion(plain(1e-6), DRAFT)
    assert suspicion(plain(1.0, top_k=3)).startswith("without a draft, position 0 is one plain draw")
    assert suspicion(plain(1.0, top_k=3), DRAFT) == ""
    assert check(Loop(residual_is_p=True), trials=5000).suspicion == ""


def test_lagging_draft_cache_is_lossless() -> None:
    """Such a loop only accepts fewer drafts. With a draft that equals the target, a right loop accepts them all."""
    right, behind = (check(Loop(draft=TARGET, cache_behind=cache)) for cache in ("", "draft"))
    assert right and behind
    assert [round(test.overlap, 9) for test in behind.tests[:3]] == [1.0, 1.0, 1.0]
    assert right.beta == 1.0
    assert behind.beta < 0.9
    assert f"Drafts accepted: {behind.beta:.3f} of those reached; one that reads all" in str(behind)


def test_tokens_that_the_target_excludes_are_caught() -> None:
    """Even a handful in 40,000."""

    def loop(prompts: Tensor, seeds: Tensor) -> Tensor:
        tokens, _, _ = Loop(top_k=3)(prompts, seeds)
        excluded = law(TARGET, torch.stack([prompts[:, -1], tokens[:, 0]], 1), 3).argmin(-1)
        tokens[:, 1] = torch.where(seeds % 10_000 == 0, excluded, tokens[:, 1])
        return tokens

    report = check_lossless(loop, filtered(TARGET, 3), vocab_size=V)
    impossible = [test.impossible for test in report.tests]
    assert report.first_break == 1 and 0 < impossible[1] < 20
    assert f"{impossible[1] + impossible[2]} tokens came that the target excludes" in str(report)


def test_a_greedy_loop() -> None:
    """The law is one-hot: nothing is left to chance, and any other token is seen."""
    target = lambda prefixes: law(TARGET, prefixes[:, -2:], 1).log()  # noqa: E731
    report = check_lossless(Loop(top_k=1), target, vocab_size=V)
    assert report and all(test.dof == 0 and test.p_value == 1.0 for test in report.tests)
    assert report.tests[0].detectable_total_variation == pytest.approx(math.log(100) / 40_000, rel=1e-3)
    assert check_lossless(Loop(top_k=2), target, vocab_size=V).first_break == 0


def test_a_draft_that_agrees_leaves_mistakes_unseen() -> None:
    """The report says that they would not be seen."""
    report = check(Loop(draft=MarkovModel(TARGET.table + 1e-3 * DRAFT.table), residual_is_p=True))
    assert report
    assert report.mistakes["a recovered token from p"] < report.tests[0].detectable_total_variation
    assert "a recovered token from p makes a TV of 0.0000 at position 0, too little to be seen" in str(report)


def test_false_alarms_of_whole_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = pytest.importorskip("scipy.stats")
    # The same in every repetition.
    monkeypatch.setattr(statistics, "detectable_effect", lru_cache(maxsize=None)(detectable_effect))
    significance, repetitions = 0.2, 150
    reports = [check(Loop(), trials=1000, significance=significance, seed=seed) for seed in range(repetitions)]
    alarms = sum(not report for report in reports)
    assert stats.binom.isf(0.9999, repetitions, 0.08) <= alarms <= stats.binom.isf(1e-4, repetitions, significance)
    for index in range(4):
        assert stats.kstest([report.tests[index].p_value for report in reports], "uniform").pvalue > 1e-4


def test_check_lossless_in_small_batches(capsys: pytest.CaptureFixture[str]) -> None:
    sizes: list[int] = []

    def target(prefixes: Tensor) -> Tensor:
        sizes.append(len(prefixes))
        return TARGET(prefixes)

    def step(prompts: Tensor, seeds: Tensor) -> Tensor:
        sizes.append(len(prompts))
        assert prompts.dtype == seeds.dtype == torch.int64 and prompts.tolist()[0] == list(PROMPT)
        assert int(seeds.min()) >= 0 and len(seeds.unique()) == len(seeds)
        # torch's CPU generator reads the low 32 bits.
        assert len((seeds % 2**32).unique()) > len(seeds) - 10
        prompts.zero_()
        return one_step(torch.tensor(PROMPT).expand(len(seeds), -1), seeds)

    options = {"vocab_size": V, "trials": 5000, "seed": 4}
    progress: list[tuple[int, int]] = []
    small = check_lossless(step, target, batch_size=30, progress=lambda *at: progress.append(at), **options)
    assert max(sizes) == 30
    assert progress[0] == (30, 5000) and progress[-1] == (5000, 5000) and len(progress) == 167
    assert small == check_lossless(step, target, batch_size=5000, progress=True, **options)
    assert "5000/5000" in capsys.readouterr().err
    with pytest.raises(TypeError, match="progress: expected a function, a bool or None, got <class 'int'>"):
        check_lossless(step, target, progress=1, **options)
    assert small != check_lossless(step, target, batch_size=5000, **options | {"seed": 5})


def test_a_loop_that_ignores_its_seeds_is_refused() -> None:
    step = lambda prompts, seeds: one_step(prompts, torch.arange(len(seeds)))  # noqa: E731
    with pytest.raises(ValueError, match="step_fn: expected random numbers that come from its seeds"):
        check_lossless(step, TARGET, vocab_size=V, batch_size=1000)


BAD_ARGUMENTS = [
    ({"vocab_size": 1}, "vocab_size: expected a number >= 2"),
    ({"vocab_size": 128_256}, r"vocab_size: expected vocab_size \*\* num_tokens <= 1048576"),
    ({"num_tokens": 0}, "num_tokens: expected a number >= 1"),
    ({"trials": 10}, "trials: expected a number >= 100"),
    ({"batch_size": 0}, "batch_size: expected a number >= 1"),
    ({"seed": -1}, "seed: expected a number >= 0"),
    ({"trials": 1e4}, "trials: expected an int"),
    ({"significance": 1.0}, r"significance: expected a number in \(0, 1\)"),
    ({"prompt": (0, 6)}, r"prompt: expected tokens in \[0, 6\)"),
    ({"prompt": torch.zeros(2, 2, dtype=torch.int64)}, r"prompt: expected integers \[P\]"),
    ({"target": torch.zeros(V, V - 1)}, r"target: expected logits \[1, 6\], got \[1, 5\]"),
    ({"target": lambda text: {"logits": TARGET(text)}}, r"target: expected logits, .* pass `lambda ids: model\(ids\)"),
    ({"target": lambda text: torch.full((len(text), V), -torch.inf)}, "target: expected finite logits, or"),
    ({"draft": lambda text: torch.full((len(text), V), torch.nan)}, "draft: expected finite logits, or"),
]
# A change of the tokens [200, 8] of a right loop, and the error.
BAD_OUTPUTS = [
    (lambda tokens: tokens[:, :2], r"expected tokens \[200, >= 3\], got \[200, 2\]"),
    (lambda tokens: tokens[1:], r"expected tokens \[200, >= 3\]"),
    (lambda tokens: tokens.float(), "expected tokens as an integer tensor, got torch.float32"),
    (lambda tokens: tokens + V, r"expected tokens in \[0, 6\), got "),
    (lambda tokens: tokens * 0 - 1, "expected at least one token in every row"),
    (lambda tokens: tokens.index_fill(1, torch.tensor([1]), -1), "and negative numbers after the emitted"),
    (lambda tokens: (tokens, tokens[:, 0]), "got a tuple of 2"),
    (lambda tokens: (tokens, tokens, tokens), r"expected num_accepted and num_reached \[200\]"),
    (lambda tokens: (tokens, tokens[:, 0] * 0 + 1, tokens[:, 0] * 0), "num_accepted <= num_reached"),
]


def test_bad_arguments_and_outputs() -> None:
    outputs = [({"step_fn": altered(change)}, f"step_fn: .*{message}") for change, message in BAD_OUTPUTS]
    for options, message in BAD_ARGUMENTS + outputs:
        arguments = {"step_fn": Loop(), "target": TARGET, "vocab_size": V, "trials": 200} | options
        with pytest.raises((TypeError, ValueError), match=message):
            check_lossless(**arguments)


def test_a_position_that_is_never_emitted_shows_nothing() -> None:
    report = check_lossless(altered(lambda tokens: tokens.index_fill(1, torch.arange(1, 8), -1)), TARGET, vocab_size=V)
    assert report
    assert [test.emitted for test in report.tests[:3]] == [1.0, 0.0, 0.0]
    assert [test.detectable_total_variation for test in report.tests[1:3]] == [1.0, 1.0]
