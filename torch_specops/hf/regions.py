"""Decoder layers that torch compiles once per model.

The layers of a model differ only in their weights and their part of the cache, so they can share compiled code. With a
nested region, torch lowers only the first layer, and calls that code for every other layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

# torch 2.11 and 2.12 have regions too, but refuse those that write to their inputs, as a layer writes to its cache.
ARE_AVAILABLE = torch.__version__ >= "2.13"
# Calling a region takes about 30 us per layer: 20 % of a step for layers of 0.2 million weights, too little to measure
# for layers of 3.5 million (benchmarks/results, cpu-compile).
MIN_WEIGHTS = 2**21


def large_layers(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """The layers that gain from being regions and that torch can make into regions."""
    found = []
    for layer in layers if ARE_AVAILABLE else ():
        weights = list(layer.parameters())
        # AOTAutograd splits quantised weights into plain tensors, but not inside regions.
        is_plain = all(type(weight) is nn.Parameter for weight in weights)
        if is_plain and sum(weight.numel() for weight in weights) >= MIN_WEIGHTS:
            found.append(layer)
    return found


def compile_once(layers: Iterable[nn.Module]) -> None:
    """Make each layer a region. Results do not change. Eager calls and exported programs contain no regions. A layer
    with an instance attribute `forward` keeps it."""
    for layer in layers:
        vars(layer).setdefault("forward", MethodType(forward, layer))


# Must be called `forward`: pickle looks a method up by name, and so finds the method of the layer's class.
def forward(layer: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    is_compiled = torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting()
    # Not on CUDA: there a layer also fuses with its neighbours, and the gain from that was not measured.
    run = _region if is_compiled and hidden_states.device.type == "cpu" else _own_forward
    return run(layer, hidden_states, *args, **kwargs)


def _own_forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(layer).forward(layer, *args, **kwargs)


_region = torch.compiler.nested_compile_region(_own_forward) if ARE_AVAILABLE else _own_forward
