"""Shared by the verify ops: the sequences in parts, greedy verification, the next token, the output."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, takewhile
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..arguments import SigmoidArguments, VerifyArguments
from ..dense.rows import scale
from ..dense.walk import LEAST_RESIDUAL, draft_indices, is_near_argmax, logits_of
from .rows import Rows, argmax_by_tiles, draw, pick_rows, runs

Given = TypeVar("Given", VerifyArguments, SigmoidArguments)
# For one sequence: how many drafts are accepted, and the next token.
Outcome = tuple[int, int]


def parts(given: Given) -> Iterator[tuple[bool, Given]]:
    """The sequences in the runs that `runs` gives, as (True if they are sampled, their arguments)."""
    logits = given.target_logits
    for is_sampled, where in runs(logits, given.temperature):
        if where == slice(0, len(logits)):
            yield is_sampled, given
        else:
            part: Any = {name: x[where] for name, x in given._asdict().items() if isinstance(x, Tensor)}
            yield is_sampled, given._replace(**part)


def output_of(draft_tokens: Tensor, outcomes: Iterable[list[Outcome]]) -> tuple[Tensor, Tensor]:
    """output_tokens [B, K+1] and num_accepted [B], from the outcomes of each part."""
    batch, num_drafts = draft_tokens.shape
    output: list[int] = []
    num_accepted: list[int] = []
    for drafts, (n, token) in zip(draft_tokens.tolist(), chain.from_iterable(outcomes), strict=True):
        output += drafts[:n] + [token] + [-1] * (num_drafts - n)
        num_accepted.append(n)
    integers = partial(torch.tensor, dtype=torch.int64, device=draft_tokens.device)
    return integers(output).view(batch, num_drafts + 1), integers(num_accepted)


def verify_greedy(given: VerifyArguments | SigmoidArguments) -> list[Outcome]:
    """Sequences with temperature 0: drafts are accepted as long as they are the argmax, or near it with
    `argmax_lenience`. With a negative or NaN temperature nothing is accepted."""
    assert given.temperature is not None
    target_logits, draft_tokens = given.target_logits, given.draft_tokens
    best = argmax_by_tiles(target_logits)
    greedy_tokens = best.tolist()
    if isinstance(given, VerifyArguments) and given.argmax_lenience < 1:
        x, in_vocab = draft_indices(draft_tokens, target_logits.shape[2])
        z, z_max = (scale(logits_of(target_logits[:, :-1], tokens), None) for tokens in (x, best[:, :-1].clamp(min=0)))
        matches = (in_vocab & is_near_argmax(z, z_max, given.argmax_lenience)).tolist()
    else:
        rows = zip(draft_tokens.tolist(), greedy_tokens, strict=True)
        matches = [[x == y >= 0 for x, y in zip(drafts, tokens, strict=False)] for drafts, tokens in rows]
    outcomes = []
    for t, tokens, accepted in zip(given.temperature.tolist(), greedy_tokens, matches, strict=True):
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
