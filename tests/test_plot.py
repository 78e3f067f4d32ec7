"""Plots of what was decoded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_specops import Completion, GenerationOutput, plot
from torch_specops.decode import GenerationStats, RowStep

pytest.importorskip("matplotlib")


def test_lines_are_shares_of_all_that_was_verified() -> None:
    one, stats = torch.ones(1, dtype=torch.int64), GenerationStats(seeds=[])
    steps = [[RowStep(3, 2, 2)], [RowStep(1, 0, 2), RowStep(1, 0, 0)]]
    output = GenerationOutput(one[None], one, one, stats, steps=steps)
    completion = Completion(0, one, one, None, 1, "length", steps=[RowStep(2, 1, 4)])
    figure = plot.acceptance({"code": output, "both": [output, completion], "request": (completion,)})
    lines = [(line.get_label(), line.get_xdata().tolist(), line.get_ydata().tolist()) for line in figure.axes[0].lines]
    assert lines == [
        ("code", [1, 2], [0.5, 0.5]),
        ("both", [1, 2, 3, 4], [2 / 3, 1 / 3, 0.0, 0.0]),
        ("request", [1, 2, 3, 4], [1.0, 0.0, 0.0, 0.0]),
    ]
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["code", "both", "request"]
    # A notebook shows the picture.
    figure = plot.acceptance(output)
    (line,) = figure.axes[0].lines
    assert line.get_ydata().tolist() == [0.5, 0.5] and figure._repr_png_().startswith(b"\x89PNG")


def test_what_cannot_be_plotted_is_named() -> None:
    wrong: Any
    for wrong, error, message in (
        (3, TypeError, "outputs: expected outputs, completions or lists of them, got <class 'int'>"),
        ({"a": [None]}, TypeError, "got <class 'NoneType'>"),
        ({"a": []}, ValueError, r"outputs: expected verified drafts, got none in \['a'\]"),
        ([], ValueError, "outputs: expected verified drafts, got none"),
        ({}, ValueError, "outputs: expected verified drafts, got none"),
    ):
        with pytest.raises(error, match=message):
            plot.acceptance(wrong)
