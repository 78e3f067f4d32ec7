"""Small random Gemma 4 targets with their assistants, and what an assistant computes from a whole text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tiny_models import sharp_model
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel

can_be_built = pytest.mark.skipif(
    transformers.__version__.startswith("5.23."), reason="transformers 5.23 cannot build an assistant"
)
KINDS = ["sliding_attention", "full_attention"]
_SIZES: dict[str, Any] = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
_SIZES |= {"global_head_dim": 16, "sliding_window": 5, "max_position_embeddings": 256, "tie_word_embeddings": False}
_SIZES |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
_SIZES |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def tiny_gemma4(
    vocab: int, kind: str = "", attention: str | None = None, of_assistant: dict[str, Any] | None = None, **fields: Any
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target of three layers and an assistant of two. Kinds: "shared", two further layers of the target have no keys;
    "ordered" embeddings; "k = v"; "unified"."""
    prefix = "Gemma4Unified" if kind == "unified" else "Gemma4"
    config = getattr(transformers, f"{prefix}TextConfig")
    sizes = _SIZES | {"vocab_size": vocab} | fields
    if kind == "k = v":
        sizes |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    layers: dict[str, Any] = {"num_hidden_layers": 3, "layer_types": [KINDS[0], *KINDS]}
    if kind == "shared":
        layers = {"num_hidden_layers": 5, "layer_types": [KINDS[0], *KINDS * 2], "num_kv_shared_layers": 2}
        layers |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": vocab}
    target_config = config(**({"hidden_size": 32} | sizes | layers))
    own = {"num_hidden_layers": 2, "layer_types": KINDS, "num_kv_shared_layers": 2, "hidden_size": 16}
    centroids = {"num_centroids": 4, "centroid_intermediate_top_k": 2, "use_ordered_embeddings": kind == "ordered"}
    assistant_config = getattr(transformers, f"{prefix}AssistantConfig")(
        text_config=config(**(sizes | own)),
        **({"backbone_hidden_size": 32, "tie_word_embeddings": False} | centroids | (of_assistant or {})),
    )
    models = []
    for seed, each in enumerate((target_config, assistant_config)):
        each._attn_implementation = attention
        models.append(sharp_model(each, seed))
    if kind == "ordered":
        models[1].masked_embedding.token_ordering.copy_(torch.randperm(vocab))
    return models[0], models[1]


IMAGE = 5


def gemma4_with_images(target: PreTrainedModel) -> PreTrainedModel:
    """A model like this target, whose token 5 is a quarter of an image."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "pooling_kernel_size": 2, "patch_size": 4}
    vision = transformers.Gemma4VisionConfig(**sizes, position_embedding_size=64)
    names = ("boi_token_id", "eoi_token_id", "video_token_id", "boa_token_id", "eoa_token_index", "audio_token_id")
    target.config.pad_token_id = 0
    config = transformers.Gemma4Config(
        text_config=target.config, vision_config=vision, image_token_id=IMAGE, **dict.fromkeys(names, IMAGE + 1)
    )
    return sharp_model(config, 0, AutoModelForImageTextToText)


def image(seed: int) -> dict[str, Tensor]:
    """What a processor gives for an image of four by four patches."""
    pixels = torch.rand(1, 16, 48, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return {"pixel_values": pixels, "image_position_ids": torch.cartesian_prod(*[torch.arange(4)] * 2).flip(1)[None]}


@torch.no_grad()
def logits_of_transformers(target: Any, assistant: Any, text: Tensor, drafts: Tensor, **inputs: Tensor) -> Tensor:
    """[K, V]: what K drafts after a text [N] come from, by the assistant's forward over fresh states of the target;
    with ordered embeddings the least logit is that of all tokens outside."""
    if inputs:
        inputs["mm_token_type_ids"] = (text[None, :-1] == IMAGE).long()
    options = {"output_hidden_states": True, "return_shared_kv_states": True, "use_cache": False}
    read = target(text[None, :-1], **options, **inputs)
    hidden, logits = read.hidden_states[-1][:, -1:], []
    for token in [text[-1], *drafts[:-1]]:
        embedded = target.get_input_embeddings()(token[None, None])
        output = assistant(
            inputs_embeds=torch.cat([embedded, hidden], -1),
            position_ids=torch.tensor([[len(text) - 1]]),
            shared_kv_states=read.shared_kv_states,
        )
        hidden = output.last_hidden_state
        logits.append(output.logits[0, 0])
    return torch.stack(logits).float()


@torch.no_grad()
def plain_logits(target: Any, assistant: Any, text: Tensor, drafts: Tensor) -> Tensor:
    """The same for a target without shared keys, in plain steps: keys of the target's last layers of each kind, and
    attention of one query."""
    states, places = target(text[None, :-1], output_hidden_states=True).hidden_states, torch.arange(len(text))[None]

    def rotated(model: Any, x: Tensor, kind: str, at: Tensor) -> Tensor:
        cos, sin = (each[:, :, None] for each in model.rotary_emb(x, at, kind))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    known = {}
    for layer, state, kind in zip(target.model.layers[-2:], states[-3:-1], KINDS, strict=True):
        own, x = layer.self_attn, layer.input_layernorm(state)
        keys, values = (part(x).unflatten(-1, (2, -1)) for part in (own.k_proj, own.v_proj))
        keys = rotated(target.model, own.k_norm(keys), kind, places[:, :-1])
        # The newest window + 1 tokens; query heads 2 g and 2 g + 1 read key head g.
        newest = slice(-6, None) if kind == KINDS[0] else slice(None)
        known[kind] = [each[0, newest].repeat_interleave(2, 1) for each in (keys, own.v_norm(values))]
    hidden, logits = states[-1][:, -1:], []
    for token in [text[-1], *drafts[:-1]]:
        x = assistant.pre_projection(torch.cat([target.model.embed_tokens(token[None, None]), hidden], -1))
        for layer, kind in zip(assistant.model.layers, KINDS, strict=True):
            own = layer.self_attn
            query = own.q_norm(own.q_proj(layer.input_layernorm(x)).unflatten(-1, (4, -1)))
            query = rotated(assistant.model, query, kind, places[:, -1:])[0, 0]
            keys, values = known[kind]
            weights = torch.einsum("hd,nhd->nh", query, keys).softmax(0)
            read = own.o_proj(torch.einsum("nh,nhd->hd", weights, values).flatten())
            x = x + layer.post_attention_layernorm(read)
            x = x + layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(x)))
            x = x * layer.layer_scalar
        x = assistant.model.norm(x)
        hidden = assistant.post_projection(x)
        logits.append(assistant.lm_head(x)[0, 0])
    return torch.stack(logits).float()
