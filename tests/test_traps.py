"""Mistakes that implementations of speculative sampling have made; docs/traps.md says where each one is tested.

A test here builds the exact input on which the mistake shows. Where a law or a property already covers the trap, the
table points there.
"""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path

import pytest
import torch
from oracle import Case, compare, poison_memory, sample_inputs
from torch import Tensor

import torch_specops
from torch_specops import reference
from torch_specops.laws import chi_square

INF = math.inf
BELOW_ONE = 1.0 - 2.0**-24
TESTS = Path(__file__).parent
TABLE = TESTS.parent / "docs" / "traps.md"


def verify(
    target: Tensor, tokens: list[int], draft: Tensor | None, u: float, s: float, t: float | None = None
) -> tuple[list[int], int]:
    """One row of verify_exact, the same u for every draft."""
    output, n = torch_specops.verify_exact(
        target[None],
        torch.tensor([tokens]),
        None if draft is None else draft[None],
        torch.full((1, len(tokens)), u),
        torch.tensor([s]),
        None if t is None else torch.tensor([t]),
    )
    return output[0].tolist(), int(n)


def first_token_p_value(vocab_size: int, trials: int, *, shared_noise: bool) -> float:
    """Chi-square of the first token against p, for a draft opposite to the target."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(vocab_size, generator=generator)
    propose = torch.rand(trials, generator=generator)
    drafts, _ = torch_specops.sample((-target).expand(trials, vocab_size), propose)
    output, _ = torch_specops.verify_exact(
        target.expand(trials, 2, vocab_size),
        drafts.unsqueeze(-1),
        (-target).expand(trials, 1, vocab_size),
        torch.rand(trials, 1, generator=generator),
        propose if shared_noise else torch.rand(trials, generator=generator),
    )
    counts = torch.bincount(output[:, 0], minlength=vocab_size)
    return chi_square(counts, torch.softmax(target.double(), 0))


def test_wide_vocabulary_hides_shared_noise() -> None:
    """The same mistake, as many trials: plain on 16 tokens, invisible on 4096. Laws are tested on narrow ones."""
    trials = 2000
    assert first_token_p_value(4096, trials, shared_noise=True) > 1e-4
    assert first_token_p_value(16, trials, shared_noise=True) < 1e-12
    assert first_token_p_value(16, trials, shared_noise=False) > 1e-4


@pytest.mark.parametrize("one_hot", [False, True])
def test_u_zero_accepts_no_excluded_token(one_hot: bool) -> None:
    """0 <= 0: a comparison that is not strict accepts what the target excludes."""
    target = torch.tensor([[0.0, -INF, 0.0], [0.0, 0.0, 0.0]])
    assert verify(target, [1], None if one_hot else torch.zeros(1, 3), 0.0, 0.9) == ([2, -1], 0)


def test_u_just_below_one_stays_in_the_vocabulary() -> None:
    """The sum of float32 weights may fall short of s times their total: the last token of positive weight is meant."""
    for vocab_size in (1, 3, 1000, 5001):
        logits = torch.zeros(2, vocab_size)
        logits[:, -1] = -INF if vocab_size > 1 else 0.0
        tokens, _ = torch_specops.sample(logits, torch.tensor([BELOW_ONE, 1.0 - 2.0**-53], dtype=torch.float64))
        assert tokens.tolist() == [max(vocab_size - 2, 0)] * 2
        assert verify(logits, [-1], torch.zeros(1, vocab_size), 0.0, BELOW_ONE)[0][0] == max(vocab_size - 2, 0)


@pytest.mark.parametrize("value", [math.nan, -INF])
@pytest.mark.parametrize("t", [None, 0.0, 0.7])
def test_row_without_a_finite_logit_emits_minus_one(value: float, t: float | None) -> None:
    """An argmax over it returns a padded lane, a token that no embedding has."""
    vocab_size = 1001
    target = torch.zeros(2, vocab_size)
    target[0] = value
    assert verify(target, [5], torch.zeros(1, vocab_size), 0.0, 0.5, t) == ([-1, -1], 0)
    assert verify(target.flip(0), [0], None, 0.0, 0.5, t) == ([0, -1], 1)


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 31, 33, 127, 1023, 1025])
def test_lanes_past_the_vocabulary_are_never_drawn(vocab_size: int) -> None:
    """Lanes that are filled with 0 outweigh logits of -1e4, or tie with probabilities of 0."""
    logits = torch.full((2, vocab_size), -1e4)
    for s in (0.0, 0.5, BELOW_ONE):
        for t in (1.0, 0.0):
            tokens, lse = torch_specops.sample(logits, torch.full((2,), s), torch.full((2,), t))
            assert (tokens < vocab_size).all()
            assert lse.tolist() == pytest.approx([-1e4 + math.log(vocab_size) if t else 0.0] * 2, rel=1e-6)
            output, _ = verify(logits, [vocab_size], logits[:1], 0.0, s, t)
            assert 0 <= output[0] < vocab_size
    # The residual of one token, and nothing but zeros after it.
    target, draft = torch.full((2, vocab_size), -INF), torch.full((1, vocab_size), -INF)
    target[:, 0] = 0.0
    draft[:, -1] = 0.0
    assert verify(target, [vocab_size - 1], draft, 0.5, BELOW_ONE)[0][0] == 0


@pytest.mark.parametrize("value", [math.nan, -INF])
def test_draft_row_without_a_law_does_not_emit_the_rejected_token(value: float) -> None:
    """max(p - NaN, 0) is zero everywhere, and the draft token itself comes out. The next token has the law of p."""
    target = torch.log(torch.tensor([1.0, 1.0, 2.0])).expand(2, 3)
    draft = torch.full((1, 3), value)
    drawn = [verify(target, [0], draft, 0.0, (i + 0.5) / 4) for i in range(4)]
    assert drawn == [([0, -1], 0), ([1, -1], 0), ([2, -1], 0), ([2, -1], 0)]


@pytest.mark.parametrize("u", [0.0, BELOW_ONE])
def test_zero_residual_draws_from_the_target(u: float) -> None:
    """p == q and a token that both exclude: neither token 0, nor the last one, nor memory nobody wrote."""
    target = torch.tensor([-INF, 0.0, 0.0, -INF, 0.0, -INF]).expand(2, 6)
    with poison_memory():
        drawn = [verify(target, [0], target[:1], u, s)[0] for s in (0.0, 0.5, BELOW_ONE)]
    assert drawn == [[1, -1], [2, -1], [4, -1]]


def test_residual_of_nearly_equal_scores_keeps_its_digits() -> None:
    """At +-1e4 a difference of two float32 scores has few digits left: the subtraction draws other tokens."""
    alpha, beta, trials, vocab_size = -1e4, 1e4, 64, 1000
    generator = torch.Generator().manual_seed(0)
    draft = torch.randn(trials, 1, vocab_size, generator=generator)
    target = draft + 0.02 * torch.randn(trials, 1, vocab_size, generator=generator)
    # The drafted token is one that the target likes less by more than rounding can hide.
    target[..., 0] = draft[..., 0] - 1.0
    args = {
        "target_logits": torch.cat((target, target), 1),
        "draft_tokens": torch.zeros(trials, 1, dtype=torch.int64),
        "draft_logits": draft,
        "accept_uniforms": torch.full((trials, 1), 1.0 - 2.0**-30, dtype=torch.float64),
        "sample_uniforms": torch.rand(trials, generator=generator),
        "alpha": alpha,
        "beta": beta,
    }
    case = Case("nearly equal scores", "verify_sigmoid", args)
    output, n = torch_specops.verify_sigmoid(**args)
    assert (n == 0).all()
    comparison = compare(case, (output, n))
    assert comparison.wrong == []
    assert comparison.rounding < trials / 4

    p_hat, q_hat = (torch.sigmoid((z[:, 0] - alpha) / (beta - alpha)) for z in (target, draft))
    tokens, _ = torch_specops.sample((p_hat - q_hat).clamp(min=0).log(), args["sample_uniforms"])
    subtracted = torch.stack((tokens, torch.full_like(tokens, -1)), 1)
    assert len(compare(case, (subtracted, n)).wrong) > trials / 4


def test_small_probabilities_keep_their_ratio() -> None:
    """No epsilon: p(x) = 1e-9 against q(x) = 2e-9 accepts at u = 0.49 and rejects at u = 0.51."""
    rest = math.log1p(-1e-9)
    target = torch.tensor([[math.log(1e-9), rest, -INF], [0.0, 0.0, 0.0]])
    draft = torch.tensor([[math.log(2e-9), rest, -INF]])
    assert verify(target, [0], draft, 0.49, 0.0) == ([0, 0], 1)
    assert verify(target, [0], draft, 0.51, 0.5) == ([1, -1], 0)


@pytest.mark.parametrize("padding", [-1, -2, -3, 3, 4, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("t", [None, 0.0])
def test_padding_is_neither_accepted_nor_wrapped(padding: int, t: float | None) -> None:
    """Clamped or wrapped into the vocabulary every one of these would be accepted here."""
    for certain in range(3):
        target = torch.full((3, 3), -INF)
        target[:, certain] = 0.0
        for tokens in ([padding, certain], [certain, padding], [padding, padding]):
            n = tokens.index(padding)
            for draft in (target[:2], None):
                expected = [certain] * (n + 1) + [-1] * (2 - n)
                assert verify(target, tokens, draft, 0.0, 0.5, t) == (expected, n)


def test_padding_before_its_place_ends_the_walk() -> None:
    """A placeholder at the head, in the middle and at the tail; the drafts behind it would all be accepted."""
    target = torch.full((5, 7), -INF)
    target[torch.arange(5), torch.tensor([1, 2, 3, 4, 5])] = 0.0
    for place in range(4):
        tokens = [1, 2, 3, 4]
        tokens[place] = -1
        expected = [1, 2, 3, 4, 5][: place + 1] + [-1] * (4 - place)
        for draft in (target[:4], None):
            for t in (None, 0.0):
                assert verify(target, tokens, draft, 0.0, 0.5, t) == (expected, place)


def test_vocabularies_that_differ_are_refused() -> None:
    target, draft = torch.zeros(1, 2, 8), torch.zeros(1, 1, 7)
    with pytest.raises(ValueError, match="draft_logits"):
        torch_specops.verify_exact(
            target, torch.zeros(1, 1, dtype=torch.int64), draft, torch.zeros(1, 1), torch.zeros(1)
        )


def test_token_outside_the_drafts_vocabulary_is_not_accepted() -> None:
    """q(x) = 0 makes u q < p hold for every u: a smaller draft vocabulary, padded with -inf, must not accept it."""
    target = torch.tensor([[0.0, 0.0, 9.0], [0.0, 0.0, 0.0]])
    draft = torch.tensor([[0.0, 0.0, -INF]])
    for u in (0.0, 0.5, BELOW_ONE):
        assert verify(target, [2], draft, u, BELOW_ONE)[1] == 0


@pytest.mark.parametrize("op", ["verify_exact", "verify_sigmoid", "sample"])
def test_outputs_are_written_to_the_end(op: str) -> None:
    """Twice on memory that holds something else: an output that nobody wrote differs, or is no token."""
    for case in sample_inputs(op, vocab_sizes=[17], names=("k8", "k0", "pad_all", "target_nan", "greedy_mixed")):
        with poison_memory():
            poisoned = getattr(torch_specops, op)(**case.args)
        assert all(map(torch.equal, poisoned, getattr(torch_specops, op)(**case.args)))
        assert compare(case, poisoned).wrong == []


def test_one_seed_for_every_row_repeats_its_tokens() -> None:
    """Rows of one seed draw alike, rows of their own seeds do not: seeds are read per row."""
    logits, positions = torch.zeros(64, 1000), torch.zeros(64, dtype=torch.int64)
    alike = torch_specops.uniforms(torch.full((64,), 3), positions, 1, "sample")[:, 0]
    own = torch_specops.uniforms(torch.arange(64), positions, 1, "sample")[:, 0]
    assert len(torch_specops.sample(logits, alike)[0].unique()) == 1
    assert len(torch_specops.sample(logits, own)[0].unique()) > 50


def test_bonus_token_is_not_drawn_from_a_residual() -> None:
    """After K acceptances row K decides, whatever the draft's last row is."""
    target = torch.tensor([[0.0, 0.0], [3.0, 0.0]])
    expected = int(reference.inverse_cdf(reference.probabilities(target[1], 1.0), 0.9))
    assert verify(target, [0], torch.tensor([[0.0, -INF]]), 0.0, 0.9) == ([0, expected], 1)
    assert verify(target, [0], None, 0.0, 0.9) == ([0, expected], 1)


def listed_tests(text: str) -> list[tuple[str, str | None]]:
    """The (file, name) of each `file::name`, or `file` on its own, in the table."""
    return [(file, name or None) for file, name in re.findall(r"`(test_\w+\.py)(?:::(\w+))?`", text)]


def defined_tests(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def missing_tests(text: str) -> list[str]:
    missing = []
    for file, name in listed_tests(text):
        if not (TESTS / file).exists():
            missing.append(file)
        elif name is not None and name not in defined_tests(file):
            missing.append(f"{file}::{name}")
    return missing


def test_every_listed_test_exists() -> None:
    text = TABLE.read_text()
    assert len(listed_tests(text)) > 30
    assert missing_tests(text) == []


def test_every_test_here_is_listed() -> None:
    listed = {name for file, name in listed_tests(TABLE.read_text()) if file == Path(__file__).name}
    own = {name for name in defined_tests(Path(__file__).name) if name.startswith("test_")}
    about_the_table = {name for name in own if "listed" in name}
    assert own - about_the_table == listed


def test_a_missing_listed_test_is_seen() -> None:
    text = "| `test_traps.py::test_not_there` | `test_nowhere.py` | `test_traps.py::test_every_listed_test_exists` |"
    assert missing_tests(text) == ["test_traps.py::test_not_there", "test_nowhere.py"]
