"""The multi-token-prediction (MTP) layers of a checkpoint: the network of `drafts.MTP`, and its weights."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..drafts.checkpoint import checkpoint_folder, open_weights
from ..ops.kv_cache import visible_slots
from .architecture import layers_of, windows
from .cache import RaggedCache, cache_argument
from .models import TransformersModel

__all__ = ["MtpHead", "read_mtp_head"]

# What configs call the number of these layers.
COUNTS = ("num_mtp_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers")
PARTS = ("enorm", "hnorm", "eh_proj", "norm", "block")
# Experts in one tensor, and the parts of each in checkpoints that have them one by one.
EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class Layout(NamedTuple):
    """How a family names the weights of layer k, which is the model's layer n, and what it does with them.

    Args:
        root: how all names begin.
        parts: how they go on for the `PARTS`. What names no layer is shared.
        of_target: weights that the target has too.
        hidden_first: the projection reads the hidden state before the embedding.
        repeats_raw: the last layer, when it reads its own output, reads it before the norm (vLLM).
    """

    root: str
    parts: tuple[str, ...]
    of_target: tuple[str, ...] = ()
    hidden_first: bool = False
    repeats_raw: bool = False


LAYOUTS = (
    # DeepSeek-V3, Kimi K2, GLM-4.5 to 4.7.
    Layout(
        "model.layers.{n}.",
        ("enorm.", "hnorm.", "eh_proj.", "shared_head.norm.", ""),
        of_target=("embed_tokens.weight", "shared_head.head.weight"),
        repeats_raw=True,
    ),
    # Qwen3-Next, Qwen3.5, Mellum.
    Layout("mtp.", ("pre_fc_norm_embedding.", "pre_fc_norm_hidden.", "fc.", "norm.", "layers.{k}.")),
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
        """What the block reads [A, n, H], from embeddings and hidden states [A, n, H]."""
        parts = [self.enorm(embedded), self.hnorm(hidden)]
        return self.eh_proj(torch.cat(parts[::-1] if self.hidden_first else parts, -1))


class MtpHead(nn.Module):
    """Layers of a target's own class. Embeddings, rotary embedding and head are those of the target of each call.

    Args:
        config: of a text model that has these layers alone.
        like: a layer of the target.
        layout: how the family puts the parts together.
    """

    def __init__(self, config: PreTrainedConfig, like: nn.Module, layout: Layout) -> None:
        super().__init__()
        self.config, self.layout, self.vocab_size = config, layout, config.vocab_size
        like = _uncompiled(like)
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(MtpLayer(config, like, index, layout.hidden_first) for index in layers)
        self._layer_class = type(like)
        self._cache_argument = cache_argument(type(like).forward)
        self._types = getattr(config, "layer_types", None) or ["all"] * len(self.layers)
        self._windows = windows(config)

    def check_target(self, target: TransformersModel) -> None:
        """Raise ValueError if the layers of a target are others."""
        own, other = self._layer_class, type(_uncompiled(layers_of(target.model)[-1]))
        if own is not other:
            raise ValueError(f"draft: the head is for another target: its layers are {own}, the target's {other}")

    def new_cache(self, batch: int, capacity: int) -> RaggedCache:
        return RaggedCache(batch, capacity, len(self.layers))

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
        places, kind = positions + index + 1, self._types[index]
        read = layer.fuse(target.embed(tokens).to(hidden.dtype), hidden)
        slots = torch.arange(width, device=positions.device).unsqueeze(0)
        seen = visible_slots(positions, slots, self._windows[kind])
        if self.config._attn_implementation == "eager":
            seen = torch.zeros_like(seen, dtype=read.dtype).masked_fill(~seen, torch.finfo(read.dtype).min)
        rotary = target.prepared.get_decoder().rotary_emb
        # Each kind of layer may have angles of its own, and so may time, height and width.
        kinds = [kind] if kind in self.config.rope_parameters else []
        with target.reading_at(places + 1):
            angles = rotary(read, places.expand(3, -1, -1) if hasattr(rotary, "mrope_section") else places, *kinds)
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
    source = model.config.name_or_path if folder_or_id is None else folder_or_id
    if not source:
        raise ValueError("folder_or_id: expected the checkpoint, because the target does not say where it came from")
    folder = checkpoint_folder(source)
    files, text = open_weights(folder), model.config.get_text_config(decoder=True)
    num_layers = text.num_hidden_layers
    layout, prefix, depth = _layout(files, num_layers)
    if depth == 0:
        expected = ", ".join(each.root.format(k=0, n=num_layers) + "*" for each in LAYOUTS)
        raise ValueError(f"draft: {folder} has no MTP weights that this reads; expected {expected}")
    for name in COUNTS:
        if (said := getattr(text, name, None)) not in (None, depth):
            raise ValueError(f"draft: {folder} has {depth} MTP layers, and the target's config says {name} = {said}")
    try:
        with torch.device("meta"):
            head = MtpHead(_layer_config(model.config, depth), layers_of(model)[-1], layout)
    # Each family asks for other fields and arguments.
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"target: {type(model).__name__} is no family with MTP layers that are known: {error}"
        ) from error

    def published(name: str, k: int) -> str:
        return prefix + (layout.root + name).format(k=k, n=num_layers + k)

    layers = range(len(head.layers))
    roots = tuple({published("", k) for k in layers})
    given = {name: read() for name, read in files.items() if name.startswith(roots)}
    for name, tensor in given.items():
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise ValueError(f"draft: the weight {name} in {folder} is quantised ({tensor.dtype}), which is not read")
    weights, missing, used = {}, [], set()
    for name in (published(*each) for each in product(layout.of_target, layers)):
        used.add(name)
        own_module: Any = model.get_input_embeddings() if "embed" in name else model.get_output_embeddings()
        _check_same(name, given.get(name), own_module.weight, folder)
    for name, parameter in head.state_dict().items():
        _, k, part, rest = name.split(".", 3)
        own = [published(layout.parts[PARTS.index(part)] + rest, int(k))]
        stem, _, last = own[0].rpartition(".")
        if last in EXPERTS and own[0] not in given:
            own = [f"{stem}.{expert}.{each}.weight" for expert in range(len(parameter)) for each in EXPERTS[last]]
        used.update(own)
        missing += [each for each in own if each not in given]
        if not missing:
            tensor = given[own[0]]
            if len(own) > 1:
                tensor = torch.cat([given[each] for each in own]).unflatten(0, (len(parameter), -1))
            is_wide = any(each in name for each in getattr(model, "_keep_in_fp32_modules_strict", None) or ())
            weights[name] = tensor.to(model.device, torch.float32 if is_wide else dtype or model.dtype)
    for what, names in (("lacks", missing), ("has unknown", sorted(given.keys() - used))):
        if names:
            raise ValueError(f"draft: {folder} {what} MTP weights: {', '.join(names[:3])} ({len(names)} in all)")
    try:
        head.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise ValueError(f"draft: the MTP weights in {folder} do not fit {type(model).__name__}: {error}") from error
    return head.requires_grad_(False).eval()


def _layout(names: Iterable[str], num_layers: int) -> tuple[Layout, str, int]:
    """The layout of the MTP weights among these names, what stands before their names, and the number of layers."""
    dotted = [f".{name}" for name in names]
    for layout in LAYOUTS:
        blocks = [f".{layout.root}{layout.parts[-1]}".format(k=k, n=num_layers + k) for k in range(99)]
        found = [[name.partition(block)[0] for name in dotted if block in name] for block in blocks]
        present = [k for k, own in enumerate(found) if own]
        if missing := set(range(max(present, default=0))) - set(present):
            raise ValueError(f"draft: there are MTP weights of layer {max(present)}, and none of layer {min(missing)}")
        if present:
            return layout, f"{found[0][0]}."[1:], len(present)
    return LAYOUTS[0], "", 0


def _uncompiled(module: Any) -> nn.Module:
    """The module that `torch.compile` was given, if this is what it has made."""
    original: nn.Module = getattr(module, "_orig_mod", module)
    return original


def _check_same(name: str, given: Tensor | None, own: Tensor, folder: Path) -> None:
    """Refuse a copy of a weight of the target that differs from it, as the target's is used. Values of a target that is
    quantised cannot be compared."""
    if given is None:
        return
    comparable = type(own) in (Tensor, nn.Parameter) and own.is_floating_point()
    if given.shape != own.shape or (comparable and not torch.equal(given.to(own), own)):
        raise ValueError(f"draft: {name} in {folder} is not the target's own, which would be used for it")


def _layer_config(config: PreTrainedConfig, depth: int) -> PreTrainedConfig:
    """A config that makes the layers with numbers from 0 on."""
    text = config.get_text_config(decoder=True)
    own: PreTrainedConfig
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
