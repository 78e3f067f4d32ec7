"""How many drafts of a row or a request were accepted, and how outputs and steps look in a notebook and as text."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest
import torch
from tiny_loops import DRAFTS, GREEDY, decode, expected_rows, steps_of
from tiny_models import PROMPTS, PairModel, random_table, shared_tiny
from tiny_requests import alone, in_order
from tiny_tokenizers import austen

from torch_specops import GenerationOutput, Request, SpeculativeDecoder
from torch_specops.decode import GenerationStats, RowStep, Step
from torch_specops.decode.inputs import GenerateArguments
from torch_specops.drafts import Draft, ModelDraft, PromptLookup


def summed(*steps: list[RowStep]) -> list[int]:
    """The tokens, accepted and verified drafts of all steps, and their number."""
    every = [counts for of_row in steps for counts in of_row]
    return [*(sum(counts[kind] for counts in every) for kind in range(3)), len(every)]


def counts_of(stats: GenerationStats) -> list[int]:
    return [stats.num_tokens, stats.num_accepted, stats.num_proposed, stats.num_row_steps]


def test_rows_and_requests_add_up_to_the_statistics() -> None:
    limits = [20, 3, 12]
    steps, output = steps_of("perturbed", 4, max_new_tokens=limits)
    for row in range(3):
        counts = [
            (len(step.tokens[row]), step.num_accepted[row], step.num_proposed[row], step.rejected[row])
            for step in steps
        ]
        assert output.steps[row] == [each for each in counts if each[0] > 0]
    assert [sum(step.num_tokens for step in steps) for steps in output.steps] == limits
    assert summed(*output.steps) == counts_of(output.stats)
    assert output.acceptance == [sum(n for _, n, *_ in of) / sum(n for _, _, n, _ in of) for of in output.steps]
    assert decode(None, 1).acceptance == [None] * 3
    # A rule cuts a row within a step: what it has left counts.
    decoder = SpeculativeDecoder(shared_tiny("llama"), shared_tiny("llama"), num_draft_tokens=4, sampling=GREEDY)
    arguments, ends = GenerateArguments(max_new_tokens=20), len(PROMPTS[0]) + 7
    output = decoder.run(
        list(map(list, PROMPTS)), arguments, row_rules=[lambda texts: [len(text) == ends for text in texts]]
    )
    assert len(output.new_tokens(0)) == 7 and output.steps[0] == [(5, 4, 4, -1), (5, 4, 4, -1)]
    assert summed(*output.steps)[1:] == counts_of(output.stats)[1:] and output.acceptance[0] == 1
    # A request has the counts of its row, whoever had the row before.
    decoder = SpeculativeDecoder(
        shared_tiny("llama"), DRAFTS["perturbed"]("llama"), num_draft_tokens=3, sampling=GREEDY
    )
    requests = [Request(list(prompt), limit) for prompt, limit in zip([*PROMPTS, [5]], (9, 4, 12, 0), strict=True)]
    completions = in_order(decoder.generate_many(requests, batch_size=2))
    assert summed(*(each.steps for each in completions)) == counts_of(decoder.stats)
    for request, completion in zip(requests, completions, strict=True):
        output = alone(decoder, request)
        assert [completion.steps] == output.steps and [completion.acceptance] == output.acceptance
    # A step that emits nothing, because the target failed, does not count.
    decoder = SpeculativeDecoder(PairModel(torch.full((9, 8, 8), torch.nan)))
    with pytest.warns(RuntimeWarning, match="no finite logit"):
        assert decoder.generate([[1, 2]]).steps == [[]]
    (completion,) = decoder.generate_many([[1, 2]], batch_size=1)
    assert completion.steps == [] and completion.acceptance is None and counts_of(decoder.stats) == [0] * 4


@pytest.mark.parametrize("compile", [False, True])
def test_the_first_rejected_draft_is_kept(compile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside rows that have ended or whose limit leaves no room for all drafts."""
    proposed: list[list[list[int]]] = []

    class Recorded(ModelDraft):
        def propose(self, *arguments: Any) -> Draft:
            found = super().propose(*arguments)
            proposed.append(found.tokens.tolist())
            return found

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    draft = Recorded(DRAFTS["perturbed"]("llama"))
    options = {"num_draft_tokens": 3, "schedule": "constant", "sampling": GREEDY, "compile": compile}
    decoder = SpeculativeDecoder(shared_tiny("llama"), draft, **options)
    steps = list(decoder.stream(list(map(list, PROMPTS)), max_new_tokens=[20, 3, 12]))
    seen = set()
    for step, drafts in zip(steps, proposed[-len(steps) :], strict=True):
        rows = zip(drafts, step.num_accepted, step.num_proposed, step.rejected, strict=True)
        for row, accepted, verified, rejected in rows:
            assert rejected == (row[accepted] if accepted < verified else -1)
            seen.add((accepted < verified, verified))
    assert {(True, 3), (False, 3), (False, 0)} <= seen


BYTES, RED = list("<b>é🙂&".encode()), "#f851494d"


def output_of(rows: list[list[int]], counts: list[list[tuple[int, ...]]], reason: str) -> GenerationOutput:
    """The rows follow a prompt of one token."""
    steps = [[RowStep(*each) for each in of_row] for of_row in counts]
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor([65, *row]) for row in rows], batch_first=True)
    lengths = torch.tensor([len(row) + 1 for row in rows])
    stats: Any = None
    ones = torch.ones_like(lengths)
    return GenerationOutput(tokens, ones, lengths, stats, finish_reasons=[reason] * len(rows), steps=steps)


def coloured(page: str) -> list[list[tuple[str, str]]]:
    """The texts of a page's rows, in pieces with their colours."""
    _, *lines = re.findall(r"<div[^>]*>(.*?)</div>", page, re.DOTALL)
    pieces = [re.findall(r'<span style="background: (#\w{8})[^"]*">(.*?)</span>', line, re.DOTALL) for line in lines]
    assert pieces[::2] == [[]] * (len(lines) // 2)
    return [[(colour, html.unescape(text)) for colour, text in row] for row in pieces[1::2]]


def test_accepted_drafts_and_own_tokens_look_different() -> None:
    # The second byte of "é" is the target's own, and the smile was a draft; the last token is an eos without text. The
    # step of "&" was cut before its next token, and its rejected draft is not shown.
    steps = [(5, 4, 4), (4, 4, 4), (1, 1, 9, 120), (1, 0, 1, ord("\n"))]
    output = output_of([[*BYTES, 0], [120]], [steps, [(1, 0, 2, 121)]], "eos")
    view = output.show(austen())
    assert str(view).split("\n") == [
        "row 0: 11 tokens in 4 steps, 9 of 18 drafts accepted, ended by eos",
        "<b>[é]🙂&~~↵~~",
        "row 1: 1 tokens in 1 steps, 0 of 2 drafts accepted, ended by eos",
        "~~y~~",
    ]
    page = view._repr_html_()
    green, red, yellow = (
        colour for colour, _ in re.findall(r'background: (#\w{8})[^"]*">(accepted|rejected|tokens)', page)
    )
    assert len({green, red, yellow}) == 3 and red == RED
    assert coloured(page) == [[(green, "<b>"), (yellow, "é"), (green, "🙂&"), (red, "↵")], [(red, "y")]]
    assert "<b>" not in page and repr(view) == str(view)
    # A model may write what a terminal obeys.
    assert str(output_of([[27]], [[(1, 0, 0)]], "length").show(austen())).endswith("[\ufffd]")
    step = Step([BYTES[:5], []], [4, 0], [5, 0], [120, -1], [False, True], 0.0)
    assert str(step.show(austen())).split("\n") == [
        *("row 0: 4 of 5 drafts accepted", "<b>~~x~~[é]", "row 1: 0 of 0 drafts accepted", "")
    ]
    assert coloured(step._repr_html_()) == [[(green, " 60 98 62 195"), (red, " 120"), (yellow, " 169")], []]


def test_the_shown_text_is_the_text() -> None:
    tokenizer, model = austen(), PairModel(random_table(128, seed=1))
    options = {"num_draft_tokens": 3, "schedule": "constant", "sampling": GREEDY}
    decoder = SpeculativeDecoder(model, PromptLookup(min_ngram=1), **options)
    output = decoder.generate(tokenizer(["She had", "It"])["input_ids"], max_new_tokens=60)
    shown = coloured(output.show(tokenizer)._repr_html_())
    assert RED in {colour for row in shown for colour, _ in row}
    assert ["".join(text for colour, text in row if colour != RED) for row in shown] == [
        re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text) for text in output.texts(tokenizer)
    ]


def test_a_notebook_shows_the_beginning_of_a_large_output() -> None:
    large = output_of([[7] * 1200] * 25, [[(3, 2, 2)] * 400] * 25, "length")
    texts, whole = (
        ["".join(text for _, text in row) for row in coloured(page)]
        for page in (large._repr_html_(), large.show()._repr_html_())
    )
    assert texts == [" 7" * 1000] * 20 and whole == [" 7" * 1200] * 25
    assert "At most 20 rows and 1000 tokens of each; show() has all." in large._repr_html_()
    assert len(coloured(Step([[1]] * 21, *[[0] * 21] * 2, [-1] * 21, [False] * 21, 0.0)._repr_html_())) == 20


def test_progress_of_tokens_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    decode("itself", 4)
    assert capsys.readouterr().err == ""
    decode("itself", 4, progress=True)
    assert " 60/60 " in capsys.readouterr().err
    # Rows that end early leave nothing to wait for.
    output = decode("itself", 4, progress=True, eos_token_id=expected_rows()[0][7])
    count = output.stats.num_tokens
    assert count < 60 and f" {count}/{count} " in capsys.readouterr().err
    for call in (SpeculativeDecoder(PairModel(torch.zeros(9, 9, 9))).generate, decoder_many):
        with pytest.raises(TypeError, match="progress: expected a bool, got <class 'str'>"):
            call([[1, 2]], progress="yes")


def decoder_many(requests: Any, **options: Any) -> Any:
    return SpeculativeDecoder(PairModel(torch.zeros(9, 9, 9))).generate_many(requests, batch_size=1, **options)


def test_a_decoder_says_what_it_is() -> None:
    target = shared_tiny("llama")
    assert repr(SpeculativeDecoder(target, shared_tiny("llama", seed=3), num_draft_tokens=4)) == (
        "SpeculativeDecoder(target='LlamaForCausalLM', draft='LlamaForCausalLM', verify='exact', "
        "schedule='Constant', num_draft_tokens=4, compiled=False)"
    )
    assert repr(SpeculativeDecoder(PairModel(torch.zeros(9, 9, 9)), PromptLookup())) == (
        "SpeculativeDecoder(target='PairModel', draft='PromptLookup', verify='gumbel', schedule='Auto', "
        "num_draft_tokens=10, compiled=False)"
    )
    assert "draft=None, verify='gumbel', schedule='Constant', num_draft_tokens=0" in repr(SpeculativeDecoder(target))
