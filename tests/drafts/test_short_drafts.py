"""Models that can read no more than some rows need: a draft reads each row as far as it can, and no target is asked to
read drafts that can never be emitted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from chains import expect_laws
from report import Report
from tiny_laws import FEWER_TRIALS, TABLES, TARGET, first_tokens, p_values, pair_laws
from tiny_loops import GREEDY, Pauses, new_tokens
from tiny_models import PairModel, padded, random_table, shared_tiny, tiny
from torch import Tensor

from torch_specops import Request, SpeculativeDecoder, compilation
from torch_specops.beam import beam_search
from torch_specops.decode import Step
from torch_specops.drafts import Draft, DraftSource, HierarchicalDraft, ModelDraft, PromptLookup, TokenMap

TABLE = random_table(8, seed=5)
READABLE = 12
# One row is short, one too long for a draft, one as long as the draft can read.
TEXTS = [[1, 2, 3], [4, 5, 6, 7] * 5, [1, 4, 2, 4] * 3]
LIMITS = [24, 8, 5]


class Short(PairModel):
    """Is never asked to read beyond what it can."""

    def __init__(self, table: Tensor = TABLE, max_length: int = READABLE) -> None:
        super().__init__(table)
        self.max_length: int = max_length

    def start(self, batch: int, capacity: int, *arguments: Any) -> None:
        assert capacity <= self.max_length
        super().start(batch, capacity)

    def forward(self, tokens: Tensor, positions: Tensor, num_logits: int | None = None) -> Tensor:
        assert int(positions.min()) >= 0 and int(positions.max()) < self.max_length
        logits = super().forward(tokens, positions, num_logits)
        assert torch.equal(self.memory.gather(1, positions), tokens), "a position has one token"
        return logits


class Repeats(DraftSource):
    """A user's own, which is given no longer row."""

    max_length = READABLE

    def start(self, tokens: Tensor, lengths: Tensor, *arguments: Any) -> None:
        assert int(lengths.max()) <= READABLE

    def restart(self, tokens: Tensor, lengths: Tensor, rows: Tensor) -> None:
        assert int(lengths.max()) <= READABLE

    def propose(self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, *rest: Any) -> Draft:
        assert int(lengths.min()) >= 1 and int(lengths.max()) <= READABLE
        return Draft(tokens.gather(1, (lengths - 1).unsqueeze(1)).expand(-1, num_draft_tokens))


# They draft what the target says, but for the last one.
DRAFTS: dict[str, Callable[[], Any]] = {
    "model": Short,
    "over lookup": lambda: HierarchicalDraft(Short(), PromptLookup(min_ngram=1), num_forwards=4),
    "over itself": lambda: HierarchicalDraft(Short(), Short(), num_forwards=2),
    "over a shorter draft": lambda: HierarchicalDraft(PairModel(TABLE), Short(), num_forwards=2),
    "token map": lambda: TokenMap(Short(), torch.arange(8)),
    "a user's": Repeats,
}


def expected() -> list[list[int]]:
    ids, mask = padded(TEXTS, "left")
    decoder = SpeculativeDecoder(PairModel(TABLE), sampling=GREEDY)
    return new_tokens(decoder.generate(ids, attention_mask=mask, max_new_tokens=LIMITS))


@pytest.mark.parametrize("how", ["eager", "compiled", "pauses", "auto"])
@pytest.mark.parametrize("kind", DRAFTS)
def test_drafting_ends_at_the_drafts_length(kind: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "compile_piece", lambda function, **options: function)
    schedule = Pauses() if how == "pauses" else "auto" if how == "auto" else "constant"
    options: dict[str, Any] = {"num_draft_tokens": 3, "schedule": schedule, "compile": how == "compiled"}
    decoder = SpeculativeDecoder(PairModel(TABLE), DRAFTS[kind](), sampling=GREEDY, **options)
    ids, mask = padded(TEXTS, "left")
    lengths, steps = [len(text) for text in TEXTS], list[Step]()
    for _ in range(2):
        steps.clear()
        output = decoder.generate(ids, attention_mask=mask, max_new_tokens=LIMITS, streamer=steps.append)
        assert new_tokens(output) == expected()
    if kind == "over a shorter draft":
        return
    for step in steps:
        for row, (proposed, tokens) in enumerate(zip(step.num_proposed, step.tokens, strict=True)):
            assert proposed <= max(READABLE + 1 - lengths[row], 0), "the first draft follows the last token read"
            lengths[row] += len(tokens)
    first, last = steps[0].num_proposed, steps[-1].num_proposed
    assert last == [0, 0, 0]
    if how in ("eager", "compiled"):
        assert first == [3, 0, 1]
    if how == "compiled":
        assert (0, False) in decoder._compiled_steps.ready, "steps without drafts have no forward of the draft"


@pytest.mark.parametrize("kind", DRAFTS)
def test_sessions_with_rows_beyond_the_draft(kind: str) -> None:
    draft = DRAFTS[kind]()
    decoder = SpeculativeDecoder(PairModel(TABLE), draft, num_draft_tokens=3, sampling=GREEDY)
    # No row has drafts for long before the last request comes.
    requests = [Request(TEXTS[1], 60), *(Request(*row) for row in zip(TEXTS, LIMITS, strict=True))]
    found = {each.index: each for each in decoder.generate_many(requests, batch_size=1, max_length=80)}
    assert [found[index].new_tokens.tolist() for index in (1, 2, 3)] == expected()
    if isinstance(draft, Short):
        assert max(positions.shape[1] for positions in draft.readings) <= READABLE, "nothing is caught up with"


@pytest.mark.parametrize("how", ["eager", "compiled", "requests"])
@pytest.mark.parametrize("draft", [lambda: PairModel(TABLE), Short, lambda: PromptLookup(min_ngram=1)])
def test_target_reads_no_position_beyond(how: str, draft: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """One row ends at its last position, others before, by an eos or their limits."""
    monkeypatch.setattr(compilation, "compile_piece", lambda function, **options: function)
    texts = {"input_ids": TEXTS, "max_new_tokens": [24, 8, 5], "eos_token_id": [[], [], [expected()[2][1]]]}
    alone = new_tokens(SpeculativeDecoder(PairModel(TABLE), sampling=GREEDY).generate(**texts))
    options: dict[str, Any] = {"num_draft_tokens": 5, "schedule": "constant", "compile": how == "compiled"}
    decoder = SpeculativeDecoder(Short(max_length=28), draft(), sampling=GREEDY, **options)
    if how == "requests":
        requests = [Request(ids, limit, eos_token_id=eos) for ids, limit, eos in zip(*texts.values(), strict=True)]
        ended = sorted(decoder.generate_many(requests, batch_size=2, max_length=50), key=lambda each: each.index)
        assert [each.new_tokens.tolist() for each in ended] == alone
    else:
        assert new_tokens(decoder.generate(**texts)) == alone


@pytest.mark.parametrize("kind", ["model", "over itself"])
def test_the_law_where_drafting_ends(kind: str, report: Report) -> None:
    close = Short(TABLES["close"], 5)
    draft = ModelDraft(close) if kind == "model" else HierarchicalDraft(close, Short(TABLES["opposite"], 4))
    found = first_tokens(PairModel(TARGET), draft, 3, trials=FEWER_TRIALS)
    expect_laws(report, f"a short draft, {kind}", p_values(found, pair_laws(TARGET)))


def test_a_transformers_model_with_fewer_positions() -> None:
    target, short = shared_tiny("gpt2"), tiny("gpt2", n_positions=24)
    weights = target.state_dict()
    weights["transformer.wpe.weight"] = weights["transformer.wpe.weight"][:24]
    short.load_state_dict(weights)
    texts = [[1, 17, 5, 33], list(range(1, 31)), [3, 4, 5] * 6]
    ids, mask = padded(texts, "left")
    call: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": [30, 6, 12]}
    alone = SpeculativeDecoder(target, sampling=GREEDY).generate(ids, **call)
    decoder = SpeculativeDecoder(target, short, num_draft_tokens=3, sampling=GREEDY)
    output = decoder.generate(ids, **call)
    assert torch.equal(output.sequences, alone.sequences) and output.stats.acceptance_rate == 1.0
    requests = [Request(text, count) for text, count in zip(texts, call["max_new_tokens"], strict=True)]
    many = sorted(decoder.generate_many(requests, batch_size=2), key=lambda each: each.index)
    assert [each.new_tokens.tolist() for each in many] == new_tokens(alone)
    for prompts in (texts[:1], texts):
        ids, mask = padded(prompts, "left")
        beams = [
            beam_search(target, ids, attention_mask=mask, num_beams=3, max_new_tokens=30, draft=draft)
            for draft in (None, short)
        ]
        assert torch.equal(beams[0].sequences, beams[1].sequences)
        assert (beams[1].stats.num_accepted > 0) == (len(prompts) == 1)
    # As a target, it is not asked for more positions than it has, though the rows have drafts of one depth.
    ids, mask = padded([texts[0], texts[2]], "left")
    call = {"attention_mask": mask, "num_beams": 3, "max_new_tokens": [20, 6]}
    found, expected = (beam_search(short, ids, draft=draft, **call).sequences for draft in (target, None))
    assert torch.equal(found, expected) and found.shape[1] == 24
