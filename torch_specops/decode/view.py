"""Shows which new tokens were accepted drafts, and which drafts were rejected: in colour, or as plain text."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from typing import Any, Literal

from .pieces import TextPieces

# The tokens that a row emitted in a step, how many of them, the first ones, were accepted drafts, and the draft
# that was rejected after these or -1.
TokensOfStep = tuple[Sequence[int], int, int]
# A row: its title, its steps, the prompt before them, and the tokens that are no text.
ViewRow = tuple[str, Sequence[TokensOfStep], Sequence[int], Sequence[int]]
Kind = Literal["accepted", "own", "rejected"]
# The page shines through the backgrounds, so that its letters can be read on light and dark pages. Lines tell the kinds
# apart without colours.
_STYLES: dict[Kind, str] = {
    "accepted": "background: #2da44e59",
    "own": "background: #d299224d; border-bottom: 2px solid #d29922",
    "rejected": "background: #f851494d; text-decoration: line-through",
}
_PLAIN: dict[Kind, str] = {"accepted": "{}", "own": "[{}]", "rejected": "~~{}~~"}
# A notebook shows this many rows on its own, and this many pieces of each.
_MOST_ROWS, _MOST_PIECES = 20, 1000


class TokenIds:
    """Stands for a tokenizer: the text of a token is its number."""

    def decode(self, tokens: Sequence[int], **arguments: Any) -> str:
        return "".join(f" {token}" for token in tokens)


class View(str):
    """Titles and texts of rows, with the target's own tokens in brackets and rejected drafts between ~~. A notebook
    shows it in colours."""

    page: str
    __repr__ = str.__str__

    def _repr_html_(self) -> str:
        return self.page


def spans(pieces: TextPieces, steps: Iterable[TokensOfStep]) -> Iterator[tuple[str, Kind]]:
    """The text of a row as it becomes certain, in pieces. A rejected draft comes before the token in its place. A piece
    is "accepted" if all of its tokens were accepted drafts, and otherwise "own"."""
    kind: Kind = "accepted"
    for tokens, num_accepted, rejected in steps:
        for index, token in enumerate(tokens):
            if index == num_accepted and rejected >= 0 and (text := pieces.text_after(rejected)):
                # A line break would move the text after it.
                yield printable(text).replace("\n", "↵"), "rejected"
            if index >= num_accepted:
                kind = "own"
            if piece := pieces.push(token):
                yield printable(piece), kind
                kind = "accepted"
    if rest := pieces.end():
        yield printable(rest), kind


def printable(text: str) -> str:
    """Replace every control character but newline and tab by U+FFFD, because a model may emit escape sequences."""
    return "".join(
        "\ufffd" if unicodedata.category(character) == "Cc" and character not in "\n\t" else character
        for character in text
    )


def view(tokenizer: Any, rows: Iterable[ViewRow], most_pieces: int | None = None) -> View:
    """Show rows. Without a tokenizer, tokens are shown as numbers."""
    legend = _marked("accepted drafts", "accepted"), _marked("rejected drafts", "rejected")
    plain, page = [], [" ".join((*legend, _marked("tokens of the target itself", "own")))]
    for title, steps, prompt, eos in rows:
        text = islice(spans(TextPieces(tokenizer or TokenIds(), prompt, eos_token_id=eos), steps), most_pieces)
        groups = [("".join(piece for piece, _ in group), of) for of, group in groupby(text, key=lambda span: span[1])]
        plain.append(f"{title}\n{''.join(_PLAIN[kind].format(part) for part, kind in groups)}")
        page += [title, "".join(_marked(*group) for group in groups)]
    shown = View("\n".join(plain))
    # The classes keep notebooks from reading dollars in a text as formulas.
    div = '<div class="tex2jax_ignore mathjax_ignore" style="white-space: pre-wrap">'
    shown.page = "".join(f"{div}{line}</div>" for line in page)
    return shown


def beginning(rows: Iterable[ViewRow]) -> str:
    """What a notebook shows on its own."""
    remark = f"At most {_MOST_ROWS} rows and {_MOST_PIECES} tokens of each; show() has all."
    return view(None, islice(rows, _MOST_ROWS), _MOST_PIECES).page + remark


def _marked(text: str, kind: Kind) -> str:
    return f'<span style="{_STYLES[kind]}">{html.escape(text)}</span>'
