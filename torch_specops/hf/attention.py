"""Grouped-query attention over the cache without a copy of the keys for each query head.

With a mask, transformers' "sdpa" repeats keys and values for every query head of a group, except in eager steps of one
token since 5.23. Ragged rows always have a mask, so each step would copy the whole cache as many times as a group has
heads. Here the query heads of a group become additional queries of their shared key head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..ops.attention import attend, attend_masked

SDPA, GROUPED = "sdpa", "torch_specops_grouped_sdpa"


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The result of transformers' "sdpa" for queries [B, G * heads, n, D] and keys [B, heads, W, D]. The mask may also
    be spans of slots for `attend`, as [B, 1, n, 2] int64.

    Queries may be packed, as [1, G * heads, N, D] for keys of several sequences. They are then, row by row, the queries
    that see a slot in the mask [B, 1, n, W].
    """
    if attention_mask is None or attention_mask.shape[1] != 1 or position_bias is not None:
        kwargs |= {"scaling": scaling, "position_bias": position_bias}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    scale = scaling or query.shape[3] ** -0.5
    if attention_mask.dtype == torch.int64:
        query = query.to(value.dtype)
        return attend(query, key, value, attention_mask.squeeze(1), scale), None
    if query.shape[0] < attention_mask.shape[0]:
        return _attend_packed(query, key, value, attention_mask, scale), None
    # Every token sees itself, so a mask over one slot hides nothing.
    mask = None if attention_mask.shape[3] == 1 else attention_mask
    return attend_masked(query, key, value, mask, scale), None


def _attend_packed(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention of packed queries, [1, N, G * heads, D]. Padding, which sees no slot, is dropped."""
    at = mask.any(3).flatten().nonzero().squeeze(1)
    padded = query.new_zeros(mask.shape[0] * mask.shape[2], *query.shape[1::2])
    padded.index_copy_(0, at, query[0].transpose(0, 1))
    output = attend_masked(padded.unflatten(0, mask.shape[::2]).transpose(1, 2), key, value, mask, scale)
    return output.flatten(0, 1).index_select(0, at).unsqueeze(0)


# Configs select it by this name, with the masks of "sdpa".
AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


def use_grouped_attention(config: PreTrainedConfig, use_spans: bool) -> None:
    """Select `grouped_attention` in a config with "sdpa" if its queries are grouped or the model gets spans; otherwise
    restore "sdpa"."""
    # The layers of a heterogeneous model may differ in their numbers of heads.
    is_grouped = use_spans or getattr(config, "is_heterogeneous", False)
    if not is_grouped:
        num_heads = getattr(config, "num_attention_heads", None)
        is_grouped = (getattr(config, "num_key_value_heads", None) or num_heads) != num_heads
    if config._attn_implementation in (SDPA, GROUPED):
        config._attn_implementation = GROUPED if is_grouped else SDPA
