"""Transformers' own assisted generation, with our ops in place of its sampling function."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from transformers.generation import utils as generation

from ..checks import check_numbers
from ..compilation import compile_piece
from ..ops import verify_exact, verify_sigmoid
from .handover import check_ensemble_weight

__all__ = ["AssistedStats", "assisted_generation", "code_digest"]

NAME = "_speculative_sampling"
LABEL = "torch_specops::assisted_sampling"
# `code_digest` of every version of the function that the samplers here can replace -> the releases that have it.
KNOWN = {"3ab8888995b3d416": "transformers 5.17"}

Method = Literal["exact", "sigmoid", "transformers"]
NextToken = Literal["multinomial", "uniform"]
Sampler = Callable[..., tuple[Tensor, Tensor]]


@dataclass
class AssistedStats:
    """Counts and times of the sampling function; filled while the context is open.

    Attributes:
        calls: decoding steps that called the sampling function. Greedy decoding and prompt lookup do not.
        num_draft_tokens: drafts verified, over all steps.
        num_accepted: drafts kept, without the next tokens.
        num_new_tokens: tokens returned, next tokens included.
    """

    calls: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    num_new_tokens: int = 0
    _times: list[float | tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list, repr=False)

    @property
    def step_seconds(self) -> list[float]:
        """The time inside the sampling function in each step: by the clock on a CPU, between two events on a GPU.

        Reading it waits for the GPU. In a profile these times have the label LABEL.
        """
        times = []
        for taken in self._times:
            if not isinstance(taken, float):
                start, end = taken
                end.synchronize()
                taken = start.elapsed_time(end) / 1e3
            times.append(taken)
        return times

    @property
    def seconds(self) -> float:
        """The sum of `step_seconds`: the metric of Wagner et al. 2024, section 4.1."""
        return sum(self.step_seconds)

    @property
    def acceptance_rate(self) -> float:
        """num_accepted / num_draft_tokens; NaN before the first step."""
        return self.num_accepted / self.num_draft_tokens if self.num_draft_tokens else float("nan")

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per step, next token included; NaN before the first step."""
        return self.num_new_tokens / self.calls if self.calls else float("nan")

    def timed(
        self,
        sampler: Sampler,
        candidate_input_ids: Tensor,
        candidate_logits: Tensor,
        candidate_length: int,
        *rest: Any,
        **named: Any,
    ) -> tuple[Tensor, Tensor]:
        """One call of the sampling function, counted and timed."""
        on_gpu = candidate_input_ids.is_cuda
        if on_gpu:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.profiler.record_function(LABEL):
            if on_gpu:
                stream = torch.cuda.current_stream(candidate_input_ids.device)
                start.record(stream)
            started = time.perf_counter()
            tokens, num_matches = sampler(candidate_input_ids, candidate_logits, candidate_length, *rest, **named)
            seconds = time.perf_counter() - started
            if on_gpu:
                end.record(stream)
        n = int(num_matches)
        # A draft that ends the text is kept without a next token, and one match less is reported. Only then is the last
        # token the draft in its place, because a residual has no weight on the rejected draft.
        ends = n < candidate_length and bool(tokens[0, -1] == candidate_input_ids[0, n - candidate_length])
        with _lock:
            self._times.append((start, end) if on_gpu else seconds)
            self.calls += 1
            self.num_draft_tokens += candidate_length
            self.num_accepted += n + ends
            self.num_new_tokens += tokens.shape[1]
        return tokens, num_matches


def assisted_generation(
    method: Method = "exact",
    alpha: float = -1e3,
    beta: float = 1e3,
    *,
    next_token: NextToken | None = None,
    compile: bool = False,
) -> AbstractContextManager[AssistedStats]:
    """Route the sampling of transformers' assisted generation through the ops while the context is open.

    Everything else stays transformers': `generate`, the caches, the candidates, their number. Its function
    `_speculative_sampling` is replaced on entering and put back on leaving, also after an exception. Only sampled
    decoding with a model as the draft (`assistant_model=`, `assistant_early_exit=`) calls that function.

    Random numbers come from torch's global generator, in transformers' order: one uniform number per draft, then those
    of the next token. With "exact" and next_token="multinomial", `torch.multinomial` draws the next token from the same
    weights, so that a seed gives the same text as without this context. (Rounding can decide otherwise where u and
    p / q agree to seven digits, and a draft with q = 0 is never accepted.) With next_token="uniform" the op draws it
    from one uniform number. That is the same distribution, with other tokens for a seed, and takes less time, because
    `multinomial` draws a number for each token of the vocabulary.

    q is the `candidate_logits` that transformers hands over. For a draft model these are the scores after all
    processors, which it sampled from. Gemma 4's multi-token assistants draft an argmax and report raw logits
    (transformers issue 47932): such a step is not lossless, with this context or without.

    Contexts nest, and the innermost one counts. A thread that has opened none uses the one that another thread has
    opened, so that `generate` may run in a thread of its own; if several threads have opened one, it gets an error.

    Args:
        method: "exact" (lossless), "sigmoid" (lossy, Wagner et al. 2024) or "transformers", its own function, only
            counted and timed.
        alpha: constant of "sigmoid", below 0, in units of a logit.
        beta: constant of "sigmoid", above 0.
        next_token: "multinomial" or "uniform"; None = "multinomial" for "exact". "sigmoid" knows "uniform" only.
        compile: run the ops under torch.compile. On a CPU the eager ops are slower than the function they replace.

    Returns:
        A context manager whose value is an `AssistedStats`.

    Raises:
        ValueError: a method, next_token or constant out of range.
        RuntimeError: another version of transformers, or another function in place of its sampling function.
        NotImplementedError: while generating, if `assistant_ensemble_weight` is below 1: that is another distribution.

    Example:
        >>> from torch_specops.hf import assisted_generation
        >>> with assisted_generation("exact") as stats:                       # doctest: +SKIP
        ...     model.generate(ids, assistant_model=draft, do_sample=True, max_new_tokens=64)
        >>> stats.calls, stats.acceptance_rate, stats.seconds                 # doctest: +SKIP
    """
    if method not in ("exact", "sigmoid", "transformers"):
        raise ValueError(f"method: expected 'exact', 'sigmoid' or 'transformers', got {method!r}")
    if next_token not in (None, "multinomial", "uniform"):
        raise ValueError(f"next_token: expected 'multinomial' or 'uniform', got {next_token!r}")
    if next_token is not None and method == "transformers":
        raise ValueError(f"next_token: 'transformers' draws it as it does, got {next_token!r}")
    if next_token == "multinomial" and method == "sigmoid":
        raise ValueError("next_token: 'sigmoid' draws it from one uniform number, got 'multinomial'")
    check_numbers(alpha=alpha, beta=beta)
    if not -float("inf") < alpha < 0 < beta < float("inf"):
        raise ValueError(f"alpha, beta: expected finite numbers with alpha < 0 < beta, got {alpha} and {beta}")
    if method == "transformers" and compile:
        raise ValueError("compile: 'transformers' is only timed, got True")

    sampler: Sampler | None = None
    if method == "sigmoid":
        sampler = partial(_sample, _bound(verify_sigmoid, (float(alpha), float(beta)), compile), False)
    elif method == "exact" and next_token == "uniform":
        sampler = partial(_sample, _bound(verify_exact, (), compile), False)
    elif method == "exact":
        sampler = partial(_sample, _bound(_count, (), compile), True)
    return _routed(_Route(sampler, AssistedStats()))


def _count(*arguments: Any) -> Tensor:
    """`num_accepted` alone: a compiled graph then computes nothing for the tokens."""
    return verify_exact(*arguments)[1]


def _bound(verify: Callable[..., Any], constants: tuple[float, ...], compile: bool) -> Callable[..., Any]:
    """The function of the tensors alone."""
    return _compiled(verify, constants) if compile else lambda *tensors: verify(*tensors, *constants)


@cache
def _compiled(verify: Callable[..., Any], constants: tuple[float, ...]) -> Callable[..., Any]:
    # The number of drafts changes from step to step.
    return compile_piece(lambda *tensors: verify(*tensors, *constants), dynamic=True)


def _sample(
    verify: Callable[..., Any],
    multinomial: bool,
    candidate_input_ids: Tensor,
    candidate_logits: Tensor,
    candidate_length: int,
    new_logits: Tensor,
    is_done_candidate: Tensor | bool,
    assistant_ensemble_weight: float | None = None,
) -> tuple[Tensor, Tensor]:
    """What `_speculative_sampling` does. `verify` gives tokens and their number accepted; with `multinomial` the number
    alone, and torch draws the next token.
    """
    check_ensemble_weight(assistant_ensemble_weight)
    drafts = candidate_input_ids[:, -candidate_length:]
    # The numbers that `torch.rand_like` would draw for as many probabilities.
    options: dict[str, Any] = {"dtype": new_logits.dtype, "device": new_logits.device}
    accept_uniforms = torch.rand(1, candidate_length, **options)
    sample_uniforms = torch.zeros(1, **options) if multinomial else torch.rand(1, **options)
    verified = verify(new_logits, drafts, candidate_logits, accept_uniforms, sample_uniforms)
    output, num_accepted = (drafts, verified) if multinomial else verified
    n = int(num_accepted)
    if n == candidate_length and is_done_candidate:
        return drafts, num_accepted[0] - 1
    if not multinomial:
        return output[:, : n + 1], num_accepted[0]
    weights = new_logits[:, n].softmax(-1)
    if n < candidate_length:
        residual = (weights - candidate_logits[:, n].softmax(-1)).clamp_(min=0)
        mass = residual.sum()
        # Rounding can reject where p = q, and the next token is then drawn from p.
        weights = residual.div_(mass) if mass > 0 else weights
    return torch.cat([drafts[:, :n], torch.multinomial(weights, 1)], 1), num_accepted[0]


@dataclass(frozen=True, eq=False)
class _Route:
    """An open context. `sampler` is None where transformers' own function is to be called."""

    sampler: Sampler | None
    stats: AssistedStats
    thread: int = field(default_factory=threading.get_ident)


_lock = threading.RLock()
_open: list[_Route] = []
_innermost: ContextVar[_Route | None] = ContextVar("torch_specops_assisted_generation", default=None)
_original: Sampler | None = None


@contextmanager
def _routed(route: _Route) -> Iterator[AssistedStats]:
    global _original
    with _lock:
        if not _open and getattr(generation, NAME, None) is not _dispatch:
            _original = _known_function()
            setattr(generation, NAME, _dispatch)
        _open.append(route)
    token = _innermost.set(route)
    try:
        yield route.stats
    finally:
        with _lock:
            _open.remove(route)
            # Another function that somebody put there meanwhile stays. `_dispatch` in it then calls the original.
            if not _open and getattr(generation, NAME) is _dispatch:
                setattr(generation, NAME, _original)
        _innermost.reset(token)


def _dispatch(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """What stands in transformers' module while a context is open."""
    assert _original is not None
    route = _route()
    if route is None:
        return _original(*arguments, **named)
    return route.stats.timed(route.sampler or _original, *arguments, **named)


def _route() -> _Route | None:
    own = _innermost.get()
    with _lock:
        if own in _open:
            return own
        if len({route.thread for route in _open}) > 1:
            raise RuntimeError(
                "assisted_generation: this thread has opened none, and several others have; open one here"
            )
        return _open[-1] if _open else None


def _known_function() -> Sampler:
    """Transformers' sampling function, if it is one that the samplers here can replace."""
    version = f"transformers {transformers.__version__}"
    known = " and ".join(sorted(set(KNOWN.values())))
    function: Sampler | None = getattr(generation, NAME, None)
    caller = inspect.unwrap(generation.GenerationMixin._assisted_decoding)
    if function is None or NAME not in caller.__code__.co_names:
        raise RuntimeError(f"{version} does not sample in {generation.__name__}.{NAME}; known: that of {known}")
    try:
        digest = code_digest(function)
    except (OSError, SyntaxError, TypeError) as error:
        raise RuntimeError(f"{version}: cannot read the source of {NAME} to see if it is known: {error}") from error
    if digest not in KNOWN:
        raise RuntimeError(
            f"{version}: {function.__module__}.{function.__qualname__} is not the {NAME} of {known}; "
            f"its code has the digest {digest}"
        )
    return function


def code_digest(function: Callable[..., Any]) -> str:
    """16 hex digits of the sha256 of a function's code, without comments, docstring and formatting.

    Raises:
        OSError, SyntaxError, TypeError: no source to read, or none of a whole function.
    """
    code = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    if isinstance(code, ast.FunctionDef) and ast.get_docstring(code) is not None:
        del code.body[0]
    # The same in every version of Python, unlike what `ast.dump` and `ast.unparse` write.
    words = [
        [type(node).__name__, *(value for _, value in ast.iter_fields(node) if isinstance(value, str | int | float))]
        for node in ast.walk(code)
    ]
    return hashlib.sha256(repr(words).encode()).hexdigest()[:16]
