"""Shows which new tokens were accepted drafts, and which are the target's own: in colour, or as plain text."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

from .pieces import TextPieces

# A piece of text, and whether all of its tokens were accepted drafts.
Span = tuple[str, bool]
# The tokens that a row emitted in a step, and how many of them were accepted drafts: the first ones.
RowStep = tuple[Sequence[int], int]
# The backgrounds let the page shine through, so that its own letters can be read on light and dark pages. The line
# tells the kinds apart without colours.
_ACCEPTED, _OWN = "background: #2da44e59", "background: #d299224d; border-bottom: 2px solid #d29922"
_CELL = '<td style="text-align: left; white-space: pre-wrap; max-width: 50em">'


class Pieces(Protocol):
    """`TextPieces`, or what stands for it."""

    def push(self, token: int) -> str: ...

    def end(self) -> str: ...


class TokenIds:
    """Stands for `TextPieces` where no tokenizer is known: the text of a token is its number."""

    def push(self, token: int) -> str:
        return f" {token}"

    def end(self) -> str:
        return ""


def spans(pieces: Pieces, steps: Iterable[RowStep]) -> Iterator[Span]:
    """The text of a row, as it becomes certain."""
    all_accepted = True
    for tokens, num_accepted in steps:
        for index, token in enumerate(tokens):
            all_accepted &= index < num_accepted
            if piece := pieces.push(token):
                yield printable(piece), all_accepted
                all_accepted = True
    yield printable(pieces.end()), all_accepted


def text_of(
    tokenizer: Any, steps: Iterable[RowStep], prompt: Sequence[int] = (), eos_token_id: int | None = None
) -> list[Span]:
    """The text of a row. Neighbours of the same kind are joined."""
    pieces = TokenIds() if tokenizer is None else TextPieces(tokenizer, prompt, eos_token_id=eos_token_id)
    groups = groupby(spans(pieces, steps), key=lambda span: span[1])
    joined = (("".join(piece for piece, _ in group), is_accepted) for is_accepted, group in groups)
    return [(piece, is_accepted) for piece, is_accepted in joined if piece]


def printable(text: str) -> str:
    """Replace every control character but newline and tab by U+FFFD, because a model may emit escape sequences."""
    return "".join(
        "\ufffd" if unicodedata.category(character) == "Cc" and character not in "\n\t" else character
        for character in text
    )


@dataclass(frozen=True, repr=False)
class View:
    """The rows of a batch, each with numbers and its text. Notebooks show the text in colours; `str` has plain text, in
    which the target's own tokens stand in brackets.

    Args:
        titles: the names of the numbers.
        rows: the numbers of each row, and its text.
        remark: what was left out.
    """

    titles: Sequence[str]
    rows: Sequence[tuple[Sequence[object], Sequence[Span]]]
    remark: str = ""

    def __str__(self) -> str:
        lines = []
        for numbers, text in self.rows:
            lines.append(", ".join(f"{title} {number}" for title, number in zip(self.titles, numbers, strict=True)))
            lines.append("".join(piece if accepted else f"[{piece}]" for piece, accepted in text))
        return "\n".join([*lines, self.remark]).removesuffix("\n")

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = ["".join(f"<th>{title}</th>" for title in (*self.titles, "text"))]
        for numbers, text in self.rows:
            cells = "".join(f"<td>{html.escape(str(number))}</td>" for number in numbers)
            rows.append(f"{cells}{_CELL}{''.join(_marked(*span) for span in text)}</td>")
        legend = f"{_marked('accepted drafts', True)} {_marked('tokens of the target itself', False)}"
        # The classes keep notebooks from reading dollars in a text as formulas.
        legend += '<table class="tex2jax_ignore mathjax_ignore">'
        return f"{legend}<tr>{'</tr><tr>'.join(rows)}</tr></table>{self.remark}"


def _marked(piece: str, is_accepted: bool) -> str:
    return f'<span style="{_ACCEPTED if is_accepted else _OWN}">{html.escape(piece)}</span>'
