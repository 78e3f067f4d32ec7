"""Captures steps as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..drafts import Draft
from .step import Masks


@dataclass(frozen=True)
class CapturedStep:
    """A step captured as one CUDA graph, or as two graphs if the host asks grammars between proposing and verifying, or
    as the graph of the verification if the host proposes.

    Args:
        verify: the graph of the whole step, or of the verification if there are two graphs.
        record: the output of `verify`.
        propose: writes the drafts into `proposal`, by a graph or on the host; None = `verify` is the whole step, or
            there is nothing to propose.
        proposal: None = `verify` is the whole step.
        inputs: the draft tokens [B, K] and the bitmask, which `verify` reads if the host asks grammars; otherwise it
            reads `proposal`.
    """

    verify: torch.cuda.CUDAGraph
    record: Tensor
    propose: Callable[[], object] | None = None
    proposal: Draft | None = None
    inputs: tuple[Tensor, ...] = ()

    def replay(self, masks: Masks | None) -> Tensor:
        """Run the step; returns its record."""
        if self.propose is not None:
            self.propose()
        if masks is not None and self.proposal is not None:
            chosen, bitmask = masks(self.proposal)
            for static, new in zip(self.inputs, (chosen.tokens, bitmask), strict=True):
                static.copy_(new)
        self.verify.replay()
        return self.record


def capture(
    stream: torch.cuda.Stream, pool: Any, function: Callable[..., Any], *arguments: Any
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture a function call. Returns the graph and the result of the call. Each replay writes the tensors of the
    result.

    Raises:
        RuntimeError: something in the call cannot be captured, such as waiting for the device.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        # Pass the stream and the error mode: by default torch captures on a stream of the device that captured first,
        # and refuses CUDA calls of other threads.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            return graph, function(*arguments)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise RuntimeError(
            f"compile: the step could not be captured as a CUDA graph: {reason} (compile=False runs it eagerly)"
        ) from error


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that hold the data of a tensor. A quantised weight has several."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor.detach()
    else:
        for name in flatten()[0]:
            yield from parts_of(getattr(tensor, name))
