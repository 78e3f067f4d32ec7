"""What the verify ops share: runs of sampled and greedy sequences, greedy verification, the next token, the output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..arguments import SigmoidArguments, VerifyArguments
from ..dense.rows import scale
from ..dense.walk import LEAST_RESIDUAL, draft_indices, is_near_argmax, logits_of
from .rows import Rows, argmax_by_tiles, draw, is_dense, pick_rows, rows_at_a_time, runs, temperatures_of

Given = TypeVar("Given", VerifyArguments, SigmoidArguments)
# For one sequence: how many drafts are accepted, and the next token.
Outcome = tuple[int, int]


def verify(
    given: Given,
    verify_sampled: Callable[[Given], list[Outcome]],
    verify_dense: Callable[[Given], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """output_tokens [B, K+1] and num_accepted [B]. `verify_sampled` gets sequences with a temperature above 0: as many
    as stay in the cache, but at least one."""
    batch, num_drafts = given.draft_tokens.shape
    vocab_size = given.target_logits.shape[2]
    size = max(1, rows_at_a_time(vocab_size) // (num_drafts + 1))
    temperatures = temperatures_of(given.temperature, batch)
    if is_dense(temperatures, vocab_size):
        return verify_dense(given)
    outcomes: list[Outcome] = []
    for is_sampled, first, last in runs(temperatures):
        if not is_sampled:
            outcomes += _verify_greedy(_sequences(given, first, last))
        else:
            for start in range(first, last, size):
                outcomes += verify_sampled(_sequences(given, start, min(start + size, last)))
    output: list[int] = []
    num_accepted: list[int] = []
    for drafts, (n, token) in zip(given.draft_tokens.tolist(), outcomes, strict=True):
        output += drafts[:n] + [token] + [-1] * (num_drafts - n)
        num_accepted.append(n)
    integers = partial(torch.tensor, dtype=torch.int64, device=given.draft_tokens.device)
    return integers(output).view(batch, num_drafts + 1), integers(num_accepted)


def _sequences(given: Given, start: int, stop: int) -> Given:
    if stop - start == given.draft_tokens.shape[0]:
        return given
    tensors = ((name, value) for name, value in given._asdict().items() if isinstance(value, Tensor))
    part: dict[str, Any] = {name: value[start:stop] for name, value in tensors}
    return given._replace(**part)


def _verify_greedy(given: VerifyArguments | SigmoidArguments) -> list[Outcome]:
    """Sequences with temperature 0: drafts are accepted as long as they are the argmax, or near it with
    `argmax_lenience`. With a negative or NaN temperature nothing is accepted."""
    assert given.temperature is not None
    target_logits, draft_tokens = given.target_logits, given.draft_tokens
    best = argmax_by_tiles(target_logits)
    matches = (draft_tokens == best[:, :-1]) & (draft_tokens >= 0)
    if isinstance(given, VerifyArguments) and given.argmax_lenience < 1:
        x, in_vocab = draft_indices(draft_tokens, target_logits.shape[2])
        z, z_max = (scale(logits_of(target_logits[:, :-1], tokens), None) for tokens in (x, best[:, :-1].clamp(min=0)))
        matches = in_vocab & is_near_argmax(z, z_max, given.argmax_lenience)
    outcomes = []
    for t, tokens, accepted in zip(given.temperature.tolist(), best.tolist(), matches.tolist(), strict=True):
        n = num_leading(accepted)
        outcomes.append((n, tokens[n]) if t == 0 else (0, -1))
    return outcomes


def num_leading(accepted: Iterable[bool]) -> int:
    """How many are accepted before the first that is not."""
    return sum(1 for _ in takewhile(bool, accepted))


def next_tokens(
    p: Rows,
    ends: Sequence[tuple[int, int]],  # the row (b, i) of p after the accepted drafts of each sequence
    rejected: Sequence[int],  # the sequences with a residual
    residual: Tensor | None,  # [len(rejected), V]
    uniforms: Sequence[float],
) -> list[int]:
    """A token for each sequence: from its residual, or from p if it has none or an empty one."""
    tokens = dict.fromkeys(range(len(ends)), -1)
    if residual is not None:
        tokens.update(zip(rejected, draw(residual, [uniforms[b] for b in rejected], LEAST_RESIDUAL), strict=True))
    others = [b for b, token in tokens.items() if token == -1]
    if others:
        weights = pick_rows(p.weights, [ends[b] for b in others]).squeeze(1)
        tokens.update(zip(others, draw(weights, [uniforms[b] for b in others]), strict=True))
    return list(tokens.values())
