"""`LookupElse`: a row is drafted by a lookup or by another source. The choice keeps the law, and no cache lags."""

from __future__ import annotations

import functools
import pickle
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from chains import expect_caught, expect_laws
from marks import slow
from report import Report
from tiny_eagle3 import trained_head
from tiny_grammars import Allowing, by_turns
from tiny_hybrids import tiny_hybrid
from tiny_laws import FEWER_TRIALS, TABLES, TARGET, V, first_tokens, p_values, pair_laws
from tiny_loops import DRAFTS, ByTurns, Given, Pauses, decode, expected_rows, limited, new_tokens
from tiny_models import PROMPTS, VOCAB, PairModel, padded, perturbed, raised, shared_tiny
from torch import Tensor

from torch_specops import SamplingParams, SpeculativeDecoder
from torch_specops.decode.step import checked_drafts
from torch_specops.drafts import (
    Draft,
    DraftSource,
    Eagle3,
    HierarchicalDraft,
    LookupElse,
    ModelDraft,
    PromptLookup,
    SuffixLookup,
)
from torch_specops.drafts import lookup_else as lookup_else_module
from torch_specops.schedules import Auto, NextStep, PastStep

# Of the two sources, where a schedule chooses.
TRIALS = 2_000


def over_a_close_model(kind: type[LookupElse] = LookupElse) -> LookupElse:
    return kind(PairModel(TABLES["close"]), min_match=1, num_other_tokens=2)


class ByTheDrawnToken(LookupElse):
    """Uses the lookup in rows where the first drafts differ: a choice that depends on the token that was drawn."""

    # Asks the model in every step.
    _keeps_states = True  # type: ignore[assignment]

    def _mixed(self, found: Tensor, drawn: Draft) -> Draft:
        is_chosen = (found[:, :1] >= 0) & (found[:, :1] != drawn.tokens[:, :1])
        return super()._mixed(torch.where(is_chosen, found, -1), drawn)


class Flipped(LookupElse):
    """Takes looked-up drafts for sampled ones, and sampled ones for looked-up ones."""

    def _mixed(self, found: Tensor, drawn: Draft) -> Draft:
        draft = super()._mixed(found, drawn)
        assert draft.is_one_hot is not None
        return replace(draft, is_one_hot=~draft.is_one_hot)


class Paying(Auto):
    """Drafts of both sources pay: they have cost nothing so far, and no row waits for another. Those of the second were
    mostly wrong, so that the first is chosen in many rows."""

    def __init__(self) -> None:
        super().__init__(2)
        self.chosen: list[tuple[list[int], list[bool]]] = []
        for count, is_looked_up, rows in ((0, True, 1), (0, True, 1), (2, True, TRIALS), *[(2, False, 1)] * 40):
            step = NextStep([0] * rows, [2] * rows, [3] * rows, TRIALS, num_others=2)
            num_others, nothing = 0 if is_looked_up else count, [0] * rows
            past = PastStep(step, [count] * rows, nothing, num_others, seconds=1.0, is_looked_up=[is_looked_up] * rows)
            self.learn(past)

    def may_look_up(self, step: NextStep) -> bool:
        return True

    def plan_sources(self, step: NextStep) -> tuple[list[int], list[bool]]:
        self.chosen.append(super().plan_sources(replace(step, is_refilled=True)))
        return self.chosen[-1]


def test_auto_with_two_sources_keeps_the_law(report: Report) -> None:
    for kind in (LookupElse, Flipped):
        schedule, target = Paying(), PairModel(TARGET)
        options: dict[str, Any] = {"trials": TRIALS, "schedule": schedule}
        found = p_values(first_tokens(target, over_a_close_model(kind), 2, **options), pair_laws(TARGET))
        if kind is Flipped:
            expect_caught(report, "loop, auto with flipped sources", found)
        else:
            expect_laws(report, "loop, auto with two sources", found)
        # Both sources are chosen in one step.
        num_chosen = [Counter(first for count, first in zip(*plan, strict=True) if count) for plan in schedule.chosen]
        assert max(min(each[True], each[False]) for each in num_chosen) > TRIALS // 10


@pytest.mark.parametrize("verify", ["exact", "block"])
def test_lookup_else_keeps_the_law(verify: str, report: Report) -> None:
    for temperature, filters in ((1.0, {}), (0.7, {"top_p": 0.9})):
        tokens = first_tokens(PairModel(TARGET), over_a_close_model(), 3, temperature, verify=verify, **filters)
        laws = pair_laws(TARGET, temperature, **filters)
        expect_laws(report, f"loop, lookup else, {verify}, T = {temperature}", p_values(tokens, laws))
    wrong = first_tokens(PairModel(TARGET), over_a_close_model(ByTheDrawnToken), 3, trials=FEWER_TRIALS, verify=verify)
    expect_caught(report, f"loop, lookup by the drawn token, {verify}", p_values(wrong, pair_laws(TARGET)))


def test_lookup_else_inside_a_hierarchical_draft_keeps_the_law(report: Report) -> None:
    draft = HierarchicalDraft(PairModel(TABLES["close"]), over_a_close_model(), num_inner_tokens=2, num_forwards=2)
    tokens = first_tokens(PairModel(TARGET), draft, 3, verify="exact")
    expect_laws(report, "loop, lookup else in a hierarchical draft", p_values(tokens, pair_laws(TARGET)))


class Known(PromptLookup):
    """Drafts in rows of some lengths. All of the first row are wrong; of other rows the last but one, after an odd
    length."""

    def propose(self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, *others: Any) -> Draft:
        texts = torch.zeros(len(PROMPTS), 64, dtype=torch.int64)
        for row, (prompt, rest) in enumerate(zip(PROMPTS, expected_rows(), strict=True)):
            texts[row, : len(prompt) + len(rest)] = torch.tensor([*prompt, *rest])
        ends = lengths.unsqueeze(1)
        # All rows in several steps in a row.
        is_found = (ends % 4 < 2) | (lengths[0] % 12 < 3)
        places = torch.arange(num_draft_tokens)
        drafts = texts.gather(1, ends + places) + (places == num_draft_tokens - 2) * (ends % 2)
        drafts[0] += 1
        return Draft(torch.where(is_found, drafts % VOCAB, -1))


def recorded(source: DraftSource, drafts: dict[tuple[int, int], int]) -> DraftSource:
    """The source; its first draft for each row and length goes into `drafts`."""
    propose = source.propose

    def recording(tokens: Tensor, lengths: Tensor, *others: Any) -> Draft:
        draft = propose(tokens, lengths, *others)
        drafts.update({(row, int(end)): int(draft.tokens[row, 0]) for row, end in enumerate(lengths)})
        return draft

    source.propose = recording  # type: ignore[method-assign]
    return source


OTHERS: dict[str, Callable[[], DraftSource]] = {
    "model": lambda: ModelDraft(perturbed(shared_tiny("llama"))),
    "eagle 3": lambda: Eagle3(trained_head()),
    "hierarchical": lambda: HierarchicalDraft(perturbed(shared_tiny("llama"))),
    "hybrid": lambda: ModelDraft(tiny_hybrid("qwen3_5_text", vocab_size=VOCAB)),
}


@functools.cache
def drafts_alone(other: str) -> dict[tuple[int, int], int]:
    """The first drafts of the source for each row and length; not to be changed."""
    drafts: dict[tuple[int, int], int] = {}
    decode(recorded(OTHERS[other](), drafts), 1)
    return drafts


AS_ON_CUDA = "pauses, as on CUDA"


@pytest.mark.parametrize(
    ("schedule", "other"),
    [("constant", other) for other in OTHERS]
    + [("pauses", "eagle 3"), ("pauses", "hierarchical"), slow("pauses", "model"), slow("pauses", "hybrid")]
    + [(AS_ON_CUDA, "model"), (AS_ON_CUDA, "hybrid"), slow(AS_ON_CUDA, "eagle 3"), slow(AS_ON_CUDA, "hierarchical")]
    # The hybrid keeps states, so it is asked in each step, and there is nothing to choose.
    + [("by turns", other) for other in OTHERS if other != "hybrid"],
)
def test_lookup_else_leaves_no_cache_behind(other: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other source drafts what it drafts alone, after steps with looked-up drafts and steps without drafts."""
    if schedule == AS_ON_CUDA:
        monkeypatch.setattr(lookup_else_module, "is_eager_cpu", lambda *tensors: False)
    alone = drafts_alone(other)
    found: dict[tuple[int, int], int] = {}
    draft = LookupElse(recorded(OTHERS[other](), found), min_match=1, lookup=Known(min_ngram=1), num_other_tokens=4)
    schedules = {"constant": "constant", "by turns": ByTurns(6)}
    output = decode(draft, 6, schedule=schedules.get(schedule, Pauses()))
    assert new_tokens(output) == expected_rows() and output.stats.num_accepted > 0
    both = {place: token for place, token in found.items() if place in alone}
    assert len(both) >= 4 and both == {place: alone[place] for place in both}


class InOneGraph(LookupElse):
    """Its steps do not read lengths, as traced ones."""

    def propose(self, *arguments: Any) -> Draft:
        with mock.patch.object(lookup_else_module, "is_eager_cpu", return_value=False):
            return super().propose(*arguments)


def test_one_graph_leaves_no_cache_behind() -> None:
    """After more steps without drafts than a step has drafts; the model catches up between the steps."""
    alone, found = drafts_alone("model"), dict[tuple[int, int], int]()
    draft = InOneGraph(recorded(OTHERS["model"](), found), min_match=9, num_other_tokens=2)
    decode(draft, 2, schedule=Given([0, 0, 0, 0, 2]))
    both = {place: token for place, token in found.items() if place in alone}
    assert len(both) >= 4 and both == {place: alone[place] for place in both}


def test_auto_hears_what_each_source_drafted() -> None:
    schedule = ByTurns(6)
    draft = LookupElse(perturbed(shared_tiny("llama")), min_match=1, lookup=Known(min_ngram=1), num_other_tokens=4)
    decode(draft, 6, schedule=schedule)
    steps = [step for step in schedule.reports if step.is_looked_up is not None]
    seen: set[tuple[bool, bool]] = set()
    for step, before in zip(steps[1:], steps, strict=False):
        offered, known, right = step.planned.offered, step.known, step.right
        assert offered is not None and known is not None and right is not None and step.is_looked_up is not None
        rows = list(zip(step.proposed, step.accepted, step.is_looked_up, offered, known, right, strict=True))
        num_others = [proposed for proposed, _, is_looked_up, *_ in rows if not is_looked_up]
        assert step.num_draft_tokens >= max(num_others, default=0)
        assert (step.num_draft_tokens > 0) == any(num_others)
        # The model reads later what it did not read in a step of lookups alone.
        assert step.caught_up == (step.num_draft_tokens > 0 and before.num_draft_tokens == 0)
        for proposed, accepted, is_looked_up, num_offered, num_known, num_right in rows:
            assert num_right <= num_known <= min(num_offered, accepted + 1)
            if is_looked_up and proposed > 0:
                assert num_right == accepted
            seen.add((is_looked_up, num_right > 0))
    assert seen == {(True, True), (True, False), (False, True), (False, False)}


@pytest.mark.parametrize("more", [-2, 2])
def test_auto_with_a_lookup_that_proposes_fewer_or_more_drafts_than_asked(more: int) -> None:
    class Wide(Known):
        def propose(self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, *others: Any) -> Draft:
            return super().propose(tokens, lengths, max(num_draft_tokens + more, 0), *others)

    schedule = ByTurns(6)
    draft = LookupElse(perturbed(shared_tiny("llama")), min_match=1, lookup=Wide(min_ngram=1), num_other_tokens=6)
    assert new_tokens(decode(draft, 6, schedule=schedule)) == expected_rows()
    drafted = [zip(step.proposed, step.is_looked_up, strict=True) for step in schedule.reports if step.is_looked_up]
    counts = Counter(pair for rows in drafted for pair in rows)
    assert max(count for count, is_looked_up in counts if is_looked_up) >= 4
    assert max(count for count, is_looked_up in counts if not is_looked_up) == 6


@pytest.mark.parametrize("reads_lengths", [True, False])
@pytest.mark.parametrize("width", [0, 1, 9])
def test_a_step_gets_all_drafts_of_the_other_source_however_many_a_lookup_has(width: int, reads_lengths: bool) -> None:
    class Empty(PromptLookup):
        def propose(self, tokens: Tensor, *others: Any) -> Draft:
            return Draft(tokens.new_full((len(tokens), width), -1))

    kind, other = LookupElse if reads_lengths else InOneGraph, perturbed(shared_tiny("llama"))
    output = decode(kind(other, min_match=1, lookup=Empty(min_ngram=1), num_other_tokens=3), 3)
    alone = decode(other, 3).stats
    assert new_tokens(output) == expected_rows()
    assert (output.stats.num_proposed, output.stats.num_accepted) == (alone.num_proposed, alone.num_accepted)


def test_a_schedule_with_another_plan_plans_both_sources() -> None:
    class Nothing(Auto):
        def plan(self, step: NextStep) -> list[int]:
            return [0] * len(step.texts)

    assert decode("lookup else", 3, schedule=Nothing(3), compile=False).stats.num_proposed == 0


class Planning(Auto):
    """Plans the two sources by a function of the step."""

    def __init__(self, plan: Callable[[NextStep], Any]) -> None:
        super().__init__(3)
        self.plan_sources = plan  # type: ignore[method-assign]

    def may_look_up(self, step: NextStep) -> bool:
        # However long lookups take.
        return True


def test_plans_of_two_sources_are_checked() -> None:
    wrong = "schedule: expected from Planning.plan_sources one number for each text, from 0 to "
    cases = [
        (([1, 1], [False] * 3), ValueError, re.escape(wrong + "[2, 2, 2], got [1, 1]")),
        (([0, 3, 0], [False] * 3), ValueError, re.escape(wrong + "[2, 2, 2], got [0, 3, 0]")),
        (([0, 0, 2], [False, True, True]), ValueError, re.escape(wrong + "[2, 0, 0], got [0, 0, 2]")),
        (([0.5, 0, 0], [False] * 3), ValueError, re.escape(wrong + "[2, 2, 2], got [0.5, 0, 0]")),
        (([0, 0, 0], [True]), ValueError, "schedule: .* one bool for each text, got \\[True\\]"),
        (([0, 0, 0], [1, 1, 1]), ValueError, "schedule: .* one bool for each text, got \\[1, 1, 1\\]"),
    ]
    draft = LookupElse(PairModel(TARGET), min_match=9, num_other_tokens=2)
    options: dict[str, Any] = {"target": PairModel(TARGET), "prompts": [[1], [2], [3]], "inputs": None}
    assert raised(lambda plan: decode(draft, 3, schedule=Planning(lambda step: plan), **options), cases) == []


def test_the_schedule_is_offered_what_may_be_verified() -> None:
    """Not the placeholder of an image, nor what comes after it."""
    target, offered = PairModel(TARGET), []
    target.undrafted = (3,)

    def plan(step: NextStep) -> tuple[list[int], list[bool]]:
        offered.append(step.offered)
        return [0] * 2, [False] * 2

    draft = LookupElse(PairModel(TARGET), min_match=1)
    decode(draft, 3, target=target, schedule=Planning(plan), prompts=[[1, 3, 2, 1], [1, 2, 3, 1]], inputs=None)
    assert offered[0] == [0, 1]


def test_rows_of_the_other_source_get_its_drafts_where_a_lookup_found_some_too() -> None:
    offered: list[Any] = []

    def plan(step: NextStep) -> tuple[list[int], list[bool]]:
        offered.append(step.offered)
        return [min(2, room) for room in step.rooms], [False] * len(step.rooms)

    # The target is its own draft, so all of these drafts are accepted.
    draft = LookupElse(PairModel(TARGET), min_match=1, num_other_tokens=2)
    stats = decode(draft, 3, target=PairModel(TARGET), schedule=Planning(plan), prompts=[[1, 3, 1]], inputs=None).stats
    assert offered[0] != [0]
    assert stats.num_accepted == stats.num_proposed > 0


def test_lookups_after_steps_without_drafts_ask_the_other_source_for_nothing() -> None:
    """It does not read the tokens of these steps until it is asked for drafts."""
    calls: list[str] = []

    class Watched(ModelDraft):
        def catch_up(self, *arguments: Any) -> None:
            calls.append("catch_up")

        def propose(self, *arguments: Any) -> Draft:
            calls.append("propose")
            return super().propose(*arguments)

    def plan(step: NextStep) -> tuple[list[int], list[bool]]:
        calls.append("plan")
        most = min(calls.count("plan") // 5, 3)
        offered = step.offered or [0] * len(step.texts)
        return [min(room, found, most) for room, found in zip(step.rooms, offered, strict=True)], [True] * len(offered)

    draft = LookupElse(Watched(shared_tiny("llama")), min_match=1, lookup=Known(min_ngram=1))
    output = decode(draft, 3, schedule=Planning(plan))
    assert new_tokens(output) == expected_rows()
    assert set(calls) == {"plan"} and output.stats.num_accepted > 0


def test_looked_up_drafts_stay_with_their_rows() -> None:
    """After the first row has ended too."""
    limits, planned, proposed = [2, 12, 16], list[list[int]](), list[list[int]]()
    ends = [len(prompt) + limit for prompt, limit in zip(PROMPTS, limits, strict=True)]

    class Measured(Known):
        def propose(self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, *others: Any) -> Draft:
            return replace(super().propose(tokens, lengths, num_draft_tokens, *others), matches=lengths)

    class Kept(Planning):
        def learn(self, step: PastStep) -> None:
            proposed.append(list(step.proposed))

    def plan(step: NextStep) -> tuple[list[int], list[bool]]:
        offered = step.offered or [0] * len(step.texts)
        if step.offered is not None:
            assert step.matches is not None
            sums = [match + left for match, left in zip(step.matches, step.left, strict=True)]
            assert sums == ends[-len(sums) :]
        planned.append([min(room, found) for room, found in zip(step.rooms, offered, strict=True)])
        return planned[-1], [True] * len(offered)

    draft = LookupElse(perturbed(shared_tiny("llama")), min_match=1, lookup=Measured(min_ngram=1))
    output = decode(draft, 3, schedule=Kept(plan), max_new_tokens=limits)
    assert new_tokens(output) == limited(expected_rows(), limits)
    assert proposed == planned and any(len(counts) == 2 and max(counts) > 0 for counts in planned)


def test_lookups_stop_when_they_have_lost_too_much_time() -> None:
    """They find nothing here. Steps are drafted without them then, and the texts are the same."""
    calls: list[None] = []

    class Slow(PromptLookup):
        def propose(self, *arguments: Any) -> Draft:
            calls.append(None)
            # Longer than several steps.
            time.sleep(0.05)
            return super().propose(*arguments)

    draft = LookupElse(DRAFTS["perturbed"]("llama"), min_match=9, lookup=Slow(9, 9))
    output = decode(draft, 4, schedule=Auto(4))
    assert new_tokens(output) == expected_rows()
    assert 0 < len(calls) < output.stats.num_steps / 2


def test_a_draft_of_features_catches_up_as_it_drafts() -> None:
    """It reads all new features in the first forward of a step, so catching up costs no other."""
    schedule, other = ByTurns(6), Eagle3(trained_head())
    other.catch_up = None  # type: ignore[assignment, method-assign]
    draft = LookupElse(other, min_match=1, lookup=Known(min_ngram=1), num_other_tokens=4)
    assert new_tokens(decode(draft, 6, schedule=schedule)) == expected_rows()
    assert not any(step.caught_up for step in schedule.reports)


def test_the_time_of_steps_includes_lookups_before_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    num_calls = 0

    class Slow(PromptLookup):
        def propose(self, *arguments: Any) -> Draft:
            nonlocal num_calls
            num_calls += 1
            return super().propose(*arguments)

    draft = LookupElse(perturbed(shared_tiny("llama")), min_match=1, lookup=Slow(min_ngram=1))
    # Each lookup takes a second, and nothing else takes time.
    clock = SimpleNamespace(perf_counter=lambda: float(num_calls))
    monkeypatch.setattr("torch_specops.decode.batch.time", clock)
    assert decode(draft, 3, schedule=ByTurns(3), compile=False).stats.seconds == num_calls > 5


def test_lookup_else_gives_the_text_of_its_seed() -> None:
    """In any batch with "exact", and with any draft with "gumbel"."""
    prompts, mask = padded([[*prompt, 5, 6, 5, 6] for prompt in PROMPTS], "left")
    for verify in ("exact", "gumbel"):
        texts = []
        for draft in ("lookup else", "lookup else" if verify == "exact" else "nothing"):
            options: dict[str, Any] = {"num_draft_tokens": 4, "verify": verify, "schedule": "constant"}
            decoder = SpeculativeDecoder(shared_tiny("llama"), DRAFTS[draft]("llama"), **options)
            rows = [slice(None)] if not texts else [slice(row, row + 1) for row in range(len(PROMPTS))]
            outputs = [
                decoder.generate(prompts[row], attention_mask=mask[row], max_new_tokens=20, seed=[7, 8, 9][row])
                for row in rows
            ]
            texts.append([text for output in outputs for text in new_tokens(output)])
        assert texts[0] == texts[1]


@pytest.mark.parametrize(("kind", "num_drafts"), [("inside a hierarchical draft", 2), ("with a grammar", 5)])
def test_lookup_else_gives_the_text_of_its_seed_in_any_batch(kind: str, num_drafts: int) -> None:
    """Whether the other source is asked in a step depends on all rows; the drafts of a row do not."""
    target = shared_tiny("llama")
    near, far = perturbed(target), shared_tiny("llama", seed=3)
    prompts, mask = padded([[*prompt, 5, 6, 5, 6] for prompt in PROMPTS] + [[9, 3, 9], [5, 6, 7, 5], [2, 2, 2]], "left")
    temperatures = [0.0, 1.0, 0.7, 0.0, 1.2, 0.5]

    def texts(rows: list[int]) -> list[list[int]]:
        options: dict[str, Any] = {}
        if kind == "with a grammar":
            draft: DraftSource = LookupElse(near, min_match=1, num_other_tokens=3)
            options["grammar"] = [Allowing(by_turns) for _ in rows]
        else:
            draft = HierarchicalDraft(near, LookupElse(far, min_match=1))
        decoder = SpeculativeDecoder(target, draft, schedule="constant", num_draft_tokens=num_drafts, verify="exact")
        sampling = SamplingParams(temperature=[temperatures[row] for row in rows])
        output = decoder.generate(
            prompts[rows], attention_mask=mask[rows], max_new_tokens=15, seed=rows, sampling=sampling, **options
        )
        return new_tokens(output)

    assert texts(list(range(6)))[::2] == [texts([row])[0] for row in (0, 2, 4)]


def test_lookup_else_follows_its_parts() -> None:
    target = PairModel(TABLES["close"])
    short = PairModel(TABLES["close"])
    short.max_length = 5
    lookup = SuffixLookup(min_ngram=1, max_ngram=4)
    draft = pickle.loads(pickle.dumps(LookupElse(short, min_match=1, lookup=lookup, num_other_tokens=2)))
    draft.bind(target)
    assert draft.default_draft_tokens == 10 and draft.vocab_size == V and not draft.deterministic
    tokens = torch.tensor([[1, 2, 3, 1, 2, 0], [0, 1, 2, 4, 5, 3], [0, 1, 0, 0, 0, 0]])
    lengths = torch.tensor([5, 6, 3])
    draft.expect(4)
    draft.start(tokens, lengths, 12)
    greedy = SamplingParams(temperature=0.0)
    proposal = draft.propose(tokens, lengths, 4, greedy.tensors(3), torch.arange(3))
    # The second row has no drafts, because the model cannot read six tokens.
    assert proposal.tokens.tolist() == [[3, 1, 2, 3], [-1] * 4, [1, 0, 1, 0]]
    # The loop leaves out token 3, the placeholder of an image, in a looked-up row, but not in a sampled one.
    target.undrafted = (3,)
    proposal = replace(proposal, is_one_hot=torch.tensor([True, False, False]))
    state: Any = SimpleNamespace(lengths=lengths, limits=lengths + 9, finished=lengths == 0)
    for drafts, num_proposed in (([1, 3, 1, 2], [1, 0, 4]), ([1, 2, 1, 2], [4, 0, 4])):
        proposal = replace(proposal, tokens=torch.tensor([drafts, [-1] * 4, [1, 3, 1, 0]]))
        assert checked_drafts(proposal, state, target)[1].tolist() == num_proposed
    for logits, num_proposed in ((proposal.logits, [4, 0, 4]), (None, [4, 0, 1])):
        same_kind = replace(proposal, logits=logits, is_one_hot=None)
        assert checked_drafts(same_kind, state, target)[1].tolist() == num_proposed
    # Without looked-up drafts, an eager step verifies no more than the model's.
    row = tokens[[1]], lengths[[2]]
    draft.start(*row, 12)
    assert draft.propose(*row, 4, greedy.tensors(1), torch.arange(1)).tokens.shape == (1, 2)
    # A row that has ended needs no drafts, so a step in which all others are looked up does not ask the model.
    draft.start(tokens, lengths, 12)
    calls: dict[tuple[int, int], int] = {}
    recorded(draft.other, calls)
    for ends in (lengths, lengths + torch.tensor([0, 0, 2])):
        asked, proposal = len(calls), draft.propose(tokens, ends, 2, greedy.tensors(3), torch.arange(3))
    assert len(calls) == asked and proposal.logits is None


def test_lookup_else_names_wrong_arguments() -> None:
    model = PairModel(TARGET)
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"other": None}, TypeError, "other: expected a model or a DraftSource, got None"),
        ({"other": 3}, TypeError, "other: expected a model, a DraftSource or None"),
        ({"min_match": 0}, ValueError, "min_match: expected a number >= 1, got 0"),
        ({"lookup": ModelDraft(model)}, TypeError, "lookup: expected a PromptLookup or a SuffixLookup, got"),
        ({"lookup": SuffixLookup()}, ValueError, "lookup: expected min_ngram >= min_match = 4, got 2"),
        ({"num_other_tokens": 0}, ValueError, "num_other_tokens: expected a number >= 1, got 0"),
    ]
    assert raised(lambda options: LookupElse(**({"other": model} | options)), cases) == []
    at_most_three = ModelDraft(model)
    at_most_three.max_draft_tokens = 3
    assert LookupElse(at_most_three).num_other_tokens == 3


def test_padded_drafts_keep_their_bounds() -> None:
    drawn = Draft(torch.ones(3, 2, dtype=torch.int64), torch.randn(3, 2, V), torch.randn(3, 2, 3))
    mixed = over_a_close_model()._mixed(torch.tensor([[1, 2, 3, -1], [-1] * 4, [-1] * 4]), drawn)
    for part, same, size in ((mixed.logits, drawn.logits, V), (mixed.lse, drawn.lse, 3)):
        assert part is not None and same is not None
        assert part.shape == (3, 4, size) and torch.equal(part[:, :2], same)
