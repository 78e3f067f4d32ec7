"""The adapters of xgrammar and llguidance, against regular expressions; and how a bitmask is applied."""

from __future__ import annotations

import re

import llguidance
import pytest
import torch
from grammar_libraries import EOS, LIBRARIES, TEXTS, llguidance_tokenizer
from tiny_grammars import allowed_tokens
from tiny_models import VOCAB, raised

from torch_specops import grammars
from torch_specops.grammars import allowed_logits, num_words

# A regular expression, and one of all beginnings of its texts.
REGEX = r"na(me|b)?: (10*|tru(e|th)), a+"
BEGINNINGS = r"(n(a(m|me|b)?)?|na(me|b)?:( (1(0*)|t|tr|tru|true|trut|truth)?(,( a*)?)?)?)?"


def can_go_on(text: str) -> bool:
    found = re.fullmatch(BEGINNINGS, text)
    return found is not None and not re.search(r"(: |tru|t|tr|trut),", text)


@pytest.mark.parametrize("library", LIBRARIES)
def test_masks_and_acceptance_are_those_of_the_language(library: str) -> None:
    """Along all tokenisations of a text; llguidance allows only the canonical token where text is forced."""
    grammar = LIBRARIES[library](REGEX)
    text, words = "", [*"name: 100, aa"]
    wholes = {token: text for token, text in enumerate(TEXTS) if not text.startswith("<")}
    num_accepted = 0
    while words:
        possible = [token for token, more in wholes.items() if can_go_on(text + more)]
        possible += [EOS] if re.fullmatch(REGEX, text) else []
        allowed = allowed_tokens(grammar)
        assert allowed == sorted(possible) if library == "xgrammar" else set(allowed) <= set(possible) and allowed
        for token in range(VOCAB):
            assert grammar.accept(token) == (token in possible), (text, TEXTS[token])
            if token in possible:
                grammar.rollback(1)
        assert allowed_tokens(grammar) == allowed
        rest = "".join(words)
        token = max((token for token in allowed if rest.startswith(TEXTS[token])), key=lambda token: len(TEXTS[token]))
        assert grammar.accept(token)
        num_accepted, text = num_accepted + 1, text + TEXTS[token]
        del words[: len(TEXTS[token])]
    assert text == "name: 100, aa"
    # An eos is accepted once, and nothing after it.
    assert EOS in allowed_tokens(grammar) and grammar.accept(EOS)
    assert not grammar.accept(EOS) and not grammar.accept(TEXTS.index("a"))
    grammar.rollback(1)
    assert EOS in allowed_tokens(grammar)
    grammar.rollback(num_accepted)
    assert allowed_tokens(grammar) == allowed_tokens(LIBRARIES[library](REGEX))


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_eos_where_nothing_else_may_come(library: str) -> None:
    grammar = LIBRARIES[library]("ab")
    assert grammar.accept(TEXTS.index("ab")) and allowed_tokens(grammar) == [EOS]
    assert not grammar.accept(TEXTS.index("a"))
    assert grammar.accept(EOS) and not grammar.accept(EOS)
    grammar.rollback(2)
    assert grammar.accept(TEXTS.index("a")) and TEXTS.index("b") in allowed_tokens(grammar)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("vocab_size", [32, VOCAB, 64, 100, 200])
def test_grammar_with_another_vocabulary_size(library: str, vocab_size: int) -> None:
    """Models pad their logits; tokens that no tokenizer has are not allowed, even where everything else is."""
    grammar = LIBRARIES[library](r"(.|\n)*")
    whole = allowed_tokens(LIBRARIES[library](r"(.|\n)*"))
    assert len(whole) > 45 and max(whole) < VOCAB
    allowed = allowed_tokens(grammar, vocab_size)
    assert allowed == [token for token in whole if token < 32 * num_words(vocab_size)]


def test_bad_input_is_refused_by_name() -> None:
    lark, tokenizer = llguidance.LLMatcher.grammar_from_lark, llguidance_tokenizer()
    makers = r"grammar: expected Lark, or .* LLMatcher.grammar_from_json_schema or grammar_from_regex"
    accepted = r"count: expected a number in \[0, 0\], the accepted tokens, got 1"
    cases = [
        (lambda: grammars.xgrammar("a*"), TypeError, "compiled_grammar: expected an xgrammar.CompiledGrammar, got"),
        (lambda: grammars.llguidance("gpt2", lark('start: "a"')), TypeError, "tokenizer: expected an LLTokenizer"),
        (lambda: grammars.llguidance(tokenizer, lark("start: b")), ValueError, f"{makers}; llguidance says: .*b"),
        (lambda: grammars.llguidance(tokenizer, '{"type": "object"}'), ValueError, makers),
        (lambda: LIBRARIES["xgrammar"]("a").rollback(1), ValueError, accepted),
        (lambda: LIBRARIES["llguidance"]("a").rollback(1), ValueError, accepted),
    ]
    assert raised(lambda make: make(), cases) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_bitmask_takes_tokens_away(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    for vocab_size in (1, 31, 32, 45, 96):
        logits = torch.randn(2, 3, vocab_size, generator=generator).to(dtype)
        bits = torch.rand(2, 3, 32 * num_words(vocab_size), generator=generator) < 0.5
        bitmask = (bits.long().unflatten(2, (-1, 32)) << torch.arange(32)).sum(3).to(torch.int32)
        expected = logits.masked_fill(~bits[..., :vocab_size], -torch.inf)
        for reads_data in (True, False):
            # Traced calls and calls on a device take another form.
            monkeypatch.setattr(grammars, "is_eager_cpu", lambda *tensors, reads_data=reads_data: reads_data)
            found = allowed_logits(logits, bitmask)
            assert found.dtype == dtype and torch.equal(found, expected)
    # An infinite logit of a forbidden token is excluded as well: the ops read NaN so.
    assert not torch.isfinite(allowed_logits(torch.full((1, 1, 2), torch.inf), torch.tensor([[[1]]]).int()))[0, 0, 1]
