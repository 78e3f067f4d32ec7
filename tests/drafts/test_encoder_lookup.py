"""Lookups copy from what the target's encoder reads, if that is tokens: the text stays, and takes fewer steps."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from tiny_loops import GREEDY, decode, expected_rows, new_tokens
from tiny_models import VOCAB, padded
from torch import Tensor

from torch_specops import Request, SpeculativeDecoder
from torch_specops.decode import GenerationOutput
from torch_specops.drafts import DraftSource, LanguageModel, PromptLookup, SuffixLookup

LOOKUPS = [PromptLookup, lambda: SuffixLookup(memory=0), lambda: SuffixLookup(memory=10**5)]
# In each of them no token occurs twice, so a text that copies one says nothing about its own end.
SOURCES = [torch.randperm(50, generator=torch.Generator().manual_seed(length))[:length] for length in (40, 28, 36)]
EDIT = 9


def answer_to(source: Tensor) -> Tensor:
    """The source, with every ninth token replaced by one that it does not have, and an end."""
    is_edit = torch.arange(len(source)) % EDIT == EDIT - 1
    return torch.cat([torch.where(is_edit, 50 + torch.arange(len(source)) % 9, source), torch.tensor([59])])


class Editor(LanguageModel):
    """A `LanguageModel` with an encoder: it writes `answer_to` the input `name` behind a token of its own."""

    vocab_size, device, reads_inputs = VOCAB, torch.device("cpu"), True

    def __init__(self, name: str = "input_ids") -> None:
        self.name = name

    def start(self, batch: int, capacity: int, inputs: Mapping[str, Tensor] | None = None) -> None:
        self.answers = torch.full((batch, capacity + 1), 59)
        for row in range(batch):
            assert inputs is not None
            self.replace_inputs(row, {name: value[row, None] for name, value in inputs.items()})

    def replace_inputs(self, row: int, inputs: Mapping[str, Tensor]) -> None:
        answer = answer_to(inputs[self.name][0][inputs["attention_mask"][0] != 0])
        self.answers[row] = 59
        self.answers[row, 1 : len(answer) + 1] = answer

    def forward(self, tokens: Tensor, positions: Tensor, num_logits: int | None = None) -> Tensor:
        logits = torch.nn.functional.one_hot(self.answers.gather(1, positions + 1), VOCAB).float()
        return logits if num_logits is None else logits[:, -num_logits:]


def edited(draft: DraftSource | None, name: str = "input_ids", side: str = "right") -> GenerationOutput:
    sources, mask = padded([source.tolist() for source in SOURCES], side)
    decoder = SpeculativeDecoder(Editor(name), draft, num_draft_tokens=8, schedule="constant", sampling=GREEDY)
    inputs = {name: sources, "attention_mask": mask}
    return decoder.generate(torch.full((3, 1), 58), inputs=inputs, max_new_tokens=50, eos_token_id=59, pad_token_id=0)


@pytest.mark.parametrize("make", LOOKUPS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_copying_task_is_drafted_from_its_input(make: type[DraftSource], side: str) -> None:
    plain, output = edited(None), edited(make(), side=side)
    assert new_tokens(output) == new_tokens(plain) == [answer_to(source).tolist() for source in SOURCES]
    # After two tokens, and again after each edit, it takes two steps to find the place; all between is copied.
    assert plain.stats.num_steps == 41 and output.stats.num_steps <= 15
    assert output.stats.acceptance_rate is not None and output.stats.acceptance_rate > 0.7
    # By another name it is nothing to copy from.
    blind = edited(make(), "features")
    assert new_tokens(blind) == new_tokens(plain) and blind.stats.num_steps == 41


@pytest.mark.parametrize("make", LOOKUPS)
def test_encoder_lookup_in_a_session(make: type[DraftSource]) -> None:
    """Inputs have any length, and stand beside rows that go on."""
    decoder = SpeculativeDecoder(Editor(), make(), num_draft_tokens=8, schedule="constant", sampling=GREEDY)
    sources = [SOURCES[index] for index in (1, 0, 2, 1, 2)]
    requests = [
        Request([58], 50, eos_token_id=59, inputs={"input_ids": each[None], "attention_mask": torch.ones(1, len(each))})
        for each in sources
    ]
    for completion in decoder.generate_many(requests, batch_size=2):
        assert completion.new_tokens.tolist() == answer_to(sources[completion.index]).tolist()
    # At most two of an edit and the two tokens behind it are drafted, and nearly all others.
    assert decoder.stats.acceptance_rate is not None and decoder.stats.acceptance_rate > 0.7


@pytest.mark.parametrize("make", LOOKUPS)
def test_what_t5_emits_does_not_change(make: type[DraftSource]) -> None:
    draft = make()
    assert new_tokens(decode(draft, 4, family="t5")) == expected_rows(family="t5")
    # The next batch has no encoder.
    assert new_tokens(decode(draft, 4)) == expected_rows() and draft._input is None


def test_encoder_lookup_match_ends_at_the_start() -> None:
    draft = PromptLookup(min_ngram=2)
    draft.start(torch.tensor([[4]]), torch.tensor([1]), 8, {"input_ids": torch.tensor([[4, 4, 4, 9]])})
    for text, expected in (([4], [-1, -1]), ([4, 4], [4, 9])):
        assert draft.propose(torch.tensor([text]), torch.tensor([len(text)]), 2).tokens.tolist() == [expected]


def test_an_input_stays_where_a_graph_reads_it() -> None:
    draft = PromptLookup()
    tokens, lengths = torch.zeros(3, 5, dtype=torch.int64), torch.ones(3, dtype=torch.int64)
    draft.start(tokens, lengths, 20, {"input_ids": torch.ones(3, 4, dtype=torch.int64)})
    (before,) = draft.static_tensors()
    draft.start(tokens, lengths, 20, {"input_ids": torch.full((3, 4), 2)})
    draft.replace_inputs(1, {"input_ids": torch.tensor([[5, 6]])})
    (after,) = draft.static_tensors()
    assert after is before and after.tolist() == [[2, 2, 2, 2, -1], [5, 6, -1, -1, -1], [2, 2, 2, 2, -1]]
    draft.replace_inputs(0, {"input_ids": torch.tensor([[3] * 6])})
    assert draft.static_tensors()[0].tolist() == [[3] * 6 + [-1], [5, 6] + [-1] * 5, [2] * 4 + [-1] * 3]
    assert PromptLookup() == draft
