"""Grouped-query attention over the KV cache without copying the keys for each query head.

If there is a mask, transformers' "sdpa" repeats keys and values for every query head of a group (since 5.23 not in
eager steps of one token). Rows of different lengths always need a mask. With a group of G query heads, each step would
then copy the whole cache G times. Instead, this module treats the query heads of a group as additional queries of the
key head they share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..ops import invariant
from ..ops.attention import attend, attend_causal, attend_masked

SDPA, GROUPED, INVARIANT = "sdpa", "torch_specops_grouped_sdpa", "torch_specops_invariant"

Attention = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


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
    """The result of transformers' "sdpa" for queries [B, G * heads, n, D] and keys [B, heads, W, D].

    Instead of a mask, `attention_mask` may hold spans of slots for `attend`, [B, 1, n, 2] int64. An empty tensor of
    int64 says that the queries are whole texts and attend to all earlier tokens (`attend_causal`).

    Queries of several sequences may be packed into one row, [1, G * heads, N, D]. They are then ordered by sequence and
    contain no padding. The mask [B, 1, n, W] shows which queries are left out as padding: those whose row is empty.
    """
    if attention_mask is None or attention_mask.shape[1] != 1 or position_bias is not None:
        kwargs |= {"scaling": scaling, "position_bias": position_bias}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    scale = scaling or query.shape[3] ** -0.5
    if attention_mask.dtype == torch.int64:
        query = query.to(value.dtype)
        if attention_mask.numel() == 0:
            return attend_causal(query, key, value, scale), None
        return attend(query, key, value, attention_mask.squeeze(1), scale), None
    if query.shape[0] < attention_mask.shape[0]:
        return _attend_packed(attend_masked, query, key, value, attention_mask, scale), None
    # Every token attends to itself, so a mask over a single slot masks nothing.
    mask = None if attention_mask.shape[3] == 1 else attention_mask
    return attend_masked(query, key, value, mask, scale), None


def invariant_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`grouped_attention` with a mask or, for texts from slot 0 on, None, whose results for a token depend on what it
    sees alone, to the last bit."""
    for name in ("softcap", "position_bias", "s_aux"):
        if kwargs.get(name) is not None:
            raise ValueError(f"invariant: expected attention without {name}")
    count, width = query.shape[2], key.shape[2]
    if attention_mask is None:
        attention_mask = torch.ones(1, 1, count, width, dtype=torch.bool, device=query.device).tril(width - count)
    if attention_mask.dtype != torch.bool:
        raise TypeError(f"invariant: expected a mask of bool, got {attention_mask.dtype}")
    scale = scaling or query.shape[3] ** -0.5
    if query.shape[0] < attention_mask.shape[0]:
        return _attend_packed(invariant.attend, query, key, value, attention_mask, scale), None
    # The mask of a token that sees all slots has a single one.
    mask = attention_mask.expand(-1, -1, -1, width)
    return invariant.attend(query, key, value, mask, scale), None


def _attend_packed(
    attention: Attention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float
) -> Tensor:
    """The attention of packed queries -> [1, N, G * heads, D], without padding."""
    at = mask.any(3).flatten().nonzero().squeeze(1)
    padded = query.new_zeros(mask.shape[0] * mask.shape[2], *query.shape[1::2])
    padded.index_copy_(0, at, query[0].transpose(0, 1))
    output = attention(padded.unflatten(0, mask.shape[::2]).transpose(1, 2), key, value, mask, scale)
    return output.flatten(0, 1).index_select(0, at).unsqueeze(0)


# A config selects a function by its name. Both take the same masks as "sdpa".
AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)
AttentionInterface.register(INVARIANT, invariant_attention)
AttentionMaskInterface.register(INVARIANT, sdpa_mask)


def use_grouped_attention(config: PreTrainedConfig, use_spans: bool) -> None:
    """In a config with "sdpa", select `grouped_attention` if query heads are grouped or the model gets spans. Otherwise
    select "sdpa" again."""
    # In a heterogeneous model, each layer may have a different number of heads, which the config does not show.
    is_grouped = use_spans or getattr(config, "is_heterogeneous", False)
    if not is_grouped:
        num_heads = getattr(config, "num_attention_heads", None)
        is_grouped = (getattr(config, "num_key_value_heads", None) or num_heads) != num_heads
    if config._attn_implementation in (SDPA, GROUPED):
        config._attn_implementation = GROUPED if is_grouped else SDPA
