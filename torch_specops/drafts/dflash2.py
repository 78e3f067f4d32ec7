"""What DFlash2 (z-lab 2026) adds to a DFlash drafter: convolutions around every sublayer, and a selector among the
likeliest tokens.

Both are causal within the block: x_n is a sublayer's input or output at place n, h_j the hidden state of draft j, and
x_j-1 the token before it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .layers import Attention, DecoderLayer, LayerConfig


class DynamicConvolution(nn.Module):
    """conv(x, w)_n = sum over t < taps of w_n,t x_n-t, with x = 0 before the block, before and after a sublayer.

    The weights w_n,t are a trained number for each channel, and a number that is computed from the sublayer's input at
    n for each group of channels.

    Args:
        hidden_size: H.
        taps: the number of weights of a place.
        group_size: the channels of a group; divides H.
    """

    def __init__(self, hidden_size: int, taps: int, group_size: int) -> None:
        super().__init__()
        self.group_size = group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * taps * (hidden_size // group_size), bias=False)

    def weights(self, read: Tensor) -> tuple[Tensor, Tensor]:
        """The weights [B, n, taps, H] before and after the sublayer, from its input [B, n, H]."""
        groups = self.kernel_projection(read).unflatten(-1, (*self.base_kernel.shape[:2], -1))
        before, after = (groups.repeat_interleave(self.group_size, -1) + self.base_kernel).unbind(-3)
        return before, after


def convolved(x: Tensor, weights: Tensor) -> Tensor:
    """conv(x, w) [B, n, H], from x [B, n, H] and its weights [B, n, taps, H]."""
    count, taps = weights.shape[1:3]
    before = torch.stack([F.pad(x, (0, 0, tap, 0))[:, :count] for tap in range(taps)], 2)
    return (weights * before).sum(2)


class ConvolvedLayer(DecoderLayer):
    """A decoder layer with convolutions before and after its attention and its MLP."""

    def __init__(self, config: LayerConfig, taps: int, group_size: int) -> None:
        super().__init__(config, config.hidden_size)
        self.attention_conv = DynamicConvolution(config.hidden_size, taps, group_size)
        self.mlp_conv = DynamicConvolution(config.hidden_size, taps, group_size)

    def add(self, residual: Tensor, read: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        before, after = self.attention_conv.weights(read)
        residual = residual + convolved(self.self_attn(convolved(read, before), cos, sin, attention), after)
        read = self.post_attention_layernorm(residual)
        before, after = self.mlp_conv.weights(read)
        return residual + convolved(self.mlp(convolved(read, before)), after)


class CandidateSelector(nn.Module):
    """Chooses draft j among the `top_k` tokens c with the largest logits u_j: its logits are
    u_j(c) + sum(P[x_j-1] * W h_j * S[c]), with sums and products over r numbers, and -inf for other tokens.

    Args:
        vocab_size: the tokens.
        hidden_size: H.
        rank: r.
        top_k: the number of candidates.
    """

    def __init__(self, vocab_size: int, hidden_size: int, rank: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def forward(self, logits: Tensor, previous: Tensor, hidden: Tensor) -> Tensor:
        """The logits [B, 1, V] of a draft, from u [B, 1, V], the tokens [B] before it and the hidden states [B, H] of
        its place."""
        scores, candidates = logits.squeeze(1).topk(self.top_k)
        context = self.predecessor_codebook[previous] * self.hidden_projection(hidden)
        scores = scores + (context.unsqueeze(1) * self.successor_codebook[candidates]).sum(-1).to(scores.dtype)
        return torch.full_like(logits.squeeze(1), -torch.inf).scatter(1, candidates, scores).unsqueeze(1)
