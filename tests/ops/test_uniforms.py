"""`torch_specops.uniforms`: Philox 4x32-10 by its published vectors, by plain Python integers and by its statistics."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from marks import slow
from scipy.stats import chisquare
from torch import Tensor
from torch.func import vmap
from torch.library import opcheck

import torch_specops
from torch_specops.ops.uniforms import STREAMS, _numbers, _philox, row_seeds

# Every statistical test below rejects at this level; the numbers are a pure function of the seeds, so none can flake.
ALPHA = 1e-3

OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")

# Random123's kat_vectors for philox4x32, 10 rounds: counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox_by_integers(counter: tuple[int, ...], key: tuple[int, ...], rounds: int = 10) -> tuple[int, ...]:
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(rounds):
        product_0, product_1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (product_1 >> 32) ^ c1 ^ k0,
            product_1 % 2**32,
            (product_0 >> 32) ^ c3 ^ k1,
            product_0 % 2**32,
        )
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def uniforms_by_integers(seed: int, position: int, n: int, stream: str) -> list[float]:
    seed, position = seed % 2**64, position % 2**64
    words: list[int] = []
    for block in range((n + 3) // 4):
        counter = (block, STREAMS[stream], position % 2**32, position >> 32)
        words += philox_by_integers(counter, (seed % 2**32, seed >> 32))
    return [(word >> 8) / 2**24 for word in words[:n]]


def int64(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    words = _philox(tuple(int64(c) for c in counter), (int64(key[0]), int64(key[1])))
    assert tuple(int(word) for word in words) == expected
    assert philox_by_integers(counter, key) == expected
    assert philox_by_integers(counter, key, rounds=9) != expected


@pytest.mark.parametrize("stream", STREAMS)
def test_equals_plain_integers(stream: str) -> None:
    generator = random.Random(2)
    edges = [0, 1, -1, 2**32 - 1, 2**32, 2**63 - 1, -(2**63)]
    seeds = edges + [generator.randrange(-(2**63), 2**63) for _ in range(40)]
    positions = edges[::-1] + [generator.randrange(2**31, 2**45) for _ in range(40)]
    for n in (0, 1, 4, 7):
        got = torch_specops.uniforms(int64(*seeds), int64(*positions), n, stream)
        expected = [
            uniforms_by_integers(seed, position, n, stream) for seed, position in zip(seeds, positions, strict=True)
        ]
        assert got.dtype == torch.float32 and got.tolist() == expected
        index = torch.arange(n)
        traced = _numbers(int64(*seeds), int64(*positions), index, torch.full_like(index, STREAMS[stream]))
        assert torch.equal(traced, got)
    # A strided view is read by value, not by storage.
    assert torch_specops.uniforms(int64(*seeds)[::2], int64(*positions)[::2], 7, stream).tolist() == expected[::2]
    assert torch_specops.uniforms(int64(), int64(), 7, stream).shape == (0, 7)


def independence(a: Tensor, b: Tensor) -> float:
    """p-value of the chi-square test of a 16 x 16 grid of equal cells."""
    cells = ((a * 16).long() * 16 + (b * 16).long()).flatten()
    return float(chisquare(torch.bincount(cells, minlength=256).numpy()).pvalue)


def test_uniform_and_pairwise_independent() -> None:
    """n = 2^17 pairs (seeds 0..2047, positions 5, 64 numbers), 16 x 16 equal cells, alpha = 1e-3, for each pair of
    streams, for consecutive numbers, positions and seeds: the ways a decoding step uses them."""
    seeds, positions = torch.arange(2048), torch.full((2048,), 5)
    u = {stream: torch_specops.uniforms(seeds, positions, 64, stream) for stream in STREAMS}
    for a, b in itertools.combinations(STREAMS, 2):
        assert independence(u[a], u[b]) > ALPHA, (a, b)
    accept = u["accept"]
    assert independence(accept[:, :-1], accept[:, 1:]) > ALPHA
    assert independence(accept, torch_specops.uniforms(seeds, positions + 1, 64, "accept")) > ALPHA
    assert independence(accept[:-1], accept[1:]) > ALPHA
    # What must be seen: the same numbers used twice, one in ten of them shared, and a law that is slightly bent.
    shared = torch.where(torch.arange(64) % 10 == 0, u["accept"], u["sample"])
    assert independence(accept, accept) < ALPHA
    assert independence(accept, shared) < ALPHA
    assert independence(accept**1.05, u["sample"]) < ALPHA


@pytest.mark.parametrize("backend", ["aot_eager", slow("inductor")])
def test_compiled_is_bit_identical(backend: str) -> None:
    """Two streams and free shapes in one graph."""
    torch._dynamo.reset()

    def drawn(seeds: Tensor, positions: Tensor, like: Tensor) -> Tensor:
        streams = ("accept", "propose")
        return torch.stack([torch_specops.uniforms(seeds, positions, like.shape[1], stream) for stream in streams])

    compiled = torch.compile(drawn, fullgraph=True, dynamic=True, backend=backend)
    for batch, n in [(5, 6), (3, 9)]:
        seeds = torch.randint(-(2**63), 2**63 - 1, (batch,), generator=torch.Generator().manual_seed(batch))
        arguments = seeds, torch.arange(batch) + 2**32 - 2, torch.empty(batch, n)
        with torch.compiler.set_stance("fail_on_recompile" if batch == 3 else "default"):
            assert torch.equal(compiled(*arguments), drawn(*arguments))


def test_an_op_that_vmap_maps() -> None:
    # Views of a tensor with more columns would not have the strides that a compiler is told.
    for size, n in ((0, 1), (0, 7), (1, 1), (1, 4), (3, 0), (3, 4), (3, 7)):
        seeds = torch.arange(2 * size).view(2, size)
        for op, *arguments in ((torch.ops.specops.uniforms, n, "accept"), (torch.ops.specops.step_uniforms, n)):
            outcome = opcheck(op.default, (seeds[0], seeds[1], *arguments), test_utils=OPCHECKS)
            assert set(outcome.values()) == {"SUCCESS"}, outcome
            mapped = vmap(lambda x, op=op, arguments=arguments: op(x, x + 1, *arguments))(seeds)
            assert torch.equal(mapped, torch.stack([op(x, x + 1, *arguments) for x in seeds]))


def test_row_seeds_are_those_of_splitmix64() -> None:
    # The published stream of seed 0: its first mix leaves 0 as it is.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert [seed % 2**64 for seed in row_seeds(0, 4).tolist()] == published
    ints = [*range(-500, 500), *(2**power for power in range(10, 63)), 2**63 - 1, -(2**63)]
    assert len({seed for given in ints for seed in row_seeds(given, 64).tolist()}) == 64 * len(ints)


def test_meta() -> None:
    meta = torch.zeros(3, dtype=torch.int64, device="meta")
    u = torch_specops.uniforms(meta, meta, 5, "accept")
    assert u.device.type == "meta" and u.shape == (3, 5) and u.dtype == torch.float32


SEEDS = torch.zeros(3, dtype=torch.int64)


def test_bad_input() -> None:
    for argument, value, error, said in (
        ("seeds", SEEDS.int(), TypeError, "int64"),
        ("seeds", [1, 2, 3], TypeError, "list"),
        ("seeds", None, TypeError, "NoneType"),
        ("positions", SEEDS.float(), TypeError, "float32"),
        ("positions", SEEDS[:2], ValueError, "[2]"),
        ("positions", SEEDS.to("meta"), ValueError, "meta"),
        ("seeds", SEEDS.view(1, 3), ValueError, "[1, 3]"),
        ("n", -1, ValueError, "-1"),
        ("n", 2.0, TypeError, "float"),
        ("n", True, TypeError, "bool"),
        ("stream", "residual", ValueError, "propose, accept, sample"),
        ("stream", 1, ValueError, "1"),
    ):
        arguments: dict[str, Any] = {"seeds": SEEDS, "positions": SEEDS, "n": 4, "stream": "accept"} | {argument: value}
        with pytest.raises(error) as caught:
            torch_specops.uniforms(**arguments)
        assert argument in str(caught.value) and "expected" in str(caught.value) and said in str(caught.value)
