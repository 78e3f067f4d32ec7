"""What the verify ops share: sequences by kind, greedy ones, the draft's side, the next token, the output."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import TypeVar

import torch
from torch import Tensor

from ..arguments import SigmoidArguments, VerifyArguments
from ..dense.filters import row_bounds, scale_kept, scale_kept_tokens
from ..dense.rows import argmax, inverse_temperature, scale
from ..dense.walk import draft_indices, is_near_argmax, logits_of, probability, stats_from_lse
from .rows import Row, Rows, draw, read_rows, rows_at_a_time, runs

# Vocabulary entries per tile of `argmax_by_tiles`.
TILE = 128

Given = TypeVar("Given", VerifyArguments, SigmoidArguments)
# Of one sequence: how many drafts are accepted, and the next token.
Outcome = tuple[int, int]


def verify(given: Given, verify_sampled: Callable[[Given], list[Outcome]]) -> tuple[Tensor, Tensor]:
    """output_tokens [B, K+1] and num_accepted [B]; `verify_sampled` is given sequences of temperature above 0: as many
    as stay in the cache, or one."""
    batch, num_drafts = given.draft_tokens.shape
    size = max(1, rows_at_a_time(given.target_logits.shape[2]) // (num_drafts + 1))
    outcomes: list[Outcome] = []
    for is_sampled, first, last in runs(given.temperature, batch):
        if not is_sampled:
            outcomes += _verify_greedy(_sequences(given, first, last))
            continue
        for start in range(first, last, size):
            outcomes += verify_sampled(_sequences(given, start, min(start + size, last)))
    output = [
        [*drafts[:n], next_token, *[-1] * (num_drafts - n)]
        for drafts, (n, next_token) in zip(given.draft_tokens.tolist(), outcomes, strict=True)
    ]
    device = given.draft_tokens.device
    num_accepted = torch.tensor([n for n, _ in outcomes], dtype=torch.int64, device=device)
    return torch.tensor(output, dtype=torch.int64, device=device).view(batch, num_drafts + 1), num_accepted


def _sequences(given: Given, start: int, stop: int) -> Given:
    if stop - start == given.draft_tokens.shape[0]:
        return given
    return type(given)(*(value[start:stop] if isinstance(value, Tensor) else value for value in given))


def _verify_greedy(given: VerifyArguments | SigmoidArguments) -> list[Outcome]:
    """Sequences of temperature 0: drafts are accepted while they are the argmax, or near it with `argmax_lenience`. Of
    a temperature that is no law: nothing."""
    assert given.temperature is not None
    target_logits, draft_tokens = given.target_logits, given.draft_tokens
    best = argmax_by_tiles(target_logits)
    matches = (draft_tokens == best[:, :-1]) & (draft_tokens >= 0)
    if isinstance(given, VerifyArguments) and given.argmax_lenience < 1:
        x, in_vocab = draft_indices(draft_tokens, target_logits.shape[2])
        z, z_max = (
            scale(logits_of(target_logits[:, :-1], tokens), None) for tokens in (x, best[:, :-1].clamp(min=0))
        )
        matches = in_vocab & is_near_argmax(z, z_max, given.argmax_lenience)
    outcomes = []
    for t, tokens, accepted in zip(given.temperature.tolist(), best.tolist(), matches.tolist(), strict=True):
        n = num_leading(accepted)
        outcomes.append((n, tokens[n]) if t == 0 else (0, -1))
    return outcomes


def num_leading(accepted: Iterable[bool]) -> int:
    """How many are accepted before the first that is not."""
    return sum(1 for _ in takewhile(bool, accepted))


def read_drafts(given: VerifyArguments, x: Tensor, first: int, stop: int) -> tuple[Rows | None, list[list[float]]]:
    """The draft's rows of the positions first .. stop - 1, and q(x) [B][stop - first]. None for one-hot drafts, and with
    `draft_lse`, which needs no row but that of a residual."""
    if given.draft_logits is None:
        return None, torch.ones(x[:, first:stop].shape, device=x.device).tolist()
    x, logits = x[:, first:stop], given.draft_logits[:, first:stop]
    if given.draft_lse is None:
        q = read_rows(logits, given.filters)
        return q, q.probabilities(x)
    inverse, bounds = inverse_temperature(given.temperature), row_bounds(logits, given.filters)
    z = scale_kept_tokens(logits_of(logits, x), x, inverse, bounds)
    return None, probability(z, *stats_from_lse(given.draft_lse[:, first:stop])).tolist()


def residual(given: VerifyArguments, p: Row, q: Row | None, b: int, n: int, reach: float = 1.0) -> Tensor:
    """[V] max(reach p - q, 0) of draft n of sequence b; q is None where `read_drafts` read no rows."""
    weights = p.times(reach)
    if given.draft_logits is None:
        weights[given.draft_tokens[b, n]] = 0.0
        return weights
    q = _row_of_lse(given, b, n) if q is None else q
    # Equal logits mean p = q, which rounding would hide, also that of a given draft_lse.
    return torch.zeros_like(weights) if torch.equal(p.z, q.z) else weights.sub_(q.times(1.0)).clamp_(min=0)


def _row_of_lse(given: VerifyArguments, b: int, n: int) -> Row:
    assert given.draft_logits is not None and given.draft_lse is not None
    logits, lse = given.draft_logits[b : b + 1, n], float(given.draft_lse[b, n])
    filters = given.filters.at(slice(b, b + 1))
    z = scale_kept(logits, inverse_temperature(filters.temperature), row_bounds(logits, filters))[0]
    return Row(z, (z - lse).exp_(), 1.0 if math.isfinite(lse) else 0.0)


def next_tokens(rows: list[Row], residuals: list[Tensor | None], uniforms: Tensor) -> list[int]:
    """Of each sequence a token from its residual; from p where there is none, or an empty one."""
    tokens = draw([row.weights if rest is None else rest for row, rest in zip(rows, residuals, strict=True)], uniforms)
    for b, (row, rest) in enumerate(zip(rows, residuals, strict=True)):
        if tokens[b] == -1 and rest is not None:
            tokens[b] = draw([row.weights], uniforms[b : b + 1])[0]
    return tokens


def argmax_by_tiles(logits: Tensor) -> Tensor:
    """`argmax` in a third of the time: torch vectorises a maximum but not argmax, which is therefore given a tile per
    row."""
    vocab_size = logits.shape[-1]
    size = min(TILE, vocab_size)
    whole = vocab_size // size * size
    tile_max = logits[..., :whole].unflatten(-1, (-1, size)).amax(-1)
    if whole < vocab_size:
        tile_max = torch.cat([tile_max, logits[..., whole:].amax(-1, keepdim=True)], -1)
    row_max = tile_max.amax(-1)
    # With NaN or infinite logits the plain form decides: both are replaced there, which may make ties.
    if not bool((row_max.float() < torch.finfo(torch.float32).max).all()):
        return argmax(logits)
    # Indices beyond the vocabulary read its last entry again, which is never the lowest index of a maximum.
    index = tile_max.argmax(-1, keepdim=True) * size + torch.arange(size, device=logits.device)
    inside = logits.gather(-1, index.clamp(max=vocab_size - 1)).argmax(-1)
    return torch.where(row_max > -torch.inf, index[..., 0] + inside, -1)
