"""Layers, vocabularies and config fields that the EAGLE-3 and DFlash networks share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..checks import is_int, is_number

ROPE_FACTORS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
ROPE_FIELDS = {"rope_type", "rope_theta", "partial_rotary_factor", *ROPE_FACTORS["llama3"]}
# Copies of the target's weights that only speculators' training needs.
NOT_NEEDED = ("verifier_norm.weight", "verifier_lm_head.weight")
# The supported values of fields that change what a head or drafter computes; None = not given.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("quantization_config", "quantization", "compression_config"), (None,)),
    **dict.fromkeys(("attn_logit_softcapping", "query_pre_attn_scalar", "attention_multiplier"), (None,)),
    **dict.fromkeys(("attention_chunk_size", "no_rope_layers"), (None,)),
    **dict.fromkeys(("logit_scale", "logits_scaling", "residual_multiplier", "embedding_multiplier"), (None, 1)),
    "is_neox_style": (None, True),
    **dict.fromkeys(("attention_sink_bias", "use_swa", "rope_interleaved"), (None, False)),
    **dict.fromkeys(("hc_mult", "modality_head_rank", "dspark_draft_topk", "markov_topk"), (None, 0)),
}
# The same for fields that only z-lab's and transformers' drafters read.
UNSCALED: dict[str, tuple[Any, ...]] = {
    "final_logit_softcapping": (None,),
    **dict.fromkeys(("output_multiplier", "input_embedding_scale"), (None, 1)),
}
# What is read of the layers. speculators' files may have these fields beside `transformer_layer_config` too.
LAYER_FIELDS = {"hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"}
LAYER_FIELDS |= {"hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias", "vocab_size", "num_hidden_layers"}
LAYER_FIELDS |= {"layer_types", "sliding_window", "use_sliding_window"}
LAYER_FIELDS |= {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"}
EXPECTED: dict[Any, tuple[str, str]] = {Mapping: ("an object", "a list of objects"), str: ("a str", "a list of str")}

# Queries [B, G * heads, n, D], keys and values [B, heads, n, D] -> [B, G * heads, n, D].
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """The sizes of a layer.

    Args:
        rope: `rope_type` ("default", "linear" or "llama3") and the numbers that it needs.
        attention_bias, mlp_bias: True = these projections have biases.
        normalises_queries: queries and keys of each head are normalised, as in Qwen 3.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default"})
    attention_bias: bool = False
    mlp_bias: bool = False
    normalises_queries: bool = False


class Norm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        # Under autocast the input may have another dtype than the weight.
        return super().forward(x.to(self.weight.dtype))


class AttentionLayer(nn.Module):
    """Projections from inputs of this width to queries, keys and values, and from attention to the hidden size."""

    def __init__(self, config: LayerConfig, width: int) -> None:
        super().__init__()
        self.head_dim, bias = config.head_dim, config.attention_bias
        of_queries, of_keys = config.num_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(width, of_queries, bias=bias)
        self.k_proj = nn.Linear(width, of_keys, bias=bias)
        self.v_proj = nn.Linear(width, of_keys, bias=bias)
        self.o_proj = nn.Linear(of_queries, config.hidden_size, bias=bias)
        norm = Norm if config.normalises_queries else nn.Identity
        self.q_norm, self.k_norm = norm(self.head_dim, config.norm_eps), norm(self.head_dim, config.norm_eps)

    def keys_values(self, read: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        keys = self.k_norm(self._heads(self.k_proj(read))).transpose(1, 2)
        return _rotated(keys, cos, sin), self._heads(self.v_proj(read)).transpose(1, 2)

    def forward(self, read: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        queries = self.q_norm(self._heads(self.q_proj(read))).transpose(1, 2)
        mixed = attention(_rotated(queries, cos, sin), *self.keys_values(read, cos, sin))
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.head_dim))


class Mlp(nn.Module):
    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=config.mlp_bias)
        self.up_proj = nn.Linear(hidden, inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, hidden, bias=config.mlp_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class DecoderLayer(nn.Module):
    """A decoder layer whose attention reads inputs of this width."""

    def __init__(self, config: LayerConfig, width: int) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.norm_eps)
        self.self_attn = AttentionLayer(config, width)
        self.mlp = Mlp(config)

    def add(self, residual: Tensor, read: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        """The residual branch [B, n, H] after the layer; its attention reads the normalised inputs `read` [B, n,
        width]."""
        residual = residual + self.self_attn(read, cos, sin, attention)
        return residual + self.mlp(self.post_attention_layernorm(residual))


def rotation(positions: Tensor, frequencies: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B, 1, n, D] of the angles at positions [B, n], in the dtype of `like`."""
    angles = positions.unsqueeze(-1) * frequencies
    # Use float32: 16-bit floats cannot represent large positions.
    angles = torch.cat([angles, angles], -1).unsqueeze(1)
    return angles.cos().to(like), angles.sin().to(like)


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat([-second, first], -1) * sin


def rope_frequencies(config: LayerConfig) -> Tensor:
    """[head_dim / 2] float32, radians per position."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    rope = config.rope
    kind = rope["rope_type"]
    check_known(("rope_type", kind, tuple(ROPE_FACTORS)))
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / rope["factor"]
    # Llama 3.1 divides low frequencies by the factor, keeps high ones, and interpolates between them.
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / rope["factor"]


def spread_logits(logits: Tensor, draft_of_target: Tensor) -> Tensor:
    """The logits [.., V] of the target's tokens, -inf for tokens that the head lacks, from the head's [.., D].
    `draft_of_target` [V] is as in `draft_tokens`."""
    found = logits[..., draft_of_target.clamp(min=0)]
    return torch.where(draft_of_target >= 0, found, -torch.inf)


def draft_tokens(count: int, vocab_size: int, offsets: Tensor | None, is_drafted: Tensor | None) -> Tensor:
    """[V] int64: maps each target token to one of the head's `count` tokens, or -1. Token i of the head is the target's
    token i + offsets[i] (d2t); `is_drafted` [V] (t2d) must mark the same tokens."""
    if offsets is None:
        if count != vocab_size:
            raise ValueError(f"draft: the head has {count} of {vocab_size} tokens and lacks the weights d2t")
        offsets = torch.zeros(count, dtype=torch.int64, device="cpu")
    if list(offsets.shape) != [count] or offsets.is_floating_point() or offsets.dtype == torch.bool:
        raise ValueError(f"draft: expected d2t [{count}] of integers, got {list(offsets.shape)} {offsets.dtype}")
    index = torch.arange(count, device=offsets.device)
    tokens = index + offsets.long()
    is_map = int(tokens.min()) >= 0 and int(tokens.max()) < vocab_size and len(tokens.unique()) == count
    # A head with all tokens must have them in the target's order, because its logits are then not spread.
    if not is_map or (count == vocab_size and bool((offsets != 0).any())):
        raise ValueError(
            f"draft: expected d2t to lead to {count} different tokens in [0, {vocab_size}), in order if all"
        )
    found = tokens.new_full((vocab_size,), -1)
    found[tokens] = index
    if is_drafted is not None and not torch.equal(is_drafted.bool(), found >= 0):
        raise ValueError("draft: t2d marks other tokens than d2t leads to")
    return found


def check_known(*values: tuple[str, Any, tuple[Any, ...]]) -> None:
    """Raise if a config value is not among the known values. Each of `values` is (name, value, known values)."""
    for name, value, known in values:
        if value not in known:
            raise ValueError(f"config: expected {name} {' or '.join(map(repr, known))}, got {value!r}")


def field_of(raw: Mapping[str, Any], name: str, kind: type, is_list: bool = False) -> Any:
    """A field of this kind, or a list of them; None = not given. Raises ValueError for another kind."""
    value = raw.get(name)
    items = value if is_list else [value]
    if value is not None and not (isinstance(items, list) and all(isinstance(each, kind) for each in items)):
        raise ValueError(f"config: expected {EXPECTED[kind][is_list]} as {name}, got {value!r}")
    return value


def joined(raw: Mapping[str, Any], parts: Mapping[str, Any], name: str, known: Set[str]) -> dict[str, Any]:
    """The config with the fields of `parts[name]` merged in. A part or field that is None is not given.

    Raises:
        ValueError: a part that is not an object, has unknown fields, or contradicts the config.
    """
    part = field_of(parts, name, Mapping) or {}
    given = {key: value for key, value in part.items() if value is not None}
    if unknown := sorted(given.keys() - known):
        raise ValueError(f"config: {name} has {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    for key, value in given.items():
        if raw.get(key) not in (None, value):
            raise ValueError(f"config: {key} is {raw[key]!r}, and {value!r} in {name}")
    return {**raw, **given}


def speculators_parts(raw: Mapping[str, Any], known: Set[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config of the layers and the fields of the drafter, from either place in a config of speculators. The
    drafter's fields are `known`."""
    layer = field_of(raw, "transformer_layer_config", Mapping) or {}
    for name in ("eagle_config", "dflash_config"):
        check_known((name, raw.get(name), (None,)), (name, layer.get(name), (None,)))
    beside = {name: raw[name] for name in LAYER_FIELDS & raw.keys()}
    inside = {name: layer[name] for name in known & layer.keys()}
    parts = {"the top level": beside, "transformer_layer_config": inside}
    layer = joined(layer, parts, "the top level", LAYER_FIELDS)
    return layer, joined(raw, parts, "transformer_layer_config", known)


def size_of(raw: Mapping[str, Any], name: str, default: int | None = None, least: int = 1) -> int:
    value = default if raw.get(name) is None else raw[name]
    if not is_int(value) or value < least:
        raise ValueError(f"config: expected an int >= {least} as {name}, got {value!r}")
    return value


def size_if_given(raw: Mapping[str, Any], name: str) -> int | None:
    return None if raw.get(name) is None else size_of(raw, name)


def number_of(raw: Mapping[str, Any], name: str, default: float | None = None) -> Any:
    value = default if raw.get(name) is None else raw[name]
    if value is not None and (not is_number(value) or value <= 0):
        raise ValueError(f"config: expected a number > 0 as {name}, got {value!r}")
    return value


def layer_ids(raw: Mapping[str, Any], name: str, least: int = 0) -> list[int]:
    ids = raw.get(name)
    if not (isinstance(ids, list) and ids and all(is_int(each) and each >= least for each in ids)):
        raise ValueError(f"config: expected a list of layers as {name}, got {ids!r}")
    return ids


def is_set(raw: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """A switch; None = the default."""
    value = raw.get(name)
    check_known((name, value, (None, True, False)))
    return default if value is None else bool(value)


def layer_kinds(raw: Mapping[str, Any], num_layers: int) -> list[str]:
    """ "full_attention" or "sliding_attention" for each layer."""
    given = field_of(raw, "layer_types", str, is_list=True)
    kinds = given or ["full_attention"] * num_layers
    if raw.get("use_sliding_window") and not given:
        raise ValueError("config: expected layer_types beside use_sliding_window, to say which layers have the window")
    check_known(
        ("layer_types of length", len(kinds), (num_layers,)),
        *(("layer_types", kind, ("full_attention", "sliding_attention")) for kind in kinds),
    )
    return kinds


def layer_sizes(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `LayerConfig` except `normalises_queries`, from a config with transformers' names."""
    rope = _rope_fields(raw)
    check_known(
        ("hidden_act", raw.get("hidden_act", "silu"), ("silu",)),
        ("partial_rotary_factor", rope["partial_rotary_factor"], (None, 1)),
    )
    hidden, num_heads = size_of(raw, "hidden_size"), size_of(raw, "num_attention_heads")
    num_key_value_heads = size_of(raw, "num_key_value_heads", num_heads)
    head_dim = size_of(raw, "head_dim", hidden // num_heads)
    check_known(
        ("num_attention_heads % num_key_value_heads", num_heads % num_key_value_heads, (0,)),
        ("head_dim % 2", head_dim % 2, (0,)),
    )
    return {
        "hidden_size": hidden,
        "intermediate_size": size_of(raw, "intermediate_size"),
        "num_heads": num_heads,
        "num_key_value_heads": num_key_value_heads,
        "head_dim": head_dim,
        "norm_eps": number_of(raw, "rms_norm_eps", 1e-6),
        "rope_theta": number_of(rope, "rope_theta", 10000.0),
        "rope": rope,
        "attention_bias": is_set(raw, "attention_bias"),
        "mlp_bias": is_set(raw, "mlp_bias"),
    }


def _rope_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary fields of a config: from `rope_scaling`, from `rope_parameters`, or from the top level."""
    rope: dict[str, Any] = {name: raw.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    for part in ("rope_scaling", "rope_parameters"):
        own = dict(field_of(raw, part, Mapping) or {})
        # The older name of `rope_type`.
        old = own.pop("type", None)
        own.setdefault("rope_type", old)
        kind = field_of(own, "rope_type", str)
        check_known((f"type in {part}", old, (None, kind)))
        # Accept any field of an unsupported kind, because `rope_frequencies` refuses the kind.
        rope = joined(rope, {part: own}, part, ROPE_FIELDS if kind in (None, *ROPE_FACTORS) else own.keys())
    kind = rope.setdefault("rope_type", "default")
    for name in ROPE_FACTORS.get(kind, ()):
        if number_of(rope, name) is None:
            raise ValueError(f"config: expected {name} beside rope_type {kind!r}")
    return rope


def default_drafts(raw: Mapping[str, Any], kind: str) -> int | None:
    """The number of drafts of the default method in `speculators_config`; None = not given."""
    known = {"algorithm", "proposal_methods", "default_proposal_method", "verifier"}
    fields = joined({}, raw, "speculators_config", known)
    methods = field_of(fields, "proposal_methods", Mapping, is_list=True) or []
    name = fields.get("default_proposal_method")
    for method in methods:
        known = {"proposal_type", "speculative_tokens", "accept_tolerance", "verifier_accept_k"}
        joined({}, {"proposal_methods": method}, "proposal_methods", known)
        check_known(
            # Rules that accept other tokens than the target's.
            ("accept_tolerance", method.get("accept_tolerance"), (None, 0)),
            ("verifier_accept_k", method.get("verifier_accept_k"), (None, 0, 1)),
        )
    check_known(
        ("algorithm in speculators_config", fields.get("algorithm"), (None, kind)),
        ("default_proposal_method", name, (None, *(method.get("proposal_type") for method in methods))),
    )
    chosen = [method for method in methods if name in (None, method.get("proposal_type"))]
    counts = {size_if_given(method, "speculative_tokens") for method in chosen} - {None}
    if len(counts) > 1:
        raise ValueError(f"config: expected default_proposal_method to choose one speculative_tokens, got {counts}")
    return counts.pop() if counts else None
