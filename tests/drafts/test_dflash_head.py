"""DFlash drafters read from files and from transformers' model, in both layouts; wrong files and targets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_dflash import MASK, SIZES, SLIDING, ZLAB, new_head, new_muse, save_drafter
from tiny_models import PairModel, raised, random_table, tiny
from torch import Tensor

from torch_specops.drafts import DFlash
from torch_specops.drafts.dflash_files import read_drafter, read_drafter_config

CPU = torch.device("cpu")
INNER = ZLAB["dflash_config"]
IDS = "eagle_aux_hidden_state_layer_ids"
MUSE = SIZES | {"model_type": "muse_glimmer_assistant", "rope_parameters": {"rope_theta": 9.0}} | INNER


def same_weights(draft: DFlash, expected: dict[str, Tensor]) -> bool:
    found = draft.head.state_dict()
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_both_layouts_from_files(tmp_path: Path) -> None:
    target, head = tiny("llama"), new_head(**SLIDING)
    draft = DFlash.from_pretrained(save_drafter(head, tmp_path / "z-lab", **SLIDING), target)
    assert same_weights(draft, head.state_dict()) and draft.head.config == head.config
    torch.testing.assert_close(draft.head.frequencies, head.frequencies.float())
    assert DFlash.from_pretrained(tmp_path / "z-lab", target, dtype=torch.float32).head.fc.weight.dtype == torch.float32
    muse = new_muse(layer_types=["full_attention", "sliding_attention"])
    muse.save_pretrained(tmp_path / "muse")
    saved = load_file(tmp_path / "muse" / "model.safetensors")
    assert {"encoder.fc.weight", "encoder.output_norm_enc.weight"} < saved.keys()
    from_files, from_model = (DFlash.from_pretrained(each, target) for each in (tmp_path / "muse", muse))
    assert from_files.head.config == from_model.head.config and same_weights(from_files, from_model.head.state_dict())
    assert from_model.head.fc.weight.data_ptr() == muse.encoder.fc.weight.data_ptr()


def test_the_same_words_mean_other_things_in_the_two_layouts() -> None:
    kinds = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}
    for raw, expected in (
        (ZLAB | kinds, ((None, None), (3, 0))),
        (ZLAB | kinds | {"is_causal": False}, ((None, None), (3, 3))),
        (ZLAB | kinds | {"is_causal": True}, ((None, 0), (3, 0))),
        (ZLAB | {"sliding_window": None}, ((None, None), (None, None))),
        (MUSE | kinds, ((None, None), (4, 4))),
    ):
        assert read_drafter_config(raw).sees == expected
    # The first drafters have the size of a block at the top.
    early = ZLAB | {"block_size": 9, "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 0]}}
    config = read_drafter_config(early)
    assert (config.block_size, config.mask_token_id, config.feature_layers) == (9, MASK, (2, 1))
    assert (config.embedding_scale, config.output_multiplier, config.softcap) == (1.0, 1.0, None)
    assert read_drafter_config(MUSE).rope_theta == 9.0


def test_configs_that_are_not_known() -> None:
    def of_block(**fields: Any) -> dict[str, Any]:
        return ZLAB | {"dflash_config": INNER | fields}

    mrope = {"rope_type": "default", "mrope_section": [2, 1, 1]}
    others = "; Domino, XPress and other drafters compute otherwise, and are not read"
    cases: list[tuple[Any, type[Exception], str]] = [
        (ZLAB | {"architectures": ["DominoModel"]}, ValueError, rf"config: .* got \['DominoModel'\].*'qwen3'{others}"),
        (
            ZLAB | {"architectures": ["DFlash2DraftModel"]},
            ValueError,
            "config: expected an int >= 1 as conv_group_size",
        ),
        ({}, ValueError, r"config: expected architectures .* got \[\], None and None"),
        (ZLAB | {"model_type": "laguna"}, ValueError, "config: expected model_type 'qwen3' or .*, got 'laguna'"),
        (of_block(selector_rank=8, causal=True), ValueError, "config: dflash_config has causal, selector_rank; known"),
        (ZLAB | {"quantization_config": {"bits": 4}}, ValueError, "config: expected quantization_config None, got"),
        (ZLAB | {"hidden_act": "gelu"}, ValueError, "config: expected hidden_act 'silu', got 'gelu'"),
        (ZLAB | {"layer_types": ["full_attention"]}, ValueError, "config: expected layer_types of length 2, got 1"),
        (ZLAB | {"layer_types": ["x", "x"]}, ValueError, "config: expected layer_types 'full_attention' or .* got 'x'"),
        (ZLAB | SLIDING | {"sliding_window": None}, ValueError, "config: expected an int >= 1 as sliding_window"),
        (of_block(block_size=None), ValueError, "config: expected an int >= 2 as block_size, got None"),
        (of_block(mask_token_id=None), ValueError, "config: expected an int >= 0 as mask_token_id, got None"),
        (of_block(block_size=1), ValueError, "config: expected an int >= 2 as block_size, got 1"),
        (
            of_block(final_logit_softcapping="30"),
            ValueError,
            "config: expected a number > 0 as final_logit_softc.*'30'",
        ),
        (of_block(output_multiplier=0), ValueError, "config: expected a number > 0 as output_multiplier, got 0"),
        (ZLAB | {"dflash_config": [1]}, ValueError, r"config: expected an object as dflash_config, got \[1\]"),
        (ZLAB | {"use_sliding_window": True}, ValueError, "config: expected layer_types beside use_sliding_window"),
        (
            ZLAB | {"rope_scaling": {"rope_type": "linear"}},
            ValueError,
            "config: expected factor beside rope_type 'linear'",
        ),
        (ZLAB | {"rope_scaling": mrope}, ValueError, "config: rope_scaling has mrope_section; known are factor"),
        (ZLAB | {"block_size": 4}, ValueError, "config: block_size is 4, and 9 in dflash_config"),
        (ZLAB | {IDS: [0, 1]}, ValueError, rf"config: expected {IDS} None or \[1, 2\], got \[0, 1\]"),
        (ZLAB | {"num_aux_hidden_states": 3}, ValueError, "config: expected num_aux_hidden_states None or 2, got 3"),
        (ZLAB | {"draft_vocab_size": 5}, ValueError, "config: expected draft_vocab_size None or 60, got 5"),
        (ZLAB | {"is_causal": "no"}, ValueError, "config: expected is_causal None or True or False, got 'no'"),
        (of_block(target_layer_ids=[]), ValueError, r"config: expected a list of layers as target_layer_ids, got \[\]"),
        (of_block(target_layer_ids=[-1]), ValueError, "config: expected a list of layers as target_layer_ids"),
        (of_block(target_layer_ids=[True]), ValueError, "config: expected a list of layers as target_layer_ids"),
        (ZLAB | {"layer_types": 3}, ValueError, "config: expected a list of str as layer_types, got 3"),
        (ZLAB | {"rope_scaling": "linear"}, ValueError, "config: expected an object as rope_scaling, got 'linear'"),
        (ZLAB | {"rope_scaling": {"rope_type": [1]}}, ValueError, r"config: expected a str as rope_type, got \[1\]"),
        (ZLAB | {"architectures": [["x"]]}, ValueError, r"config: expected a list of str as architectures, got \[\["),
        (ZLAB | {"num_key_value_heads": 3}, ValueError, "config: expected num_attention_heads % num_key_value_heads 0"),
        (ZLAB | {"head_dim": 7}, ValueError, "config: expected head_dim % 2 0, got 1"),
        (ZLAB | {"num_target_layers": "2"}, ValueError, "config: expected an int >= 1 as num_target_layers, got '2'"),
        (
            ZLAB | {"sliding_window_non_causal": True},
            ValueError,
            "config: expected sliding_window_non_causal None or F",
        ),
        (ZLAB | {"markov_rank": 4}, ValueError, "config: expected markov_rank None or 0, got 4"),
        (ZLAB | {"eagle_config": {}}, ValueError, "config: expected eagle_config None, got {}"),
        (
            ZLAB | {"architectures": ["LlamaForCausalLMEagle3"]},
            ValueError,
            "config: .*Eagle3'.*; drafts.Eagle3 reads it",
        ),
        (
            {"model_type": "gemma4_assistant"},
            ValueError,
            "config: .*gemma4_assistant'; load it with transformers' AutoModelForCausalLM .*, for drafts.Gemma4Assist",
        ),
    ]
    assert raised(read_drafter_config, cases) == []
    with pytest.raises(ValueError, match="config: expected rope_type 'default' or 'linear' or 'llama3', got 'yarn'"):
        new_head(rope_scaling={"rope_type": "yarn", "factor": 4.0})


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    def read(change: Callable[[dict[str, Tensor]], object]) -> None:
        folder = save_drafter(new_head(), tmp_path)
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")
        read_drafter(folder, CPU, torch.float32)

    small, whole = torch.zeros(2), torch.zeros(32, 64, dtype=torch.int8)
    cases: list[tuple[Any, type[Exception], str]] = [
        (
            lambda w: w.pop("hidden_norm.weight"),
            ValueError,
            r'draft: the weights in .*\n.*Missing .*"hidden_norm.weight"',
        ),
        (lambda w: w.update({"lm_head.bias": small}), ValueError, r'draft: .*\n.*Unexpected .*"lm_head.bias"'),
        (lambda w: w.update({"norm.weight": small}), ValueError, r"draft: .*\n.*norm.weight: .*\[2\].*\[32\]"),
        (
            lambda w: w.update({"fc.weight": whole}),
            ValueError,
            "draft: fc.weight in .* is torch.int8: quantised weights",
        ),
    ]
    assert raised(read, cases) == []
    muse = new_muse()
    del muse.encoder.fc.weight
    with pytest.raises(ValueError, match=r"MuseGlimmerAssistantModel do not fit its config: .*\n.*fc.weight"):
        read_drafter(muse, CPU, torch.float32)


def test_a_drafter_for_another_target(tmp_path: Path) -> None:
    folder, other = save_drafter(new_head(), tmp_path), "draft: it is for another target: "
    cases: list[tuple[Any, type[Exception], str]] = [
        ({"vocab": 61}, ValueError, other + "vocab_size 60, the target has 61"),
        ({"hidden_size": 16}, ValueError, other + "hidden_size 32, the target has 16"),
        ({"num_hidden_layers": 3}, ValueError, other + "num_target_layers 2, the target has 3"),
    ]
    assert raised(lambda fields: DFlash.from_pretrained(folder, tiny("llama", **fields)), cases) == []
    # Muse's config says less of the target.
    muse = new_muse()
    cases = [
        ({"num_hidden_layers": 1}, ValueError, other + r"it reads layers \[1, 2\], the target has layers 0 to 1"),
        ({"vocab": MASK}, ValueError, f"draft: mask_token_id {MASK} is none of the target's tokens"),
    ]
    assert raised(lambda fields: DFlash.from_pretrained(muse, tiny("llama", **fields)), cases) == []
    with pytest.raises(TypeError, match=r"target: .* expected a torch_specops.drafts.FeatureModel, got .*PairModel"):
        DFlash.from_pretrained(folder, PairModel(random_table(60, seed=0)))
