"""Tiny EAGLE-3 heads, and what they compute in plain steps over a whole text."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_models import PROMPTS, VOCAB, greedy_rows, shared_tiny
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

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
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    save_file(head.state_dict(), folder / "model.safetensors")


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
        output = head.read(hidden, embed(tokens), positions, causal(head.config.window))
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
            output = head.read(hidden, embed(text[:, 1:-1]), positions, causal())
            # Once more with its own output in place of features, for the drafts after the first.
            hidden = head.feedback(output)[:, :-1]
            again = head.read(hidden, embed(text[:, 2:-1]), positions[:, 1:], causal())
            losses += [F.cross_entropy(head.logits(output)[0], text[0, 2:])]
            losses += [F.cross_entropy(head.logits(again)[0], text[0, 3:])]
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()
    return head.requires_grad_(False)
