"""What a caller gives a decode, checked and brought into the form of the state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import checks

__all__ = ["align_prompts", "eos_tensor", "per_row", "row_seeds"]

EosTokenIds = int | Sequence[int] | Sequence[Sequence[int]] | None


def align_prompts(input_ids: Tensor, attention_mask: Tensor | None, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Prompts padded on either side -> tokens [B, P] that begin at index 0, and lengths [B].

    Raises:
        TypeError, ValueError: a wrong dtype or shape, an empty prompt, a mask with holes, a token out of range.
    """
    if not isinstance(input_ids, Tensor) or input_ids.dtype not in (torch.int64, torch.int32):
        found = getattr(input_ids, "dtype", type(input_ids))
        raise TypeError(f"input_ids: expected an int64 tensor [B, P], got {found}")
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise ValueError(f"input_ids: expected [B, P] with B, P >= 1, got shape {list(input_ids.shape)}")
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask: expected a tensor [B, P], got {type(attention_mask)}")
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask: expected {list(input_ids.shape)}, as input_ids has, got {list(attention_mask.shape)}"
        )
    if bool(((attention_mask != 0) & (attention_mask != 1)).any()):
        raise ValueError("attention_mask: expected zeros and ones")
    is_token = attention_mask.to(input_ids.device).bool()
    lengths = is_token.sum(1)
    if bool((lengths == 0).any()):
        raise ValueError(f"attention_mask: expected a token in every row, got none in row {int(lengths.argmin())}")
    # Rises from padding to text must be one per row, counting a start with text.
    starts = is_token & ~torch.nn.functional.pad(is_token, (1, 0))[:, :-1]
    if bool((starts.sum(1) > 1).any()):
        row = int((starts.sum(1) > 1).long().argmax())
        raise ValueError(f"attention_mask: expected padding at the ends of a row only, got a hole in row {row}")
    tokens = input_ids.long().gather(1, (~is_token).long().argsort(dim=1, stable=True))
    inside = torch.arange(tokens.shape[1], device=tokens.device) < lengths.unsqueeze(1)
    wrong = inside & ((tokens < 0) | (tokens >= vocab_size))
    if bool(wrong.any()):
        raise ValueError(f"input_ids: expected tokens in [0, {vocab_size}), got {int(tokens[wrong][0])}")
    return torch.where(inside, tokens, 0)[:, : int(lengths.max())], lengths


def per_row(name: str, value: int | Sequence[int] | Tensor, batch: int, least: int) -> Tensor:
    """One int or one per row -> [B] int64."""
    if isinstance(value, Tensor):
        value = value.tolist()
    values = list(value) if isinstance(value, Sequence) else [value] * batch
    if len(values) != batch:
        raise ValueError(f"{name}: expected one number or {batch}, got {len(values)}")
    for each in values:
        checks.check_int(name, each, least)
    return torch.tensor(values, dtype=torch.int64)


def row_seeds(seed: int | Tensor | None, batch: int) -> Tensor:
    """[B] int64. An int seeds row b with seed + b; None draws one from torch's default generator."""
    if seed is None:
        seed = int(torch.randint(0, 2**62, (1,)))
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64:
            raise TypeError(f"seed: expected an int or an int64 tensor [{batch}], got {seed.dtype}")
        if seed.shape != (batch,):
            raise ValueError(f"seed: expected an int or a tensor [{batch}], got shape {list(seed.shape)}")
        return seed.cpu()
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed: expected an int or an int64 tensor [{batch}], got {type(seed)}")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed: expected a 64-bit number, got {seed}")
    return torch.tensor(seed) + torch.arange(batch)


def eos_tensor(eos_token_id: Any, batch: int) -> Tensor:
    """A token, several, or several for each row -> [B, E] int64, padded with -1."""
    if isinstance(eos_token_id, str) or not isinstance(eos_token_id, Sequence):
        rows: list[list[Any]] = [[eos_token_id]] * batch
    elif not any(isinstance(each, Sequence) for each in eos_token_id):
        rows = [list(eos_token_id)] * batch
    else:
        rows = [list(each) if isinstance(each, Sequence) else [each] for each in eos_token_id]
        if len(rows) != batch:
            raise ValueError(f"eos_token_id: expected tokens for each of {batch} rows, got {len(rows)} lists")
    for token in (token for row in rows for token in row):
        checks.check_int("eos_token_id", token, 0)
    width = max(max(len(row) for row in rows), 1)
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.int64)
