"""`specops::attend`: attention of new tokens over a static cache, which reads the slots that somebody sees.

Attention under a mask reads the whole cache, and the mask. Here each token comes with the span of slots that it sees:
on CUDA a kernel reads the slots of each row's spans (`cuda/attention.py`), and a call on a CPU looks for the last
slot. Compiled code calls the op unchanged. On a CPU a compiler would have to know how much is read. On CUDA Inductor
would analyse the kernels anew for every layer of a model.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .kv_cache import Window
from .registration import register_op
from .tracing import is_eager_cpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Slots from which compiled steps on a CPU attend to spans. In 2,048 slots that is faster up to 1,400 tokens of text:
# the call and its mask take 0.1 ms a layer more, a slot that is not read saves 0.4 us (docs/design.md).
MIN_SPAN_CAPACITY = 2048
# More new tokens than a step has: a prompt.
MAX_STEP_TOKENS = 32


def spans_serve(positions: Tensor, capacity: int, dtype: torch.dtype) -> bool:
    """True if spans serve tokens at positions [B, n] of a cache better than a mask over all slots."""
    if dtype not in DTYPES:
        return False
    if positions.device.type == "cuda":
        return True
    if is_eager_cpu(positions):
        # An eager step leaves out what nobody sees anyway. A prompt needs no mask.
        return positions.shape[1] > MAX_STEP_TOKENS
    return torch.compiler.is_dynamo_compiling() and capacity >= MIN_SPAN_CAPACITY


def attention_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which attention computes with a tensor: under `torch.autocast` its dtype, as in torch's own."""
    kind = tensor.device.type
    return (
        torch.get_autocast_dtype(kind) if tensor.dtype in DTYPES and torch.is_autocast_enabled(kind) else tensor.dtype
    )


def spans_of(positions: Tensor, window: Window | None) -> Tensor:
    """[B, n, 2], what `attend` takes for tokens at positions [B, n] that see a window of their text; None = all of it
    up to their own slot."""
    first = torch.zeros_like(positions) if window is None else window.first(positions)
    return torch.stack([first, positions], -1)


def attend(queries: Tensor, keys: Tensor, values: Tensor, spans: Tensor, scale: float) -> Tensor:
    """softmax(scale * queries @ keys^T) @ values, over the slots of a span for each query.

    Args:
        queries: [B, G * H, n, D] float32, bfloat16 or float16; any strides.
        keys, values: [B, H, W, D] in the same dtype. Query heads g * G to (g + 1) * G - 1 share head g.
        spans: [B, n, 2] int64, the first and the last slot that query i of a row sees, in [0, W). Slots of a row that
            lie outside of all its spans are not read; what is between them has to be finite.
        scale: of the scores.

    Returns:
        [B, n, G * H, D].

    Raises:
        ValueError, TypeError: a shape or dtype that does not fit.
    """
    return torch.ops.specops.attend.default(queries, keys, values, spans, scale)


@register_op(attend, is_opaque=lambda **_: True, opaque_on_cuda=True)
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
            # A prompt from its first token on: what a mask would hide is then not computed either.
            output = F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=scale, enable_gqa=queries.shape[1] != keys.shape[1]
            )
            return output.transpose(1, 2).contiguous()
    slots = torch.arange(keys.shape[2], device=keys.device)
    seen = (slots >= spans[..., :1]) & (slots <= spans[..., 1:])
    return attend_masked(queries, keys, values, seen.unsqueeze(1), scale)


def attend_masked(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """`attend` for queries that see the slots of a mask [B or 1, 1, n, W] bool; None = all."""
    batch, num_heads, count, head_dim = queries.shape
    group = num_heads // keys.shape[1]
    if count > head_dim:
        # Folding copies the mask for each head of a group. For a long prompt the mask is larger than the keys.
        keys, values = (each.repeat_interleave(group, 1) if group > 1 else each for each in (keys, values))
    else:
        # The query heads of a group become further queries of the key head that they share, one head after another.
        queries = queries.reshape(batch, keys.shape[1], group * count, head_dim)
        if mask is not None:
            mask = mask.expand(batch, group, -1, -1).reshape(batch, 1, group * count, -1)
    output = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
    return output.reshape(batch, num_heads, count, -1).transpose(1, 2).contiguous()


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
