"""Tiny DFlash drafters, and what they compute in plain steps over a whole text, from the facts of the two layouts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_checkpoints import save_checkpoint
from tiny_models import PROMPTS, VOCAB, greedy_rows, shared_tiny
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from torch_specops.drafts import DFlash
from torch_specops.drafts.dflash_files import read_drafter_config
from torch_specops.drafts.dflash_head import DFlashHead

MASK, BLOCK = VOCAB - 1, 9
# The tiny models have two layers; what the second one gives goes through the last norm.
IDS = [0, 1]
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SIZES |= {"num_hidden_layers": 2}
ZLAB: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "num_target_layers": 2,
    "rope_theta": 1000.0,
    "dflash_config": {"block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": IDS},
} | SIZES
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}


def new_head(seed: int = 0, **fields: Any) -> DFlashHead:
    """A random drafter of z-lab's layout for the tiny models, in float64."""
    torch.manual_seed(seed)
    head = DFlashHead(read_drafter_config(ZLAB | fields)).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, float(parameter.dim() == 1), 0.3)
    return head.requires_grad_(False)


def save_drafter(head: DFlashHead, folder: Path, **fields: Any) -> Path:
    """As z-lab does."""
    weights = {name: tensor.contiguous() for name, tensor in head.state_dict().items()}
    return save_checkpoint(ZLAB | fields, weights, folder)


def new_muse(seed: int = 0, **fields: Any) -> Any:
    """transformers' own drafter for the tiny models, in float64."""
    own = {"block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": IDS, "sliding_window": 4}
    own |= {"layer_types": ["full_attention"] * 2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if not hasattr(transformers, "MuseGlimmerAssistantModel"):
        pytest.skip("this release of transformers has no DFlash drafter")
    config = transformers.MuseGlimmerAssistantConfig(**(SIZES | own | fields))
    torch.manual_seed(seed)
    model = transformers.MuseGlimmerAssistantModel(config).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, float(parameter.dim() == 1), 0.3)
    return model.requires_grad_(False)


def rotated(heads: Tensor, places: Tensor, theta: float) -> Tensor:
    """Heads [heads, n, D] turned by their places [n]: number i and number i + D / 2 are a plane."""
    half = heads.shape[-1] // 2
    angles = places.double().unsqueeze(1) * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(heads[..., :half].double(), heads[..., half:].double()) * torch.polar(angles * 0 + 1, angles)
    return torch.cat([turned.real, turned.imag], -1).to(heads)


def is_seen(raw: dict[str, Any], layer: int, query: Tensor, key: Tensor) -> Tensor:
    """Which keys a query sees, by their places, as z-lab's code and transformers' masks say."""
    slides = raw.get("layer_types", ["full_attention"] * 9)[layer] == "sliding_attention"
    distance = query - key
    if raw["model_type"] == "muse_glimmer_assistant":
        return distance.abs() <= (raw["sliding_window"] if slides else math.inf)
    is_causal = slides if raw.get("is_causal") is None else raw["is_causal"]
    seen = distance >= 0 if is_causal else torch.ones_like(distance, dtype=torch.bool)
    return seen & (distance.abs() < raw["sliding_window"]) if slides else seen


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def convolution(x: Tensor, kernel: Tensor | None) -> Tensor:
    """DFlash2's, of x [n, H] with weights [n, taps, H]; None = none."""
    if kernel is None:
        return x
    rows = [sum(kernel[n, tap] * x[n - tap] for tap in range(min(kernel.shape[1], n + 1))) for n in range(len(x))]
    return torch.stack(rows)  # type: ignore[arg-type]


def convolved(own: dict[str, Tensor], name: str, read: Tensor) -> tuple[Tensor, Tensor | None]:
    """A sublayer's input [n, H] after the convolution before it, and the weights of the one after it."""
    base = own.get(f"{name}.base_kernel")
    if base is None:
        return read, None
    groups = (read @ own[f"{name}.kernel_projection.weight"].T).view(len(read), 2, base.shape[1], -1)
    size = read.shape[1] // groups.shape[-1]
    kernels = torch.stack([base[:, :, c] + groups[..., c // size] for c in range(read.shape[1])], -1)
    return convolution(read, kernels[:, 0]), kernels[:, 1]


def block_states(
    raw: dict[str, Any],
    weights: dict[str, Tensor],
    features: Tensor,
    block: Tensor,
    is_seen: Callable[[dict[str, Any], int, Tensor, Tensor], Tensor] = is_seen,
) -> Tensor:
    """What the head gets of a block [n, H] of embeddings, after features [N - 1, F * H] of a text."""
    eps, theta = raw.get("rms_norm_eps", 1e-6), raw.get("rope_theta") or raw["rope_parameters"]["rope_theta"]
    text = norm(features @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    places = torch.arange(len(text) + len(block))
    new = places[len(text) :]
    for layer in range(raw["num_hidden_layers"]):
        own = {name.split(".", 2)[2]: w for name, w in weights.items() if name.startswith(f"layers.{layer}.")}

        def heads(x: Tensor, name: str, own: dict[str, Tensor] = own) -> Tensor:
            projected = F.linear(x, own[f"self_attn.{name}_proj.weight"], own.get(f"self_attn.{name}_proj.bias"))
            split = projected.unflatten(-1, (-1, raw["head_dim"])).transpose(0, 1)
            return split if name == "v" else norm(split, own[f"self_attn.{name}_norm.weight"], eps)

        read, kernel = convolved(own, "attention_conv", norm(block, own["input_layernorm.weight"], eps))
        queries = rotated(heads(read, "q"), new, theta)
        both = torch.cat([text, read])
        keys, values = rotated(heads(both, "k"), places, theta), heads(both, "v")
        group = len(queries) // len(keys)
        scores = queries @ keys.repeat_interleave(group, 0).transpose(1, 2) / math.sqrt(raw["head_dim"])
        hidden = ~is_seen(raw, layer, new.unsqueeze(1), places.unsqueeze(0))
        shares = scores.masked_fill(hidden, -math.inf).softmax(-1)
        mixed = (shares @ values.repeat_interleave(group, 0)).transpose(0, 1).flatten(1)
        mixed = F.linear(mixed, own["self_attn.o_proj.weight"], own.get("self_attn.o_proj.bias"))
        block = block + convolution(mixed, kernel)
        read, kernel = convolved(own, "mlp_conv", norm(block, own["post_attention_layernorm.weight"], eps))
        gated = F.silu(read @ own["mlp.gate_proj.weight"].T) * (read @ own["mlp.up_proj.weight"].T)
        block = block + convolution(gated @ own["mlp.down_proj.weight"].T, kernel)
    return norm(block, weights["norm.weight"], eps)


def plain_logits(
    raw: dict[str, Any], weights: dict[str, Tensor], target: PreTrainedModel, states: Sequence[Tensor], text: Tensor
) -> Tensor:
    """[block_size - 1, V]: what drafts after a text [N] are chosen from, given the target's hidden states [1, M, H] of
    a text that begins with it."""
    own = raw | raw.get("dflash_config", {})
    features = torch.cat([states[layer + 1][0, : len(text) - 1] for layer in own["target_layer_ids"]], -1)
    block = torch.full((own["block_size"],), own["mask_token_id"])
    block[0] = text[-1]
    embedded = target.get_input_embeddings().weight[block] * own.get("input_embedding_scale", 1.0)
    read = block_states(raw, weights, features, embedded)[1:]
    logits = read @ target.get_output_embeddings().weight.T * own.get("output_multiplier", 1.0)
    cap = own.get("final_logit_softcapping")
    return logits if cap is None else cap * torch.tanh(logits / cap)


@functools.cache
def trained_drafter(family: str = "llama") -> DFlashHead:
    """A drafter that has learnt what the model writes after PROMPTS, and so guesses right often; not to be changed."""
    target = shared_tiny(family)
    embed, head_of_target = target.get_input_embeddings(), target.get_output_embeddings()
    cases = []
    for prompt, row in zip(PROMPTS, greedy_rows(family, 20), strict=True):
        text = torch.tensor([*prompt, *row])
        with torch.no_grad():
            states = target(text[None], output_hidden_states=True).hidden_states
            # Blocks after many a text, side by side.
            ends = torch.arange(1, len(text) - BLOCK + 1, 2)
            block = torch.full((len(ends), BLOCK), MASK)
            block[:, 0] = text[ends - 1]
            embedded = embed(block.flatten())[None]
        places = (ends.unsqueeze(1) - 1 + torch.arange(BLOCK)).flatten()
        of_block = torch.arange(len(ends)).repeat_interleave(BLOCK)
        sees_text = torch.arange(len(text)) < (ends[of_block] - 1).unsqueeze(1)
        seen = torch.cat([sees_text, of_block.unsqueeze(1) == of_block], 1)
        following = text[ends.unsqueeze(1) + torch.arange(BLOCK - 1)].flatten()
        cases.append((torch.cat([states[layer + 1] for layer in IDS], -1), embedded, places[None], seen, following))
    head = new_head().requires_grad_(True)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.02)
    for _ in range(25):
        optimizer.zero_grad()
        for features, embedded, places, seen, following in cases:
            context = head.context(features, torch.arange(features.shape[1])[None])
            read = head(embedded, places, [functools.partial(_over_both, both, seen) for both in context])
            logits = head_of_target(read.unflatten(1, (-1, BLOCK))[:, :, 1:]).flatten(0, 2)
            F.cross_entropy(logits, following).backward()
        optimizer.step()
    return head.requires_grad_(False)


def _over_both(context: tuple[Tensor, Tensor], seen: Tensor, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    keys, values = (torch.cat(each, 2) for each in zip(context, (keys, values), strict=True))
    return F.scaled_dot_product_attention(queries, keys, values, seen, enable_gqa=True)


class Recorder(DFlash):
    """Keeps the text, its length and the logits of every step."""

    def _read_block(self, tokens: Tensor, ends: Tensor, *rest: Any) -> Any:
        logits, *others = super()._read_block(tokens, ends, *rest)
        self.seen.append((tokens.clone(), ends[:, 0].tolist(), logits))
        return logits, *others

    def start(self, *arguments: Any) -> None:
        super().start(*arguments)
        self.seen: list[tuple[Tensor, list[int], Tensor]] = []

    @torch.inference_mode()
    def largest_difference(self, raw: dict[str, Any], target: PreTrainedModel, lengths: list[int]) -> float:
        """Of logits and those of a plain computation, in rows that are not as long yet."""
        weights, differences = dict(self.head.named_parameters()), []
        known: dict[int, tuple[list[int], Any]] = {}
        # The newest texts first, because they have those before them in them.
        for tokens, ends, logits in reversed(self.seen):
            for row, end in enumerate(ends):
                if end >= lengths[row]:
                    continue
                text = tokens[row, :end].tolist()
                if row not in known or known[row][0][:end] != text:
                    output = target(tokens[row : row + 1, :end], output_hidden_states=True, use_cache=False)
                    known[row] = text, output.hidden_states
                expected = plain_logits(raw, weights, target, known[row][1], tokens[row, :end])
                differences.append(float((logits[row] - expected[: logits.shape[1]]).abs().max()))
        assert len(differences) > 10
        return max(differences)
