"""Tiny EAGLE-3 and P-EAGLE heads, and what they compute in plain steps over a whole text."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tiny_checkpoints import save_checkpoint
from tiny_dflash import norm, rotated
from tiny_models import PROMPTS, VOCAB, greedy_rows, shared_tiny
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from torch_specops.drafts.eagle3_files import read_config
from torch_specops.drafts.eagle3_head import Eagle3Config, Eagle3Head
from torch_specops.drafts.layers import Attention

# The tiny models have two layers.
LAYERS = (0, 1, 1)


def new_head(seed: int = 0, **fields: Any) -> Eagle3Head:
    """A random head for the tiny models, in float64."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    others = {"draft_vocab_size": VOCAB, "target_hidden_size": 32, "feature_layers": LAYERS}
    torch.manual_seed(seed)
    head = Eagle3Head(Eagle3Config(**({"vocab_size": VOCAB} | sizes | others | fields))).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, float(parameter.dim() == 1), 0.3)
    return head.requires_grad_(False)


def save_head(head: Eagle3Head, folder: Path) -> None:
    """As SpecForge does."""
    config = head.config
    names = ("hidden_size", "intermediate_size", "num_key_value_heads", "head_dim", "vocab_size", "draft_vocab_size")
    content = {name: getattr(config, name) for name in names} | {"num_attention_heads": config.num_heads}
    content |= {"architectures": ["LlamaForCausalLMEagle3"], "target_hidden_size": config.target_hidden_size}
    # Here layers are counted by their outputs.
    outputs = [layer - 1 for layer in config.feature_layers or ()]
    content["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": outputs}
    save_checkpoint(content, head.state_dict(), folder)


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SIZES |= {"vocab_size": VOCAB}
IDS = "eagle_aux_hidden_state_layer_ids"
SLIDING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 7}
OF_QWEN: dict[str, Any] = {"model_type": "qwen3", "num_hidden_layers": 3, "rope_theta": 1000.0} | SIZES
METHOD = {"proposal_type": "greedy", "speculative_tokens": 3, "accept_tolerance": 0.0, "verifier_accept_k": 1}
SPECULATORS: dict[str, Any] = {
    "speculators_model_type": "eagle3",
    "architectures": ["Eagle3DraftModel"],
    "transformer_layer_config": OF_QWEN,
    IDS: [0, 1],
    "draft_vocab_size": 24,
    "speculators_config": {"default_proposal_method": "greedy", "proposal_methods": [METHOD]},
}
PEAGLE = SPECULATORS | {"speculators_model_type": "peagle", "mask_token_id": VOCAB - 1}
DEEPSPEC = SIZES | {"architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", "num_hidden_layers": 1}
DEEPSPEC |= {"target_layer_ids": [0], "num_target_layers": 2, "ttt_length": 7}
AMAZON = SIZES | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 2, "ptd_token_id": VOCAB - 1}
AMAZON |= {"eagle_config": {IDS: [-1, 0, 0]}}


def is_parallel(raw: Mapping[str, Any]) -> bool:
    return raw.get("speculators_model_type") == "peagle" or "ptd_token_id" in raw


def new_weights(raw: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights, in float64, in the file of a head with this config."""
    torch.manual_seed(0)
    head = Eagle3Head(read_config(raw, is_parallel(raw))).double()
    for name, parameter in head.named_parameters():
        torch.nn.init.normal_(parameter, float("norm" in name), 0.3)
    weights = head.requires_grad_(False).state_dict()
    if head.config.draft_vocab_size < VOCAB:
        tokens = torch.randperm(VOCAB)[: head.config.draft_vocab_size].sort().values
        weights["d2t"] = tokens - torch.arange(len(tokens))
    if "ptd_token_id" in raw:
        weights["mask_hidden"] = weights["mask_hidden"][0]
        return weights
    return {name.replace("midlayer.", "layers.0."): weight for name, weight in weights.items()}


def saved(raw: Mapping[str, Any], folder: Path, weights: Mapping[str, Tensor] | None = None) -> Path:
    """The folder of a head; without `weights`, with random ones."""
    return save_checkpoint(raw, new_weights(raw) if weights is None else weights, folder)


def plain_layers(raw: Mapping[str, Any], weights: Mapping[str, Tensor], hidden: Tensor, embedded: Tensor) -> Tensor:
    """What the layers make of features [n, H] and embeddings [n, H] of places 0 to n - 1."""
    raw = raw | raw.get("eagle_config", {}) | raw.get("transformer_layer_config", {})
    count, theta = raw.get("num_hidden_layers", 1), raw.get("rope_theta", 1e4)
    places = torch.arange(len(hidden))
    distance = places.unsqueeze(1) - places
    for index, kind in enumerate(raw.get("layer_types", ["full_attention"] * count)):
        prefix = rf"(midlayer|layers\.{index})\." if index == 0 else rf"layers\.{index}\."
        own = {re.sub(prefix, "", name): weight for name, weight in weights.items() if re.match(prefix, name)}
        if index == 0:
            read = norm(hidden, own["hidden_norm.weight"], 1e-6)
            hidden = read if raw.get("norm_before_residual") else hidden
            read = torch.cat([norm(embedded, own["input_layernorm.weight"], 1e-6), read], -1)
        else:
            read = norm(hidden, own["input_layernorm.weight"], 1e-6)

        def heads(name: str, read: Tensor = read, own: dict[str, Tensor] = own) -> Tensor:
            split = (read @ own[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, 8)).transpose(0, 1)
            of_norm = own.get(f"self_attn.{name}_norm.weight")
            split = split if of_norm is None else norm(split, of_norm, 1e-6)
            return split if name == "v" else rotated(split, places, theta)

        scores = heads("q") @ heads("k").repeat_interleave(2, 0).transpose(1, 2) / 8**0.5
        window = raw["sliding_window"] if kind == "sliding_attention" else math.inf
        shares = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf).softmax(-1)
        mixed = (shares @ heads("v").repeat_interleave(2, 0)).transpose(0, 1).flatten(1)
        hidden = hidden + mixed @ own["self_attn.o_proj.weight"].T
        read = norm(hidden, own["post_attention_layernorm.weight"], 1e-6)
        gated = F.silu(read @ own["mlp.gate_proj.weight"].T) * (read @ own["mlp.up_proj.weight"].T)
        hidden = hidden + gated @ own["mlp.down_proj.weight"].T
    return hidden


def plain_chain(
    raw: Mapping[str, Any], weights: Mapping[str, Tensor], features: Tensor, following: Tensor, drafts: Tensor
) -> Tensor:
    """[K, V]: what K drafts were drawn from, as speculators, DeepSpec, vLLM, SGLang and TensorRT-LLM compute it, given
    features [N, F * H], the tokens [N] after each and drafts [K]."""
    own, count, parallel = raw | raw.get("eagle_config", {}), len(drafts), is_parallel(raw)
    if parallel:
        masks = drafts.new_full((count - 1,), own.get("mask_token_id", own.get("ptd_token_id")))
        features = torch.cat([features, weights["mask_hidden"].view(1, -1).expand(count - 1, -1)])
        following = torch.cat([following, masks])
    if own.get("fc_norm"):
        width = len(weights["fc_norm.0.weight"])
        parts = enumerate(features.split(width, -1))
        features = torch.cat([norm(part, weights[f"fc_norm.{i}.weight"], 1e-6) for i, part in parts], -1)
    hidden, embed, states = features @ weights["fc.weight"].T, weights["embed_tokens.weight"], []
    for depth in range(1 if parallel else count):
        output = plain_layers(raw, weights, hidden, embed[torch.cat([following, drafts[:depth]])])
        last = norm(output, weights["norm.weight"], 1e-6)
        states.append(last[-count:] if parallel else last[-1:])
        hidden = torch.cat([hidden, (last if own.get("norm_output") else output)[-1:]])
    logits = (torch.cat(states) @ weights["lm_head.weight"].T).float()
    if "d2t" in weights:
        tokens = torch.arange(logits.shape[1]) + weights["d2t"]
        logits = torch.full((count, VOCAB), -torch.inf).scatter(1, tokens.expand(count, -1), logits)
    return logits


@torch.inference_mode()
def plain_drafts(
    raw: Mapping[str, Any], weights: Mapping[str, Tensor], target: PreTrainedModel, text: Tensor, drafts: Tensor
) -> Tensor:
    """[K, V]: what drafts [K] after a text [n] were drawn from."""
    inputs = raw.get(IDS) or [each + 1 for each in raw.get("target_layer_ids") or raw["eagle_config"][IDS]]
    states = target(text[None, :-1], output_hidden_states=True, use_cache=False).hidden_states
    features = torch.cat([states[layer][0] for layer in inputs], -1)
    return plain_chain(raw, weights, features, text[1:], drafts)


def causal(window: int | None = None) -> Attention:
    """Attention of each token to those before it, `window` of them with itself; None = all."""

    def attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        distance = torch.arange(keys.shape[2]).unsqueeze(1) - torch.arange(keys.shape[2])
        visible = (distance >= 0) & (distance < (window or math.inf))
        return F.scaled_dot_product_attention(queries, keys, values, visible, enable_gqa=True)

    return attention


def chain_logits(
    head: Eagle3Head,
    features: Tensor,
    following: Tensor,
    drafts: Tensor,
    target_embed: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """[K, V]: what each of K drafts was drawn from, given features [N, F * H] and the tokens [N] after each.

    Args:
        target_embed: for a head without embeddings.
    """
    embed = target_embed if head.embed_tokens is None else head.embed_tokens
    assert embed is not None
    hidden = head.fuse(features.unsqueeze(0))
    logits = []
    for depth in range(len(drafts)):
        tokens = torch.cat([following, drafts[:depth]]).unsqueeze(0)
        positions = torch.arange(tokens.shape[1]).unsqueeze(0)
        output = head.read(hidden, embed(tokens), positions, [causal(window) for window in head.config.windows])
        logits.append(head.target_logits(output)[0, -1])
        # Only the drafts' features are the head's own.
        hidden = torch.cat([hidden, head.feedback(output)[:, -1:]], 1)
    return torch.stack(logits)


@torch.inference_mode()
def plain_logits(head: Eagle3Head, target: PreTrainedModel, text: Tensor, drafts: Tensor) -> Tensor:
    """[K, V]: what drafts [K] after a text [n] were drawn from."""
    states = target(text[None, :-1], output_hidden_states=True, use_cache=False).hidden_states
    assert head.config.feature_layers is not None
    features = torch.cat([states[layer] for layer in head.config.feature_layers], -1)[0]
    return chain_logits(head, features, text[1:], drafts, target.get_input_embeddings())


@functools.cache
def trained_head(family: str = "llama") -> Eagle3Head:
    """A head that has learnt what the model writes after PROMPTS, and so guesses right often; not to be changed."""
    target = shared_tiny(family)
    texts = [torch.tensor([[*prompt, *row]]) for prompt, row in zip(PROMPTS, greedy_rows(family, 20), strict=True)]
    with torch.no_grad():
        states = [target(text, output_hidden_states=True).hidden_states for text in texts]
    head = new_head().requires_grad_(True)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.03)
    embed = head.embed_tokens
    assert embed is not None
    for _ in range(20):
        losses = []
        for text, own in zip(texts, states, strict=True):
            hidden = head.fuse(torch.cat([own[layer] for layer in LAYERS], -1)[:, :-2])
            positions = torch.arange(hidden.shape[1]).unsqueeze(0)
            output = head.read(hidden, embed(text[:, 1:-1]), positions, [causal()])
            # Once more with its own output in place of features, for the drafts after the first.
            hidden = head.feedback(output)[:, :-1]
            again = head.read(hidden, embed(text[:, 2:-1]), positions[:, 1:], [causal()])
            losses += [F.cross_entropy(head.logits(output)[0], text[0, 2:])]
            losses += [F.cross_entropy(head.logits(again)[0], text[0, 3:])]
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()
    return head.requires_grad_(False)
