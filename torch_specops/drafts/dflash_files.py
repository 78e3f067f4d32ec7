"""Reads published DFlash, DSpark and DFlash2 drafters, configs and safetensors, in five layouts.

| layout | features of layer i | first draft | a window of w tokens |
| --- | --- | --- | --- |
| z-lab's | the output of layer i | at the first mask | w - 1 before each token, w - 1 after if not `is_causal` |
| transformers' (Muse Glimmer) | its output | at the first mask | w before each token, w after it unless `is_causal` |
| DeepSpec's, SpecForge's DSpark | its output, -1 = the embeddings | at the newest token | z-lab's |
| speculators' | its input | at the first mask, DSpark: at the newest token | w before the block |
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..models.checkpoint import checkpoint_folder, filled, open_weights, read_json
from .dflash_head import DFlashConfig, DFlashHead
from .layers import (
    NOT_NEEDED,
    SUPPORTED,
    UNSCALED,
    check_known,
    default_drafts,
    draft_tokens,
    field_of,
    is_set,
    joined,
    layer_ids,
    layer_kinds,
    layer_sizes,
    number_of,
    rope_frequencies,
    size_if_given,
    size_of,
    speculators_parts,
)
from .markov import KINDS
from .methods import MUSE, method_of

MUSE_NAMES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}

FIELDS = {"block_size", "mask_token_id", "target_layer_ids", "projector_type", *UNSCALED}
DFLASH2_FIELDS = FIELDS | {"conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"}
DSPARK_FIELDS = FIELDS | {"markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"}
# These two say how SpecForge trained.
DSPARK_FIELDS |= {"attention_mode", "confidence_head_alpha"}
# The fields of each method in z-lab's `dflash_config`.
OF_METHOD = {"dflash": FIELDS, "dflash2": DFLASH2_FIELDS, "dspark": DSPARK_FIELDS}
# These give a drafter a part that others lack.
PARTS = ("markov_rank", "enable_confidence_head", "conv_kernel_size", "selector_rank")
IDS = "aux_hidden_state_layer_ids"
SPECULATORS_FIELDS = DFLASH2_FIELDS | DSPARK_FIELDS | {*SUPPORTED, IDS, f"eagle_{IDS}", "num_aux_hidden_states"}
SPECULATORS_FIELDS |= {"draft_vocab_size", "target_hidden_size", "num_target_layers", "is_causal"}
SPECULATORS_FIELDS |= {"sample_from_anchor", "sliding_window_non_causal"}


def read_drafter(source: str | os.PathLike[str] | nn.Module, device: torch.device, dtype: torch.dtype) -> DFlashHead:
    """Read a drafter from a folder, a hub repository or a transformers model. Raises the errors of
    `DFlash.from_pretrained`."""
    # Unwrap the result of `torch.compile`.
    model: Any = getattr(source, "_orig_mod", source)
    if not isinstance(model, nn.Module):
        folder = checkpoint_folder(model)
        place, config = str(folder), read_drafter_config(read_json(folder))
        weights = {name: read() for name, read in open_weights(folder).items()}
    elif hasattr(model, "config"):
        own_config: Any = model.config
        place, config = type(model).__name__, read_drafter_config(own_config.to_dict())
        weights = model.state_dict()
    else:
        raise TypeError(f"folder_or_id: expected a folder, a hub id or a drafter of transformers, got {type(model)}")
    weights = {MUSE_NAMES.get(name, name): weights[name] for name in weights if name not in NOT_NEEDED}
    offsets, is_drafted = weights.pop("d2t", None), weights.pop("t2d", None)
    vocab_size = config.vocab_size or 0
    count = config.draft_vocab_size or vocab_size
    if count < vocab_size and "lm_head.weight" not in weights:
        raise ValueError(f"draft: the head has {count} of {vocab_size} tokens and lacks the weight lm_head.weight")
    with torch.device("meta"):
        head = DFlashHead(config, "embed_tokens.weight" in weights, "lm_head.weight" in weights)
    head.frequencies = rope_frequencies(config).to(device)
    if count != vocab_size or offsets is not None or is_drafted is not None:
        found = draft_tokens(count, vocab_size, offsets, is_drafted)
        head.draft_of_target = None if count == vocab_size else found.to(device)
    return filled(head, weights, place, device, dtype)


def read_drafter_config(raw: Mapping[str, Any]) -> DFlashConfig:
    """The config of a drafter, given the content of config.json in any layout."""
    method = method_of(raw, "DFlash")
    return (_of_publishers if raw.get("speculators_model_type") is None else _of_speculators)(raw, method)


def _of_publishers(raw: Mapping[str, Any], kind: str) -> DFlashConfig:
    """The layouts of z-lab, transformers, DeepSpec and SpecForge."""
    is_muse, is_dspark = raw.get("model_type") == MUSE, kind == "dspark"
    fields, causal = joined(raw, raw, "dflash_config", OF_METHOD[kind]), raw.get("is_causal")
    check_known(
        ("model_type", raw.get("model_type"), ("qwen3", MUSE)),
        ("eagle_config", raw.get("eagle_config"), (None,)),
        ("draft_vocab_size", raw.get("draft_vocab_size"), (None, raw.get("vocab_size"))),
        ("is_causal", causal, (None, True, False)),
        ("sliding_window_non_causal", raw.get("sliding_window_non_causal"), (None, causal is False)),
        ("sample_from_anchor", raw.get("sample_from_anchor"), (None, is_dspark)),
    )

    def sees(kind: str) -> tuple[int | None, int | None]:
        window = size_of(raw, "sliding_window") if kind == "sliding_attention" else None
        if is_muse or window is None:
            return window, 0 if causal else window
        return window - 1, 0 if causal is not False else window - 1

    return _config(
        raw,
        fields,
        kind,
        sees,
        [each + 1 for each in layer_ids(fields, "target_layer_ids", least=-1 if is_dspark else 0)],
        # SpecForge's configs may name the weight of the confidence loss instead.
        **(_dspark_heads(fields, bool(fields.get("confidence_head_alpha")), reads_markov=False) if is_dspark else {}),
        **(_dflash2_parts(raw, fields) if kind == "dflash2" else {}),
        first_place=0 if is_dspark else 1,
        embedding_scale=number_of(fields, "input_embedding_scale", 1.0),
        output_multiplier=number_of(fields, "output_multiplier", 1.0),
        softcap=number_of(fields, "final_logit_softcapping"),
    )


def _of_speculators(raw: Mapping[str, Any], kind: str) -> DFlashConfig:
    layer, fields = speculators_parts(raw, SPECULATORS_FIELDS)
    kinds = field_of(layer, "layer_types", str, is_list=True) or []
    is_dspark, slides = kind == "dspark", "sliding_attention" in kinds
    after = None if is_set(fields, "sliding_window_non_causal", default=kind == "dflash2") else 0
    check_known(
        *((name, fields.get(name), known) for name, known in UNSCALED.items()),
        ("model_type", layer.get("model_type"), ("qwen3", "llama")),
        ("use_sliding_window", layer.get("use_sliding_window"), (None, True) if slides else (None, True, False)),
        # The library does not read it; z-lab's drafters, which it converts, may have it.
        ("is_causal", fields.get("is_causal"), (None,) if slides and after == 0 else (None, False)),
    )
    first_place = 0 if is_set(fields, "sample_from_anchor", default=is_dspark) else 1
    count, most = default_drafts(raw, kind), size_of(fields, "block_size", least=2) - first_place
    if count is not None and count > most:
        raise ValueError(f"config: expected speculative_tokens <= {most}, the drafts of a block, got {count}")
    return _config(
        layer,
        fields,
        kind,
        lambda kind: (size_of(layer, "sliding_window"), after) if kind == "sliding_attention" else (None, None),
        layer_ids(fields, IDS),
        **(_dspark_heads(fields, is_enabled=True, reads_markov=True) if is_dspark else {}),
        **(_dflash2_parts(layer, fields) if kind == "dflash2" else {}),
        first_place=first_place,
        draft_vocab_size=size_of(fields, "draft_vocab_size"),
        num_drafts=count,
        window_of_block=True,
        reads_last_norm=False,
    )


def _dspark_heads(fields: Mapping[str, Any], is_enabled: bool, reads_markov: bool) -> dict[str, Any]:
    """The fields of DSpark's heads. Layouts differ in what a confidence head is if the config does not say it."""
    rank, kind = size_of(fields, "markov_rank", least=0), fields.get("markov_head_type")
    has_confidence = is_set(fields, "enable_confidence_head", is_enabled)
    reads_markov = is_set(fields, "confidence_head_with_markov", reads_markov)
    check_known(("markov_head_type", kind, (None, *KINDS)))
    if has_confidence and reads_markov and rank == 0:
        raise ValueError("config: confidence_head_with_markov is True, and markov_rank is 0")
    return {
        "markov_rank": rank,
        "markov_kind": kind or "vanilla",
        "has_confidence": has_confidence,
        "confidence_reads_markov": reads_markov,
    }


def _dflash2_parts(layer: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of DFlash2's convolutions and selector."""
    hidden, vocab_size = size_of(layer, "hidden_size"), size_of(layer, "vocab_size")
    group_size, top_k = size_of(fields, "conv_group_size"), size_of(fields, "selector_top_k")
    check_known(
        ("draft_vocab_size", fields.get("draft_vocab_size"), (None, vocab_size)),
        ("hidden_size % conv_group_size", hidden % group_size, (0,)),
    )
    if top_k > vocab_size:
        raise ValueError(f"config: expected selector_top_k <= {vocab_size}, the tokens, got {top_k}")
    return {
        "conv_taps": size_of(fields, "conv_kernel_size"),
        "conv_group_size": group_size,
        "selector_rank": size_of(fields, "selector_rank"),
        "selector_top_k": top_k,
    }


def _config(
    layer: Mapping[str, Any],
    fields: Mapping[str, Any],
    kind: str,
    sees: Callable[[str], tuple[int | None, int | None]],
    feature_layers: list[int],
    **others: Any,
) -> DFlashConfig:
    # z-lab's and transformers' drafters have no weights for tokens, and may not say how many there are.
    knows_tokens = not others.keys().isdisjoint({"markov_rank", "draft_vocab_size", "selector_rank"})
    # `target_layer_ids` counts layer outputs, the other two count inputs. vLLM reads EAGLE's name first.
    outputs = [each - 1 for each in feature_layers]
    same: dict[str, Any] = {IDS: feature_layers, f"eagle_{IDS}": feature_layers, "target_layer_ids": outputs}
    same |= {"num_aux_hidden_states": len(feature_layers), "projector_type": kind}
    check_known(
        *((name, fields.get(name), known) for name, known in SUPPORTED.items()),
        *((name, fields.get(name), (None, 0)) for name in PARTS if name not in OF_METHOD[kind]),
        *((name, fields.get(name), (None, value)) for name, value in same.items()),
        ("target_hidden_size", fields.get("target_hidden_size"), (None, layer.get("hidden_size"))),
    )
    return DFlashConfig(
        **layer_sizes(layer),
        **others,
        vocab_size=size_of(layer, "vocab_size") if knows_tokens else size_if_given(layer, "vocab_size"),
        num_target_layers=size_if_given(fields, "num_target_layers"),
        normalises_queries=True,
        block_size=size_of(fields, "block_size", least=2),
        mask_token_id=size_of(fields, "mask_token_id", least=0),
        feature_layers=tuple(feature_layers),
        sees=tuple(sees(kind) for kind in layer_kinds(layer, size_of(layer, "num_hidden_layers"))),
    )
