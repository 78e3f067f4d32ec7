"""Tiny drafters of speculators, DeepSpec and DFlash2, and what they compute in plain steps over a whole text, from the
facts of the layouts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tiny_checkpoints import save_checkpoint
from tiny_dflash import MASK, SIZES, ZLAB, block_states
from tiny_models import VOCAB
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from torch_specops.drafts.dflash_files import read_drafter_config
from torch_specops.drafts.dflash_head import DFlashHead

RANK, BLOCK, KEPT = 4, 5, 24
LAYER: dict[str, Any] = {"model_type": "qwen3", "vocab_size": VOCAB, "rope_theta": 1000.0} | SIZES
METHOD = {"proposal_type": "greedy", "speculative_tokens": 3, "accept_tolerance": 0.0, "verifier_accept_k": 1}
DFLASH: dict[str, Any] = {
    "speculators_model_type": "dflash",
    "architectures": ["DFlashDraftModel"],
    "transformer_layer_config": LAYER,
    "aux_hidden_state_layer_ids": [0, 1],
    "block_size": BLOCK,
    "mask_token_id": MASK,
    "draft_vocab_size": VOCAB,
    "target_hidden_size": None,
    "speculators_config": {"algorithm": "dflash", "default_proposal_method": "greedy", "proposal_methods": [METHOD]},
}
MARKOV: dict[str, Any] = {
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
DSPARK = DFLASH | MARKOV | {"speculators_model_type": "dspark", "speculators_config": {"proposal_methods": [METHOD]}}
DEEPSPEC: dict[str, Any] = {"architectures": ["Qwen3DSparkModel"], "num_target_layers": 2, "target_layer_ids": [-1, 1]}
DEEPSPEC |= {"block_size": BLOCK, "mask_token_id": MASK} | LAYER | MARKOV
PARTS = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": RANK, "selector_top_k": 6}
DFLASH2 = DFLASH | PARTS | {"speculators_model_type": "dflash2", "speculators_config": {"proposal_methods": [METHOD]}}
ZLAB2 = ZLAB | {"architectures": ["DFlash2DraftModel"], "is_causal": False}
ZLAB2 |= {"dflash_config": {"block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": [1, 0]} | PARTS}


def new_head(raw: dict[str, Any], seed: int = 0) -> DFlashHead:
    """A random drafter in float64. DeepSpec's have embeddings and a head, speculators' a head if they have fewer tokens
    than the target."""
    of_deepspec, kept = raw["architectures"] == ["Qwen3DSparkModel"], raw.get("draft_vocab_size", VOCAB)
    torch.manual_seed(seed)
    head = DFlashHead(read_drafter_config(raw), of_deepspec, of_deepspec or kept < VOCAB).double()
    for name, parameter in head.named_parameters():
        torch.nn.init.normal_(parameter, float("norm" in name), 0.3)
    if kept < VOCAB:
        tokens = torch.randperm(VOCAB)[:kept].sort().values
        head.draft_of_target = torch.full((VOCAB,), -1).scatter(0, tokens, torch.arange(kept))
    return head.requires_grad_(False)


def new_weights(raw: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """The weights in the file of this drafter."""
    head = new_head(raw, seed)
    weights = head.state_dict()
    if head.draft_of_target is not None:
        weights["t2d"] = head.draft_of_target >= 0
        tokens = weights["t2d"].nonzero().squeeze(1)
        weights["d2t"] = tokens - torch.arange(len(tokens))
    return weights


def saved(raw: dict[str, Any], folder: Path, weights: Mapping[str, Tensor] | None = None) -> Path:
    """The folder of a drafter; without `weights`, with random ones."""
    return save_checkpoint(raw, new_weights(raw) if weights is None else weights, folder)


def is_seen(raw: dict[str, Any], layer: int, query: Tensor, key: Tensor) -> Tensor:
    """Which keys a query sees, by their places, as the mask of speculators says."""
    layers, newest = raw["transformer_layer_config"], query.min()
    if layers.get("layer_types", ["full_attention"] * 9)[layer] == "full_attention":
        return torch.ones_like(query - key, dtype=torch.bool)
    in_text = (key < newest) & (key >= newest - layers["sliding_window"])
    return in_text | (key >= newest) & ((key <= query) | raw.get("sliding_window_non_causal", "selector_rank" in raw))


def plain_drafts(
    raw: dict[str, Any], weights: dict[str, Tensor], target: PreTrainedModel, text: Tensor, drafts: Tensor
) -> tuple[Tensor, Tensor]:
    """The logits [K, V] of drafts [K] after a text [N], each after the drafts before it, and their confidences [K] if
    the drafter has them."""
    layer = raw.get("transformer_layer_config", raw)
    seen = [] if layer is raw else [lambda _, *places: is_seen(raw, *places)]
    own = raw | raw.get("dflash_config", {})
    ids = own.get("aux_hidden_state_layer_ids") or [each + 1 for each in own["target_layer_ids"]]
    states = target(text[None], output_hidden_states=True, use_cache=False).hidden_states
    block = torch.full((BLOCK,), MASK)
    block[0] = text[-1]
    embedded = F.embedding(block, weights.get("embed_tokens.weight", target.get_input_embeddings().weight))
    features = torch.cat([states[each][0, :-1] for each in ids], -1)
    hidden = block_states(layer, weights, features, embedded, *seen)
    head = weights.get("lm_head.weight", target.get_output_embeddings().weight)
    heads = {name.partition(".")[2]: weight for name, weight in weights.items()}
    # Where the newest token gives no draft, it still moves the state.
    first = 0 if raw.get("sample_from_anchor", "markov_rank" in raw) else 1
    state, previous = torch.zeros(RANK, dtype=torch.float64), [text[-1]] * (first + 1) + list(drafts[:-1])
    logits, confidences = [], []
    for read, token in zip(hidden, previous, strict=False):
        found = head @ read
        if "markov_w1.weight" in heads:
            z = embedded = heads["markov_w1.weight"][token]
            if "gate_proj.bias" in heads:
                gate = heads["gate_proj.weight"] @ torch.cat([read, embedded]) + heads["gate_proj.bias"]
                z = torch.sigmoid(gate) * embedded
            if "joint_proj.bias" in heads:
                joint = heads["joint_proj.weight"] @ torch.cat([state, embedded, read]) + heads["joint_proj.bias"]
                gate, candidate, output = joint.split(RANK)
                state = torch.sigmoid(gate) * state + torch.sigmoid(-gate) * torch.tanh(candidate)
                z = torch.tanh(output)
            found = found + heads["markov_w2.weight"] @ z
            read = torch.cat([read, embedded]) if raw["confidence_head_with_markov"] else read
        if "proj.bias" in heads:
            confidences.append(torch.sigmoid(heads["proj.weight"] @ read + heads["proj.bias"]))
        if "successor_codebook" in heads:
            context = heads["predecessor_codebook"][token] * (heads["hidden_projection.weight"] @ read)
            scores, candidates = (
                found + heads["successor_codebook"] @ context,
                found.topk(own["selector_top_k"]).indices,
            )
            found = torch.full_like(found, -torch.inf)
            found[candidates] = scores[candidates]
        if "d2t" in weights:
            tokens = torch.arange(len(found)) + weights["d2t"]
            found = torch.full((VOCAB,), -torch.inf, dtype=found.dtype).scatter(0, tokens, found)
        logits.append(found)
    return torch.stack(logits[first:]), torch.cat(confidences[first:]) if confidences else torch.empty(0)
