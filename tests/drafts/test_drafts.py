"""Draft sources: prompt and suffix lookup against plain loops; a draft model's law, and a cache that never lags."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_dflash import new_head as new_drafter
from tiny_eagle3 import new_head
from tiny_loops import TokenStreamer, decode
from tiny_models import VOCAB, PairModel, perturbed, raised, random_table, shared_tiny, tiny
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torch_specops
from torch_specops.drafts import (
    DFlash,
    Draft,
    DraftSource,
    LookupElse,
    ModelDraft,
    PEagle,
    PromptLookup,
    SuffixLookup,
    lookup,
)
from torch_specops.drafts.hierarchical import HierarchicalDraft
from torch_specops.sampling import SamplingTensors


def lookup_by_loops(
    tokens: list[int], num_draft_tokens: int, max_ngram: int, min_ngram: int, repeat: bool
) -> list[int]:
    for ngram in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(tokens) - ngram):
            if ngram < len(tokens) and tokens[start : start + ngram] == tokens[-ngram:]:
                text = list(tokens)
                for index in range(num_draft_tokens):
                    follows = repeat or start + ngram + index < len(tokens)
                    text.append(text[start + ngram + index] if follows else -1)
                return text[len(tokens) :]
    return [-1] * num_draft_tokens


def rows(vocab_size: int) -> st.SearchStrategy[list[list[int]]]:
    return st.lists(st.lists(st.integers(0, vocab_size - 1), max_size=14), min_size=1, max_size=4)


@settings(deadline=None, max_examples=100)
@given(
    texts=st.one_of(rows(2), rows(3), rows(8)).filter(all),
    num_draft_tokens=st.integers(0, 6),
    ngrams=st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted),
    repeat=st.booleans(),
    spare=st.integers(0, 3),
)
def test_prompt_lookup_is_the_plain_loop(
    texts: list[list[int]], num_draft_tokens: int, ngrams: list[int], repeat: bool, spare: int
) -> None:
    min_ngram, max_ngram = ngrams
    width = max(len(text) for text in texts) + spare
    # Tokens behind a row's length must not be read: they continue every match.
    tokens = torch.tensor([text + [text[-1] if text else 0] * (width - len(text)) for text in texts])
    tokens = tokens.reshape(len(texts), width).long()
    lengths = torch.tensor([len(text) for text in texts])
    before = tokens.clone()
    options = max_ngram, min_ngram, repeat
    draft = PromptLookup(*options).propose(tokens, lengths, num_draft_tokens)
    assert draft.tokens.shape == (len(texts), num_draft_tokens) and draft.tokens.dtype == torch.int64
    assert draft.tokens.tolist() == [lookup_by_loops(text, num_draft_tokens, *options) for text in texts]
    assert draft.logits is None and draft.lse is None and draft.matches is not None
    for text, drafts, length in zip(texts, draft.tokens.tolist(), draft.matches.tolist(), strict=True):
        if drafts and drafts[0] >= 0:
            # The length of the match that was used, also beyond max_ngram.
            ngram = next(n for n in range(max_ngram, 0, -1) if lookup_by_loops(text, 1, n, n, repeat)[0] >= 0)
            start = next(i for i in range(len(text)) if text[i : i + ngram] == text[-ngram:])
            match = text[: start + ngram]
            assert length == max(n for n in range(1, len(match) + 1) if match[-n:] == text[-n:])
    # The code of a traced step.
    with mock.patch.object(lookup, "is_eager_cpu", return_value=False):
        assert torch.equal(PromptLookup(*options).propose(tokens, lengths, num_draft_tokens).tokens, draft.tokens)
    assert torch.equal(tokens, before)


def test_prompt_lookup_takes_the_steps_of_transformers() -> None:
    """With the same settings, whose default theirs are. The model's greedy text ends in a cycle of a few tokens."""
    model = tiny("llama")
    for layer in model.model.layers:
        # Each token now depends on the one before alone.
        layer.self_attn.o_proj.weight.data.zero_()
    prompt = torch.tensor([[1, 17, 5, 33, 17, 5, 48]])
    for ngram, repeat in ((2, False), (1, False), (3, False), (2, True)):
        theirs = TokenStreamer()
        model.generation_config.max_matching_ngram_size = None if ngram == 2 else ngram
        options = {"do_sample": False, "max_new_tokens": 40, "pad_token_id": 0, "prompt_lookup_num_tokens": 6}
        model.generate(prompt, attention_mask=torch.ones_like(prompt), streamer=theirs, **options)
        greedy = torch_specops.SamplingParams(temperature=0.0)
        decoder = torch_specops.SpeculativeDecoder(
            model,
            PromptLookup(ngram, 1, repeat),
            num_draft_tokens=6,
            schedule="constant",
            sampling=greedy,
            compile=False,
        )
        ours = [step.tokens[0] for step in decoder.stream(prompt, max_new_tokens=40, eos_token_id=())]
        assert (ours == theirs.heard[1:-1]) == (not repeat), (ngram, repeat)
        assert len(ours) < 20


def suffix_lookup_by_loops(texts: list[list[int]], num_draft_tokens: int, max_ngram: int, least: float) -> list[int]:
    """The last text is the row's own, and the others are remembered."""
    own, places = texts[-1], []
    for text in texts:
        for end in range(len(text) - (text is own)):
            length = 0
            while length < min(max_ngram, end + 1, len(own)) and text[end - length] == own[-1 - length]:
                length += 1
            places.append((text, end, length))
    longest = max((length for _, _, length in places), default=0)
    # The newest place decides between equal votes.
    agree = [(text, end) for text, end, length in reversed(places) if length == longest]
    drafts: list[int] = []
    likely = 1.0
    while longest > 0 and len(drafts) < num_draft_tokens:
        votes = []
        for text, end in agree:
            ahead = len(drafts) % (len(own) - 1 - end) if text is own else len(drafts)
            votes.append(text[end + 1 + ahead] if end + 1 + ahead < len(text) else -1)
        counts = Counter(vote for vote in votes if vote >= 0)
        if not counts:
            break
        token, count = counts.most_common(1)[0]
        matched = longest + len(drafts)
        likely *= count / len(votes) * matched / (matched + 1)
        if likely < least:
            break
        drafts.append(token)
        agree = [place for place, vote in zip(agree, votes, strict=True) if vote == token]
    return drafts + [-1] * (num_draft_tokens - len(drafts))


@settings(deadline=None, max_examples=100)
@given(
    remembered=rows(3).map(lambda texts: texts[:2]),
    texts=st.one_of(rows(2), rows(3)).filter(lambda texts: all(texts)),
    num_draft_tokens=st.integers(0, 5),
    max_ngram=st.integers(1, 5),
    least=st.sampled_from([0.0, 0.1103, 0.3103]),
)
def test_suffix_lookup_is_the_plain_loop(
    remembered: list[list[int]], texts: list[list[int]], num_draft_tokens: int, max_ngram: int, least: float
) -> None:
    width = max(len(text) for text in texts) + 1
    tokens = torch.tensor([text + [text[-1]] * (width - len(text)) for text in texts])
    lengths = torch.tensor([len(text) for text in texts])
    draft = SuffixLookup(max_ngram, 1, least, memory=40)
    for text in remembered:
        draft.on_finished(torch.tensor([[*text, 0]]), torch.tensor([len(text)]))
    found = draft.propose(tokens, lengths, num_draft_tokens).tokens
    expected = [suffix_lookup_by_loops([*remembered, text], num_draft_tokens, max_ngram, least) for text in texts]
    assert found.tolist() == expected


def test_suffix_lookup_remembers_the_newest() -> None:
    """The ring forgets the oldest text, also one longer than itself; `forget` forgets all, and nothing is as well."""
    draft = SuffixLookup(memory=6)
    prompt, lengths = torch.tensor([[1, 2]]), torch.tensor([2])
    for text in ([1, 2, 3, 4], [1, 2, 5, 6]):
        draft.on_finished(torch.tensor([text]), torch.tensor([4]))
    assert draft.propose(prompt, lengths, 3).tokens.tolist() == [[5, 6, -1]]
    draft.on_finished(torch.tensor([[0, 0, 0, 0, 0, 1, 2, 7]]), torch.tensor([8]))
    assert draft.propose(prompt, lengths, 3).tokens.tolist() == [[7, -1, -1]]
    draft.forget()
    assert draft.propose(prompt, lengths, 3).tokens.tolist() == [[-1, -1, -1]]
    SuffixLookup(memory=0).on_finished(torch.tensor([[1, 2, 3]]), torch.tensor([3]))


def test_suffix_lookup_in_the_loop() -> None:
    """A text that is decoded again is copied from memory, and has the same tokens; traced, too."""
    model = PairModel(TABLE)
    draft = SuffixLookup()
    sampling = torch_specops.SamplingParams(temperature=0.0)
    decoder = torch_specops.SpeculativeDecoder(model, draft, schedule="constant", sampling=sampling)
    first, second = (decoder.generate(torch.tensor([[1, 2]]), max_new_tokens=24) for _ in range(2))
    assert torch.equal(first.sequences, second.sequences)
    assert second.stats.num_steps < first.stats.num_steps
    arguments = (first.sequences[:, :6].clone(), torch.tensor([6]), 4)
    traced = torch.compile(draft.propose, fullgraph=True, backend="eager")
    assert torch.equal(traced(*arguments).tokens, draft.propose(*arguments).tokens)


def test_lookups_with_bad_arguments() -> None:
    cases = [
        (lambda: PromptLookup(3, 0), ValueError, "min_ngram: expected a number >= 1, got 0"),
        (lambda: PromptLookup(1, 2), ValueError, "max_ngram: expected a number >= 2"),
        (lambda: SuffixLookup(min_ngram=0), ValueError, "min_ngram: expected"),
        (lambda: SuffixLookup(max_ngram=1), ValueError, "max_ngram: expected a number >= 2"),
        (lambda: SuffixLookup(min_probability=1.5), ValueError, r"min_probability: expected a number in \[0, 1\]"),
        (lambda: SuffixLookup(memory=-1), ValueError, "memory: expected a number >= 0, got -1"),
        (lambda: SuffixLookup(memory=10**8 + 1), ValueError, "memory: expected a number <= 100000000, got 100000001"),
        (lambda: SuffixLookup(memory=1e6), TypeError, "memory: expected an int, got"),
    ]
    assert raised(lambda make: make(), cases) == []


V = 9
TABLE = random_table(V, seed=1)
ROWS = [[3, 1, 4, 1, 5], [2], [6, 5]]


def pair_logits(text: list[int]) -> Tensor:
    """What PairModel says after a text, without a memory."""
    return TABLE[text[-2] if len(text) > 1 else V, text[-1]]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_model_draft_returns_what_it_sampled_from(temperature: float) -> None:
    source = ModelDraft(PairModel(TABLE))
    # Tokens behind a text are garbage.
    tokens = torch.tensor([row + [8] * (24 - len(row)) for row in ROWS])
    lengths, seeds = torch.tensor([len(row) for row in ROWS]), torch.tensor([5, 6, 7])
    source.start(tokens, lengths, 24)
    sampling = SamplingTensors(torch.full((3,), temperature), top_k=torch.full((3,), 2))
    draft = source.propose(tokens, lengths, 4, sampling, seeds)
    assert draft.logits is not None and draft.lse is not None
    assert draft.tokens.shape == draft.lse.shape == (3, 4) and draft.logits.shape == (3, 4, V)
    uniforms = torch_specops.uniforms(seeds, lengths, 4, "propose")
    for row, text in enumerate(ROWS):
        drafts = draft.tokens[row].tolist()
        expected = torch.stack([pair_logits(text + drafts[:index]) for index in range(4)])
        assert torch.equal(draft.logits[row], expected)
        drawn, lse = torch_specops.sample(
            expected, uniforms[row], torch.full((4,), temperature), top_k=torch.full((4,), 2)
        )
        assert torch.equal(draft.tokens[row], drawn)
        assert torch.equal(draft.lse[row], lse)


class Copies(TorchDispatchMode):
    """Collects the ops that copy logits [B, n, V]. A step under a dispatch mode is the step of a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func.__name__.split(".")[0]
        copies = name in ("cat", "clone", "constant_pad_nd", "pad", "scatter", "stack")
        if copies and result.dim() == 3 and result.shape[-1] == VOCAB:
            self.found.append(name)
        return result


def copies_of(draft: DraftSource, num_draft_tokens: int) -> list[str]:
    """The copies of logits in one `propose`."""
    found: list[list[str]] = []
    propose = draft.propose

    def observed(*arguments: Any) -> Draft:
        with Copies() as copies:
            proposal = propose(*arguments)
        assert proposal.logits is not None
        found.append(copies.found)
        return proposal

    with mock.patch.object(draft, "propose", observed):
        decode(draft, num_draft_tokens, sampling=torch_specops.SamplingParams(), compile=False, max_new_tokens=4)
    return found[0]


def test_logits_are_not_copied() -> None:
    model = perturbed(shared_tiny("llama"))
    assert copies_of(ModelDraft(model), 3) == ["stack"]
    assert copies_of(ModelDraft(model), 1) == []
    assert copies_of(LookupElse(model, num_other_tokens=1), 1) == []
    assert copies_of(PEagle(new_head(mask_token_id=VOCAB - 1), sampled=True), 3) == []
    assert copies_of(DFlash(new_drafter(), sampled=True), 3) == []
    assert copies_of(HierarchicalDraft(model), 3) == []
