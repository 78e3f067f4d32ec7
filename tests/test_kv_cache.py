"""The ragged key-value cache: where keys and values are written. What a token sees is tested in test_hf.py."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from torch_specops.kv_cache import RaggedKeyValues

BATCH, HEADS, CAPACITY, WIDTH = 3, 2, 7, 4
SLOTS = torch.tensor([[0, 1], [5, 6], [3, 4]])


@pytest.fixture
def states() -> tuple[Tensor, Tensor]:
    """Keys and values of two tokens, wider values than keys."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(BATCH, HEADS, 2, WIDTH, generator=generator)
    return keys, torch.randn(BATCH, HEADS, 2, WIDTH + 1, generator=generator)


def test_some_rows_are_written_and_read_apart_from_the_others(states: tuple[Tensor, Tensor]) -> None:
    keys, values = states
    whole, apart = (RaggedKeyValues(*states, CAPACITY) for _ in range(2))
    whole.write(*states, SLOTS)
    for buffer, written in ((whole.keys, keys), (whole.values, values)):
        assert buffer.shape[2] == CAPACITY and int((buffer != 0).sum()) == written.numel()
        for row in range(BATCH):
            assert torch.equal(buffer[row][:, SLOTS[row]], written[row])
    for rows in (torch.tensor([2, 0]), torch.tensor([1])):
        apart.write(keys[rows], values[rows], SLOTS[rows], rows)
        for read, buffer in zip(apart.read(6, rows), (whole.keys, whole.values), strict=True):
            assert torch.equal(read, buffer[rows][:, :, :6])
    own = (apart.keys, apart.values)
    for read, buffer, expected in zip(apart.read(), own, (whole.keys, whole.values), strict=True):
        assert torch.equal(read, expected) and read.data_ptr() == buffer.data_ptr()
    # CUDA graphs know the addresses.
    apart.clear()
    assert all(bool((buffer == 0).all()) for buffer in own) and apart.keys is own[0] and apart.values is own[1]


def test_a_compiled_write_copies_no_buffer(states: tuple[Tensor, Tensor], fresh_dynamo: None) -> None:
    """`scatter_` did: every step read and wrote the whole cache twice."""
    cache = RaggedKeyValues(*states, 777)
    _, sources = run_and_get_code(torch.compile(cache.write, fullgraph=True), *states, SLOTS)
    allocations = re.findall(r"empty_strided\w*\(\((.*?)\)", "".join(sources))
    assert not [shape for shape in allocations if "777" in shape]
    for buffer, written in zip((cache.keys, cache.values), states, strict=True):
        assert torch.equal(buffer[1, :, 5:7], written[1]) and torch.equal(buffer[2, :, 3:5], written[2])
