"""Attention of grouped queries over the cache, without a copy of the keys for each query head.

transformers' "sdpa" repeats keys and values for every head of a group when there is a mask, and ragged rows always have
one: each step would copy the whole cache, as many times over as a group has heads. Here the heads of a group become
further queries of the one key head they share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .architecture import layers_of

__all__ = ["configs_to_group", "grouped", "grouped_attention"]

SDPA, GROUPED = "sdpa", "torch_specops_grouped_sdpa"


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers' "sdpa" computes, for queries [B, G * heads, n, D] and keys [B, heads, W, D]."""
    batch, num_heads, count, head_dim = query.shape
    group = num_heads // key.shape[1]
    # The mask is copied for each head of a group. For a long prompt that is more than the keys are.
    is_long = count > head_dim
    if group == 1 or is_long or attention_mask is None or attention_mask.shape[1] != 1 or position_bias is not None:
        kwargs |= {"dropout": dropout, "scaling": scaling, "position_bias": position_bias}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    # [B, heads, G * n, D] and [B, 1, G * n, W]: the queries of a head's group one after another.
    folded = query.reshape(batch, -1, group * count, head_dim)
    mask = attention_mask.expand(batch, group, -1, -1).reshape(batch, 1, group * count, -1)
    output = nn.functional.scaled_dot_product_attention(
        folded, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling
    )
    return output.reshape(batch, num_heads, count, -1).transpose(1, 2).contiguous(), None


# Another thread may use the model meanwhile, in transformers' own way; it gets the same masks and the same attention.
AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


def configs_to_group(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configs that a model's layers take their attention from, where it is "sdpa" and queries are grouped."""
    try:
        layers = layers_of(model)[1]
    except ValueError:
        return []
    configs: dict[int, PreTrainedConfig] = {}
    for module in layers.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig) and config._attn_implementation == SDPA and _is_grouped(config):
            configs[id(config)] = config
    return list(configs.values())


def _is_grouped(config: PreTrainedConfig) -> bool:
    num_heads = getattr(config, "num_attention_heads", None)
    num_key_value_heads = getattr(config, "num_key_value_heads", None)
    return num_heads is not None and num_key_value_heads is not None and num_key_value_heads < num_heads


@contextmanager
def grouped(configs: Sequence[PreTrainedConfig]) -> Iterator[None]:
    """Within it the layers of these configs attend by `grouped_attention`. The model is as it was behind it."""
    for config in configs:
        config._attn_implementation = GROUPED
    try:
        yield
    finally:
        for config in configs:
            config._attn_implementation = SDPA
