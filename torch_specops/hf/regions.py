"""Compile a decoder layer once and reuse the code for all layers of a model.

The layers of a model differ only in their weights and their part of the cache, so they can share compiled code. If each
layer is a nested compile region, torch compiles only the first layer and calls its code for the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

# torch 2.11 and 2.12 have nested regions too, but a region there must not write to its inputs, and a layer writes to
# the KV cache.
ARE_AVAILABLE = torch.__version__ >= "2.13"
# A call of a region takes about 30 us. That is 20 % of a step if layers have 0.2 million weights, and not measurable if
# they have 3.5 million (benchmarks/results, cpu-compile).
MIN_WEIGHTS = 2**21


def large_layers(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """The layers that are large enough to benefit from a region and that torch supports in regions."""
    large = []
    for layer in layers if ARE_AVAILABLE else ():
        weights = list(layer.parameters())
        # Skip layers with quantised weights, because AOTAutograd does not unwrap tensor subclasses inside regions.
        is_plain = all(type(weight) is nn.Parameter for weight in weights)
        if is_plain and sum(weight.numel() for weight in weights) >= MIN_WEIGHTS:
            large.append(layer)
    return large


def compile_once(layers: Iterable[nn.Module]) -> None:
    """Make each layer a nested compile region. Results do not change. Eager calls and exported programs do not use
    regions. A layer that already has an instance attribute `forward` is left unchanged."""
    for layer in layers:
        vars(layer).setdefault("forward", MethodType(forward, layer))


# This function must be named `forward`, because pickle stores a bound method by name and loads the `forward` of the
# layer's class.
def forward(layer: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    is_compiled = torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting()
    # Do not use regions on CUDA, where they would prevent fusion across layers; the cost of that was not measured.
    run = _region if is_compiled and hidden_states.device.type == "cpu" else _own_forward
    return run(layer, hidden_states, *args, **kwargs)


def _own_forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(layer).forward(layer, *args, **kwargs)


_region = torch.compiler.nested_compile_region(_own_forward) if ARE_AVAILABLE else _own_forward
