"""The multi-token-prediction (MTP) layers of a checkpoint: the network of `drafts.MTP`, and its weights."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..drafts.checkpoint import checkpoint_folder, read_weights, weight_files
from ..ops.kv_cache import visible_slots
from .architecture import layers_of, windows
from .cache import RaggedCache, cache_argument
from .models import TransformersModel

__all__ = ["MtpHead", "read_mtp_head"]


class Layout(NamedTuple):
    """How a family names the weights of layer k; n is its number after the layers of the model.

    Args:
        root: all names that begin so are weights of these layers.
        names: the parts of an `MtpLayer`. What has no k is shared by the layers.
        of_target: weights that the target has too.
        hidden_first: the projection reads the hidden state before the embedding.
        repeats_raw: beyond its depth, the last layer reads its output before the norm (vLLM).
    """

    root: str
    names: Mapping[str, str]
    of_target: tuple[str, ...] = ()
    hidden_first: bool = False
    repeats_raw: bool = False


LAYOUTS = (
    # DeepSeek-V3, Kimi K2, GLM-4.5 to 4.7.
    Layout(
        "model.layers.{n}.",
        {
            "enorm": "model.layers.{n}.enorm",
            "hnorm": "model.layers.{n}.hnorm",
            "eh_proj": "model.layers.{n}.eh_proj",
            "norm": "model.layers.{n}.shared_head.norm",
            "block": "model.layers.{n}",
        },
        of_target=("model.layers.{n}.embed_tokens.weight", "model.layers.{n}.shared_head.head.weight"),
        repeats_raw=True,
    ),
    # Qwen3-Next, Qwen3.5, Mellum.
    Layout(
        "mtp.",
        {
            "enorm": "mtp.pre_fc_norm_embedding",
            "hnorm": "mtp.pre_fc_norm_hidden",
            "eh_proj": "mtp.fc",
            "norm": "mtp.norm",
            "block": "mtp.layers.{k}",
        },
    ),
    # MiMo.
    Layout(
        "model.mtp_layers.{k}.",
        {
            "enorm": "model.mtp_layers.{k}.token_layernorm",
            "hnorm": "model.mtp_layers.{k}.hidden_layernorm",
            "eh_proj": "model.mtp_layers.{k}.input_proj",
            "norm": "model.mtp_layers.{k}.final_layernorm",
            "block": "model.mtp_layers.{k}",
        },
        hidden_first=True,
    ),
)
# Parameters of experts in one tensor, and the names of their parts in checkpoints with one tensor per expert.
EXPERTS = {"experts.gate_up_proj": ("gate_proj", "up_proj"), "experts.down_proj": ("down_proj",)}


class MtpLayer(nn.Module):
    def __init__(self, config: PreTrainedConfig, like: Any, index: int) -> None:
        super().__init__()
        norm, size = type(like.input_layernorm), config.hidden_size
        self.enorm, self.hnorm, self.norm = (norm(size, eps=config.rms_norm_eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.block = type(like)(config, index)


class MtpHead(nn.Module):
    """Layers of a target's own class. Embeddings, rotary embedding and head are those of the target of each call.

    Args:
        config: of the target's text model, with as many layers as there are here.
        like: a layer of the target.
        layout: how the family puts the parts together.
    """

    def __init__(self, config: PreTrainedConfig, like: nn.Module, layout: Layout) -> None:
        super().__init__()
        self.config = config
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.hidden_first, self.repeats_raw = layout.hidden_first, layout.repeats_raw
        self.layers = nn.ModuleList(MtpLayer(config, like, index) for index in range(config.num_hidden_layers))
        self._cache_argument = cache_argument(type(like).forward)
        self._types = getattr(config, "layer_types", None) or ["all"] * len(self.layers)
        self._windows = windows(config)

    def emptied(self, cache: RaggedCache | None, batch: int, capacity: int) -> RaggedCache:
        """A cache without texts: the same one, if it has this size."""
        if cache is None or (cache.batch, cache.capacity) != (batch, capacity):
            return RaggedCache(batch, capacity, len(self.layers))
        cache.begin()
        return cache

    def read(
        self,
        target: TransformersModel,
        cache: RaggedCache,
        index: int,
        hidden: Tensor,
        tokens: Tensor,
        positions: Tensor,
        width: int,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The output of a layer [A, n, H], before and after its norm, from hidden states [A, n, H] of positions [A, n]
        and tokens [A, n] that stand index + 1 further on. It attends to the first `width` slots."""
        layer: Any = self.layers[index]
        places = positions + index + 1
        parts = [layer.enorm(target.embed(tokens).to(hidden.dtype)), layer.hnorm(hidden)]
        read = layer.eh_proj(torch.cat(parts[::-1] if self.hidden_first else parts, -1))
        slots = torch.arange(width, device=positions.device).unsqueeze(0)
        seen = visible_slots(positions, slots, self._windows[self._types[index]])
        if self.config._attn_implementation == "eager":
            seen = torch.zeros_like(seen, dtype=read.dtype).masked_fill(~seen, torch.finfo(read.dtype).min)
        rotary = target.prepared.get_decoder().rotary_emb
        # Each kind of layer may have angles of its own, and so may time, height and width.
        kind = [self._types[index]] if self._types[index] in self.config.rope_parameters else []
        angles = rotary(read, places.expand(3, -1, -1) if hasattr(rotary, "mrope_section") else places, *kind)
        named = {"attention_mask": seen, "position_ids": places, "position_embeddings": angles}
        with cache.writing_at(positions, width, rows):
            raw = layer.block(read, **named, **{self._cache_argument: cache})
        return raw, layer.norm(raw)

    def logits(self, target: TransformersModel, hidden: Tensor) -> Tensor:
        """[A, n, V] in float32 or less."""
        return target.head(hidden.to(target.dtype))


def read_mtp_head(
    model: PreTrainedModel, folder_or_id: str | os.PathLike[str] | None = None, dtype: torch.dtype | None = None
) -> MtpHead:
    """The MTP layers of a model, with the errors of `MTP.from_pretrained`."""
    text = model.config.get_text_config(decoder=True)
    source = model.config.name_or_path if folder_or_id is None else folder_or_id
    if not source:
        raise ValueError("folder_or_id: expected the checkpoint, because the target does not say where it came from")
    folder = checkpoint_folder(source)
    files = weight_files(folder)
    layout, prefix, count = _found(files, text.num_hidden_layers, folder)

    def published(name: str, k: int) -> str:
        return prefix + name.format(k=k, n=text.num_hidden_layers + k)

    with torch.device("meta"):
        head = MtpHead(_layer_config(model.config, count), layers_of(model)[-1], layout)
    roots = tuple({published(layout.root, k) for k in range(len(head.layers))})
    given = read_weights({name: file for name, file in files.items() if name.startswith(roots)})
    for name, tensor in given.items():
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise ValueError(f"draft: the weight {name} in {folder} is quantised ({tensor.dtype}), which is not read")
    weights, used, missing = {}, set(), []
    for name, parameter in head.state_dict().items():
        k, part, rest = name.removeprefix("layers.").split(".", 2)
        own = [published(layout.names[part], int(k)) + "." + rest]
        parts = next((parts for end, parts in EXPERTS.items() if own[0].endswith(end)), None)
        if parts and own[0] not in given:
            stem = own[0].rpartition(".")[0]
            own = [f"{stem}.{expert}.{each}.weight" for expert in range(len(parameter)) for each in parts]
        used.update(own)
        missing += [each for each in own if each not in given]
        if not missing:
            tensor = given[own[0]]
            if len(own) > 1:
                tensor = torch.cat([given[each] for each in own]).unflatten(0, (len(parameter), -1))
            keeps = any(each in name for each in getattr(model, "_keep_in_fp32_modules_strict", None) or ())
            weights[name] = tensor.to(model.device, torch.float32 if keeps else dtype or model.dtype)
    used.update(published(each, k) for each in layout.of_target for k in range(len(head.layers)))
    for what, names in (("lacks", missing), ("has unknown", sorted(given.keys() - used))):
        if names:
            raise ValueError(f"draft: {folder} {what} MTP weights: {', '.join(names[:3])} ({len(names)} in all)")
    try:
        head.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise ValueError(f"draft: the MTP weights in {folder} do not fit {type(model).__name__}: {error}") from error
    return head.requires_grad_(False).eval()


def _found(names: Mapping[str, Path], num_layers: int, folder: Path) -> tuple[Layout, str, int]:
    """The layout of the MTP weights among these names, what stands before their names, and the number of layers."""
    for layout in LAYOUTS:
        block = layout.names["block"] + "."
        first = block.format(k=0, n=num_layers)
        for name in names:
            start, found, _ = f".{name}".partition(f".{first}")
            if found:
                prefix = start[1:] + "." if start else ""
                return layout, prefix, _count(names, prefix + block, num_layers)
    expected = ", ".join(layout.root.format(k=0, n=num_layers) + "*" for layout in LAYOUTS)
    raise ValueError(f"draft: {folder} has no MTP weights that this reads; expected {expected}")


def _count(names: Mapping[str, Path], block: str, num_layers: int) -> int:
    count = 0
    while any(name.startswith(block.format(k=count, n=num_layers + count)) for name in names):
        count += 1
    return count


def _layer_config(config: PreTrainedConfig, count: int) -> PreTrainedConfig:
    """A config that makes the layers with numbers from 0 on."""
    text = config.get_text_config(decoder=True)
    own: PreTrainedConfig
    if getattr(text, "num_mtp_layers", None):
        own = config.get_mtp_config()
    else:
        if "sliding_attention" in (getattr(text, "layer_types", None) or ()):
            raise ValueError(f"target: the config of {text.model_type} does not say what its MTP layers attend to")
        own = copy.deepcopy(text)
        own.num_hidden_layers = count
        fields = {"layer_types": ["full_attention"] * count, "mlp_only_layers": [], "decoder_sparse_step": 1}
        for name, value in fields.items():
            if hasattr(own, name):
                setattr(own, name, value)
    own._attn_implementation = text._attn_implementation
    return own
