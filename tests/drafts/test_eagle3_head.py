"""EAGLE-3 heads read from files: against what the speculators library computes, in both formats; wrong files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_eagle3 import chain_logits, new_head, plain_chain, save_head
from tiny_models import PairModel, raised, random_table, tiny
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from torch_specops.drafts import Eagle3
from torch_specops.drafts.eagle3_files import read_config, read_head
from torch_specops.drafts.layers import rope_frequencies
from torch_specops.hf import language_model

DATA = Path(__file__).parents[1] / "data"
HEADS = ("llama", "llama_norms", "qwen3", "qwen3_window")
CPU = torch.device("cpu")


def as_specforge(folder: Path, to: Path) -> Path:
    """A head of the speculators library in the other format."""
    to.mkdir()
    raw = json.loads((folder / "config.json").read_text())
    layer = raw.pop("transformer_layer_config")
    outputs = [layer_id - 1 for layer_id in raw.pop("eagle_aux_hidden_state_layer_ids")]
    names = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm")
    config = layer | {name: raw[name] for name in names} | {"architectures": ["LlamaForCausalLMEagle3"]}
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": outputs, "use_aux_hidden_state": True}
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (to / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name.replace("layers.0.", "midlayer."): tensor for name, tensor in weights.items()}, to / "part-1.safetensors"
    )
    return to


@pytest.mark.parametrize("name", [*HEADS, "llama, SpecForge", "llama_norms, SpecForge"])
def test_logits_are_those_of_the_speculators_library(name: str, tmp_path: Path) -> None:
    """The logits of three drafts; the second and third draft read the head's own output."""
    folder = DATA / f"eagle3_{name.removesuffix(', SpecForge')}"
    expected = load_file(folder / "expected" / "outputs.safetensors")
    head = read_head(as_specforge(folder, tmp_path / "head") if "SpecForge" in name else folder, CPU, torch.float32)
    with torch.inference_mode():
        found = chain_logits(head, expected["features"], expected["following"], expected["drafts"])
    known = head.draft_of_target >= 0
    # In training, the window does not move on with the drafts.
    count = 1 if name == "qwen3_window" else 3
    torch.testing.assert_close(found[:count, known], expected["logits"][:count], rtol=1e-5, atol=1e-5)
    assert (found[:, ~known] == -torch.inf).all() and int(known.sum()) == expected["logits"].shape[1]
    assert head.config.feature_layers == ((1, 3) if name == "qwen3" else (0, 2, 4))


@pytest.mark.parametrize("norm_output", [None, False, True])
@pytest.mark.parametrize("fields", [{"fc_norm": True}, {}, {"fc_norm": True, "norm_before_residual": True}])
def test_later_drafts_in_eagles_format(norm_output: bool | None, fields: dict[str, bool], tmp_path: Path) -> None:
    """`norm_output` says what is fed back, with and without `fc_norm`, in either place; the last norm is always before
    the logits."""
    head = new_head(**fields)
    save_head(head, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    given = fields if norm_output is None else fields | {"norm_output": norm_output}
    features, tokens = torch.randn(6, 96).double(), torch.randint(60, (9,))
    chain = features, tokens[:6], tokens[6:]
    for beside, inner in ((given, {}), ({}, given)):
        config = raw | beside | {"eagle_config": raw["eagle_config"] | inner}
        (tmp_path / "config.json").write_text(json.dumps(config))
        found = chain_logits(read_head(tmp_path, CPU, torch.float64), *chain)
        torch.testing.assert_close(found, plain_chain(config, head.state_dict(), *chain), rtol=1e-4, atol=1e-4)


def test_rotary_embeddings_are_those_of_transformers() -> None:
    own = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
    for kind in ("llama3", "linear"):
        rope = {"rope_type": kind, "rope_theta": 5000.0} | (own if kind == "llama3" else {"factor": 4.0})
        config = LlamaConfig(head_dim=32, rope_parameters=rope, **SIZES)
        expected, _ = ROPE_INIT_FUNCTIONS[kind](config, CPU)
        found = rope_frequencies(read_config(SPECFORGE | {"head_dim": 32, "rope_parameters": rope}))
        torch.testing.assert_close(found, expected)


SIZES = {"hidden_size": 16, "intermediate_size": 20, "num_attention_heads": 4}
SPECFORGE: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 24} | SIZES
IDS = "eagle_aux_hidden_state_layer_ids"
SPECULATORS: dict[str, Any] = {
    "speculators_model_type": "eagle3",
    "transformer_layer_config": {"model_type": "llama", "vocab_size": 24} | SIZES,
}


def test_the_same_words_mean_other_things_in_the_two_formats() -> None:
    ids, next_ids = ({IDS: [1 + more, 3 + more, 4 + more]} for more in (0, 1))
    assert read_config(SPECULATORS | ids).feature_layers == (1, 3, 4)
    assert read_config(SPECFORGE | {"eagle_config": ids}).feature_layers == (2, 4, 5)
    # vLLM reads them here, and counts them by their inputs in this format too.
    assert read_config(SPECFORGE | ids).feature_layers == (1, 3, 4)
    assert read_config(SPECFORGE | next_ids | {"eagle_config": ids}).feature_layers == (2, 4, 5)
    config = read_config(SPECFORGE)
    assert (config.head_dim, config.num_key_value_heads, config.draft_vocab_size) == (4, 4, 24)
    assert (config.target_hidden_size, config.feature_layers, config.rope_theta) == (16, None, 10000.0)


def test_fields_are_read_from_both_places() -> None:
    sizes = {"draft_vocab_size": 20, "target_hidden_size": 12}
    switches = {"norm_before_residual": True, "norm_before_fc": True, "fc_norm": True, "norm_output": True}
    for place in ("eagle_config", "transformer_layer_config", None):
        raw = SPECFORGE if place == "eagle_config" else SPECULATORS
        config = read_config(
            raw | (sizes | switches if place is None else {place: raw.get(place, {}) | sizes | switches})
        )
        assert (config.draft_vocab_size, config.target_hidden_size) == (20, 12)
        assert config.norm_before_residual and config.norm_before_fc and config.fc_norm and config.norm_before_feedback
    # The name in TensorRT-LLM.
    assert read_config(SPECFORGE | {"eagle_config": {"return_hidden_post_norm": True}}).norm_before_feedback
    window = {"layer_types": ["sliding_attention"], "sliding_window": 5}
    assert read_config(SPECFORGE | window).windows == (5,)
    assert read_config(SPECFORGE | window | {"layer_types": ["full_attention"]}).windows == (None,)
    # As ModelOpt writes it.
    inner = {"use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True}
    inner |= {"use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1, IDS: [0, 1]}
    inner |= {"parallel_draft_heads_num_layers": None}
    assert read_config(SPECFORGE | {"eagle_config": inner, "num_aux_hidden_states": 2}).feature_layers == (1, 2)


def test_configs_that_are_not_known() -> None:
    def of_layer(**fields: Any) -> dict[str, Any]:
        return SPECULATORS | {"transformer_layer_config": SPECULATORS["transformer_layer_config"] | fields}

    def of_eagle(**fields: Any) -> dict[str, Any]:
        return SPECFORGE | {"eagle_config": fields}

    mrope = {"rope_type": "default", "mrope_section": [2, 1, 1]}
    cases: list[tuple[Any, type[Exception], str]] = [
        ({}, ValueError, r"config: expected architectures \['LlamaForCausalLMEagle3'\] or .*, got \[\], None and None"),
        (
            {"architectures": ["LlamaForCausalLM"]},
            ValueError,
            r"config: .*got \['LlamaForCausalLM'\], None and None; Domino",
        ),
        (
            SPECFORGE | {"speculators_model_type": "dflash"},
            ValueError,
            "config: expected .* got .*'dflash' and None; drafts.DFlash r",
        ),
        (of_layer(model_type="gpt_oss"), ValueError, "config: expected model_type 'llama' or 'qwen3', got 'gpt_oss'"),
        (SPECFORGE | {"hidden_act": "gelu"}, ValueError, "config: expected hidden_act 'silu', got 'gelu'"),
        (SPECFORGE | {"num_hidden_layers": 0}, ValueError, "config: expected an int >= 1 as num_hidden_layers, got 0"),
        (SPECFORGE | {"hidden_size": None}, ValueError, "config: expected an int >= 1 as hidden_size, got None"),
        (SPECFORGE | {"draft_vocab_size": 0}, ValueError, "config: expected an int >= 1 as draft_vocab_size, got 0"),
        (of_eagle(use_aux_hidden_state=False), ValueError, "config: expected use_aux_hidden_state None or True, got F"),
        (of_eagle(use_last_layernorm=False), ValueError, "config: expected use_last_layernorm None or True, got False"),
        (
            SPECFORGE | {"use_last_layernorm": False},
            ValueError,
            "config: expected use_last_layernorm None or True, got",
        ),
        (of_eagle(parallel_draft_step=4), ValueError, "config: expected parallel_draft_step None or 1, got 4"),
        (of_eagle(layers=[1], depth=2), ValueError, "config: eagle_config has depth, layers; known are attention_"),
        (SPECFORGE | {"eagle_config": [1]}, ValueError, r"config: expected an object as eagle_config, got \[1\]"),
        (of_eagle(fc_norm=True) | {"fc_norm": False}, ValueError, "config: fc_norm is False, and True in eagle_config"),
        (
            of_layer(norm_output=True) | {"norm_output": False},
            ValueError,
            "config: norm_output is False, and True in transformer",
        ),
        (SPECFORGE | {"fc_norm": "false"}, ValueError, "config: expected fc_norm None or True or False, got 'false'"),
        (SPECULATORS | {"eagle_config": {IDS: [1]}}, ValueError, "config: expected eagle_config None, got {'eagle"),
        (SPECFORGE | {"logit_scale": 2.0}, ValueError, "config: expected logit_scale None or 1, got 2.0"),
        (
            SPECFORGE | {"target_layer_ids": [1, 2, 3]},
            ValueError,
            r"config: expected target_layer_ids None, got \[1, 2",
        ),
        (SPECULATORS | {IDS: "2"}, ValueError, "config: expected a list .*, got '2'"),
        (
            of_eagle(**{IDS: [1, 3]}) | {IDS: [1, 3]},
            ValueError,
            rf"config: {IDS} is \[1, 3\] in .* \[2, 4\], got \[1, 3\]",
        ),
        (
            of_eagle(**{IDS: [1, 3]}) | {"num_aux_hidden_states": 3},
            ValueError,
            ".*num_aux_hidden_states None or 2, got 3",
        ),
        (
            SPECFORGE | {"num_aux_hidden_states": 4},
            ValueError,
            "config: expected num_aux_hidden_states None or 3, got 4",
        ),
        (
            SPECFORGE | {"layer_types": ["chunked_attention"]},
            ValueError,
            "config: expected layer_types .* got 'chunked",
        ),
        (SPECFORGE | {"layer_types": ["full_attention"] * 2}, ValueError, ".*layer_types of length 1, got 2"),
        (SPECFORGE | {"layer_types": ["sliding_attention"]}, ValueError, "config: expected an int >= 1 as sliding_win"),
        (of_layer(use_sliding_window=True), ValueError, "config: expected layer_types beside use_sliding_window"),
        (SPECFORGE | {"rope_scaling": mrope}, ValueError, "config: rope_scaling has mrope_section; known are factor"),
        (of_layer(rope_parameters=mrope), ValueError, "config: rope_parameters has mrope_section; known are factor"),
        (SPECFORGE | {"rope_scaling": mrope | {"type": "mrope"}}, ValueError, ".*type in rope_scaling .*, got 'mrope'"),
        (SPECFORGE | {"partial_rotary_factor": 0.25}, ValueError, "config: expected partial_rotary_factor .* got 0.25"),
        (
            SPECFORGE | {"rope_theta": 2.0, "rope_parameters": {"rope_theta": 3.0}},
            ValueError,
            "config: rope_theta is 2.0, and 3.0 in rope_parameters",
        ),
    ]
    assert raised(read_config, cases) == []
    rope = read_config(SPECFORGE | {"rope_scaling": {"type": "yarn", "factor": 4.0}})
    with pytest.raises(ValueError, match="config: expected rope_type 'default' or 'linear' or 'llama3', got 'yarn'"):
        rope_frequencies(rope)


def changed(folder: Path, change: Callable[[dict[str, Tensor]], object], head: str = "llama") -> Path:
    weights = load_file(DATA / f"eagle3_{head}" / "model.safetensors")
    change(weights)
    folder.mkdir(exist_ok=True)
    shutil.copy(DATA / f"eagle3_{head}" / "config.json", folder)
    save_file(weights, folder / "model.safetensors")
    return folder


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    zeros, wrong_map = torch.zeros(11, 16), r".*expected d2t to lead to (10|24) different tokens in \[0, 24\)"
    reverse = torch.arange(24).flip(0) - torch.arange(24)
    cases: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        ((lambda w: w.pop("fc.weight"),), ValueError, r'draft: the weights in .*\n.*Missing .*"fc.weight"'),
        ((lambda w: w.update({"layers.1.bias": zeros}),), ValueError, r'.*\n.*Unexpected .*"layers.1.bias"'),
        ((lambda w: w.update({"lm_head.weight": zeros}),), ValueError, r".*\n.*lm_head.weight: .*\[11, .*\[10, 16"),
        ((lambda w: w.pop("d2t"),), ValueError, "draft: the head has 10 of 24 tokens and lacks the weights d2t"),
        (
            (lambda w: w.update({"d2t": w["d2t"][:9]}),),
            ValueError,
            r"draft: expected d2t \[10\] of integers, got \[9\]",
        ),
        ((lambda w: w.update({"d2t": w["d2t"].float()}),), ValueError, r".*d2t \[10\] of integers, .* torch.float32"),
        ((lambda w: w["d2t"].zero_(),), ValueError, "draft: t2d marks other tokens than d2t leads to"),
        ((lambda w: w["t2d"].logical_not_(),), ValueError, "draft: t2d marks other tokens than d2t leads to"),
        ((lambda w: w.update({"t2d": w["t2d"][1:]}),), ValueError, "draft: t2d marks other tokens than d2t leads to"),
        (
            (lambda w: w.update({"midlayer.x": zeros, "layers.0.x": zeros.clone()}),),
            ValueError,
            ".* midlayer.x under two names",
        ),
        ((lambda w: w.update({"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}),), ValueError, ".*inv_freq is"),
        ((lambda w: w["d2t"].add_(20),), ValueError, wrong_map),
        ((lambda w: w["d2t"][1:2].copy_(w["d2t"][:1] - 1),), ValueError, wrong_map),
        # A head with all tokens, but in another order.
        ((lambda w: w.update({"d2t": reverse}), "llama_norms"), ValueError, wrong_map),
    ]
    assert raised(lambda case: read_head(changed(tmp_path / "head", *case), CPU, torch.float32), cases) == []


def test_folders_without_a_head(tmp_path: Path) -> None:
    def message(folder: str | Path = tmp_path) -> str:
        with pytest.raises(ValueError) as caught:
            read_head(folder, CPU, torch.float32)
        return str(caught.value)

    assert message("/no/such/head") == "draft: there is no folder '/no/such/head', and it is no hub id"
    assert message() == f"draft: expected config.json in {tmp_path}, found none"
    shutil.copy(DATA / "eagle3_llama" / "config.json", tmp_path)
    # A pickle is not opened, whatever is in it.
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert message().endswith("found pytorch_model.bin; pickled weights are not read")
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    assert message().startswith(f"draft: cannot read {tmp_path / 'model.safetensors'}: ")
    (tmp_path / "config.json").write_text("{")
    assert message().startswith(f"draft: cannot read {tmp_path / 'config.json'} as JSON: ")
    (tmp_path / "config.json").write_text("[1]")
    assert message() == f"draft: expected an object in {tmp_path / 'config.json'}, got <class 'list'>"
    # Indices.
    shutil.copy(DATA / "eagle3_llama" / "config.json", tmp_path)
    shutil.copy(DATA / "eagle3_llama" / "model.safetensors", tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for text, wrong in (
        ("{", f"cannot read {index} as JSON: "),
        ("[]", f"expected an object in {index}, got"),
        ('{"weight_map": 3}', f"expected an object as weight_map in {index}, got 3"),
    ):
        index.write_text(text)
        assert message().startswith(f"draft: {wrong}")
    with pytest.raises(TypeError, match="folder_or_id: expected a folder or a hub id, got <class 'NoneType'>"):
        read_head(None, CPU, torch.float32)  # type: ignore[arg-type]


TARGET = {"vocab": 24, "hidden_size": 16, "num_hidden_layers": 5}


def test_a_head_for_another_target(tmp_path: Path) -> None:
    folder = DATA / "eagle3_llama"
    draft = Eagle3.from_pretrained(folder, tiny("llama", **TARGET), dtype=torch.float32)
    assert draft.feature_layers == (0, 2, 4) and draft.head.fc.weight.dtype == torch.float32
    assert Eagle3.from_pretrained(folder, tiny("llama", **TARGET)).head.fc.weight.dtype == torch.float64
    # A config without layers means 2, L // 2 and L - 3.
    draft = Eagle3(new_head(feature_layers=None))
    draft.bind(language_model(tiny("llama", num_hidden_layers=8)))
    assert draft.feature_layers == (2, 4, 5)
    other = "draft: it is for another target: "
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        (TARGET | {"vocab": 25}, ValueError, other + "vocab_size 24, the target has 25"),
        (TARGET | {"hidden_size": 32}, ValueError, other + "target_hidden_size 16, the target has 32"),
        (TARGET | {"num_hidden_layers": 4}, ValueError, other + r"it reads layers \[0, 2, 4\], .* has layers 0 to 3"),
    ]
    assert raised(lambda fields: Eagle3.from_pretrained(folder, tiny("llama", **fields)), cases) == []
    with pytest.raises(TypeError, match=r"target: .* expected a torch_specops.drafts.FeatureModel, got .*PairModel"):
        Eagle3.from_pretrained(folder, PairModel(random_table(24, seed=0)))
    with pytest.raises(TypeError, match="target: expected a transformers model or a LanguageModel"):
        Eagle3.from_pretrained(folder, torch.nn.Linear(2, 2))


def test_embeddings_of_the_target_stand_in_for_missing_ones(tmp_path: Path) -> None:
    folder = changed(tmp_path / "head", lambda weights: weights.pop("embed_tokens.weight"))
    draft = Eagle3.from_pretrained(folder, tiny("llama", **TARGET))
    assert draft.head.embed_tokens is None
    # A head that is narrower than its target needs its own.
    narrow = json.loads((folder / "config.json").read_text()) | {"target_hidden_size": 32}
    (folder / "config.json").write_text(json.dumps(narrow))
    weights = load_file(folder / "model.safetensors") | {"fc.weight": torch.zeros(16, 96)}
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match="the head has no embed_tokens, and the target's are 32 wide; expected 16"):
        Eagle3.from_pretrained(folder, tiny("llama", **(TARGET | {"hidden_size": 32})))
