"""`specops::attend`: attention of new tokens over a static KV cache that skips unused slots.

Attention with a mask reads the whole cache and the mask. In this op, each token has a span: the first and the last slot
that it attends to. On CUDA, a kernel reads only the slots in the spans of each row (`cuda/attention.py`). On a CPU, a
call reads the slots up to the largest end of a span.

Compiled code calls the op without inlining it. On a CPU the number of slots depends on data, and on CUDA Inductor would
analyse the kernels again for every layer of a model.

On CUDA, torch's causal attention reads long prompts (`attend_causal`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .kv_cache import Window
from .registration import register_op
from .tracing import is_eager_cpu, is_traced

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Compiled steps on a CPU use spans only if the cache has at least this many slots. The call of the op and its mask cost
# 0.1 ms per layer, and each slot that is not read saves 0.4 us. With 2,048 slots, spans are faster for sequences of up
# to 1,400 tokens (docs/design.md).
MIN_SPAN_CAPACITY = 2048
# A forward with more new tokens than this is a prefill, not a decode step.
MAX_STEP_TOKENS = 32
# On CUDA, texts of at least this many tokens are read by `attend_causal`. `attend` is made for a few queries: a program
# has 64 of them and reads 32 slots at a time. In shorter texts, attention is at most 2 % of the products of a forward
# of Llama-2 7B (n * 4096 / 202e6). This is computed; on a GPU, `benchmarks/bench_prompt.py` will time both ways.
MIN_CAUSAL_TOKENS = 1024


def spans_serve(positions: Tensor, capacity: int, dtype: torch.dtype) -> bool:
    """True if spans are faster than a mask over all slots for tokens at positions [B, n] of a cache."""
    if dtype not in DTYPES:
        return False
    if positions.device.type == "cuda":
        return True
    if is_eager_cpu(positions):
        # In an eager step the caller already passes only the used slots of the cache, so spans save nothing. In a
        # prefill they avoid the mask.
        return positions.shape[1] > MAX_STEP_TOKENS
    return torch.compiler.is_dynamo_compiling() and capacity >= MIN_SPAN_CAPACITY


def is_long_text(positions: Tensor) -> bool:
    """True if an eager call on CUDA reads at least `MIN_CAUSAL_TOKENS` tokens at positions [B, n], which are 0 to n - 1
    in each row. The host then waits for the device, to look at them."""
    count = positions.shape[1]
    if positions.device.type != "cuda" or count < MIN_CAUSAL_TOKENS or is_traced():
        return False
    # A step that is captured cannot wait, and is not a prompt.
    if torch.cuda.is_current_stream_capturing():
        return False
    return torch.equal(positions, torch.arange(count, device=positions.device).expand_as(positions))


def attention_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which attention computes with a tensor. Under `torch.autocast` it is the autocast dtype, as in
    `scaled_dot_product_attention`."""
    kind = tensor.device.type
    return (
        torch.get_autocast_dtype(kind) if tensor.dtype in DTYPES and torch.is_autocast_enabled(kind) else tensor.dtype
    )


def spans_of(positions: Tensor, window: Window | None) -> Tensor:
    """The spans [B, n, 2] of tokens at positions [B, n] that attend to a window of their sequence; None = to all slots
    up to their position."""
    first = torch.zeros_like(positions) if window is None else window.first(positions)
    return torch.stack([first, positions], -1)


def attend(queries: Tensor, keys: Tensor, values: Tensor, spans: Tensor, scale: float) -> Tensor:
    """Attention, softmax(scale * queries @ keys^T) @ values, in which each query attends to the slots of its span.

    Args:
        queries: [B, G * H, n, D] float32, bfloat16 or float16; any strides.
        keys, values: [B, H, W, D] in the same dtype. Query heads g * G to (g + 1) * G - 1 share head g.
        spans: [B, n, 2] int64 in [0, W), the first and the last slot that query i of a row attends to. On CUDA, the
            slots of a row before all its spans and after all its spans are not read. All slots that are read must be
            finite.
        scale: the factor that scores are multiplied by.

    Returns:
        [B, n, G * H, D].

    Raises:
        ValueError, TypeError: a shape or a dtype does not fit.
    """
    return torch.ops.specops.attend.default(queries, keys, values, spans, scale)


@register_op(attend, is_opaque=lambda **_: True)
def _attend(queries: Tensor, keys: Tensor, values: Tensor, spans: Tensor, scale: float) -> Tensor:
    _check(queries, keys, values, spans)
    if queries.device.type == "cuda":
        from .cuda.attention import attend as launch

        return launch(queries, keys, values, spans, scale)
    if is_eager_cpu(queries, keys, values, spans):
        width = int(spans[..., 1].amax()) + 1
        keys, values = keys[:, :, :width], values[:, :, :width]
        count = spans.shape[1]
        if width == count > MAX_STEP_TOKENS and torch.equal(
            spans, spans_of(torch.arange(count, device=spans.device), None).expand_as(spans)
        ):
            return attend_causal(queries, keys, values, scale)
    slots = torch.arange(keys.shape[2], device=keys.device)
    seen = (slots >= spans[..., :1]) & (slots <= spans[..., 1:])
    return attend_masked(queries, keys, values, seen.unsqueeze(1), scale)


def attend_causal(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """`attend` for whole texts: query i attends to the slots 0 to i. The masked scores are not computed."""
    count, group = queries.shape[2], queries.shape[1] // keys.shape[1]
    keys, values = keys[:, :, :count], values[:, :, :count]
    if queries.device.type == "cuda":
        # On CUDA, only flash attention takes grouped queries, and it takes neither float32 nor heads wider than 256.
        # Otherwise torch would write the scores of all heads, [B, G * H, n, n].
        keys, values, group = _for_each_query_head(keys, group), _for_each_query_head(values, group), 1
    output = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale, enable_gqa=group > 1)
    return output.transpose(1, 2).contiguous()


def attend_masked(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """`attend` with a mask [B or 1, 1, n, W] bool instead of spans; None = queries attend to all slots."""
    batch, num_heads, count, head_dim = queries.shape
    group = num_heads // keys.shape[1]
    if count > head_dim:
        # Repeat the keys for each query head. Folding the heads would copy the mask, which is larger than the keys of a
        # long prompt.
        keys, values = _for_each_query_head(keys, group), _for_each_query_head(values, group)
    else:
        # Treat the query heads of a group as additional queries of their shared key head, so that the keys are not
        # copied.
        queries = queries.reshape(batch, keys.shape[1], group * count, head_dim)
        if mask is not None:
            mask = mask.expand(batch, group, -1, -1).reshape(batch, 1, group * count, -1)
    output = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
    return output.reshape(batch, num_heads, count, -1).transpose(1, 2).contiguous()


def _for_each_query_head(tensor: Tensor, group: int) -> Tensor:
    """[B, H, W, D] -> [B, G * H, W, D]."""
    return tensor.repeat_interleave(group, 1) if group > 1 else tensor


def _check(queries: Tensor, keys: Tensor, values: Tensor, spans: Tensor) -> None:
    batch, num_heads, count, head_dim = queries.shape
    if keys.shape != values.shape or (keys.shape[0], keys.shape[3]) != (batch, head_dim) or num_heads % keys.shape[1]:
        raise ValueError(
            f"keys, values: expected [{batch}, H, W, {head_dim}] with H a divisor of {num_heads}, "
            f"got {list(keys.shape)} and {list(values.shape)}"
        )
    if spans.shape != (batch, count, 2) or spans.dtype != torch.int64:
        raise ValueError(f"spans: expected int64 [{batch}, {count}, 2], got {spans.dtype} {list(spans.shape)}")
    if not queries.dtype == keys.dtype == values.dtype or queries.dtype not in DTYPES:
        raise TypeError(
            "queries, keys, values: expected one dtype, float32, bfloat16 or float16, "
            f"got {queries.dtype}, {keys.dtype}, {values.dtype}"
        )
