"""Small random models of images and text, prompts with images, and what transformers writes after them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from tiny_loops import GREEDY
from tiny_models import perturbed, sharp_model
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForImageTextToText, PreTrainedModel

from torch_specops import Request, SpeculativeDecoder

VOCAB, IMAGE, BEGIN, END = 64, 60, 61, 62
NEW = 10

_TEXT = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
_TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0}
_TEXT |= {"bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
_TOWER |= {"image_size": 16, "patch_size": 4}
_QWEN = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4, "in_channels": 3}
_QWEN |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32}
_TOKENS = {"image_token_id": IMAGE, "video_token_id": 59, "vision_start_token_id": BEGIN, "vision_end_token_id": END}


def _rope(*section: int, **fields: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "mrope_section": list(section), "rope_theta": 10000.0, **fields}
    return {"rope_parameters": rope, "rope_scaling": rope}


def _qwen2_5() -> Any:
    vision = _QWEN | {"fullatt_block_indexes": [1], "window_size": 16}
    return transformers.Qwen2_5_VLConfig(text_config=_TEXT | _rope(1, 1, 2), vision_config=vision, **_TOKENS)


def _qwen3() -> Any:
    vision = _QWEN | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
    return transformers.Qwen3VLConfig(text_config=_TEXT | _rope(2, 1, 1), vision_config=vision, **_TOKENS)


def _qwen3_5() -> Any:
    text = _TEXT | {"layer_types": ["linear_attention", "full_attention"]} | _rope(2, 1, 1, partial_rotary_factor=1.0)
    text |= {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
    text |= {"linear_value_head_dim": 8, "linear_conv_kernel_dim": 3}
    vision = _QWEN | {"num_position_embeddings": 64}
    return transformers.Qwen3_5Config(text_config=text, vision_config=vision, **_TOKENS)


def _gemma3() -> Any:
    text = _TEXT | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    tokens = {"image_token_index": IMAGE, "boi_token_index": BEGIN, "eoi_token_index": END, "mm_tokens_per_image": 4}
    return transformers.Gemma3Config(text_config=text, vision_config=_TOWER, **tokens)


def _llava() -> Any:
    vision = transformers.CLIPVisionConfig(**(_TOWER | {"patch_size": 8}))
    options = {"vision_feature_layer": -1, "vision_feature_select_strategy": "default", "image_token_index": IMAGE}
    return transformers.LlavaConfig(text_config=transformers.LlamaConfig(**_TEXT), vision_config=vision, **options)


def _idefics(kind: str) -> Any:
    config = getattr(transformers, f"{kind}Config")
    text = transformers.LlamaConfig(**_TEXT)
    return config(text_config=text, vision_config=_TOWER, image_token_id=IMAGE, scale_factor=2)


class Family(NamedTuple):
    config: Callable[[], Any]
    # The name of the type ids that transformers' own `generate` needs.
    types: str | None = None
    is_qwen: bool = False
    # Its images are given for each row.
    by_row: bool = False


FAMILIES = {
    "qwen2_5_vl": Family(_qwen2_5, "mm_token_type_ids", is_qwen=True),
    "qwen3_vl": Family(_qwen3, "mm_token_type_ids", is_qwen=True),
    "qwen3_5": Family(_qwen3_5, "mm_token_type_ids", is_qwen=True),
    "gemma3": Family(_gemma3, "token_type_ids"),
    "llava": Family(_llava),
    "idefics3": Family(lambda: _idefics("Idefics3"), by_row=True),
    "smolvlm": Family(lambda: _idefics("SmolVLM"), by_row=True),
}


class Prompt(NamedTuple):
    """A text with images; a number in `images` is the seed of one, and its size where sizes differ."""

    tokens: tuple[int, ...]
    images: tuple[int, ...] = ()


@functools.cache
def vision_model(family: str, seed: int = 0) -> PreTrainedModel:
    """Not to be changed."""
    return sharp_model(FAMILIES[family].config(), seed, AutoModelForImageTextToText)


def _grid(seed: int) -> list[int]:
    return [1, 4, 4 + 4 * (seed % 2)]


def prompt(family: str, *parts: int | str) -> Prompt:
    """Tokens and images, "3" for the image of seed 3."""
    tokens: list[int] = []
    for part in parts:
        if isinstance(part, str):
            _, height, width = _grid(int(part)) if FAMILIES[family].is_qwen else (1, 4, 4)
            tokens += [BEGIN, *[IMAGE] * (height * width // 4), END]
        else:
            tokens.append(part)
    return Prompt(tuple(tokens), tuple(int(part) for part in parts if isinstance(part, str)))


def prompts(family: str) -> list[Prompt]:
    """With two images, none, one, and none again."""
    rows: list[tuple[int | str, ...]] = [
        (5, 6, "1", 7, 8, "2", 9, 5, 6),
        (11, 12, 13, 11, 12),
        (3, "3", 14, 15, 3),
        (4,),
    ]
    return [prompt(family, *row) for row in rows]


def images(family: str, rows: Sequence[Prompt]) -> dict[str, Tensor]:
    """What a processor gives for the images of these rows."""
    seeds = [[*row.images] for row in rows]
    if not any(seeds):
        return {}

    def image(seed: int, *shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    if FAMILIES[family].is_qwen:
        grids = torch.tensor([_grid(seed) for row in seeds for seed in row])
        patches = [image(seed, int(torch.tensor(_grid(seed)).prod()), 96) for row in seeds for seed in row]
        return {"pixel_values": torch.cat(patches), "image_grid_thw": grids}
    if not FAMILIES[family].by_row:
        return {"pixel_values": torch.stack([image(seed, 3, 16, 16) for row in seeds for seed in row])}
    most = max(map(len, seeds))
    values, mask = torch.zeros(len(rows), most, 3, 16, 16), torch.zeros(len(rows), most, 16, 16, dtype=torch.bool)
    values = values.double()
    for index, row in enumerate(seeds):
        for place, seed in enumerate(row):
            # Images are padded to one size.
            width = 16 - 4 * (seed % 2)
            values[index, place, :, :, :width] = image(seed, 3, 16, width)
            mask[index, place, :, :width] = True
    return {"pixel_values": values, "pixel_attention_mask": mask}


def batch(family: str, rows: Sequence[Prompt], side: str = "left") -> dict[str, Tensor]:
    """A processor's output. The padding is a token like any other."""
    width = max(len(row.tokens) for row in rows)
    ends = [(width - len(row.tokens), 0) if side == "left" else (0, width - len(row.tokens)) for row in rows]
    ids = torch.stack([pad(torch.tensor(row.tokens), end, value=7) for row, end in zip(rows, ends, strict=True)])
    mask = torch.stack([pad(torch.ones(len(row.tokens)).long(), end) for row, end in zip(rows, ends, strict=True)])
    found, types = {"input_ids": ids, "attention_mask": mask, **images(family, rows)}, FAMILIES[family].types
    return found | ({types: ((ids == IMAGE) & (mask == 1)).long()} if types is not None else {})


def alone(model: PreTrainedModel, family: str, row: Prompt, num_new: int = NEW) -> list[int]:
    """The new tokens of transformers' greedy decoding."""
    output = model.generate(**batch(family, [row]), do_sample=False, max_new_tokens=num_new, eos_token_id=None)
    return output[0, len(row.tokens) :].tolist()


@functools.cache
def expected(family: str) -> list[list[int]]:
    """Of `prompts`."""
    return [alone(vision_model(family), family, row) for row in prompts(family)]


@functools.cache
def small_vision_model(family: str) -> PreTrainedModel:
    """A draft that often agrees."""
    return perturbed(vision_model(family), 0.01)


def image_call(family: str, rows: list[Prompt], side: str = "left") -> dict[str, Any]:
    """Arguments of the decoder's `generate`, without type ids."""
    given = batch(family, rows, side)
    return {name: given[name] for name in ("input_ids", "attention_mask")} | {
        "inputs": images(family, rows) or None,
        "max_new_tokens": NEW,
        "eos_token_id": (),
    }


def image_loop(family: str, draft: Any = None, **options: Any) -> SpeculativeDecoder:
    """A greedy decoder with three drafts."""
    options = {"sampling": GREEDY, "schedule": "constant", "num_draft_tokens": 3} | options
    return SpeculativeDecoder(vision_model(family), draft, **options)


def image_request(family: str, row: Prompt, num_new: int = NEW, **options: Any) -> Request:
    return Request(list(row.tokens), num_new, inputs=images(family, [row]) or None, eos_token_id=(), **options)


@torch.no_grad()
def next_logits(family: str, row: Prompt, *new: int) -> Tensor:
    """[VOCAB], after a prompt and new tokens, from a forward over all of them."""
    given = batch(family, [row._replace(tokens=(*row.tokens, *new))])
    return vision_model(family)(**given).logits[0, -1]
