"""A quantised copy of a model as its draft. This is the only file that imports torchao."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import nn

from .. import checks

Model = TypeVar("Model", bound=nn.Module)


def quantised_copy(model: Model, weights: str = "int8", group_size: int | None = None) -> Model:
    """Copy a model and quantise the weights of its Linear layers (torchao, weight-only). As a draft, the copy nearly
    always agrees with the model.

    Embeddings, norms and convolutions are not quantised. A head that is tied to the embedding is quantised, and is not
    tied in the copy. The model itself is not changed.

    int8 is symmetric and works on any device. int4 on CUDA uses torchao's packed kernels, which need bfloat16. On a
    CPU, each int4 value takes a byte of memory. An eager forward on a CPU is not faster with quantised weights, because
    it converts them to floating point first.

    Args:
        model: a model in float32, bfloat16 or float16, with most of its weights in `nn.Linear` layers.
        weights: "int8" or "int4".
        group_size: the number of inputs that share a scale; None = a whole row for int8, and 32 for int4. It must
            divide the number of inputs of every Linear layer.

    Raises:
        ModuleNotFoundError: torchao is not installed; the message names the command that installs it.
        NotImplementedError: int4 is requested on a device other than CPU and CUDA; or on CUDA with a dtype other than
            bfloat16, or with a `group_size` other than 32, 64, 128 and 256.
        TypeError: `model` is not a module, or `group_size` is not an int.
        ValueError: `weights` is unknown, `group_size` is below 1 or does not divide the inputs of a layer, torchao does
            not quantise the dtype, or most weights of the model are not in Linear layers.

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
    for name in layers:
        # torchao sets a method that cannot be pickled, and that a copy of the layer would share with it.
        vars(clone.get_submodule(name)).pop("extra_repr", None)
    return clone


def _config(quantization: Any, weights: str, group_size: int | None, device: torch.device) -> Any:
    granularity = quantization.PerRow() if group_size is None else quantization.PerGroup(group_size)
    if weights == "int8":
        # Pass `set_inductor_config=False`, because torchao would change Inductor's settings for the whole process.
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
        # Raise, because torchao would leave such a layer unquantised and only log a message.
        if group_size is not None and layer.in_features % group_size:
            raise ValueError(
                f"group_size: expected a divisor of the {layer.in_features} inputs of {name}, got {group_size}"
            )


def _check_int4(device: torch.device, group_size: int | None, dtypes: set[torch.dtype]) -> None:
    if device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"weights: int4 is made for CPU and CUDA, got a model on {device}")
    if device.type == "cuda" and dtypes != {torch.bfloat16}:
        names = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise NotImplementedError(f"weights: int4 on CUDA takes bfloat16, got {names}")
    if device.type == "cuda" and group_size not in (32, 64, 128, 256):
        raise NotImplementedError(f"group_size: int4 on CUDA takes 32, 64, 128 or 256, got {group_size}")
