"""The network of EAGLE-3 (Li et al. 2025, arXiv:2503.01840) and P-EAGLE heads: layers over the target's features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .layers import Attention, DecoderLayer, LayerConfig, Norm, rope_frequencies, rotation, spread_logits


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(LayerConfig):
    """The sizes of a head, and the switches in which heads differ.

    Args:
        vocab_size: the target's.
        draft_vocab_size: the tokens that the head has logits for, at most `vocab_size`.
        target_hidden_size: the width of the target's hidden states.
        feature_layers: the target's layers whose inputs are the features; None = 2, L // 2 and L - 3 of L layers.
        windows: for each layer, the tokens that a token attends to; None = all before it.
        norm_before_residual: the residual branch starts from the normalised feature.
        norm_before_fc: one norm is applied to the features of all layers together.
        fc_norm: a separate norm is applied to the features of each layer.
        norm_before_feedback: the norm before the logits also applies to the output that is fed back as the next
            feature.
        mask_token_id: the target's token of the masks of a P-EAGLE head; None = the head is an EAGLE-3 head.
        num_target_layers: the target's; None = not known.
        num_drafts: K by default; None = not known.
    """

    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    feature_layers: tuple[int, ...] | None = None
    windows: tuple[int | None, ...] = (None,)
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_feedback: bool = False
    mask_token_id: int | None = None
    num_target_layers: int | None = None
    num_drafts: int | None = None

    @property
    def num_features(self) -> int:
        return 3 if self.feature_layers is None else len(self.feature_layers)


class Eagle3Head(nn.Module):
    """Reads pairs (feature of token i, token i + 1) and gives logits of token i + 2. The first layer reads both,
    further layers read the output of the layer before.

    Parameters are named as in published heads.

    Args:
        has_embedding: True = the head has its own embeddings; False = it uses the target's.

    Attributes:
        mask_hidden: [1, 1, F * H_target], what the masks of a P-EAGLE head have in place of features; None = the head
            is an EAGLE-3 head.
        draft_of_target: [V] int64, the index of each target token's logit in the head, -1 = none; the identity unless
            set.
    """

    draft_of_target: Tensor
    frequencies: Tensor

    def __init__(self, config: Eagle3Config, has_embedding: bool = True) -> None:
        super().__init__()
        self.config = config
        hidden, eps = config.hidden_size, config.norm_eps
        fused = config.num_features * config.target_hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden) if has_embedding else None
        self.input_norm = Norm(fused, eps) if config.norm_before_fc else None
        self.fc_norm = None
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(Norm(config.target_hidden_size, eps) for _ in range(config.num_features))
        self.fc = nn.Linear(fused, hidden, bias=False)
        self.midlayer = _Layer(config)
        more = (str(index) for index in range(1, len(config.windows)))
        self.layers = nn.ModuleDict({index: DecoderLayer(config, hidden) for index in more})
        self.norm = Norm(hidden, eps)
        self.mask_hidden = None
        if config.mask_token_id is not None:
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, fused))
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

    def read(self, hidden: Tensor, embedded: Tensor, positions: Tensor, attentions: Sequence[Attention]) -> Tensor:
        """The last layer's output [B, n, H] at positions i [B, n], from the `fuse` or `feedback` of token i and the
        embedding of token i + 1, both [B, n, H]. The attention of each layer attends to the pairs up to each
        position."""
        cos, sin = rotation(positions, self.frequencies, hidden)
        hidden = self.midlayer(hidden, embedded, cos, sin, attentions[0])
        layers: Any = self.layers.values()
        for layer, attention in zip(layers, attentions[1:], strict=True):
            hidden = layer.add(hidden, layer.input_layernorm(hidden), cos, sin, attention)
        return hidden

    def feedback(self, output: Tensor) -> Tensor:
        """The feature of a draft, from the output [B, n, H] at the pair that it was drawn from."""
        return self.norm(output) if self.config.norm_before_feedback else output

    def logits(self, output: Tensor) -> Tensor:
        """[B, n, draft_vocab_size] from the output [B, n, H]."""
        return self.lm_head(self.norm(output))

    def target_logits(self, output: Tensor) -> Tensor:
        """[B, n, V], the logits of the target's tokens, -inf for tokens that the head lacks; float64 becomes
        float32."""
        logits = self.logits(output)
        logits = logits.float() if logits.dtype == torch.float64 else logits
        if self.config.draft_vocab_size == self.config.vocab_size:
            return logits
        return spread_logits(logits, self.draft_of_target)


class _Layer(DecoderLayer):
    def __init__(self, config: Eagle3Config) -> None:
        # The attention reads an embedding and a feature side by side.
        super().__init__(config, 2 * config.hidden_size)
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = Norm(config.hidden_size, config.norm_eps)

    def forward(self, hidden: Tensor, embedded: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        read = torch.cat([self.input_layernorm(embedded), normed], -1)
        return self.add(residual, read, cos, sin, attention)
