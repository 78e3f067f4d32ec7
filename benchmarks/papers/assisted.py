"""Transformers' own assisted generation, with an op in place of its sampling function, and that function timed.

Random numbers come from torch's global generator, in transformers' order: one uniform number per draft, then those of
the next token. With "exact" a seed therefore gives the text that it gives without this context. (Rounding can decide
otherwise where u and p / q agree to seven digits, and a draft with q = 0 is never accepted.)
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers.generation import utils as generation

from torch_specops import verify_exact, verify_sigmoid
from torch_specops.compilation import compile_piece
from torch_specops.hf.door.generate import check_ensemble_weight

Sampler = Callable[..., tuple[Tensor, Tensor]]
# transformers 5.17 tells its function that the drafts end the text; later releases cut the text afterwards.
IS_TOLD = "is_done_candidate" in inspect.signature(generation._speculative_sampling).parameters


@dataclass
class AssistedStats:
    """Calls of the sampling function, drafts verified and kept in them, tokens returned, and the seconds of each call,
    whose sum is the metric of Wagner et al. 2024, section 4.1."""

    calls: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    num_new_tokens: int = 0
    step_seconds: list[float] = field(default_factory=list, repr=False)


@contextmanager
def assisted_generation(
    method: str = "exact",
    alpha: float = -1e3,
    beta: float = 1e3,
    *,
    next_token: str = "multinomial",
    compile: bool = False,
) -> Iterator[AssistedStats]:
    """While the context is open, `generate(assistant_model=..., do_sample=True)` samples with an op of the package.

    Args:
        method: "exact" (lossless), "sigmoid" (lossy, Wagner et al. 2024) or "transformers": its own function, timed.
        alpha, beta: constants of "sigmoid".
        next_token: of "exact": "multinomial" draws it as transformers does; "uniform" from one number, with the same
            law in less time. "sigmoid" draws it from one number.
        compile: run the op under torch.compile.

    Raises:
        NotImplementedError: while generating, if `assistant_ensemble_weight` is below 1: that is another distribution.
    """
    stats = AssistedStats()
    if method == "transformers":
        sampler = generation._speculative_sampling
    elif method == "sigmoid":
        sampler = partial(_sample, _verifier(verify_sigmoid, (alpha, beta), compile), False)
    elif method == "exact" and next_token == "uniform":
        sampler = partial(_sample, _verifier(verify_exact, (), compile), False)
    elif method == "exact":
        sampler = partial(_sample, _verifier(_count, (), compile), True)
    else:
        raise ValueError(f"method: expected 'exact', 'sigmoid' or 'transformers', got {method!r}")
    with mock.patch.object(generation, "_speculative_sampling", partial(_timed, stats, sampler)):
        yield stats


def call_sampler(ids: Tensor, draft: Tensor, num_drafts: int, target: Tensor) -> tuple[Tensor, Tensor]:
    """Call the function that transformers samples with, as its loop does where the drafts do not end the text."""
    return generation._speculative_sampling(ids, draft, num_drafts, target, *[False] * IS_TOLD)


def _timed(
    stats: AssistedStats, sampler: Sampler, ids: Tensor, draft: Tensor, num_drafts: int, *rest: Any, **named: Any
) -> tuple[Tensor, Tensor]:
    wait = torch.cuda.synchronize if ids.is_cuda else lambda: None
    wait()
    started = time.perf_counter()
    tokens, num_matches = sampler(ids, draft, num_drafts, *rest, **named)
    wait()
    stats.step_seconds.append(time.perf_counter() - started)
    n = int(num_matches)
    # A draft that ends the text is kept without a next token, and one match less is reported. Only then is the last
    # token the draft in its place, because a residual has no weight on the rejected draft.
    ends = n < num_drafts and bool(tokens[0, -1] == ids[0, n - num_drafts])
    stats.calls += 1
    stats.num_draft_tokens += num_drafts
    stats.num_accepted += n + ends
    stats.num_new_tokens += tokens.shape[1]
    return tokens, num_matches


def _count(*arguments: Any) -> Tensor:
    """`num_accepted` alone: a compiled graph then computes nothing for the tokens."""
    return verify_exact(*arguments)[1]


@cache
def _verifier(verify: Callable[..., Any], constants: tuple[float, ...], compile: bool) -> Callable[..., Any]:
    def verified(*tensors: Tensor) -> Any:
        return verify(*tensors, *constants)

    # The number of drafts changes from step to step.
    return compile_piece(verified, dynamic=True) if compile else verified


def _sample(
    verify: Callable[..., Any],
    multinomial: bool,
    ids: Tensor,
    draft: Tensor,
    num_drafts: int,
    target: Tensor,
    is_done: Any = False,
    assistant_ensemble_weight: float | None = None,
) -> tuple[Tensor, Tensor]:
    """What transformers' function does. `verify` gives tokens and their number accepted; with `multinomial` the number
    alone, and torch draws the next token."""
    check_ensemble_weight(assistant_ensemble_weight)
    drafts = ids[:, -num_drafts:]
    # The numbers that `torch.rand_like` would draw for as many probabilities.
    options: dict[str, Any] = {"dtype": target.dtype, "device": target.device}
    accept_uniforms = torch.rand(1, num_drafts, **options)
    sample_uniforms = torch.zeros(1, **options) if multinomial else torch.rand(1, **options)
    verified = verify(target, drafts, draft, accept_uniforms, sample_uniforms)
    output, num_accepted = (drafts, verified) if multinomial else verified
    n = int(num_accepted)
    if n == num_drafts and is_done:
        return drafts, num_accepted[0] - 1
    if not multinomial:
        return output[:, : n + 1], num_accepted[0]
    weights = target[:, n].softmax(-1)
    if n < num_drafts:
        residual = (weights - draft[:, n].softmax(-1)).clamp_(min=0)
        mass = residual.sum()
        # Rounding can reject where p = q, and the next token is then drawn from p.
        weights = residual.div_(mass) if mass > 0 else weights
    return torch.cat([drafts[:, :n], torch.multinomial(weights, 1)], 1), num_accepted[0]
