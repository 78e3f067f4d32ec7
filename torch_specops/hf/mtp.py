"""The multi-token-prediction (MTP) layers of a checkpoint: the network of `drafts.MTP`, and its weights."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Container, Iterable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..models import LanguageModel
from ..models.checkpoint import check_floating, checkpoint_folder, filled, open_weights
from ..ops.kv_cache import visible_slots
from .architecture import layers_of, windows
from .cache import RaggedCache, cache_argument
from .images import ImageTextModel, mrope_of
from .models import TransformersModel

# Config fields that give the number of MTP layers.
COUNTS = ("num_mtp_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers")
PARTS = ("enorm", "hnorm", "eh_proj", "norm", "block")
# Maps each tensor that holds a weight of all experts to its names in checkpoints that store experts separately.
EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class Layout(NamedTuple):
    """How a family names the weights of MTP layer k, which is layer n of the model, and how it uses the weights.

    Args:
        root: the prefix of all names.
        parts: the next part of the names, for each of `PARTS`. Weights without a layer number are shared.
        hidden_first: the projection reads the hidden state before the embedding.
        repeats_raw: True = a last layer that reads its own output gets this output before the norm (as in vLLM).
    """

    root: str
    parts: tuple[str, ...]
    hidden_first: bool = False
    repeats_raw: bool = False


# Qwen3-Next, Qwen3.5, Mellum.
QWEN = Layout("mtp.", ("pre_fc_norm_embedding.", "pre_fc_norm_hidden.", "fc.", "norm.", "layers.{k}."))
LAYOUTS = (
    # DeepSeek-V3, Kimi K2, GLM-4.5 to 4.7, Step-3.7.
    Layout("model.layers.{n}.", ("enorm.", "hnorm.", "eh_proj.", "shared_head.norm.", ""), repeats_raw=True),
    QWEN,
    # MiMo.
    Layout(
        "model.mtp_layers.{k}.",
        ("token_layernorm.", "hidden_layernorm.", "input_proj.", "final_layernorm.", ""),
        hidden_first=True,
    ),
)


class MtpLayer(nn.Module):
    def __init__(self, config: PreTrainedConfig, like: Any, index: int, hidden_first: bool = False) -> None:
        super().__init__()
        self.hidden_first = hidden_first
        norm, size = type(like.input_layernorm), config.hidden_size
        self.enorm, self.hnorm, self.norm = (norm(size, eps=config.rms_norm_eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.block = type(like)(config, index)

    def fuse(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """The input of the block [A, n, H], from embeddings and hidden states [A, n, H]."""
        parts = [self.enorm(embedded), self.hnorm(hidden)]
        return self.eh_proj(torch.cat(parts[::-1] if self.hidden_first else parts, -1))


class MtpHead(nn.Module):
    """MTP layers of the target's layer class. Embeddings, rotary embedding and head come from the target of each call.

    Args:
        config: the config of a text model with only these layers.
        like: a layer of the target.
        layout: how the family combines the parts.
    """

    def __init__(self, config: PreTrainedConfig, like: nn.Module, layout: Layout) -> None:
        super().__init__()
        self.config, self.layout, self.vocab_size = config, layout, config.vocab_size
        # A compiled module has another class.
        like = getattr(like, "_orig_mod", like)
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(MtpLayer(config, like, index, layout.hidden_first) for index in layers)
        self._layer_class = type(like)
        self._cache_argument = cache_argument(type(like).forward)
        self._types = getattr(config, "layer_types", None) or ["all"] * len(self.layers)
        self._windows = windows(config)

    def sizes(self, target: LanguageModel) -> dict[str, tuple[Any, Any]]:
        """The properties that head and target must share: the head's value and the target's."""
        target, config = _of_transformers(target), self.config
        layer = layers_of(target.model)[-1]
        return {
            "layers": (self._layer_class, type(getattr(layer, "_orig_mod", layer))),
            "hidden_size": (config.hidden_size, target.hidden_size),
            "vocab_size": (config.vocab_size, target.vocab_size),
        }

    def new_cache(self) -> RaggedCache:
        return RaggedCache(len(self.layers))

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
        """The output of a layer [A, n, H], before and after its norm, from hidden states [A, n, H] at positions [A, n]
        and the tokens [A, n] that are index + 1 positions later. The layer attends to the first `width` slots."""
        layer: Any = self.layers[index]
        places, kind = positions + index + 1, self._types[index]
        read = layer.fuse(target.embed(tokens).to(hidden.dtype), hidden)
        slots = torch.arange(width, device=positions.device).unsqueeze(0)
        seen = visible_slots(positions, slots, self._windows[kind])
        if self.config._attn_implementation == "eager":
            seen = torch.zeros_like(seen, dtype=read.dtype).masked_fill(~seen, torch.finfo(read.dtype).min)
        # Each kind of layer may have different angles.
        kinds = [kind] if kind in self.config.rope_parameters else []
        with cache.writing_at(positions, width, rows):
            grid = places
            if mrope_of(target.prepared) is not None:
                grid = places.expand(3, -1, -1)
                if isinstance(target, ImageTextModel):
                    # Add the offsets of the hidden states, so that distances between positions stay as in the model.
                    grid = grid + target.offsets_at(positions, cache)
            with target.reading_at(places + 1):
                angles = target.prepared.get_decoder().rotary_emb(read, grid, *kinds)
            named = {"attention_mask": seen, "position_ids": places, "position_embeddings": angles}
            raw = layer.block(read, **named, **{self._cache_argument: cache})
        return raw, layer.norm(raw)


class Found(NamedTuple):
    """The layout of a checkpoint, and the name prefix of each MTP layer."""

    layout: Layout
    roots: list[str]

    def names(self, own: str, like: Tensor, given: Container[str]) -> list[str]:
        """The names in the checkpoint of the weights that make up one parameter of `MtpHead`."""
        _, layer, part, rest = own.split(".", 3)
        name = self.roots[int(layer)] + self.layout.parts[PARTS.index(part)].format(k=layer) + rest
        stem, _, last = name.rpartition(".")
        if last not in EXPERTS or name in given:
            return [name]
        return [f"{stem}.{expert}.{each}.weight" for expert in range(len(like)) for each in EXPERTS[last]]


def _of_transformers(target: LanguageModel) -> TransformersModel:
    if not isinstance(target, TransformersModel):
        raise TypeError(f"target: expected a transformers model, which has MTP layers, got {type(target).__name__}")
    return target


def read_mtp_head(
    target: LanguageModel | PreTrainedModel,
    folder_or_id: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
) -> MtpHead:
    """Read the MTP layers of a model. Raises the errors of `MTP.from_pretrained`."""
    model: PreTrainedModel = _of_transformers(target).model if isinstance(target, LanguageModel) else target
    source = model.config.name_or_path if folder_or_id is None else folder_or_id
    if not source:
        raise ValueError("folder_or_id: expected the checkpoint, because the target does not say where it came from")
    folder = checkpoint_folder(source)
    files = open_weights(folder)
    found = _find(files, model.config.get_text_config(decoder=True), folder)
    given = {name: read() for name, read in files.items() if name.startswith(tuple(found.roots))}
    check_floating(given, folder)
    _take_copies(found.roots, given, model, folder)
    head = _empty_head(model, found)
    parameters = head.state_dict()
    names = {own: found.names(own, parameter, given) for own, parameter in parameters.items()}
    needed = {name for each in names.values() for name in each}
    for what, others in (("lacks", needed - given.keys()), ("has unknown", given.keys() - needed)):
        if others:
            first = ", ".join(sorted(others)[:3])
            raise ValueError(f"draft: {folder} {what} MTP weights: {first} ({len(others)} in all)")
    weights = {}
    for own, published in names.items():
        parts = [given[name] for name in published]
        weights[own] = parts[0] if len(parts) == 1 else torch.cat(parts).unflatten(0, (len(parameters[own]), -1))
    wide = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return filled(head, weights, folder, model.device, dtype or model.dtype, wide)


def _find(names: Iterable[str], text: PreTrainedConfig, folder: Path) -> Found:
    """Find the MTP weights among these names. The number of layers must be the config's, without gaps."""
    tried = []
    for layout in LAYOUTS:
        before, is_counted_on = (layout.root + layout.parts[-1]).partition("{")[0], "{n}" in layout.root
        first = text.num_hidden_layers if is_counted_on else 0
        tried.append(layout.root.format(k=0, n=first) + "*")
        # If the text model is part of another model, names begin with the text model's name.
        pattern = re.compile(rf"(|.*?\.){re.escape(before)}(\d+)\.")
        numbered = {int(match[2]) - first: match[1] for name in names if (match := pattern.match(name))}
        prefixes = {layer: prefix for layer, prefix in numbered.items() if layer >= 0}
        if not prefixes:
            continue
        said = {name: getattr(text, name) for name in COUNTS if getattr(text, name, None) is not None}
        depth = max(max(prefixes) + 1, *said.values(), 0)
        roots = [prefixes.get(k, prefixes[max(prefixes)]) + layout.root.format(k=k, n=first + k) for k in range(depth)]
        counts = "".join(f", the target's config says {name} = {number}" for name, number in said.items())
        if missing := set(range(depth)) - prefixes.keys():
            lost = min(missing)
            weight = f"{roots[lost]}{layout.parts[-1].format(k=lost)}input_layernorm.weight"
            raise ValueError(
                f"draft: {folder} lacks MTP layer {lost}, the weight {weight} and all others; it has MTP layers "
                f"{sorted(prefixes)}{counts}"
            )
        if any(number != depth for number in said.values()):
            raise ValueError(f"draft: {folder} has {depth} MTP layers{counts}")
        return Found(layout, roots)
    raise ValueError(f"draft: {folder} has no MTP weights that this reads; expected {', '.join(tried)}")


def _take_copies(roots: Iterable[str], given: dict[str, Tensor], model: PreTrainedModel, folder: Path) -> None:
    """Remove copies of the target's weights, because the target's are used. The copies must be equal to the target's
    weights, but values are not compared if the target is quantised."""
    modules: dict[str, Any] = {"embed_tokens": model.get_input_embeddings()}
    modules["shared_head.head"] = model.get_output_embeddings()
    for root, rest in product(roots, modules):
        name, own = f"{root}{rest}.weight", modules[rest].weight
        copy = given.pop(name, None)
        comparable = type(own) in (Tensor, nn.Parameter) and own.is_floating_point()
        if copy is not None and (copy.shape != own.shape or (comparable and not torch.equal(copy.to(own), own))):
            raise ValueError(f"draft: {name} in {folder} is not the target's own, which would be used for it")


def _empty_head(model: PreTrainedModel, found: Found) -> MtpHead:
    try:
        with torch.device("meta"):
            return MtpHead(_layer_config(model.config, len(found.roots)), layers_of(model)[-1], found.layout)
    # Families need different config fields and arguments.
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"target: {type(model).__name__} is no family with MTP layers that are known: {error}"
        ) from error


def _layer_config(config: PreTrainedConfig, depth: int) -> PreTrainedConfig:
    """A config for `depth` MTP layers, numbered from 0."""
    text = config.get_text_config(decoder=True)
    if getattr(text, "num_mtp_layers", None):
        own = config.get_mtp_config()
    elif "sliding_attention" in (getattr(text, "layer_types", None) or ()):
        raise ValueError(f"target: the config of {text.model_type} does not say what its MTP layers attend to")
    else:
        own, fields = copy.deepcopy(text), {"layer_types": ["full_attention"] * depth, "num_hidden_layers": depth}
        for name, value in {**fields, "mlp_only_layers": [], "decoder_sparse_step": 1}.items():
            if hasattr(own, name):
                setattr(own, name, value)
    own._attn_implementation = text._attn_implementation
    return own
