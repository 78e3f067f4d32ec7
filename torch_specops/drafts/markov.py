"""The heads that DSpark adds to a DFlash drafter: one for the token before a draft, one for the draft's chance.

The place of draft j in the block has the hidden state h_j; x_j-1 is the token before this draft.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

KINDS = ("vanilla", "gated", "rnn")


class MarkovHead(nn.Module):
    """The bias W2 z of low rank r that a draft's logits get from the token before it, with e = W1[x_j-1].

    - "vanilla": z = e.
    - "gated": z = sigmoid(G [h_j; e]) * e.
    - "rnn": (g, c, o) = J [s; e; h_j], s <- sigmoid(g) s + (1 - sigmoid(g)) tanh(c), z = tanh(o). The state s is 0
      at the beginning of a block.

    Args:
        kind: one of these.
        vocab_size: V, the target's tokens.
        draft_vocab_size: D, the drafter's tokens.
        hidden_size: H.
        rank: r.
    """

    def __init__(self, kind: str, vocab_size: int, draft_vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.kind = kind
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def forward(self, previous: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The bias [B, D] and the next state [B, r], from the target's tokens `previous` [B] and the hidden states
        [B, H] of its place. Only "rnn" reads and changes the state."""
        z = embedded = self.markov_w1(previous)
        if self.kind == "gated":
            z = self.gate_proj(torch.cat([hidden, embedded], -1)).sigmoid() * embedded
        elif self.kind == "rnn":
            gate, candidate, output = self.joint_proj(torch.cat([state, embedded, hidden], -1)).chunk(3, -1)
            kept = gate.sigmoid()
            state, z = kept * state + (1 - kept) * candidate.tanh(), output.tanh()
        return self.markov_w2(z), state


class ConfidenceHead(nn.Module):
    """sigmoid(w h_j + b) or sigmoid(w [h_j; e] + b): how likely the target accepts draft j. It depends on the drafts
    before j, and not on draft j."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, read: Tensor) -> Tensor:
        """Probabilities [B] in float32, from [B, H] or [B, H + r]."""
        return self.proj(read).squeeze(-1).float().sigmoid()
