"""Shows which new tokens were accepted drafts, and which are the target's own: in colour, or as plain text."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from typing import Any

from .pieces import TextPieces

# The tokens that a row emitted in a step, and how many of them, the first ones, were accepted drafts.
RowStep = tuple[Sequence[int], int]
# A row: its title, its steps, the prompt before them, and the tokens that are no text.
ViewRow = tuple[str, Sequence[RowStep], Sequence[int], Sequence[int]]
# The page shines through the backgrounds, so that its letters can be read on light and dark pages. The line tells the
# kinds apart without colours.
_OWN, _ACCEPTED = "background: #d299224d; border-bottom: 2px solid #d29922", "background: #2da44e59"
# A notebook shows this many rows on its own, and this many pieces of each.
_MOST_ROWS, _MOST_PIECES = 20, 1000


class TokenIds:
    """Stands for a tokenizer: the text of a token is its number."""

    def decode(self, tokens: Sequence[int], **arguments: Any) -> str:
        return "".join(f" {token}" for token in tokens)


class View(str):
    """Titles and texts of rows, with the target's own tokens in brackets. A notebook shows it in colours."""

    page: str
    __repr__ = str.__str__

    def _repr_html_(self) -> str:
        return self.page


def spans(pieces: TextPieces, steps: Iterable[RowStep]) -> Iterator[tuple[str, bool]]:
    """The text of a row as it becomes certain: pieces, and whether all tokens of a piece were accepted drafts."""
    all_accepted = True
    for tokens, num_accepted in steps:
        for index, token in enumerate(tokens):
            all_accepted &= index < num_accepted
            if piece := pieces.push(token):
                yield printable(piece), all_accepted
                all_accepted = True
    if rest := pieces.end():
        yield printable(rest), all_accepted


def printable(text: str) -> str:
    """Replace every control character but newline and tab by U+FFFD, because a model may emit escape sequences."""
    return "".join(
        "\ufffd" if unicodedata.category(character) == "Cc" and character not in "\n\t" else character
        for character in text
    )


def view(tokenizer: Any, rows: Iterable[ViewRow], most_pieces: int | None = None) -> View:
    """Show rows. Without a tokenizer, tokens are shown as numbers."""
    plain, page = [], [f"{_marked('accepted drafts', True)} {_marked('tokens of the target itself', False)}"]
    for title, steps, prompt, eos in rows:
        text = islice(spans(TextPieces(tokenizer or TokenIds(), prompt, eos_token_id=eos), steps), most_pieces)
        groups = [("".join(piece for piece, _ in group), of) for of, group in groupby(text, key=lambda span: span[1])]
        plain.append(f"{title}\n{''.join(part if accepted else f'[{part}]' for part, accepted in groups)}")
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


def _marked(text: str, is_accepted: bool) -> str:
    return f'<span style="{_ACCEPTED if is_accepted else _OWN}">{html.escape(text)}</span>'
