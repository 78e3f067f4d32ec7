"""The ragged key-value cache: what a token may see, and where keys and values are written."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from torch_specops.kv_cache import RaggedKeyValues, visible_slots

BATCH, HEADS, CAPACITY, WIDTH = 3, 2, 7, 4


SLOTS = torch.arange(CAPACITY).unsqueeze(0)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_a_token_sees_the_slots_up_to_its_own(window: int | None) -> None:
    positions = torch.tensor([[0, 1], [4, 5], [6, 2]])
    visible = visible_slots(positions, SLOTS, window)
    assert visible.shape == (3, 1, 2, CAPACITY) and visible.dtype == torch.bool
    for row in range(3):
        for index in range(2):
            position = int(positions[row, index])
            # The token itself and window - 1 tokens before it.
            first = 0 if window is None else max(position - window + 1, 0)
            expected = [first <= slot <= position for slot in range(CAPACITY)]
            assert visible[row, 0, index].tolist() == expected


def test_a_token_of_a_tree_sees_its_own_text_within_the_window() -> None:
    """Slots hold any positions there, and which ones are a token's own text is given."""
    own_text = torch.tensor([[[True, True, False, True]]])
    slot_positions = torch.tensor([[0, 2, 1, 1]])
    for window, expected in ((None, [0, 1, 3]), (2, [1, 3]), (1, [1])):
        visible = visible_slots(torch.tensor([[2]]), slot_positions, window, own_text)
        assert visible.shape == (1, 1, 1, 4) and visible[0, 0, 0].nonzero().flatten().tolist() == expected


def random_states(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_some_rows_are_written_and_read_apart_from_the_others() -> None:
    keys, values = random_states(BATCH, HEADS, 2, WIDTH, seed=0), random_states(BATCH, HEADS, 2, WIDTH + 1, seed=1)
    slots = torch.tensor([[0, 1], [5, 6], [3, 4]])
    whole, apart = (RaggedKeyValues(keys, values, CAPACITY) for _ in range(2))
    whole.write(keys, values, slots)
    for buffer, written in ((whole.keys, keys), (whole.values, values)):
        assert buffer.shape[2] == CAPACITY
        for row in range(BATCH):
            others = [slot for slot in range(CAPACITY) if slot not in slots[row].tolist()]
            assert torch.equal(buffer[row][:, slots[row]], written[row])
            assert (buffer[row][:, others] == 0).all()
    for rows in (torch.tensor([2, 0]), torch.tensor([1])):
        apart.write(keys[rows], values[rows], slots[rows], rows)
        for read, buffer in zip(apart.read(6, rows), (whole.keys, whole.values), strict=True):
            assert torch.equal(read, buffer[rows][:, :, :6])
    for read, own, buffer in zip(apart.read(), (apart.keys, apart.values), (whole.keys, whole.values), strict=True):
        assert torch.equal(read, buffer)
        assert read.data_ptr() == own.data_ptr()


def test_a_later_write_takes_the_place_of_an_earlier_one() -> None:
    """Rollback: a row that goes back writes over its rejected drafts, and the others keep theirs."""
    first, second = random_states(2, HEADS, 3, WIDTH, seed=2), random_states(2, HEADS, 3, WIDTH, seed=3)
    cache = RaggedKeyValues(first, first, CAPACITY)
    cache.write(first, first, torch.tensor([[0, 1, 2], [0, 1, 2]]))
    cache.write(second, second, torch.tensor([[1, 2, 3], [3, 4, 5]]))
    assert torch.equal(cache.keys[0, :, :4], torch.cat([first[0, :, :1], second[0]], 1))
    assert torch.equal(cache.keys[1, :, :6], torch.cat([first[1], second[1]], 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_clearing_leaves_zeros_at_the_same_addresses(dtype: torch.dtype) -> None:
    states = torch.full((1, HEADS, 2, WIDTH), torch.nan, dtype=dtype)
    cache = RaggedKeyValues(states, states, CAPACITY)
    before = cache.keys.data_ptr(), cache.values.data_ptr()
    cache.write(states, states, torch.tensor([[2, 3]]))
    assert cache.keys.isnan().any() and cache.values.isnan().any()
    cache.clear()
    assert (cache.keys == 0).all() and (cache.values == 0).all()
    assert (cache.keys.data_ptr(), cache.values.data_ptr()) == before
    assert cache.keys.dtype == cache.values.dtype == dtype


def test_a_compiled_write_copies_no_buffer(fresh_dynamo: None) -> None:
    """`scatter_` did: every step read and wrote the whole cache twice."""
    keys, values = random_states(BATCH, HEADS, 2, WIDTH, seed=0), random_states(BATCH, HEADS, 2, WIDTH, seed=1)
    cache = RaggedKeyValues(keys, values, 777)
    slots = torch.tensor([[0, 1], [5, 6], [3, 4]])
    _, sources = run_and_get_code(torch.compile(cache.write, fullgraph=True), keys, values, slots)
    allocations = re.findall(r"empty_strided\w*\(\((.*?)\)", "".join(sources))
    assert not [shape for shape in allocations if "777" in shape]
    assert torch.equal(cache.keys[1, :, 5:7], keys[1])
    assert torch.equal(cache.values[2, :, 3:5], values[2])
