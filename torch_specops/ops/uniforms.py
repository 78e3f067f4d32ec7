"""Counter-based uniform random numbers, a pure function of (seed, position, stream, index).

A sequence's numbers do not depend on its row, on the device, or on the state of a generator, which a CUDA graph would
freeze.

The generator is Philox 4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). Its key is the 64
bits of the seed, and its counter is (index // 4, stream, position low, position high). A block has four words, and
number `index` uses word index % 4. A word w gives the float (w >> 8) * 2**-24, which is exact in float32 and below 1.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..checks import check_tensor, is_int
from .registration import register_op
from .tracing import is_eager_cpu

STREAMS = {"propose": 0, "accept": 1, "sample": 2, "inner": 3, "noise": 4}

MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
MASK = 0xFFFFFFFF
# Constants of SplitMix64: the increment of its counter, and the factors of its mixing function.
GOLDEN, MIX_0, MIX_1 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MASK_64 = 0xFFFFFFFFFFFFFFFF

# A function (words, multiplier) -> the high and the low word of each product.
Multiply = Callable[[Any, int], tuple[Any, Any]]


def uniforms(seeds: Tensor, positions: Tensor, n: int, stream: str) -> Tensor:
    """Uniform random numbers for each sequence, bit-identical on CPU and CUDA, eager and compiled.

    Args:
        seeds: [B] int64, a seed for each request; all 64 bits are used.
        positions: [B] int64, for example the length of the sequence. The same position with the same seed and stream
            gives the same numbers.
        n: how many numbers per sequence, >= 0. The first m of n numbers are the same as in a call with n = m.
        stream: "propose" (draws of the draft), "accept" (acceptance tests), "sample" (the next token), "inner" (seeds
            for the draft of a draft) or "noise" (keys of the noise of `sample_gumbel`). The numbers of two
            streams are independent, because each stream has its own counters in the generator. Do not use one stream
            for two purposes: the numbers would not be independent, and the output would not have the target's
            distribution.

    Returns:
        [B, n] float32 multiples of 2**-24 in [0, 1).

    Raises:
        TypeError: a tensor has another dtype, or `n` is not an int.
        ValueError: a shape or a device does not fit, `n` is negative, or the stream is unknown.

    Examples:
        >>> import torch, torch_specops
        >>> seeds, positions = torch.tensor([7, 8]), torch.tensor([0, 0])
        >>> torch_specops.uniforms(seeds, positions, 2, "accept").shape
        torch.Size([2, 2])
    """
    # Check here, because the dispatcher would convert wrong arguments, or raise an error that does not name the
    # argument.
    for name, tensor in (("seeds", seeds), ("positions", positions)):
        check_tensor(name, tensor, expected="an int64 tensor [B]")
    if not is_int(n):
        raise TypeError(f"n: expected an int, got {type(n)}")
    if stream not in STREAMS:
        raise ValueError(f"stream: expected one of {', '.join(STREAMS)}, got {stream!r}")
    if torch.compiler.is_compiling():
        _check(seeds, positions, n)
    return _uniforms(seeds, positions, n, stream)


def verification_uniforms(seeds: Tensor, positions: Tensor, num_draft_tokens: int) -> tuple[Tensor, Tensor]:
    """The numbers for one verification: `uniforms(.., K, "accept")` [B, K], and the first number of the stream "sample"
    [B]. One op computes both, and they are views of one tensor."""
    numbers = step_uniforms(seeds, positions, num_draft_tokens)
    return numbers[:, :-1], numbers[:, -1]


def step_uniforms(seeds: Tensor, positions: Tensor, num_draft_tokens: int) -> Tensor:
    """[B, K+1]: K numbers of the stream "accept", and the first number of the stream "sample"."""
    return _step_uniforms(seeds, positions, num_draft_tokens)


# Compiled code on a CPU calls these ops instead of inlining them, because their 200 small operations would take longer
# to compile than the rest of a step.
@register_op(uniforms, is_opaque=lambda **_: True)
def _uniforms(seeds: Tensor, positions: Tensor, n: int, stream: str) -> Tensor:
    _check(seeds, positions, n)
    if seeds.device.type == "cuda":
        from .cuda.uniforms import numbers as launch

        return launch(seeds, positions, n, STREAMS[stream])
    if is_eager_cpu(seeds, positions):
        numbers = _blocks(seeds, positions, [(block, STREAMS[stream]) for block in range(-(-n // 4))])
        return numbers[:, :n].contiguous()
    index = torch.arange(n, device=seeds.device)
    return _numbers(seeds, positions, index, torch.full_like(index, STREAMS[stream]))


@register_op(step_uniforms, is_opaque=lambda **_: True)
def _step_uniforms(seeds: Tensor, positions: Tensor, num_draft_tokens: int) -> Tensor:
    if seeds.device.type == "cuda":
        from .cuda.uniforms import numbers as launch

        return launch(seeds, positions, num_draft_tokens, STREAMS["accept"], STREAMS["sample"])
    if is_eager_cpu(seeds, positions):
        accept_blocks = [(block, STREAMS["accept"]) for block in range(-(-num_draft_tokens // 4))]
        numbers = _blocks(seeds, positions, [*accept_blocks, (0, STREAMS["sample"])])
        return torch.cat([numbers[:, :num_draft_tokens], numbers[:, -4:-3]], 1)
    index = torch.arange(num_draft_tokens + 1, device=seeds.device)
    is_sample = index == num_draft_tokens
    streams = torch.where(is_sample, STREAMS["sample"], STREAMS["accept"])
    return _numbers(seeds, positions, torch.where(is_sample, 0, index), streams)


def _check(seeds: Tensor, positions: Tensor, n: int) -> None:
    for name, tensor in (("seeds", seeds), ("positions", positions)):
        if tensor.dtype != torch.int64:
            raise TypeError(f"{name}: expected an int64 tensor [B], got {tensor.dtype}")
    if seeds.dim() != 1 or positions.shape != seeds.shape:
        raise ValueError(
            f"positions: expected [B] like seeds, got {list(positions.shape)} for seeds of shape {list(seeds.shape)}"
        )
    if positions.device != seeds.device:
        raise ValueError(
            f"positions: expected a tensor on {seeds.device}, as seeds are, got a tensor on {positions.device}"
        )
    if n < 0:
        raise ValueError(f"n: expected a number >= 0, got {n}")


def row_seeds(seed: int, batch: int) -> Tensor:
    """A seed for each row of a batch, by a 64-bit hash. (If the row were added to the seed, row 1 of seed 0 would have
    the same numbers as row 0 of seed 1.)

    The hash is SplitMix64 (Steele et al. 2014, "Fast splittable pseudorandom number generators"), with arithmetic
    modulo 2**64: row b gets mix(mix(seed) + (b + 1) * 0x9E3779B97F4A7C15). Rows of one seed never share a row seed.
    Rows of different seeds collide as rarely as random 64-bit numbers.

    Args:
        seed: in [-2**63, 2**63).
        batch: B.

    Returns:
        [B] int64.
    """
    first = _mixed(seed & MASK_64)
    mixed = [_mixed((first + (row + 1) * GOLDEN) & MASK_64) for row in range(batch)]
    # Convert each unsigned 64-bit number to the signed number with the same bits.
    return torch.tensor([word - (word >> 63 << 64) for word in mixed], dtype=torch.int64, device="cpu")


def inner_seeds(seeds: Tensor, positions: Tensor, n: int) -> Tensor:
    """Seeds for a source that drafts for a draft model. For each sequence and position there are n seeds of 63 random
    bits.

    The inner source must not use the sequence's seed, because it would then reuse random numbers of the outer source,
    in this step or a later one.

    Args:
        seeds, positions: as in `uniforms`.
        n: the number of calls to the inner source in a step.

    Returns:
        [B, n] int64.
    """
    bits = (uniforms(seeds, positions, 3 * n, "inner") * 2**21).long().view(-1, n, 3)
    return bits[..., 0] << 42 | bits[..., 1] << 21 | bits[..., 2]


def noise_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """[N, 2] int64 in [0, 2**32): the two keys for the noise of `sample_gumbel`. They are the first two words of block
    0 of the stream "noise"."""
    zeros = torch.zeros_like(positions)
    counter = (zeros, zeros + STREAMS["noise"], positions & MASK, (positions >> 32) & MASK)
    return torch.stack(_philox(counter, (seeds & MASK, (seeds >> 32) & MASK))[:2], 1)


def noise_key_bytes(seeds: Sequence[int], positions: Sequence[int]) -> bytes:
    """`noise_keys` for eager calls, as bytes: N pairs of two 32-bit words."""
    first, second, *_ = _packed_words(seeds, positions, [(0, STREAMS["noise"])])
    return (first | second << 32).to_bytes(8 * len(seeds), "little")


def _mixed(word: int) -> int:
    word = ((word ^ word >> 30) * MIX_0) & MASK_64
    word = ((word ^ word >> 27) * MIX_1) & MASK_64
    return word ^ word >> 31


def _numbers(seeds: Tensor, positions: Tensor, index: Tensor, streams: Tensor) -> Tensor:
    """[B, n], where column j has number index[j] of the stream streams[j].

    For every number this computes a whole block and keeps one of its four words. The compiled code is then one chain of
    rounds; if the four words were concatenated, the compiler would compute the rounds four times.
    """
    seed, position = seeds.unsqueeze(-1), positions.unsqueeze(-1)
    counter = (index // 4, streams, position & MASK, (position >> 32) & MASK)
    words = _philox(counter, (seed & MASK, (seed >> 32) & MASK))
    lane = index % 4
    word = torch.where(lane < 2, torch.where(lane == 0, words[0], words[1]), torch.where(lane == 2, words[2], words[3]))
    return (word >> 8).float() * 2.0**-24


def _philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    return _rounds(torch.broadcast_tensors(*counter), key, (WEYL_0, WEYL_1), MASK, _multiply)


def _rounds(counter: Sequence[Any], key: Sequence[Any], weyl: tuple[int, int], mask: int, multiply: Multiply) -> Any:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high_0, low_0 = multiply(c0, MULTIPLIER_0)
        high_1, low_1 = multiply(c2, MULTIPLIER_1)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + weyl[0]) & mask, (k1 + weyl[1]) & mask
    return c0, c1, c2, c3


def _multiply(a: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """The high and the low 32 bits of a 32 x 32 bit product. It multiplies 16-bit halves, so that no int64 product
    overflows."""
    low = a * (multiplier & 0xFFFF)
    high = a * (multiplier >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def _blocks(seeds: Tensor, positions: Tensor, blocks: Sequence[tuple[int, int]]) -> Tensor:
    """[B, 4 len(blocks)], all numbers of the given blocks (index // 4, stream), for eager calls."""
    batch, size = seeds.shape[0], seeds.shape[0] * len(blocks)
    if size == 0:
        return torch.empty(batch, 4 * len(blocks), dtype=torch.float32, device="cpu")
    top = _packed([MASK >> 8] * size)
    w0, w1, w2, w3 = ((word >> 8) & top for word in _packed_words(seeds.tolist(), positions.tolist(), blocks))
    pairs = (bytearray(pair.to_bytes(8 * size, "little")) for pair in (w0 | w1 << 32, w2 | w3 << 32))
    words = [torch.frombuffer(pair, dtype=torch.int32).view(size, 2) for pair in pairs]
    return torch.cat(words, 1).view(batch, 4 * len(blocks)).float().mul_(2.0**-24)


def _packed_words(seeds: Sequence[int], positions: Sequence[int], blocks: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """The four words of each row's blocks, for eager calls.

    All blocks are packed into one large Python integer, in which each 32-bit word takes 64 bits, so that a product of
    two words fits. One integer operation then handles all blocks; torch would need a hundred calls on tiny tensors.
    """
    ones = _packed([1] * (len(seeds) * len(blocks)))
    mask = ones * MASK
    seed, position = (_packed([value & MASK_64 for value in values for _ in blocks]) for values in (seeds, positions))
    index, stream = (_packed(values * len(seeds)) for values in map(list, zip(*blocks, strict=True)))

    def multiply(a: int, multiplier: int) -> tuple[int, int]:
        product = a * multiplier
        return (product >> 32) & mask, product & mask

    counter = (index, stream, position & mask, (position >> 32) & mask)
    weyl = (ones * WEYL_0, ones * WEYL_1)
    return _rounds(counter, (seed & mask, (seed >> 32) & mask), weyl, mask, multiply)


def _packed(values: Sequence[int]) -> int:
    return int.from_bytes(array("Q", values).tobytes(), "little")
