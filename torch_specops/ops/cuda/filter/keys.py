"""Convert logits to int32 keys with the same order, so that a search can bisect them. A key has 16 significant bits for
a 16-bit type, and 32 for float32."""

import triton
import triton.language as tl

from ..tiles import widen


@triton.jit
def order_key(x):
    """Raw logits -> int32 keys. Both zeros have the same key, and the key of NaN is arbitrary."""
    BITS: tl.constexpr = x.dtype.primitive_bitwidth
    bits = x.to(tl.int16, bitcast=True).to(tl.int32) if BITS == 16 else x.to(tl.int32, bitcast=True)
    bits = tl.where(bits == -(2 ** (BITS - 1)), 0, bits)
    return bits ^ ((bits >> 31) & (2 ** (BITS - 1) - 1))


@triton.jit
def key_value(key, DTYPE: tl.constexpr):
    """int32 keys -> raw logits in float32."""
    BITS: tl.constexpr = DTYPE.primitive_bitwidth
    bits = key ^ ((key >> 31) & (2 ** (BITS - 1) - 1))
    x = bits.to(tl.int16).to(DTYPE, bitcast=True) if BITS == 16 else bits.to(DTYPE, bitcast=True)
    return widen(x)


@triton.jit
def lowest_key(DTYPE: tl.constexpr):
    """The key of the lowest logit that is not masked, which is 1 above the key of -inf."""
    return order_key(tl.full((), float("-inf"), tl.float32).to(DTYPE)) + 1


@triton.jit
def average(low, high):
    """The mean of two keys, rounded down. Neither a sum nor a difference of the keys is computed, because it could
    overflow."""
    return (low & high) + ((low ^ high) >> 1)
