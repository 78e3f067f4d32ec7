"""The script that trains EAGLE-3 heads, and the head that it made for the byte-level target of the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_scripts import needs_benchmarks, script
from safetensors.torch import load_file
from tiny_eagle3 import chain_logits, new_head

from torch_specops.cli.loading import AUSTEN, HEADS, load_model, load_tokenizer
from torch_specops.drafts import Eagle3

pytestmark = needs_benchmarks
HELDOUT = Path(__file__).parents[1] / "data" / "austen_heldout.txt"


def test_what_is_trained_is_what_is_used() -> None:
    """Every chain of drafts at once gives what one chain after another gives."""
    head = new_head(norm_before_feedback=True)
    length, depth = 9, 3
    features = torch.randn(2, length, 96, dtype=torch.float64)
    tokens = torch.randint(60, (2, length + depth))
    assert head.embed_tokens is not None
    found = list(script("train_eagle3").chain_logits(head, features, head.embed_tokens(tokens), depth))
    for row, start in ((0, 0), (0, 4), (1, 8)):
        following, drafts = tokens[row, 1 : start + 2], tokens[row, start + 2 : start + 1 + depth]
        # The last draft is not read.
        drafts = torch.cat([drafts, torch.zeros(1, dtype=torch.int64)])
        expected = chain_logits(head, features[row, : start + 1], following, drafts)
        own = torch.stack([logits[row, start] for logits in found]).float()
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5)


def test_a_head_is_trained_and_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = script("train_eagle3")
    sizes = {"ROWS_PER_BATCH": 2, "BEGINNING": 8, "WINDOW": 12, "TOKENS_PER_STEP": 96, "SAVE_EVERY": 2}
    for name, value in sizes.items():
        monkeypatch.setattr(train, name, value)
    options = ["--tokens", "96", "--layers", "1", "5"]
    options += ["--draft-vocab", "20", "--row", "24", "--turn", "!"]
    for steps in ("1", "12"):
        rows = train.main([*options, "--steps", steps, "--out", str(tmp_path / steps)])
    draft = Eagle3.from_pretrained(tmp_path / "12", load_model(AUSTEN))
    assert draft.feature_layers == (1, 5)
    first, last = (load_file(tmp_path / steps / "model.safetensors") for steps in ("1", "12"))
    assert first.keys() == last.keys()
    # All weights learn. The embeddings are the target's.
    same = {name for name in first if torch.equal(first[name], last[name])}
    assert same == {"d2t", "t2d"} and "embed_tokens.weight" not in first
    counts = rows.flatten().bincount(minlength=256)
    has = draft.head.draft_of_target >= 0
    assert int(has.sum()) == 20 and int(counts[has].min()) >= int(counts[~has].max())
    heads = [train.read_head(tmp_path / steps, *CPU) for steps in ("1", "12")]
    read = train.Target(load_model(AUSTEN).model, heads[0]).read(rows)
    for divergence in (0.0, 1.0):
        losses = [float(train.losses(head, read, 12, divergence).mean()) for head in heads]
        assert 0 < losses[1] < losses[0] - 0.1


CPU = (torch.device("cpu"), torch.float32)


def test_measured_numbers_are_those_of_the_head() -> None:
    train = script("train_eagle3")
    recorded: dict[str, Any] = json.loads((HEADS[AUSTEN] / "metrics.json").read_text())
    head = train.read_head(HEADS[AUSTEN], *CPU)
    target = train.Target(load_model(AUSTEN).model, head)
    found = train.measure(head, target, train.held_out(load_tokenizer(AUSTEN), HELDOUT))
    for name in ("temperature 1", "greedy"):
        assert found[name] == pytest.approx(recorded[name], abs=1e-3)
        assert found[name][0] == max(found[name])
    assert (HEADS[AUSTEN] / "model.safetensors").stat().st_size < 2**20
