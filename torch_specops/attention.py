"""`specops::attend`: attention of a few new tokens over a static cache, which reads the slots that somebody sees.

Attention under a mask reads the whole cache, and the mask. Here each token comes with the span of slots that it sees:
on CUDA a kernel reads the slots of each row's spans (`kernels/attention.py`), and a call on a CPU looks for the last
one. Compiled code on a CPU calls the op as it is, because a compiler has to know how much is read.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .kv_cache import fold_groups
from .registration import register_op
from .tracing import can_read_data, on_device_of

__all__ = ["DTYPES", "MAX_QUERIES", "attend"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# More new tokens than a step has are a prompt, which compute rather than memory limits.
MAX_QUERIES = 32


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
    result: Tensor = torch.ops.specops.attend.default(queries, keys, values, spans, scale)
    return result


@register_op(attend, whole_from=0)
def _attend(queries: Tensor, keys: Tensor, values: Tensor, spans: Tensor, scale: float) -> Tensor:
    _check(queries, keys, values, spans)
    if queries.device.type == "cuda":
        from .kernels.attention import attend as launch

        with on_device_of(queries):
            return launch(queries, keys, values, spans, scale)
    if can_read_data(queries, keys, values, spans):
        width = int(spans[..., 1].amax()) + 1
        keys, values = keys[:, :, :width], values[:, :, :width]
    slots = torch.arange(keys.shape[2], device=keys.device)
    seen = (slots >= spans[..., :1]) & (slots <= spans[..., 1:])
    folded, mask = fold_groups(queries, keys.shape[1], seen.unsqueeze(1))
    output = F.scaled_dot_product_attention(folded, keys, values, mask, scale=scale)
    return output.reshape(queries.shape).transpose(1, 2).contiguous()


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
