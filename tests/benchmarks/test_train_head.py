"""The script that trains EAGLE-3 heads and MTP layers, and what it made for the byte-level target of the package."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_scripts import needs_benchmarks, script
from marks import slow
from safetensors.torch import load_file
from tiny_eagle3 import chain_logits, new_head

import torch_specops
from torch_specops.cli.loading import AUSTEN, HEADS, load_model, load_tokenizer
from torch_specops.drafts import MTP, Draft, Eagle3
from torch_specops.drafts.eagle3_files import read_head

pytestmark = needs_benchmarks
HELDOUT = Path(__file__).parents[1] / "data" / "austen_heldout.txt"


def test_what_is_trained_is_what_is_used() -> None:
    """Every chain of drafts at once gives what one chain after another gives."""
    head = new_head(norm_before_feedback=True)
    length, depth = 9, 3
    features = torch.randn(2, length, 96, dtype=torch.float64)
    tokens = torch.randint(60, (2, length + depth))
    assert head.embed_tokens is not None
    found = list(script("train_head").chain_logits(head, features, head.embed_tokens(tokens), depth))
    for row, start in ((0, 0), (0, 4), (1, 8)):
        following, drafts = tokens[row, 1 : start + 2], tokens[row, start + 2 : start + 1 + depth]
        # The last draft is not read.
        drafts = torch.cat([drafts, torch.zeros(1, dtype=torch.int64)])
        expected = chain_logits(head, features[row, : start + 1], following, drafts)
        own = torch.stack([logits[row, start] for logits in found]).float()
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5)


def test_an_mtp_layer_is_trained_as_it_is_used(tmp_path: Path) -> None:
    """The logits of every step are those of a chain over the whole text."""
    train, model = script("train_head"), load_model(AUSTEN)
    head = train.Mtp(model.model)
    train.save(head, tmp_path)
    seen: list[tuple[torch.Tensor, Draft]] = []

    class Kept(MTP):
        def propose(self, tokens: torch.Tensor, lengths: torch.Tensor, *others: Any) -> Draft:
            seen.append((tokens[:, : int(lengths)].clone(), super().propose(tokens, lengths, *others)))
            return seen[-1][1]

    draft = Kept.from_pretrained(model, tmp_path)
    prompt = torch.tensor([list(b"It was not to be ")])
    torch_specops.generate(model, prompt, draft=draft, num_draft_tokens=3, max_new_tokens=12, seed=0)
    assert len(seen) > 3
    for text, drafts in seen:
        row = torch.cat([text, drafts.tokens], 1)
        with torch.inference_mode():
            features = model.model(row, output_hidden_states=True).hidden_states[-1][:, : text.shape[1] - 1]
            chains = train.chain_logits(head, features, model.model.get_input_embeddings()(row), drafts.tokens.shape[1])
            own = torch.stack([logits[0, -1] for logits in chains])
        assert drafts.logits is not None
        torch.testing.assert_close(drafts.logits[0], own, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["eagle3", slow("mtp")])
def test_a_head_is_trained_and_stored(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = script("train_head")
    sizes = {"ROWS_PER_BATCH": 2, "BEGINNING": 8, "WINDOW": 12, "TOKENS_PER_STEP": 96}
    for name, value in sizes.items():
        monkeypatch.setattr(train, name, value)
    heads = []

    def recording(head: Any, *rest: Any, train_head: Any = train.train) -> Any:
        heads.append(deepcopy(head))
        heads.append(train_head(head, *rest))
        return heads[1]

    monkeypatch.setattr(train, "train", recording)
    options = [kind, "--tokens", "96", "--row", "24", "--turn", "!", "--steps", "12"]
    options += ["--layers", "1", "5", "--draft-vocab", "20"] if kind == "eagle3" else []
    rows = train.main([*options, "--out", str(tmp_path / "last")])
    train.save(heads[0], tmp_path / "first")
    name = {"eagle3": "model.safetensors", "mtp": "mtp.safetensors"}[kind]
    first, last = (load_file(tmp_path / folder / name) for folder in ("first", "last"))
    assert first.keys() == last.keys()
    # All weights learn. The embeddings are the target's.
    same = {name for name in first if torch.equal(first[name], last[name])}
    assert same == ({"d2t", "t2d"} if kind == "eagle3" else set()) and "embed_tokens.weight" not in first
    model, draft_of_target, layers = load_model(AUSTEN), torch.arange(256), (8,)
    if kind == "eagle3":
        draft = Eagle3.from_pretrained(tmp_path / "last", model)
        assert draft.feature_layers == (1, 5)
        counts = rows.flatten().bincount(minlength=256)
        draft_of_target, layers = draft.head.draft_of_target, (1, 5)
        has = draft_of_target >= 0
        assert int(has.sum()) == 20 and int(counts[has].min()) >= int(counts[~has].max())
    read = train.read_text(model.model, layers, draft_of_target, rows)
    for divergence in (0.0, 1.0):
        losses = [float(train.losses(head, read, 12, divergence).mean().detach()) for head in heads]
        assert 0 < losses[1] < losses[0] - 0.1


# The files do not change.
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_measured_numbers_are_those_of_the_head(kind: str) -> None:
    train, model = script("train_head"), load_model(AUSTEN).model
    if kind == "eagle3":
        weights, metrics = HEADS[AUSTEN] / "model.safetensors", HEADS[AUSTEN] / "metrics.json"
        head = read_head(HEADS[AUSTEN], torch.device("cpu"), torch.float32)
        layers, most = head.config.feature_layers, 2**20
    else:
        weights, metrics = (Path(model.name_or_path) / name for name in ("mtp.safetensors", "mtp_metrics.json"))
        head, layers, most = train.Mtp(model), (8,), 500_000
        head.layer.load_state_dict(MTP.from_pretrained(model).head.layers[0].state_dict())
    text = train.held_out(load_tokenizer(AUSTEN), HELDOUT)
    found = train.measure(head, train.read_text(model, layers, torch.arange(256), text))
    recorded: dict[str, Any] = json.loads(metrics.read_text())
    for name in ("temperature 1", "greedy"):
        assert found[name] == pytest.approx(recorded[name], abs=1e-3)
    assert weights.stat().st_size < most
