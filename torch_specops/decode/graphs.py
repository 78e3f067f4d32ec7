"""Steps as CUDA graphs."""

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
    """A step in one graph, or in two if the host asks grammars between proposing and verifying.

    Args:
        verify: the graph of the step, or of its verification if there are two.
        record: the output of `verify`.
        propose: the first graph; None = there is none, or it would be empty.
        proposal: the output of `propose`; None = the step is one graph.
        inputs: the drafts' tokens [B, K] and the bitmask that the second graph reads.
    """

    verify: torch.cuda.CUDAGraph
    record: Tensor
    propose: torch.cuda.CUDAGraph | None = None
    proposal: Draft | None = None
    inputs: tuple[Tensor, ...] = ()

    def replay(self, masks: Masks | None) -> Tensor:
        """Run the step; returns its record."""
        if self.propose is not None:
            self.propose.replay()
        if masks is not None and self.proposal is not None:
            chosen, bitmask = masks(self.proposal)
            for own, new in zip(self.inputs, (chosen.tokens, bitmask), strict=True):
                own.copy_(new)
        self.verify.replay()
        return self.record


def capture(
    stream: torch.cuda.Stream, pool: Any, function: Callable[..., Any], *arguments: Any
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture a call. Returns the graph and the result of the call, whose tensors a replay writes."""
    graph = torch.cuda.CUDAGraph()
    # By default torch would capture on a stream of the device that captured first, and block CUDA calls of other
    # threads.
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        return graph, function(*arguments)


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold the data of a tensor: a quantised weight has several."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor.detach()
    else:
        for name in flatten()[0]:
            yield from parts_of(getattr(tensor, name))
