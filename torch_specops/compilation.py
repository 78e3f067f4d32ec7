"""Compiles the functions of the decoding loop, and decides whether steps are compiled, captured or eager."""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from .ops import private

# How steps run: as Python, as CUDA graphs of that, or as compiled code, which on CUDA is captured too.
Way = Literal["eager", "captured", "compiled"]

# Compiling on a CPU pays after 3,500 (greedy) to 7,100 (sampled) steps, as measured in benchmarks/results (cpu-compile
# and cpu-loop-austen-bytes).
STEPS_THAT_PAY = 8000


def choice(
    wanted: bool | str, device: torch.device, *, num_steps: float, obstacle: str | None, drafts_vary: bool
) -> tuple[Way, str]:
    """Decide how steps run. Returns the decision and its reason.

    Args:
        wanted: True, False or "auto".
        num_steps: the number of eager steps that are done or certain to follow.
        obstacle: the reason why a model cannot be compiled; None = all models can be compiled.
        drafts_vary: whether the number of drafts depends on the tokens so far.

    Raises:
        ValueError: another value of `wanted`; or True for a model that cannot be compiled.
    """
    if isinstance(wanted, bool):
        if wanted and obstacle is not None:
            raise ValueError(f"compile: expected False or 'auto', got True: {obstacle}")
        return "compiled" if wanted else "eager", f"compile={wanted} was asked for"
    if wanted != "auto":
        raise ValueError(f"compile: expected True, False or 'auto', got {wanted!r}")
    if obstacle is not None:
        return "eager", f"eager: {obstacle}"
    if device.type == "cuda":
        return "captured", "captured: on CUDA the host would be the bottleneck of an eager step"
    if drafts_vary:
        # If a lookup finds no match, an eager step reads one token per row, whereas a compiled step always reads K
        # drafts too.
        return (
            "eager",
            f"eager: on {device.type} an eager step reads only the tokens proposed, a compiled step always K",
        )
    pays = f"on {device.type} compiling pays after about {STEPS_THAT_PAY:,} steps"
    if num_steps >= STEPS_THAT_PAY:
        return "compiled", f"compiled: {pays}"
    return "eager", f"eager: {pays}, and {num_steps:,.0f} are done or certain"


def compile_piece(function: Callable[..., Any], dynamic: bool = False, **options: Any) -> Callable[..., Any]:
    """`torch.compile(function, fullgraph=True)`, but each call has a separate limit on the number of graphs.

    torch counts the graphs of each code object, over all callers, and refuses the ninth graph. Many models, batch sizes
    and values of K would reach that limit, so each call compiles a copy of the code. Inductor's size asserts on weights
    and caches are turned off: guards already check these sizes, and the asserts take a tenth of a small model's
    forward.
    """
    plain = function.__func__ if isinstance(function, types.MethodType) else function
    copied = types.FunctionType(
        plain.__code__.replace(), plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__
    )
    copied.__kwdefaults__ = plain.__kwdefaults__
    alone: Any = types.MethodType(copied, function.__self__) if isinstance(function, types.MethodType) else copied
    if "backend" not in options:
        options["options"] = {"size_asserts": False} | options.get("options", {})
    return torch.compile(alone, fullgraph=True, dynamic=dynamic, **options)


@contextmanager
def compile_errors_named() -> Iterator[None]:
    """Shorten errors of torch's compiler, which fill pages, to one line with the place and the reason.

    Raises:
        RuntimeError: replaces the compiler's error, which is its `__cause__`.
    """
    try:
        yield
    except RuntimeError as error:
        if not private.is_compiler_error(error):
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        # A first line such as "backend='inductor' raised:" says nothing without the next line.
        reason = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
        frames = list(getattr(error, "real_stack", None) or ())
        place = f", in {frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""
        raise RuntimeError(
            f"compile: torch could not compile the step{place}: {reason} (compile=False runs it eagerly)"
        ) from error


def _without_limit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Like `compile_piece`, but when torch refuses another graph, the function is compiled again with a new limit. Each
    value of an attribute, such as the scale of an adapter, needs a separate graph and may reach the limit."""
    piece = compile_piece(function)

    def call(*args: Any) -> Any:
        nonlocal piece
        try:
            return piece(*args)
        except Exception as error:
            if not private.is_limit_of_graphs(error):
                raise
        piece = compile_piece(function)
        return piece(*args)

    return call


class CompiledPieces:
    """Functions that are compiled once per key, each with one graph.

    A copy or an unpickled object is empty, because compiled code belongs to one process.
    """

    def __init__(self) -> None:
        self._pieces: dict[Hashable, Callable[..., Any]] = {}

    def get(self, function: Callable[..., Any], *key: Hashable) -> Callable[..., Any]:
        """`function`, compiled for the shapes and numbers that the key identifies."""
        piece = self._pieces.get((function, key))
        if piece is None:
            piece = self._pieces[function, key] = _without_limit(function)
        return piece

    def __reduce__(self) -> tuple[type[CompiledPieces], tuple[()]]:
        return CompiledPieces, ()
