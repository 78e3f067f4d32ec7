"""The ragged key-value cache: where keys and values are written, and that nothing copies it.

What a token sees, and that the attention is right, is tested in test_language_models.py.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from marks import slow
from tiny_models import tiny
from torch import Tensor
from torch._inductor import cpu_vec_isa
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import fresh_cache, run_and_get_code

from torch_specops.hf import TransformersModel, language_model
from torch_specops.hf.cache import first_slot
from torch_specops.models.reading import read_beginnings
from torch_specops.ops.kv_cache import RaggedKeyValues

BATCH, HEADS, CAPACITY, WIDTH = 3, 2, 7, 4
SLOTS = torch.tensor([[0, 1], [5, 6], [3, 4]])


@pytest.fixture
def states() -> tuple[Tensor, Tensor]:
    """Keys and values of two tokens, wider values than keys."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(BATCH, HEADS, 2, WIDTH, generator=generator)
    return keys, torch.randn(BATCH, HEADS, 2, WIDTH + 1, generator=generator)


def test_kv_cache_of_some_rows(states: tuple[Tensor, Tensor]) -> None:
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


# A text of one token is read twice at position 0; trees have slots in any order.
@pytest.mark.parametrize("slots", [[[3, 4]] * 3, [[0, 0]] * 3, [[4, 3]] * 3, [[3, 5]] * 3, [[3, 4], [3, 4], [4, 5]]])
def test_neighbouring_slots_of_all_rows_have_a_first(slots: list[list[int]], states: tuple[Tensor, Tensor]) -> None:
    first = first_slot(torch.tensor(slots))
    assert first == (3 if slots == [[3, 4]] * 3 else None)
    if first is not None:
        by_slots, by_first = (RaggedKeyValues(*states, CAPACITY) for _ in range(2))
        by_slots.write(*states, torch.tensor(slots))
        by_first.write(*states, first)
        assert torch.equal(by_slots.keys, by_first.keys) and torch.equal(by_slots.values, by_first.values)
        with pytest.raises(RuntimeError):
            by_first.write(*states, CAPACITY - 1)


def test_what_rows_have_in_common_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = language_model(tiny("llama"))
    read, forward = [], model.forward

    def watching(tokens: Tensor, *rest: Any) -> Tensor:
        read.append(tokens.tolist())
        return forward(tokens, *rest)

    monkeypatch.setattr(model, "forward", watching)
    tokens = torch.tensor([[5, 6, 7, 1], [8, 6, 7, 2], [5, 6, 7, 3], [5, 6, 7, 4]])
    model.keep_features((0, 1))
    found = []
    with torch.inference_mode():
        for reads_rows in (True, False):
            model.reads_rows = reads_rows
            model.start(4, 10)
            read_beginnings(model, tokens, torch.full((4,), 4), num_unread=1)
            cache = [each.clone() for layer in model.key_values for each in (layer.keys, layer.values)]
            found.append([*cache, model.features.clone()])
    assert read == [[[5, 6, 7], [8, 6, 7]], tokens[:, :3].tolist()]
    torch.testing.assert_close(*found)


# A C++ compiler takes long for the first kernel.
@pytest.mark.parametrize("runs", [False, slow(True)])
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_write_copies_no_buffer(runs: bool, states: tuple[Tensor, Tensor]) -> None:
    """`scatter_` did: every step read and wrote the whole cache twice. The code that Inductor writes shows it."""
    cache = RaggedKeyValues(*states, 777)
    write = torch.compile(cache.write, fullgraph=True)
    # To find the processor's vector instructions, Inductor compiles and loads programs.
    with ExitStack() as patches:
        if not runs:
            # To find the processor's vector instructions, Inductor compiles and loads programs.
            scalar = mock.patch.object(cpu_vec_isa, "pick_vec_isa", return_value=cpu_vec_isa.invalid_vec_isa)
            no_kernel = mock.patch.object(AsyncCompile, "cpp_pybinding", return_value=mock.Mock())
            patches.enter_context(scalar)
            patches.enter_context(no_kernel)
        # The cache's code for other instructions is another test's.
        patches.enter_context(fresh_cache())
        _, sources = run_and_get_code(write, *states, SLOTS)
    allocations = re.findall(r"empty_strided\w*\(\((.*?)\)", "".join(sources))
    assert "cpp_fused" in sources[0] and not [shape for shape in allocations if "777" in shape]
    for buffer, written in zip((cache.keys, cache.values), states, strict=True):
        is_written = torch.equal(buffer[1, :, 5:7], written[1]) and torch.equal(buffer[2, :, 3:5], written[2])
        assert is_written == runs


# With grouped queries and a mask, transformers' "sdpa" repeats the keys for every query head; 5.23 does so for several
# tokens, and in a compiled forward. Without Gemma 2, which 5.21 and later give eager attention.
GROUPED_FAMILIES = ["llama", "qwen2", "qwen2 sliding", "qwen3", "mistral", "gemma", "gemma3"]


@pytest.mark.parametrize("family", GROUPED_FAMILIES)
def test_the_cache_is_not_copied(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer attends to the memory of the cache itself; so do a model's first layers."""
    attended: list[int] = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def watching(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        attended.extend(each.untyped_storage().data_ptr() for each in (key, value))
        return attention(query, key, value, **options)

    def reads_its_cache(model: TransformersModel) -> bool:
        model.start(2, 40)
        attended.clear()
        for width in (3, 1):
            model.forward(torch.ones(2, width, dtype=torch.int64), torch.arange(width).expand(2, -1), 1)
        cache = [each for layer in model.key_values for each in (layer.keys, layer.values)]
        return attended == 2 * [each.untyped_storage().data_ptr() for each in cache]

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watching)
    model = language_model(tiny(family))
    with torch.inference_mode():
        assert reads_its_cache(model) and reads_its_cache(model.first_layers(1))
        monkeypatch.setattr("torch_specops.hf.models.use_grouped_attention", lambda *_: None)
        assert not reads_its_cache(language_model(tiny(family)))


def test_a_compiled_forward_copies_nothing_either(fresh_dynamo: None) -> None:
    model = language_model(tiny("llama"))
    shapes: list[tuple[int, ...]] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        # A region of the graph may stand for several layers.
        nodes = [node for part in graph.modules() for node in part.graph.nodes]
        calls = [node for node in nodes if "scaled_dot_product_attention" in str(node.target)]
        shapes.extend(tuple(node.args[1].meta["example_value"].shape) for node in calls)
        return graph

    read = torch.compile(model.forward, fullgraph=True, backend=backend)
    tokens, positions = torch.ones(2, 3, dtype=torch.int64), torch.arange(3).expand(2, -1)
    with torch.inference_mode():
        model.start(2, 40)
        expected = model.forward(tokens, positions, 3)
        # A new batch takes up what has changed in the model, and compiles nothing anew.
        for stance in ("default", "fail_on_recompile"):
            model.start(2, 40)
            model.forward(tokens, positions, 3)
            with torch.compiler.set_stance(stance):
                torch.testing.assert_close(read(tokens, positions, 3), expected)
    config = model.model.config
    head_dim = config.hidden_size // config.num_attention_heads
    # All slots, of the key heads alone.
    assert set(shapes) == {(2, config.num_key_value_heads, 40, head_dim)}
