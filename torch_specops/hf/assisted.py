"""Transformers' own assisted generation, with the ops in the place of its sampling function."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
import threading
import time
import tokenize
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from io import StringIO
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from transformers.generation import utils as generation

from ..checks import check_numbers
from ..ops import verify_exact, verify_sigmoid

__all__ = ["AssistedStats", "assisted_generation", "code_digest"]

NAME = "_speculative_sampling"
LABEL = "torch_specops::assisted_sampling"
# `code_digest` of the functions whose arguments, results and law are known here -> the versions that have them.
KNOWN = {"89b382bbb4d6030b": "transformers 5.17"}

Method = Literal["exact", "sigmoid", "transformers"]
NextToken = Literal["multinomial", "uniform"]
Sampler = Callable[..., tuple[Tensor, Tensor]]


@dataclass
class AssistedStats:
    """What went through the sampling function; filled while the context is open.

    Attributes:
        calls: decoding steps that came to the sampling function. Greedy decoding and prompt lookup do not.
        num_draft_tokens: drafts verified, over all steps.
        num_accepted: drafts kept; the next tokens are not counted.
        num_new_tokens: tokens returned, next tokens included.
    """

    calls: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    num_new_tokens: int = 0
    _times: list[float | tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def step_seconds(self) -> list[float]:
        """The time inside the sampling function of each step: on a CPU by the clock, on a GPU between two events of
        its stream. Reading it waits for the GPU. The steps also have the profiler's label LABEL."""
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
        self, sampler: Sampler, candidate_input_ids: Tensor, candidate_logits: Tensor, num_drafts: int, *rest: Any
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
            tokens, num_matches = sampler(candidate_input_ids, candidate_logits, num_drafts, *rest)
            seconds = time.perf_counter() - started
            if on_gpu:
                end.record(stream)
        n = int(num_matches)
        # A draft that ends the text is kept without a next token, and then one less is reported as matched. Nothing
        # else makes the last token equal to the draft in its place: a residual has no weight there.
        ends = n < num_drafts and bool(tokens[0, -1] == candidate_input_ids[0, n - num_drafts])
        with self._lock:
            self._times.append((start, end) if on_gpu else seconds)
            self.calls += 1
            self.num_draft_tokens += num_drafts
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
    of the next token. With "exact" and next_token="multinomial" the next token is drawn from the same weights by the
    same `torch.multinomial`, so that a seed gives the tokens it gives without this context. (Rounding can decide
    otherwise where u and p / q agree to seven digits, and a draft of probability zero under its own law is never
    accepted.) With next_token="uniform" the op draws it from a single uniform number: the same law, other tokens for a
    seed, and less time, because `multinomial` draws a number for each token of the vocabulary.

    The draft's law q is the `candidate_logits` that transformers hands over. For a draft model these are the scores
    after all processors, which it did sample from. Gemma 4's multi-token assistants draft an argmax and report raw
    logits (transformers issue 47932): such a step is not lossless, with this context or without.

    Contexts nest; the innermost counts. A thread that has opened none uses the one that is open elsewhere, so that
    `generate` may run in a thread of its own; if several threads have opened one, such a thread gets an error.

    Args:
        method: "exact" (lossless), "sigmoid" (lossy, Wagner et al. 2024) or "transformers", its own function, only
            counted and timed.
        alpha: constant of "sigmoid", below 0, in units of a logit.
        beta: constant of "sigmoid", above 0.
        next_token: "multinomial" or "uniform"; None = "multinomial" for "exact". "sigmoid" knows "uniform" only.
        compile: run the ops under torch.compile, once for each kind of call in a process. On a CPU the eager ops are
            slower than the function that they replace.

    Returns:
        A context manager whose value is an `AssistedStats`.

    Raises:
        ValueError: a method or constant that is none.
        RuntimeError: another version of transformers, whose function is not known here; or another function in its
            place.
        NotImplementedError: while generating, if `assistant_ensemble_weight` is set: that is another law.

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
        sampler = _OpSampler(_bound(verify_sigmoid, (float(alpha), float(beta)), compile))
    elif method == "exact" and next_token == "uniform":
        sampler = _OpSampler(_bound(verify_exact, (), compile))
    elif method == "exact":
        sampler = _MultinomialSampler(_bound(_count, (), compile))
    return _routed(_Route(sampler, AssistedStats()))


def _count(*arguments: Any) -> Tensor:
    """`num_accepted` alone: compiled, what only the tokens need is not computed."""
    return verify_exact(*arguments)[1]


def _bound(verify: Callable[..., Any], constants: tuple[float, ...], compile: bool) -> Callable[..., Any]:
    """The function of the tensors alone."""
    return _compiled(verify, constants) if compile else lambda *tensors: verify(*tensors, *constants)


@functools.cache
def _compiled(verify: Callable[..., Any], constants: tuple[float, ...]) -> Callable[..., Any]:
    def call(*tensors: Tensor) -> Any:
        return verify(*tensors, *constants)

    # torch counts the graphs of a code object, and gives up at the ninth: other constants are other graphs.
    call.__code__ = call.__code__.replace()
    # The number of drafts changes from step to step.
    return torch.compile(call, fullgraph=True, dynamic=True)


@dataclass(frozen=True)
class _OpSampler:
    """The op draws the next token from one uniform number."""

    verify: Callable[..., tuple[Tensor, Tensor]]

    def __call__(
        self,
        candidate_input_ids: Tensor,
        candidate_logits: Tensor,
        candidate_length: int,
        new_logits: Tensor,
        is_done_candidate: Tensor | bool,
        assistant_ensemble_weight: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        _check(candidate_logits, candidate_length, assistant_ensemble_weight)
        drafts = candidate_input_ids[:, -candidate_length:]
        uniforms = _uniforms(candidate_length, new_logits)
        output, num_accepted = self.verify(new_logits, drafts, candidate_logits, uniforms, _uniforms(1, new_logits)[0])
        n = int(num_accepted)
        if n == candidate_length and is_done_candidate:
            return drafts, num_accepted[0] - 1
        return output[:, : n + 1], num_accepted[0]


@dataclass(frozen=True)
class _MultinomialSampler:
    """The op verifies; the next token is drawn as transformers draws it, from that one row."""

    count: Callable[..., Tensor]

    def __call__(
        self,
        candidate_input_ids: Tensor,
        candidate_logits: Tensor,
        candidate_length: int,
        new_logits: Tensor,
        is_done_candidate: Tensor | bool,
        assistant_ensemble_weight: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        _check(candidate_logits, candidate_length, assistant_ensemble_weight)
        drafts = candidate_input_ids[:, -candidate_length:]
        uniforms = _uniforms(candidate_length, new_logits)
        num_accepted = self.count(new_logits, drafts, candidate_logits, uniforms, new_logits.new_zeros(1))
        n = int(num_accepted)
        if n == candidate_length and is_done_candidate:
            return drafts, num_accepted[0] - 1
        weights = new_logits[:, n].softmax(-1)
        if n < candidate_length:
            residual = (weights - candidate_logits[:, n].softmax(-1)).clamp_(min=0)
            mass = residual.sum()
            # Rounding can reject where p and q are equal, and p is then what is left to draw from.
            weights = residual.div_(mass) if mass > 0 else weights
        return torch.cat([drafts[:, :n], torch.multinomial(weights, 1)], 1), num_accepted[0]


def _check(candidate_logits: Tensor, candidate_length: int, ensemble_weight: float | None) -> None:
    if ensemble_weight is not None:
        raise NotImplementedError(
            f"assistant_ensemble_weight: verifying against a mixture is another law, got {ensemble_weight}"
        )
    if candidate_logits.shape[1] != candidate_length:
        raise ValueError(
            f"candidate_logits: expected a row for each of {candidate_length} drafts, got {candidate_logits.shape[1]}"
        )


def _uniforms(number: int, logits: Tensor) -> Tensor:
    """[1, number], the numbers that `torch.rand_like` would draw for as many probabilities."""
    return torch.rand(1, number, dtype=logits.dtype, device=logits.device)


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
            # If someone replaced it meanwhile, it stays: without an open context `_dispatch` calls the original.
            if not _open and getattr(generation, NAME) is _dispatch:
                setattr(generation, NAME, _original)
        _innermost.reset(token)


def _dispatch(
    candidate_input_ids: Tensor,
    candidate_logits: Tensor,
    candidate_length: int,
    new_logits: Tensor,
    is_done_candidate: Tensor | bool,
    assistant_ensemble_weight: float | None = None,
) -> tuple[Tensor, Tensor]:
    """What stands in transformers' module while a context is open; the arguments are those of every known version."""
    arguments = (
        candidate_input_ids,
        candidate_logits,
        candidate_length,
        new_logits,
        is_done_candidate,
        assistant_ensemble_weight,
    )
    assert _original is not None
    route = _route()
    if route is None:
        return _original(*arguments)
    return route.stats.timed(route.sampler or _original, *arguments)


def _route() -> _Route | None:
    own = _innermost.get()
    with _lock:
        if own in _open or not _open:
            return own if own in _open else None
        if len({route.thread for route in _open}) > 1:
            raise RuntimeError(
                "assisted_generation: this thread has opened none, and several others have; open one here"
            )
        return _open[-1]


def _known_function() -> Sampler:
    """Transformers' sampling function, if it is one that the samplers here can stand in for."""
    version = f"transformers {transformers.__version__}"
    known = " and ".join(sorted(set(KNOWN.values())))
    function: Sampler | None = getattr(generation, NAME, None)
    caller = inspect.unwrap(generation.GenerationMixin._assisted_decoding)
    if function is None or NAME not in caller.__code__.co_names:
        raise RuntimeError(f"{version} does not sample in {generation.__name__}.{NAME}; known: that of {known}")
    try:
        digest = code_digest(function)
    except (OSError, SyntaxError, TypeError, tokenize.TokenError) as error:
        raise RuntimeError(f"{version}: cannot read the source of {NAME} to see if it is known: {error}") from error
    if digest not in KNOWN:
        raise RuntimeError(
            f"{version}: {function.__module__}.{function.__qualname__} is not the {NAME} of {known}; "
            f"its code has the digest {digest}"
        )
    return function


def code_digest(function: Callable[..., Any]) -> str:
    """16 hex digits of the sha256 of a function's code: its tokens without comments, line breaks and docstring.

    Raises:
        OSError, SyntaxError, TypeError, tokenize.TokenError: no source to read, or none of a whole function.
    """
    source = textwrap.dedent(inspect.getsource(function))
    ignored = (tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER)
    tokens = [each for each in tokenize.generate_tokens(StringIO(source).readline) if each.type not in ignored]
    body = getattr(ast.parse(source).body[0], "body", None)
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        docstring = [token.start for token in tokens].index((body[0].lineno, body[0].col_offset))
        # With the end of its line.
        del tokens[docstring : docstring + 2]
    # How deep a block is indented does not matter.
    layout = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    words = [tokenize.tok_name[token.type] if token.type in layout else token.string for token in tokens]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]
