"""A quantised copy of a model as its draft. The only file that imports torchao."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import nn

from .. import checks

Model = TypeVar("Model", bound=nn.Module)


def quantised_copy(model: Model, weights: str = "int8", group_size: int | None = None) -> Model:
    """A copy whose Linear layers hold integer weights (torchao, weight-only): a draft that nearly always agrees.

    Embeddings, norms and convolutions are not quantised. A head that is tied to the embedding is quantised and no
    longer tied. The model itself is not changed.

    int8 is symmetric, on any device. int4 on CUDA uses torchao's packed kernels, which take bfloat16. On a CPU each
    int4 value takes a byte of memory. An eager CPU forward becomes no faster, because it converts the weights back.

    Args:
        model: float32, bfloat16 or float16, its weights mostly in `nn.Linear` layers.
        weights: "int8" or "int4".
        group_size: the number of inputs that share a scale; None = int8: a whole row, int4: 32. It must divide the
            inputs of every Linear layer.

    Raises:
        ModuleNotFoundError: torchao is missing, with the command that installs it.
        NotImplementedError: int4 on another device than CPU and CUDA; on CUDA, another dtype than bfloat16 or a
            group_size other than 32, 64, 128 and 256.
        TypeError: a model that is not a module, a group_size that is not an int.
        ValueError: an unknown `weights`; a group_size that is below 1 or does not divide a layer's inputs; a dtype that
            torchao does not quantise; a model whose weights are mostly outside Linear layers.

    Examples:
        >>> import torch, transformers, torch_specops
        >>> config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        ...     num_attention_heads=4, num_key_value_heads=2, eos_token_id=None)
        >>> target = transformers.LlamaForCausalLM(config).eval()
        >>> draft = torch_specops.drafts.quantised_copy(target, "int8")
        >>> output = torch_specops.generate(target, torch.tensor([[5, 6, 7]]), draft=draft, max_new_tokens=8, seed=0)
        >>> output.lengths
        tensor([11])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch module, got {type(model)}")
    if weights not in ("int8", "int4"):
        raise ValueError(f"weights: expected 'int8' or 'int4', got {weights!r}")
    if group_size is not None:
        group_size = checks.check_int("group_size", group_size, 1)
    elif weights == "int4":
        group_size = 32
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    _check_layers(model, layers, group_size)
    device = next(iter(layers.values())).weight.device
    if weights == "int4":
        _check_int4(device, group_size, {layer.weight.dtype for layer in layers.values()})
    try:
        from torchao import quantization
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("a quantised copy needs torchao; run: pip install torchao", name="torchao") from error
    clone = copy.deepcopy(model)
    quantization.quantize_(clone, _config(quantization, weights, group_size, device))
    return clone


def _config(quantization: Any, weights: str, group_size: int | None, device: torch.device) -> Any:
    granularity = quantization.PerRow() if group_size is None else quantization.PerGroup(group_size)
    if weights == "int8":
        # Otherwise torchao changes Inductor's settings for the whole process.
        return quantization.Int8WeightOnlyConfig(granularity=granularity, set_inductor_config=False, version=2)
    if device.type == "cuda":
        return quantization.Int4WeightOnlyConfig(
            group_size=group_size, int4_packing_format="tile_packed_to_4d", set_inductor_config=False
        )
    int4 = torch.int4  # type: ignore[attr-defined]
    return quantization.IntxWeightOnlyConfig(weight_dtype=int4, granularity=granularity)


def _check_layers(model: nn.Module, layers: dict[str, nn.Linear], group_size: int | None) -> None:
    embeddings = {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Embedding)}
    linear = sum(layer.weight.numel() for layer in layers.values() if id(layer.weight) not in embeddings)
    total = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in embeddings)
    if 2 * linear <= total:
        raise ValueError(
            f"model: expected most weights in Linear layers, the only ones that are quantised; in "
            f"{type(model).__name__} they hold {linear / max(total, 1):.0%} of those outside embeddings"
        )
    for name, layer in layers.items():
        if layer.weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"model: expected float32, bfloat16 or float16 weights, got {layer.weight.dtype} in {name}"
            )
        # torchao would leave such a layer unchanged and only log it.
        if group_size is not None and layer.in_features % group_size:
            raise ValueError(
                f"group_size: expected a divisor of the {layer.in_features} inputs of {name}, got {group_size}"
            )


def _check_int4(device: torch.device, group_size: int | None, dtypes: set[torch.dtype]) -> None:
    if device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"weights: int4 is made for CPU and CUDA, got a model on {device}")
    if device.type == "cuda" and dtypes != {torch.bfloat16}:
        found = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise NotImplementedError(f"weights: int4 on CUDA takes bfloat16, got {found}")
    if device.type == "cuda" and group_size not in (32, 64, 128, 256):
        raise NotImplementedError(f"group_size: int4 on CUDA takes 32, 64, 128 or 256, got {group_size}")
