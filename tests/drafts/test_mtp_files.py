"""MTP layers in checkpoints of published names: no weight is left out without a word, and whose layers they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import PairModel, raised, random_table, shared_tiny
from tiny_mtp import TinyMtp, tiny_mtp

from torch_specops import SpeculativeDecoder
from torch_specops.drafts import MTP

TOKENS = 8


def changed(tiny: TinyMtp, folder: Path, change: Any) -> Path:
    shutil.copytree(tiny.folder, folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_no_weight_is_left_out(tmp_path: Path) -> None:
    deepseek, qwen = tiny_mtp("deepseek_v3", 2, vocab=TOKENS), tiny_mtp("qwen3_next", 1, vocab=TOKENS)
    name = "model.layers.3.mlp.experts.1.up_proj.weight"
    cases: list[tuple[TinyMtp, Any, str]] = [
        (
            deepseek,
            lambda w: w.pop("model.layers.2.enorm.weight"),
            r".* lacks MTP weights: model.layers.2.enorm.weight \(",
        ),
        (deepseek, lambda w: w.pop(name), f".* lacks MTP weights: {name} "),
        (
            deepseek,
            lambda w: w.update({f"{name}_scale_inv": torch.ones(1)}),
            f".* has unknown MTP weights: {name}_scale_inv ",
        ),
        (
            deepseek,
            lambda w: w.update({name: w[name].to(torch.float8_e4m3fn)}),
            f"draft: {name} in .* is torch.float8_e4m3fn: quantised weights are not read",
        ),
        (
            deepseek,
            lambda w: [w.pop(each) for each in list(w) if each.startswith("model.layers.3.")],
            r"draft: .* lacks MTP layer 1, the weight model.layers.3.input_layernorm.weight and all others; it has MTP "
            r"layers \[0\], the target's config says num_.*_layers = 2",
        ),
        (
            deepseek,
            lambda w: [w.pop(each) for each in list(w) if each.startswith("model.layers.2.")],
            r"draft: .* lacks MTP layer 0, the weight model.layers.2.input_layernorm.weight .* has MTP layers \[1\],",
        ),
        (
            deepseek,
            lambda w: w["model.layers.3.shared_head.head.weight"].add_(1),
            ".*model.layers.3.shared_head.head.weight in .* is not the target's own",
        ),
        (
            deepseek,
            lambda w: w.update({"model.layers.2.embed_tokens.weight": torch.ones(3, 3)}),
            ".*model.layers.2.embed_tokens.weight in .* is not the target's own",
        ),
        (qwen, lambda w: w.pop("mtp.norm.weight"), ".* lacks MTP weights: mtp.norm.weight "),
        (qwen, lambda w: w.update({"mtp.gate": torch.ones(1)}), ".* has unknown MTP weights: mtp.gate "),
        (
            qwen,
            lambda w: w.update({"mtp.fc.weight": torch.ones(2, 2)}),
            r"(?s)draft: the weights in .* do not fit its config.*eh_proj",
        ),
        (
            qwen,
            lambda w: [w.pop(each) for each in list(w) if each.startswith("mtp.")],
            r".* has no MTP weights that this reads; expected model.layers.2.\*, mtp.\*",
        ),
    ]
    wrong = []
    for index, (tiny, change, message) in enumerate(cases):
        folder = changed(tiny, tmp_path / str(index), change)
        wrong += raised(lambda given: MTP.from_pretrained(*given), [((tiny.model, folder), ValueError, message)])
    assert wrong == []


def test_which_targets_have_layers(tmp_path: Path) -> None:
    tiny = tiny_mtp("qwen2", 1, vocab=TOKENS)
    cases = [
        (shared_tiny("llama"), ValueError, "folder_or_id: expected the checkpoint, because the target does not say"),
        (
            PairModel(random_table(8, seed=5)),
            TypeError,
            "target: expected a transformers model, which has MTP layers, got",
        ),
    ]
    assert raised(MTP.from_pretrained, cases) == []
    draft = MTP.from_pretrained(tiny.model)
    wider = TinyMtp("qwen2", 1, vocab=TOKENS).model
    wider.config.hidden_size = 64
    others = [
        (
            shared_tiny("llama"),
            ValueError,
            "draft: it is for another target: layers .*Qwen2DecoderLayer.*, the target has",
        ),
        (wider, ValueError, "draft: it is for another target: hidden_size 32, the target has 64"),
    ]
    assert raised(lambda target: SpeculativeDecoder(target, draft), others) == []
    # Weights in several files, as large models have them, with the names of a model inside another.
    weights = load_file(tiny.folder / "model.safetensors")
    own = {f"language_model.{name}": weights.pop(name) for name in list(weights) if "mtp" in name}
    folder = tmp_path / "parts"
    folder.mkdir()
    save_file(weights, folder / "model-1.safetensors")
    for part in range(2):
        save_file(dict(list(own.items())[part::2]), folder / f"model-{part + 2}.safetensors")
    first, second = (MTP.from_pretrained(tiny.model, each).head.state_dict() for each in (None, folder))
    assert all(torch.equal(first[name], second[name]) for name in first)
    # A file that the index names and that is not there, and a file too many.
    lost = {"weight_map": {name.replace(".0.", ".1."): "model-4.safetensors" for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(lost))
    with pytest.raises(ValueError, match=r"is in model-4.safetensors, which is not in .*parts"):
        MTP.from_pretrained(tiny.model, folder)
    save_file(dict(list(own.items())[:1]), folder / "model-4.safetensors")
    with pytest.raises(ValueError, match=r"is in several files of .*parts"):
        MTP.from_pretrained(tiny.model, folder)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (0, "has 1 MTP layers, the target's config says mtp_num_hidden_layers = 0"),
        (2, r"lacks MTP layer 1, the weight mtp.layers.1.input_layernorm.weight .* layers \[0\], the .*layers = 2"),
    ],
)
def test_a_config_that_says_another_number_of_layers(said: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_mtp("qwen3_next", 1, vocab=TOKENS).model
    monkeypatch.setattr(model.config, "mtp_num_hidden_layers", said, raising=False)
    with pytest.raises(ValueError, match=message):
        MTP.from_pretrained(model)
