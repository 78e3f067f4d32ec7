"""Text in pieces adds up to the text of the whole."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_tokenizers import KINDS, austen, byte_fallback, byte_level, unigram
from transformers.convert_slow_tokenizer import bytes_to_unicode

from torch_specops import GenerationOutput, TextPieces
from torch_specops.hf import stop_string_rule

WORDS = ["the", " big", " ", "é", "東", "🙂", ",", "a", "'", " n't", " ' ", " .", "\n"]


def whole(tokenizer: Any, prompt: list[int], new: list[int], reason: str = "length", **arguments: Any) -> str:
    tokens, length = torch.tensor([prompt + new], dtype=torch.int64), torch.tensor([len(prompt)])
    output = GenerationOutput(tokens, length, length + len(new), None, finish_reasons=[reason])  # type: ignore[arg-type]
    return output.texts(tokenizer, **arguments)[0]


def in_pieces(tokenizer: Any, prompt: list[int], new: Any, **arguments: Any) -> list[str]:
    pieces = TextPieces(tokenizer, prompt, **arguments)
    return [*map(pieces.push, new), pieces.end()]


def texts_of(tokenizer: Any, draw: random.Random) -> Iterator[tuple[list[int], list[int]]]:
    """Prompts and new tokens: of words, of any tokens, of the same few, or of bytes with gaps. Half of them end in any
    place, which may be inside a character."""
    size, vocab = len(tokenizer), tokenizer.get_vocab()
    byte_ids = [vocab.get(f"<0x{byte:02X}>", vocab.get(letter)) for byte, letter in bytes_to_unicode().items()]
    token_of = dict(zip(bytes_to_unicode(), byte_ids, strict=True))
    while True:
        words = "".join(draw.choices(WORDS, k=20))
        kinds = [
            tokenizer(words, add_special_tokens=False)["input_ids"],
            draw.choices(range(size), k=30),
            draw.choices(draw.choices(range(size), k=3), k=60),
            [token for byte in words.encode() if (token := token_of[byte]) is not None and draw.random() < 0.9],
        ]
        tokens = draw.choice(kinds)
        end = draw.choice([len(tokens), draw.randint(0, len(tokens))])
        start = draw.choice([0, draw.randint(0, end)])
        yield tokens[:start], tokens[start:end]


@pytest.mark.parametrize("made", KINDS, ids=lambda made: made.__name__)
def test_pieces_add_up_to_the_text(made: Any) -> None:
    """Whatever is skipped, and whether spaces are cleaned up."""
    draw, differ = random.Random(5), []
    force = {"clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True}
    for cleans in (False, True):
        tokenizer = made(clean_up_tokenization_spaces=cleans, **force)
        for prompt, new in islice(texts_of(tokenizer, draw), 120):
            arguments = {"skip_special_tokens": draw.random() < 0.5}
            expected = whole(tokenizer, prompt, new, **arguments)
            # Text waits for a stop string that does not come.
            stop = "@" * draw.choice([1, 12])
            if (
                stop not in expected
                and "".join(in_pieces(tokenizer, prompt, new, stop_strings=stop, **arguments)) != expected
            ):
                differ.append((prompt, new, arguments))
    assert differ == []


def test_what_waits_and_what_does_not() -> None:
    letters, named = byte_level(), byte_fallback()
    (letter,) = letters("a")["input_ids"]
    bytes_of = austen()("é🙂a")["input_ids"]
    assert in_pieces(austen(), [], bytes_of) == ["", "é", "", "", "", "🙂", "a", ""]
    assert in_pieces(austen(), [], bytes_of[:4]) == ["", "é", "", "", "\ufffd"]
    # A wrong byte changes all of a run: the library decodes it as one.
    run = [named.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "é".encode()]
    special, big = named.convert_tokens_to_ids(["</s>", "▁big"])
    assert in_pieces(named, [big], [big, *run, special, big]) == [" big", "", "", "", "é big", ""]
    assert in_pieces(named, [big], [*run, special, run[0], big]) == ["", "", "", "", "\ufffd" * 3 + " big", ""]
    # The space of SentencePiece, after the prompt and after a token without text; not where a text begins.
    assert in_pieces(named, [big], [special, big, special, big]) == ["", " big", "", " big", ""]
    assert in_pieces(named, [], [special, big, special, big]) == ["", "big", "", " big", ""]
    # A character whose last byte is far from the others.
    smile = letters.convert_tokens_to_ids([bytes_to_unicode()[byte] for byte in (0xFF, *"🙂".encode())])
    blanks = letters.convert_tokens_to_ids(["</s>"] * 20)
    for count in range(16):
        tokens = [letter] * count + smile[:-1] + blanks + smile[-1:]
        assert "".join(in_pieces(letters, [], tokens)) == "a" * count + "\ufffd🙂", count
    # Half a character of the prompt.
    half, rest = letters("¢")["input_ids"]
    assert "".join(in_pieces(letters, [letter, half], [rest, letter])) == "\ufffda"
    assert "".join(in_pieces(letters, [letter, half], [letter])) == "a"


def test_arguments_of_pieces() -> None:
    tokenizer, bytes_of = austen(), list(b"a big cat")
    # An eos token has no text, special or not.
    for reason, eos, arguments in (("eos", ord("t"), {}), ("length", (), {"skip_special_tokens": False})):
        expected = whole(tokenizer, [], bytes_of, reason, **arguments)
        assert "".join(in_pieces(tokenizer, [], bytes_of, eos_token_id=eos, **arguments)) == expected, reason
    assert "".join(in_pieces(tokenizer, [], torch.tensor(bytes_of), eos_token_id=[1, ord("t")])) == "a big ca"
    # A tensor, a processor, a tokenizer of the library, and an object that has `decode` alone.
    named = byte_fallback()
    for holder in (SimpleNamespace(tokenizer=named, decode=named.decode), named.backend_tokenizer):
        pieces = TextPieces(holder, torch.tensor([5, 6]))
        assert [pieces.push(token) for token in torch.tensor([3 + 0xC3, 3 + 0xA9, 3 + 0x61])] == [""] * 3
        assert (pieces.end(), pieces.end()) == ("éa", "")
    words = SimpleNamespace(decode=lambda ids, skip_special_tokens: "".join(f" {token}" for token in ids)[1:])
    assert in_pieces(words, [9], [8, 7]) == [" 8", " 7", ""]
    with pytest.raises(ValueError, match="stop_strings: expected strings that are not empty, got ''"):
        TextPieces(tokenizer, stop_strings=["a", ""])


def test_stop_strings_end_the_text() -> None:
    """At the token at which the rule of `generate` ends it. Nothing that may begin a string is given before."""
    draw, num_stopped = random.Random(6), 0
    for made in (byte_level, byte_fallback, unigram):
        tokenizer = made()
        for prompt, new in islice(texts_of(tokenizer, draw), 100):
            text = whole(tokenizer, prompt, new)
            stops = [text[place : place + 3] for place in (len(text) // 2, len(text) // 3)]
            if "\ufffd" in text or "" in stops:
                continue
            pieces = TextPieces(tokenizer, prompt, stop_strings=stops)
            given, end = "", min(map(text.index, stops))
            taken = []
            while not pieces.stopped:
                taken.append(new[len(taken)])
                given += pieces.push(taken[-1])
                assert text[:end].startswith(given)
            assert given == text[:end] and pieces.push(new[0]) == pieces.end() == ""
            num_stopped += 1
            # The rule sees the prompt too, and a space that SentencePiece drops.
            if made is byte_level and not prompt:
                rule = stop_string_rule(tokenizer, stops)
                ended = rule([taken[:length] for length in range(1, len(taken) + 1)])
                assert ended == [False] * (len(taken) - 1) + [True]
    assert num_stopped > 100
    # In a last token that ends inside a character.
    pieces = TextPieces(
        SimpleNamespace(decode=lambda ids, **_: "".join(["one end\ufffd"][: len(ids)])), stop_strings="end"
    )
    assert (pieces.push(0), pieces.stopped) == ("one ", True)


def test_few_tokens_are_decoded_for_each() -> None:
    """However long the text, and if it is never whole."""
    for made in (byte_level, austen):
        tokenizer, widths = made(), []

        def decode(ids: list[int], tokenizer: Any = tokenizer, widths: list[int] = widths, **arguments: Any) -> str:
            widths.append(len(ids))
            return tokenizer.decode(ids, **arguments)

        invalid = [len(tokenizer) - 1 if made is austen else tokenizer.convert_tokens_to_ids(bytes_to_unicode()[255])]
        for tokens in (tokenizer("a big text 🙂" * 20)["input_ids"], invalid * 200):
            pieces = TextPieces(SimpleNamespace(decode=decode), tokens[:1])
            text = "".join(map(pieces.push, tokens))
            assert len(text) >= len(tokens) / 4
            assert text + pieces.end() == tokenizer.decode(tokens)
        assert max(widths) <= 24
