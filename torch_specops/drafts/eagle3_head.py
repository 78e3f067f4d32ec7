"""The network of an EAGLE-3 head (Li et al. 2025, arXiv:2503.01840): one decoder layer over the target's features."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Attention", "Eagle3Config", "Eagle3Head", "rope_frequencies"]

ROPE_TYPES = ("default", "linear", "llama3")

# Queries [B, G * heads, n, D], keys and values [B, heads, n, D] -> [B, G * heads, n, D].
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Eagle3Config:
    """The sizes of a head, and the switches in which heads differ.

    Args:
        vocab_size: the target's.
        draft_vocab_size: the tokens that the head has logits for, at most `vocab_size`.
        target_hidden_size: the width of the target's hidden states.
        feature_layers: the target's layers whose inputs are the features; None = 2, L // 2 and L - 3 of L layers.
        rope: `rope_type` ("default", "linear" or "llama3") and the numbers that it needs.
        window: tokens that a token attends to; None = all before it.
        attention_bias, mlp_bias: True = these projections have biases.
        normalises_queries: queries and keys of each head go through a norm, as in Qwen 3.
        norm_before_residual: the residual branch starts from the normalised feature.
        norm_before_fc: the features go through one norm together.
        fc_norm: the features of each layer go through a norm of their own.
        norm_before_logits: the layer's output goes through the last norm before the logits.
        norm_before_feedback: the last norm also applies to the output that is fed back as the next feature.
    """

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    target_hidden_size: int
    feature_layers: tuple[int, ...] | None = None
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default"})
    window: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    normalises_queries: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_logits: bool = True
    norm_before_feedback: bool = False

    @property
    def num_features(self) -> int:
        return 3 if self.feature_layers is None else len(self.feature_layers)


class Eagle3Head(nn.Module):
    """Reads pairs (feature of token i, token i + 1) and gives logits of token i + 2.

    The names of parameters are those of published heads.

    Args:
        config: the sizes.
        has_embedding: True = it has embeddings of its own; False = it is given the target's.

    Attributes:
        draft_of_target: [V] int64, the head's logit of each of the target's tokens, -1 = none; all of them in order
            unless set.
    """

    draft_of_target: Tensor
    frequencies: Tensor

    def __init__(self, config: Eagle3Config, has_embedding: bool = True) -> None:
        super().__init__()
        self.config = config
        hidden, eps = config.hidden_size, config.norm_eps
        fused = config.num_features * config.target_hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden) if has_embedding else None
        self.input_norm = _Norm(fused, eps) if config.norm_before_fc else None
        self.fc_norm = None
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(_Norm(config.target_hidden_size, eps) for _ in range(config.num_features))
        self.fc = nn.Linear(fused, hidden, bias=False)
        self.midlayer = _Layer(config)
        self.norm = _Norm(hidden, eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.register_buffer("draft_of_target", torch.arange(config.vocab_size), persistent=False)
        self.register_buffer("frequencies", rope_frequencies(config), persistent=False)

    def fuse(self, features: Tensor) -> Tensor:
        """[B, n, H] from the target's hidden states [B, n, F * H_target]."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(features)

    def read(self, hidden: Tensor, embedded: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """The layer's output [B, n, H] at positions i [B, n], from the `fuse` or `feedback` of token i and the
        embedding of token i + 1, both [B, n, H]. `attention` attends to the pairs up to each."""
        angles = positions.unsqueeze(-1) * self.frequencies
        # Use float32: 16-bit floats cannot represent large positions.
        rotation = torch.cat([angles, angles], -1).unsqueeze(1)
        return self.midlayer(hidden, embedded, rotation.cos().to(hidden), rotation.sin().to(hidden), attention)

    def feedback(self, output: Tensor) -> Tensor:
        """The feature of a draft: the layer's output [B, n, H] at the pair that it was drawn from."""
        return self.norm(output) if self.config.norm_before_feedback else output

    def logits(self, output: Tensor) -> Tensor:
        """[B, n, draft_vocab_size] from the layer's output [B, n, H]."""
        return self.lm_head(self.norm(output) if self.config.norm_before_logits else output)

    def target_logits(self, output: Tensor) -> Tensor:
        """[B, n, V] in float32 or less: the same, -inf for tokens that the head does not have."""
        logits = self.logits(output)
        logits = logits.float() if logits.dtype == torch.float64 else logits
        if self.config.draft_vocab_size == self.config.vocab_size:
            return logits
        found = logits[..., self.draft_of_target.clamp(min=0)]
        return torch.where(self.draft_of_target >= 0, found, -torch.inf)


class _Norm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        # Autocast leaves the input in another dtype than the weight.
        return super().forward(x.to(self.weight.dtype))


class _Layer(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = _Norm(hidden, eps)
        self.hidden_norm = _Norm(hidden, eps)
        self.post_attention_layernorm = _Norm(hidden, eps)
        self.self_attn = _Attention(config)
        self.mlp = _Mlp(config)

    def forward(self, hidden: Tensor, embedded: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        read = torch.cat([self.input_layernorm(embedded), normed], -1)
        residual = residual + self.self_attn(read, cos, sin, attention)
        return residual + self.mlp(self.post_attention_layernorm(residual))


class _Attention(nn.Module):
    """Its inputs are twice as wide as the layer: an embedding and a feature."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width, bias = 2 * config.hidden_size, config.attention_bias
        of_queries, of_keys = config.num_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(width, of_queries, bias=bias)
        self.k_proj = nn.Linear(width, of_keys, bias=bias)
        self.v_proj = nn.Linear(width, of_keys, bias=bias)
        self.o_proj = nn.Linear(of_queries, config.hidden_size, bias=bias)
        norm = _Norm if config.normalises_queries else nn.Identity
        self.q_norm, self.k_norm = norm(self.head_dim, config.norm_eps), norm(self.head_dim, config.norm_eps)

    def forward(self, read: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        heads = (-1, self.head_dim)
        queries = self.q_norm(self.q_proj(read).unflatten(-1, heads)).transpose(1, 2)
        keys = self.k_norm(self.k_proj(read).unflatten(-1, heads)).transpose(1, 2)
        values = self.v_proj(read).unflatten(-1, heads).transpose(1, 2)
        mixed = attention(_rotated(queries, cos, sin), _rotated(keys, cos, sin), values)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class _Mlp(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=config.mlp_bias)
        self.up_proj = nn.Linear(hidden, inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, hidden, bias=config.mlp_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat([-second, first], -1) * sin


def rope_frequencies(config: Eagle3Config) -> Tensor:
    """[head_dim / 2] float32, radians per position."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    rope = config.rope
    kind = rope["rope_type"]
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / rope["factor"]
    if kind != "llama3":
        raise ValueError(f"config: expected a rope_type of {', '.join(ROPE_TYPES)}, got {kind!r}")
    # Llama 3.1 slows slow rotations down by the factor, keeps fast ones, and blends in between.
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / rope["factor"]
