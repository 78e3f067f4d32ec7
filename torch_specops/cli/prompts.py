"""Reads files of prompts: JSON lines in the format of Spec-Bench."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from .loading import read_text

# The category of lines that name no category.
ALL = "all"


@dataclass(frozen=True)
class Question:
    """A prompt: the first turn of a line. Later turns are left out, because they need the answers to earlier turns."""

    text: str
    category: str = ""
    place: str = "prompt"  # the beginning of error messages
    num_later_turns: int = 0


def read_questions(path: Path) -> list[Question]:
    """The questions of a file, in its order. Empty lines are skipped.

    Raises:
        ValueError: a file that cannot be read, or a line that is not a question; the message names the line.
    """
    # Do not use `splitlines`, because it also splits at other line breaks, which a JSON string may contain.
    lines = read_text("prompts", path).split("\n")
    questions = [
        _question(line, f"prompts: {path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not questions:
        raise ValueError(f"prompts: expected a question in {str(path)!r}, got an empty file")
    return questions


def _question(line: str, place: str) -> Question:
    expected = f"{place}: expected "
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{expected}JSON, got {line[:40]!r} ({error})") from error
    if not isinstance(fields, dict):
        raise ValueError(f'{expected}an object such as {{"category": "math", "turns": ["2 + 2?"]}}, got {line[:40]!r}')
    if "turns" not in fields:
        raise ValueError(f"{expected}the field 'turns', got {', '.join(map(repr, fields)) or 'none'}")
    turns, category = fields["turns"], fields.get("category", ALL)
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(f"{expected}'turns' to be a list of texts, none of them empty, got {json.dumps(turns)[:40]}")
    # Refuse control characters in the name, because tables print it and a terminal would obey them.
    if not isinstance(category, str) or not category.strip() or not category.isprintable():
        raise ValueError(f"{expected}'category' to be a name, got {json.dumps(category)[:40]}")
    return Question(turns[0], category, place, len(turns) - 1)
