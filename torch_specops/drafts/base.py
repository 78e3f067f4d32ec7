"""What a source of draft tokens gives and what a model with a cache does: the two protocols of the decoding loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["CachedModel", "Draft", "DraftSource"]


@dataclass(frozen=True)
class Draft:
    """K proposed tokens per sequence, and the law they were drawn from.

    Args:
        tokens: [B, K] int64; -1 is padding, and what follows a padding is never verified.
        logits: [B, K, V], exactly the logits the tokens were sampled from; None = deterministic (q is one-hot).
        lse: [B, K] float32, logsumexp(logits / temperature) as `sample` returned it; None where logits is.
    """

    tokens: Tensor
    logits: Tensor | None = None
    lse: Tensor | None = None


class DraftSource(Protocol):
    """Where draft tokens come from."""

    def propose(
        self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, temperature: Tensor, seeds: Tensor
    ) -> Draft:
        """Propose tokens to follow each sequence.

        Args:
            tokens: [B, L] int64, the sequences; what stands at or after a row's length is not read.
            lengths: [B] int64, 0..L.
            num_draft_tokens: K >= 0.
            temperature: [B] float32, the target's; a source that samples must use it, or q is not what is verified.
            seeds: [B] int64; a source that samples takes `uniforms(seeds, lengths, K, "propose")` and no other stream.
        """
        ...


class CachedModel(Protocol):
    """A language model that remembers what it has read, one sequence at a time."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def max_length(self) -> int | None:
        """The longest sequence the model can read; None = no limit known."""
        ...

    def forward(self, tokens: Tensor, position: int, num_logits: int) -> Tensor:
        """Read tokens [1, n] at position, position + 1, ...; return the logits [1, num_logits, V] of the last ones.

        What was remembered of `position` and beyond is forgotten first: rollback is reading at an earlier position.
        """
        ...
