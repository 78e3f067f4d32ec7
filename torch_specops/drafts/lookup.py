"""The common part of the lookups: tokens to copy from besides the text so far, and the search for matches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from .base import DraftSource

__all__ = ["LookupDraft", "match_lengths"]


class LookupDraft(DraftSource):
    """A source that copies from the text. If the target's encoder reads tokens (`input_ids`, as that of T5), it copies
    from these too: they stand before the text (Leviathan et al. 2023, section 3.6, copies from the context; shallow
    aggressive decoding, Sun et al. 2021, from the input)."""

    # [B, S] int64, the encoder's tokens, with -1 in place of padding and at the end; None = there are none.
    _input: Tensor | None = None

    def start(self, tokens: Tensor, lengths: Tensor, capacity: int, inputs: Mapping[str, Tensor] | None = None) -> None:
        self._keep(_tokens_of(inputs, tokens.device))

    def restart(self, tokens: Tensor, lengths: Tensor, rows: Tensor) -> None:
        """Nothing to do: texts are read when drafts are wanted."""

    def replace_inputs(self, row: int, inputs: Mapping[str, Tensor]) -> None:
        old = self._input
        new = None if old is None else _tokens_of(inputs, old.device)
        if old is None or new is None:
            return
        rows = pad(old, (0, max(new.shape[1] - old.shape[1], 0)), value=-1)
        rows[row] = pad(new[0], (0, rows.shape[1] - new.shape[1]), value=-1)
        self._keep(rows)

    def static_tensors(self) -> Sequence[Tensor]:
        return () if self._input is None else (self._input,)

    def _keep(self, new: Tensor | None) -> None:
        old = self._input
        # A CUDA graph reads the old memory.
        if old is not None and new is not None and old.shape == new.shape and old.device == new.device:
            new = old.copy_(new)
        # Not by assignment, because `PromptLookup` is frozen for its users.
        vars(self)["_input"] = new

    def _behind_input(self, tokens: Tensor) -> tuple[Tensor, int]:
        """The encoder's tokens and then the text [B, S + W], and S."""
        return (tokens, 0) if self._input is None else (torch.cat([self._input, tokens], 1), self._input.shape[1])


def _tokens_of(inputs: Mapping[str, Tensor] | None, device: torch.device) -> Tensor | None:
    """[B, S] int64, as `LookupDraft` keeps them."""
    inputs = inputs or {}
    tokens, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if tokens is None:
        return None
    tokens = tokens if mask is None else torch.where(mask != 0, tokens, -1)
    return pad(tokens.to(device), (0, 1), value=-1)


def match_lengths(text: Tensor, last: Tensor, most: int, first: int = 0) -> Tensor:
    """[B, N] for each place before the row's end, how many tokens, read backwards from it, equal those read backwards
    from the end.

    Args:
        text: [B, N].
        last: [B, 1], the index of each row's last token.
        most: the longest match to look for.
        first: where the rows begin; text before it is not theirs.
    """
    position = torch.arange(text.shape[1], device=text.device)
    alive, lengths = position < last, torch.zeros_like(text)
    for back in range(most):
        token = text.gather(1, (last - back).clamp(min=first))
        alive = alive & (position >= back) & (last - back >= first) & (text.roll(back, 1) == token)
        lengths += alive
    return lengths
