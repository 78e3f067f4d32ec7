"""The hash behind the noise of `sample_gumbel` and `verify_gumbel`: uniform, and independent wherever a text or a batch
puts two numbers side by side. What each test rejects is in `REJECTED`, the hash is in docs/math.md, section 17."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from op_cases import NOISE_PLACES
from scipy import stats

from torch_specops import reference
from torch_specops.ops.cpu.gumbel import dense_hashes, hashes
from torch_specops.ops.uniforms import noise_key_bytes, noise_keys

Array = Any
# Keys [N, 2] and V -> [N, V].
Hash = Callable[[Array, int], Array]
# Seeds and positions -> [N, 2].
Keys = Callable[[Sequence[int], Sequence[int]], Array]
N, V = 8000, 500
WEYL, FACTOR = np.uint32(0x9E3779B9), np.uint32(0x735A2D97)


def philox(seeds: Sequence[int], positions: Sequence[int]) -> Array:
    return np.frombuffer(noise_key_bytes(seeds, positions), np.uint32).reshape(-1, 2)


def shifted(x: Array, by: int) -> Array:
    return x >> np.uint32(by)


def chi_square(values: Array, bins: int) -> float:
    return float(stats.chisquare(np.bincount(values.ravel(), minlength=bins)).pvalue)


def pairs(a: Array, b: Array) -> float:
    """Independent and uniform in their upper four bits."""
    return chi_square(shifted(a, 28) * np.uint32(16) + shifted(b, 28), 256)


def of_texts(of: Hash, keys: Keys) -> Array:
    """[N, V]: the first position of many seeds, then many positions of one."""
    return np.concatenate([of(keys(range(N // 2), [0] * (N // 2)), V), of(keys([7] * (N // 2), range(N // 2)), V)])


def one_word(of: Hash, keys: Keys) -> float:
    return chi_square(shifted(of_texts(of, keys), 22), 1024)


def last_byte(of: Hash, keys: Keys) -> float:
    return chi_square(of_texts(of, keys) & np.uint32(255), 256)


def next_token(of: Hash, keys: Keys) -> float:
    h = of_texts(of, keys)
    return pairs(h[:, :-1], h[:, 1:])


def four_tokens(of: Hash, keys: Keys) -> float:
    """Evenly spaced tokens: what is linear in the token cancels."""
    h = of_texts(of, keys)
    a, b, c, d = (h[:, i : V - 3 + i] for i in range(4))
    return chi_square(shifted(a - b - c + d, 24), 256)


def next_seed(of: Hash, keys: Keys) -> float:
    h = of(keys(range(N), [0] * N), V)
    return pairs(h[:-1], h[1:])


def next_position(of: Hash, keys: Keys) -> float:
    h = of(keys([7] * N, range(N)), V)
    return pairs(h[:-1], h[1:])


def seed_for_position(of: Hash, keys: Keys) -> float:
    """Position t + 1 of seed s, and position t of seed s + 1."""
    return pairs(of(keys(range(N), [6] * N), V), of(keys(range(1, N + 1), [5] * N), V))


def one_bit_of_the_seed(of: Hash, keys: Keys) -> float:
    """The least p-value of several bits, times their number."""
    seeds = np.random.default_rng(0).integers(-(2**62), 2**62, N)
    h, bits = of(keys(seeds.tolist(), [0] * N), V), (0, 1, 31, 32, 61)
    return len(bits) * min(pairs(h, of(keys((seeds ^ 1 << bit).tolist(), [0] * N), V)) for bit in bits)


def place_of_the_least(of: Hash, keys: Keys) -> float:
    """Which of few tokens a flat law draws."""
    h = of(np.concatenate([keys(range(2 * N), [0] * 2 * N), keys([7] * 2 * N, range(2 * N))]), 64)
    return chi_square(h.argmin(1), 64)


def size_of_the_least(of: Hash, keys: Keys) -> float:
    least = of_texts(of, keys).min(1)
    return float(stats.kstest(1 - (1 - (least + 0.5) / 2**32) ** V, "uniform").pvalue)


STATISTICS = (
    *(one_word, last_byte, next_token, four_tokens, next_seed, next_position, seed_for_position, one_bit_of_the_seed),
    *(place_of_the_least, size_of_the_least),
)


@pytest.mark.parametrize("statistic", STATISTICS)
def test_the_noise_is_uniform_and_independent(statistic: Callable[[Hash, Keys], float]) -> None:
    assert statistic(hashes, philox) > 0.01


def without_shifts(keys: Array, vocab_size: int) -> Array:
    return (np.arange(vocab_size, dtype=np.uint32) * WEYL ^ keys[:, :1]) * (keys[:, 1:] | np.uint32(1)) * FACTOR


def weyl_sequence(keys: Array, vocab_size: int) -> Array:
    return np.arange(vocab_size, dtype=np.uint32) * WEYL + keys[:, :1]


def without_the_first_key(keys: Array, vocab_size: int) -> Array:
    x = np.arange(vocab_size, dtype=np.uint32) * WEYL
    x = (x ^ shifted(x, 16)) * (keys[:, 1:] | np.uint32(1))
    return (x ^ shifted(x, 15)) * FACTOR


def of_16_bits(keys: Array, vocab_size: int) -> Array:
    return hashes(keys, vocab_size) & np.uint32(0xFFFF0000)


def of_the_sum(seeds: Sequence[int], positions: Sequence[int]) -> Array:
    return philox([s + t for s, t in zip(seeds, positions, strict=True)], [0] * len(seeds))


def of_half_the_seed(seeds: Sequence[int], positions: Sequence[int]) -> Array:
    return philox([seed & 0xFFFFFFFF for seed in seeds], positions)


def unmixed(seeds: Sequence[int], positions: Sequence[int]) -> Array:
    return np.array([[seed & 0xFFFFFFFF, t] for seed, t in zip(seeds, positions, strict=True)], np.uint32)


# Weak hashes and weak keys, each with statistics that reject it.
REJECTED: list[tuple[Hash, Keys, tuple[Any, ...]]] = [
    (without_shifts, philox, (four_tokens,)),
    (weyl_sequence, philox, (next_token, four_tokens, place_of_the_least, size_of_the_least)),
    (without_the_first_key, philox, (one_word, next_token, next_seed, place_of_the_least, size_of_the_least)),
    (of_16_bits, philox, (last_byte,)),
    (hashes, of_the_sum, (seed_for_position,)),
    (hashes, of_half_the_seed, (one_bit_of_the_seed,)),
    (hashes, unmixed, (next_seed, next_position, one_bit_of_the_seed)),
]


@pytest.mark.parametrize("of, keys, statistics", REJECTED)
def test_weak_noise_is_rejected(of: Hash, keys: Keys, statistics: tuple[Any, ...]) -> None:
    for statistic in statistics:
        assert statistic(of, keys) < 1e-9, statistic


def test_every_form_has_the_same_hash() -> None:
    """Bit for bit; that of the kernels is in `test_kernels_interpreter.py`. All words of seeds and positions count."""
    expected = [reference.noise_hash(*place, V).tolist() for place in NOISE_PLACES]
    assert hashes(philox(*zip(*NOISE_PLACES, strict=True)), V).tolist() == expected
    assert dense_hashes(noise_keys(*torch.tensor(NOISE_PLACES).T), V).tolist() == expected
    # As docs/math.md has them.
    assert reference.noise_keys(7, 0) == (0x797A40FE, 0xF515EB5C)
    assert reference.noise_hash(7, 0, 3).tolist() == [3392943478, 2178911209, 448029170]
