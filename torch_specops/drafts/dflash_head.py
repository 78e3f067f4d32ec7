"""The network of a DFlash drafter (Chen et al. 2026, arXiv:2602.06036), and a reader of two published layouts.

z-lab's layout and transformers' Muse Glimmer assistant differ in the names of two weights, in the place of the config's
fields, and in a window of w tokens. In z-lab's, a token attends to itself, to w - 1 tokens before it, and to w - 1
after it if `is_causal` is False. In Muse's, it attends to w tokens before it, and to w after it unless `is_causal` is
True.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..models.checkpoint import checkpoint_folder, filled, open_weights, read_json
from .layers import (
    Attention,
    DecoderLayer,
    LayerConfig,
    Norm,
    check_known,
    joined,
    layer_ids,
    layer_kinds,
    layer_sizes,
    number_of,
    rope_frequencies,
    rotation,
    size_of,
)

MUSE = "muse_glimmer_assistant"
MUSE_NAMES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
FIELDS = {"block_size", "mask_token_id", "target_layer_ids"}
FIELDS |= {"input_embedding_scale", "output_multiplier", "final_logit_softcapping"}


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(LayerConfig):
    """The sizes of a drafter, and the options in which drafters differ.

    Args:
        block_size: the tokens of a block: the newest token and the masks after it.
        mask_token_id: the target's token that stands for a mask.
        feature_layers: the target's layers whose inputs are the features.
        sees: for each layer, how many tokens before and after itself a token attends to, up to the block's end; None =
            all.
        vocab_size, num_target_layers: the target's; None = not known.
        embedding_scale: multiplies the target's embeddings.
        output_multiplier, softcap: the logits are softcap * tanh(output_multiplier * head / softcap); None = no cap.
    """

    block_size: int
    mask_token_id: int
    feature_layers: tuple[int, ...]
    sees: tuple[tuple[int | None, int | None], ...]
    vocab_size: int | None = None
    num_target_layers: int | None = None
    embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    softcap: float | None = None


class DFlashHead(nn.Module):
    """Reads features of the sequence and embeddings of a block. Parameters have z-lab's names."""

    frequencies: Tensor

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        hidden, eps = config.hidden_size, config.norm_eps
        self.fc = nn.Linear(len(config.feature_layers) * hidden, hidden, bias=False)
        self.hidden_norm = Norm(hidden, eps)
        self.layers = nn.ModuleList(DecoderLayer(config, hidden) for _ in config.sees)
        self.norm = Norm(hidden, eps)
        self.register_buffer("frequencies", rope_frequencies(config), persistent=False)

    def context(self, features: Tensor, positions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values [B, heads, n, D] for each layer, of positions [B, n] with features [B, n, F * H]."""
        read = self.hidden_norm(self.fc(features))
        cos, sin = rotation(positions, self.frequencies, read)
        attentions: Any = [layer.self_attn for layer in self.layers]
        return (attention.keys_values(read, cos, sin) for attention in attentions)

    def forward(self, embedded: Tensor, positions: Tensor, attentions: Sequence[Attention]) -> Tensor:
        """The input [B, n, H] of the target's head, from embeddings [B, n, H] of a block at positions [B, n]."""
        hidden, (cos, sin) = embedded, rotation(positions, self.frequencies, embedded)
        layers: Any = self.layers
        for layer, attention in zip(layers, attentions, strict=True):
            hidden = layer.add(hidden, layer.input_layernorm(hidden), cos, sin, attention)
        return self.norm(hidden)


def read_drafter(source: str | os.PathLike[str] | nn.Module, device: torch.device, dtype: torch.dtype) -> DFlashHead:
    """Read a drafter from a folder, a hub repository or a transformers model. Raises the errors of
    `DFlash.from_pretrained`."""
    # Unwrap the result of `torch.compile`.
    model: Any = getattr(source, "_orig_mod", source)
    if not isinstance(model, nn.Module):
        folder = checkpoint_folder(model)
        place, raw = str(folder), read_json(folder)
        weights = {name: read() for name, read in open_weights(folder).items()}
    elif hasattr(model, "config"):
        own_config: Any = model.config
        place, raw, weights = type(model).__name__, own_config.to_dict(), model.state_dict()
    else:
        raise TypeError(f"folder_or_id: expected a folder, a hub id or a drafter of transformers, got {type(model)}")
    config = read_drafter_config(raw)
    with torch.device("meta"):
        head = DFlashHead(config)
    head.frequencies = rope_frequencies(config).to(device)
    return filled(head, {MUSE_NAMES.get(name, name): weights[name] for name in weights}, place, device, dtype)


def read_drafter_config(raw: Mapping[str, Any]) -> DFlashConfig:
    """The config of a drafter, given the content of config.json in either layout."""
    is_muse, architectures = raw.get("model_type") == MUSE, raw.get("architectures")
    if "speculators_model_type" in raw or not (is_muse or architectures == ["DFlashDraftModel"]):
        raise ValueError(
            f"config: expected architectures ['DFlashDraftModel'] or model_type {MUSE!r}, got {architectures} and "
            f"{raw.get('speculators_model_type', raw.get('model_type'))!r}; DFlash2, DSpark and drafters of the "
            "speculators library compute otherwise, and are not read"
        )
    own = raw if is_muse else joined(raw, raw.get("dflash_config"), "dflash_config", FIELDS)
    # `target_layer_ids` counts layer outputs; `eagle_aux_hidden_state_layer_ids`, which vLLM reads first, counts
    # inputs.
    feature_layers = [each + 1 for each in layer_ids(own, "target_layer_ids")]
    check_known(
        ("model_type", raw.get("model_type"), ("qwen3", MUSE)),
        # Quantised weights are not read.
        ("quantization_config", raw.get("quantization_config"), (None,)),
        ("eagle_aux_hidden_state_layer_ids", raw.get("eagle_aux_hidden_state_layer_ids"), (None, feature_layers)),
        ("num_aux_hidden_states", raw.get("num_aux_hidden_states"), (None, len(feature_layers))),
        ("target_hidden_size", raw.get("target_hidden_size"), (None, raw.get("hidden_size"))),
        ("draft_vocab_size", raw.get("draft_vocab_size"), (None, raw.get("vocab_size"))),
        ("logit_scale", raw.get("logit_scale"), (None, 1)),
        ("is_causal", raw.get("is_causal"), (None, True, False)),
    )

    def sees(kind: str) -> tuple[int | None, int | None]:
        slides, causal = kind == "sliding_attention", raw.get("is_causal")
        window = size_of(raw, "sliding_window") if slides else None
        if is_muse or window is None:
            return window, 0 if causal else window
        return window - 1, 0 if causal is not False else window - 1

    return DFlashConfig(
        **layer_sizes(raw),
        normalises_queries=True,
        block_size=size_of(own, "block_size", least=2),
        mask_token_id=size_of(own, "mask_token_id", least=0),
        feature_layers=tuple(feature_layers),
        sees=tuple(sees(kind) for kind in layer_kinds(raw, size_of(raw, "num_hidden_layers"))),
        vocab_size=raw.get("vocab_size"),
        num_target_layers=raw.get("num_target_layers"),
        embedding_scale=number_of(own, "input_embedding_scale", 1.0),
        output_multiplier=number_of(own, "output_multiplier", 1.0),
        softcap=number_of(own, "final_logit_softcapping"),
    )
