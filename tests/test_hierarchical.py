"""A draft model with drafts of its own: it keeps its law, the loop keeps the target's, and wrong ones are caught.

The laws are those of three tokens over V = 5 by chi-square, as in test_loop_laws.py; ALPHA is 1e-4 for this module
(Bonferroni over NUM_LAWS p-values), and a wrong draft has to fall below the same number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import PROMPTS, PairModel, greedy_rows, padded, perturbed, random_table, shared_tiny, tiny
from torch import Tensor

import torch_specops
from torch_specops import SamplingParams, SpeculativeDecoder
from torch_specops.decode import Step
from torch_specops.drafts import Draft, DraftSource, ModelDraft, NGram, PromptLookup
from torch_specops.drafts.hierarchical import HierarchicalDraft
from torch_specops.hf import language_model
from torch_specops.laws import chi_square

V = 5
TRIALS = 12_000
NUM_LAWS = 5
ALPHA = 1e-4 / NUM_LAWS
# Repeated pairs, so that prompt lookup has something to say.
PROMPT = [1, 0, 2, 0, 1, 0]
TARGET = random_table(V, seed=11, scale=1.2)
SMALL = TARGET + random_table(V, seed=12, scale=1.0)
GREEDY = SamplingParams(temperature=0.0)


def inner_source(kind: str) -> DraftSource:
    if kind == "prompt lookup":
        return PromptLookup(min_ngram=1)
    return NGram.from_tokens(torch.randint(V, (60,), generator=torch.Generator().manual_seed(3)), vocab_size=V)


def law(table: Tensor, temperature: float) -> Tensor:
    """[V * V * V] of the three tokens that follow PROMPT."""
    p = torch.softmax(table.double() / temperature, -1)
    first, second = p[PROMPT[-2], PROMPT[-1]], p[PROMPT[-1]]
    return (first[:, None, None] * second[:, :, None] * p[:V]).flatten()


def p_value(tokens: Tensor, table: Tensor, temperature: float) -> float:
    counts = torch.bincount(tokens @ torch.tensor([V * V, V, 1]), minlength=V**3)
    return chi_square(counts, law(table, temperature))


def started(draft: ModelDraft, trials: int, num_draft_tokens: int) -> tuple[Tensor, Tensor]:
    tokens = torch.tensor([PROMPT]).repeat(trials, 1)
    lengths = torch.full((trials,), len(PROMPT))
    draft.start(tokens, lengths, len(PROMPT) + num_draft_tokens + 1)
    return tokens, lengths


def drafts_of(draft: ModelDraft, temperature: float, num_draft_tokens: int = 3, trials: int = TRIALS) -> Draft:
    tokens, lengths = started(draft, trials, num_draft_tokens)
    sampling = SamplingParams(temperature=temperature).tensors(trials)
    return draft.propose(tokens, lengths, num_draft_tokens, sampling, torch.arange(trials))


def first_tokens(draft: DraftSource, num_draft_tokens: int, temperature: float) -> Tensor:
    """[TRIALS, 3] what the loop emits."""
    decoder = SpeculativeDecoder(
        PairModel(TARGET), draft, num_draft_tokens=num_draft_tokens, sampling=SamplingParams(temperature=temperature)
    )
    prompts = torch.tensor([PROMPT]).repeat(TRIALS, 1)
    return decoder.generate(prompts, max_new_tokens=3, seed=5, eos_token_id=()).sequences[:, -3:]


@pytest.mark.parametrize(("inner", "temperature"), [("prompt lookup", 0.7), ("n-gram", 1.3)])
def test_drafts_have_the_law_of_the_draft_model(inner: str, temperature: float) -> None:
    """With a forward for every draft none is missing. (Fewer leave padding, and what is then there is a selection.)"""
    draft = HierarchicalDraft(PairModel(SMALL), inner_source(inner), num_inner_tokens=2, num_forwards=3)
    found = drafts_of(draft, temperature)
    assert (found.tokens >= 0).all()
    assert p_value(found.tokens, SMALL, temperature) > ALPHA
    # The logits are those of the draft model behind the drafts before.
    texts = torch.cat([torch.tensor([PROMPT]).repeat(TRIALS, 1), found.tokens], 1)
    before = texts[:, len(PROMPT) - 2 : -1]
    assert found.logits is not None
    assert torch.equal(found.logits, SMALL[before[:, :-1], before[:, 1:]])


@pytest.mark.parametrize(
    ("inner", "num_draft_tokens", "num_inner_tokens", "num_forwards", "temperature"),
    [("n-gram", 2, 1, 1, 1.0), ("prompt lookup", 3, 3, 2, 0.7), ("n-gram", 4, 2, 4, 1.3)],
)
def test_emitted_text_has_the_law_of_the_target(
    inner: str, num_draft_tokens: int, num_inner_tokens: int, num_forwards: int, temperature: float
) -> None:
    draft = HierarchicalDraft(
        PairModel(SMALL), inner_source(inner), num_inner_tokens=num_inner_tokens, num_forwards=num_forwards
    )
    tokens = first_tokens(draft, num_draft_tokens, temperature)
    assert p_value(tokens, TARGET, temperature) > ALPHA


class Believing(HierarchicalDraft):
    """Takes what the inner source says, and shows the model's law."""

    def propose(self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, sampling: Any, seeds: Tensor) -> Draft:
        drafts = super().propose(tokens, lengths, num_draft_tokens, sampling, seeds)
        said = self.inner.propose(tokens, lengths, num_draft_tokens, sampling, seeds).tokens
        return Draft(torch.where((drafts.tokens >= 0) & (said >= 0), said, drafts.tokens), drafts.logits)


class Picky(HierarchicalDraft):
    """Drops a draft for being what it is: padding that depends on the token at its own position."""

    def propose(self, *arguments: Any) -> Draft:
        drafts = super().propose(*arguments)
        return Draft(torch.where(drafts.tokens == 0, -1, drafts.tokens), drafts.logits)


class Repeating(HierarchicalDraft):
    """One pair of random numbers for all positions of a step."""

    def _draws(self, *arguments: Any) -> Tensor:
        draws = super()._draws(*arguments)
        return draws[:, :2].repeat(1, draws.shape[1] // 2)


@pytest.mark.parametrize("wrong", [Believing, Picky])
def test_a_wrong_draft_is_caught_in_the_emitted_text(wrong: type[HierarchicalDraft]) -> None:
    draft = wrong(PairModel(SMALL), PromptLookup(min_ngram=1), num_inner_tokens=2, num_forwards=3)
    assert p_value(first_tokens(draft, 3, 1.0), TARGET, 1.0) < ALPHA


def test_random_numbers_used_again_are_caught() -> None:
    draft = Repeating(PairModel(SMALL), PromptLookup(min_ngram=1), num_inner_tokens=2, num_forwards=3)
    assert p_value(drafts_of(draft, 1.0).tokens, SMALL, 1.0) < ALPHA


def steps_of(target: Any, draft: Any, num_draft_tokens: int = 4) -> list[Step]:
    steps: list[Step] = []
    ids, mask = padded(PROMPTS, "left")
    torch_specops.generate(
        target,
        ids,
        draft=draft,
        attention_mask=mask,
        max_new_tokens=16,
        num_draft_tokens=num_draft_tokens,
        sampling=GREEDY,
        compile=False,
        streamer=steps.append,
    )
    return steps


class OneBehind:
    """A language model that is never told the older one of the two newest tokens."""

    def __init__(self, model: Any, width: int) -> None:
        self._model, self._width = model, width

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, tokens: Tensor, positions: Tensor, num_logits: int | None = None) -> Tensor:
        skipped = 1 if tokens.shape[1] == self._width + 2 else 0
        return self._model.forward(tokens[:, skipped:], positions[:, skipped:], num_logits)


def accepted(steps: list[Step]) -> list[list[int]]:
    return [step.num_accepted for step in steps]


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_greedy_steps_are_those_of_the_draft_model_alone(noise: float) -> None:
    """The same drafts, so the same number accepted in every step of every row."""
    target = shared_tiny("llama")
    small = perturbed(target, noise)
    expected = steps_of(target, small)
    found = steps_of(target, HierarchicalDraft(language_model(small), num_inner_tokens=2, num_forwards=4))
    assert accepted(found) == accepted(expected)
    assert [[token for step in found for token in step.tokens[row]] for row in range(3)] == [
        list(row) for row in greedy_rows("llama", 16)
    ]


def test_a_cache_that_lags_is_caught() -> None:
    """The target as its own draft: all is accepted, unless a draft that was accepted last is never read."""
    target = shared_tiny("llama")
    models: list[Any] = [language_model(target), OneBehind(language_model(target), 2)]
    # The last step of a row has fewer drafts.
    right, wrong = (
        accepted(steps_of(target, HierarchicalDraft(model, num_inner_tokens=2, num_forwards=4)))[:2] for model in models
    )
    assert right == [[4, 4, 4]] * 2
    assert wrong != right


def cycle(vocab: int) -> Tensor:
    """The next token is certain: one more, round and round."""
    table = torch.full((vocab + 1, vocab, vocab), -torch.inf)
    for token in range(vocab):
        table[:, token, (token + 1) % vocab] = 0.0
    return table


def test_right_inner_drafts_save_forwards() -> None:
    text = torch.arange(12) % V
    right = NGram.from_tokens(text, vocab_size=V)
    wrong = NGram.from_tokens(text.flip(0), vocab_size=V)
    forwards = {}
    for name, inner in (("right", right), ("wrong", wrong)):
        model = PairModel(cycle(V))
        draft = HierarchicalDraft(model, inner, num_inner_tokens=3, num_forwards=8)
        found = drafts_of(draft, 1.0, num_draft_tokens=8, trials=3)
        expected = (PROMPT[-1] + 1 + torch.arange(8)) % V
        assert torch.equal(found.tokens, expected.expand(3, -1))
        # The prompt was read, too.
        forwards[name] = len(model.readings) - 1
    assert forwards == {"right": 2, "wrong": 8}


def test_padding_behind_the_last_forward() -> None:
    draft = HierarchicalDraft(PairModel(SMALL), PromptLookup(min_ngram=1), num_inner_tokens=2, num_forwards=2)
    found = drafts_of(draft, 1.0, num_draft_tokens=6, trials=500)
    present = found.tokens >= 0
    # From the first padding on there is nothing else, and two forwards make two drafts at least, six at most.
    assert torch.equal(present.long().cumprod(1).bool(), present)
    assert set(present.sum(1).tolist()) == {2, 3, 4, 5, 6}


def test_a_single_draft_needs_no_inner_one() -> None:
    class Silent(PromptLookup):
        def propose(self, *arguments: Any) -> Draft:
            raise AssertionError("nothing to propose")

    found = drafts_of(HierarchicalDraft(PairModel(SMALL), Silent()), 1.0, num_draft_tokens=1, trials=4)
    assert found.tokens.shape == (4, 1) and (found.tokens >= 0).all()


def test_it_traces_as_one_graph() -> None:
    model = tiny("llama", vocab=V).float()
    sampling = SamplingParams(temperature=0.8).tensors(2)
    ids, lengths = torch.tensor([PROMPT, [3, 1, 3, 0, 0, 0]]), torch.tensor([6, 3])

    def run(wrap: Callable[[Any], Any]) -> Draft:
        draft = HierarchicalDraft(language_model(model), num_inner_tokens=2, num_forwards=2)
        draft.start(ids, lengths, 16)
        propose = wrap(draft.propose)
        return propose(ids, lengths, 4, sampling, torch.tensor([1, 2]))

    with torch.inference_mode():
        eager = run(lambda propose: propose)
        traced = run(lambda propose: torch.compile(propose, fullgraph=True, backend="eager"))
    assert torch.equal(eager.tokens, traced.tokens)
    present = (eager.tokens >= 0).unsqueeze(2)
    assert eager.logits is not None and traced.logits is not None
    torch.testing.assert_close(eager.logits * present, traced.logits * present)


def test_errors_name_the_argument() -> None:
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, "inner: expected a DraftSource", {"inner": "prompt lookup"}),
        (
            ValueError,
            "inner: expected a deterministic source",
            {"inner": NGram.from_tokens(torch.arange(V), vocab_size=V, probabilities=True)},
        ),
        (ValueError, "inner: expected the model's 5", {"inner": NGram.from_tokens(torch.arange(V), vocab_size=V + 1)}),
        (ValueError, "num_inner_tokens: ", {"num_inner_tokens": 0}),
        (ValueError, "num_forwards: ", {"num_forwards": 0}),
    ]
    for error, message, arguments in cases:
        with pytest.raises(error, match=f"^{message}"):
            HierarchicalDraft(PairModel(SMALL), **arguments)
