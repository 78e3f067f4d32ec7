"""Read the architecture of a transformers model: its layers, their attention windows and its largest position."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..ops.kv_cache import Window
from .rotary import growing_rotaries
from .states import state_modules

# Names in `config.layer_types`: layers with attention, with a recurrent state, with both, and with neither.
ATTENTION_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}
STATE_KINDS = ("linear_attention", "conv")
ATTENTION_OF = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
OTHER_KINDS = ("mlp", "moe")
EQUAL_ROWS = "its attention counts distances in a cache whose rows are equally long"
# Model types for which the loop would compute wrong outputs -> the reason.
UNREADABLE = {
    "inkling_text": EQUAL_ROWS,
    "inkling2_text": EQUAL_ROWS,
    "zamba2": "transformers' own decoding computes other states for it than its reading of a prompt does",
    "minimax": "it keeps a state in a cache of its own",
}


class Reading(NamedTuple):
    """The results of the checks of a model, which become attributes of `TransformersModel`."""

    supports_spans: bool
    max_length: int | None
    limited_by: str | None


def unwrapped(model: Any) -> PreTrainedModel:
    """Unwrap a transformers model. A `PeftModel` becomes its base model, whose layers contain the active adapter. The
    result of `torch.compile` becomes the original model, because the loop compiles its steps itself.

    Raises:
        TypeError: `model` is not a transformers model.
        ValueError: a `PeftModel` whose forward changes the input or the weights of its base model, for example prompt
            tuning.
    """
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, PreTrainedModel) and hasattr(model, "get_base_model"):
        adapter = model.active_peft_config
        kind = getattr(adapter.peft_type, "value", adapter.peft_type)
        # X-LoRA computes the weights of its adapters in the forward of the wrapper, which the loop does not call.
        if adapter.is_prompt_learning or kind in ("POLY", "XLORA"):
            raise ValueError(
                f"model: a PeftModel with {kind} gives its base more than tokens, which this loop would not do; decode "
                "with peft_model.generate, or without the adapter with peft_model.get_base_model()"
            )
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: expected a transformers model, got {type(model)}")
    return model


def architecture_key(model: PreTrainedModel) -> Hashable:
    """A key that is equal for models whose forwards differ in their weights only: the classes of the modules, the
    configs, and the types, dtypes and devices of the weights. The key holds no reference to the model."""
    settings = repr([vars(config) for config in (model.config, model.config.get_text_config(decoder=True))])
    weights = frozenset((type(weight), weight.dtype, weight.device.type) for weight in model.parameters())
    return tuple(map(type, model.modules())), settings, weights


def check_can_decode(model: PreTrainedModel) -> None:
    """Raise ValueError if the loop cannot decode the model. Such a model cannot be rolled back, has no language head,
    is offloaded, is on several devices, or is sharded by FSDP2 over several ranks."""
    _check_layers(model)
    adapters = getattr(model, "peft_config", {}).values()
    if any(getattr(adapter, "alora_invocation_tokens", None) for adapter in adapters):
        raise ValueError("model: an aLoRA adapter depends on where a text calls it; decode with peft_model.generate")
    if model.get_output_embeddings() is None:
        raise ValueError(f"model: expected a model with a language head, got {type(model).__name__}")
    devices = {parameter.device for parameter in model.parameters()}
    # accelerate keeps offloaded weights on the meta device between forwards, or moves the whole model to the device for
    # each forward.
    is_offloaded = type(getattr(model, "_hf_hook", None)).__name__ == "CpuOffload"
    if len(devices) > 1 or is_offloaded or torch.device("meta") in devices:
        raise ValueError(
            f"model: expected all weights on one device, got {', '.join(sorted(map(str, devices)))}; "
            "load it without a device_map that spreads it and without offload to the CPU or a disk"
        )

    if ranks_of(model) is not None and is_sharded(model):
        raise ValueError(
            "model: its weights are sharded (fully_shard) over several ranks, whose forwards wait for each other, and "
            "texts end at different steps; decode with a model that has whole weights"
        )


def _check_layers(model: PreTrainedModel) -> None:
    config = model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ())
    others = kinds - ATTENTION_KINDS
    keeps_states = any(state_modules(model))
    if keeps_states:
        others -= {*STATE_KINDS, *ATTENTION_OF, *OTHER_KINDS}
    reason = UNREADABLE.get(config.model_type)
    if reason is None and others:
        reason = f"it has layers of the kind {', '.join(sorted(others))}"
    # Do not refuse a model only because its class is marked `_is_stateful`: with other configs the class has states,
    # but all layers of this model may have attention.
    if reason is None and not keeps_states and not kinds and getattr(model, "_is_stateful", False):
        reason = "it keeps a state outside of the cache"
    if reason is not None:
        raise ValueError(
            f"model: {type(model).__name__} cannot be rolled back: {reason}; decode with transformers alone"
        )


def ranks_of(model: nn.Module) -> Any:
    """The group of ranks over which the weights are sharded (`tp_plan`, FSDP2); None = the model is whole."""
    # Every step of a session asks, so do not look at all weights where there is no group.
    if not (dist.is_available() and dist.is_initialized()):
        return None
    meshes = [weight.device_mesh for weight in model.parameters() if hasattr(weight, "device_mesh")]
    mesh = max(meshes, key=lambda mesh: mesh.size(), default=None)
    return None if mesh is None or mesh.size() == 1 else mesh.get_group(max(range(mesh.ndim), key=mesh.size))


def is_sharded(model: nn.Module) -> bool:
    """True if FSDP2 shards the weights, and gathers them before a module runs."""
    return any(kind.__name__ == "FSDPModule" for module in model.modules() for kind in type(module).__mro__)


def max_length(config: PreTrainedConfig) -> tuple[int | None, str | None]:
    """The longest sequence that a model can read (None = no limit), and the reason if the limit is not its number of
    positions."""
    names = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len")
    positions = next((length for name in names if (length := getattr(config, name, None)) is not None), None)
    limits = []
    if getattr(config, "attn_temperature_tuning", False):
        limits.append((config.floor_scale - 1, "it scales later queries by the length of its cache (floor_scale)"))
    if getattr(config, "keep_window_size", None):
        # Such a model drops the tokens with the lowest scores from its cache beyond this number. Which of two equal
        # scores it drops depends on how many tokens a forward reads.
        limits.append(
            (config.keep_window_size, "which tokens it keeps of more depends on how they are read (keep_window_size)")
        )
    length, reason = min(limits, default=(None, None))
    if length is None or (positions is not None and positions < length):
        return positions, None
    return length, reason


def computes_positions(model: PreTrainedModel) -> bool:
    """True if the model has rotary embeddings, and so can read sequences beyond `max_position_embeddings`, with less
    accurate predictions."""
    config = model.config.get_text_config(decoder=True)
    has_rotary = any(getattr(module, "rope_type", None) for module in model.get_decoder().modules())
    return has_rotary and max_length(config)[0] == getattr(config, "max_position_embeddings", None)


def windows(config: PreTrainedConfig) -> dict[str, Window | None]:
    """The kinds of attention layers in a model -> the window of each; None = the layer attends to all earlier
    tokens."""
    size, chunk = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    sliding = Window(size) if size else None
    chunked = Window(chunk, in_chunks=True) if chunk else None
    known = {"sliding_attention": sliding, "hybrid_sliding": sliding, "chunked_attention": chunked}
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - {*STATE_KINDS, *OTHER_KINDS})
    return {kind: known.get(kind) for kind in kinds} or {"all": sliding}


def why_not_compiled(model: PreTrainedModel) -> str | None:
    """The reason not to compile the model, or None. For example, some rotary embeddings branch on the sequence length,
    which would break the graph."""
    if is_sharded(model):
        return f"fully_shard gathers the weights of {type(model).__name__} in hooks that torch does not compile"
    if ranks_of(model) is not None:
        return "compiled steps of a model that is sharded over ranks are not tested"
    kind = next((kind for _, kinds in growing_rotaries(model) for kind in kinds), None)
    return kind and f"the {kind!r} rotary embedding of {type(model).__name__} looks at the lengths of texts"


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    decoder = model.get_decoder()
    for name in ("layers", "h", "block"):
        layers = getattr(decoder, name, None)
        if isinstance(layers, nn.ModuleList):
            return layers
    raise ValueError(f"model: {type(model).__name__} does not keep its layers where other models do")
