"""How the loop compiles its pieces."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["compile_piece"]


def compile_piece(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`torch.compile(function, fullgraph=True, dynamic=False)` that counts its recompilations alone.

    torch counts the graphs of a function by its code object, whoever compiled it, and refuses the ninth. Decoders of
    many models, batch sizes and K would run into that together, so each compiles a copy of the code.
    """
    plain = function.__func__ if isinstance(function, types.MethodType) else function
    copied = types.FunctionType(
        plain.__code__.replace(), plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__
    )
    copied.__kwdefaults__ = plain.__kwdefaults__
    alone: Any = types.MethodType(copied, function.__self__) if isinstance(function, types.MethodType) else copied
    return torch.compile(alone, fullgraph=True, dynamic=False, **options)
