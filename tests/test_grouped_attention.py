"""Grouped queries: the same attention as transformers', and no copy of the keys for every query head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from torch_specops.hf import language_model
from torch_specops.hf.attention import grouped_attention
from torch_specops.hf.models import TransformersModel

GROUPED_FAMILIES = ["llama", "qwen2", "qwen2 sliding", "qwen3", "mistral", "gemma", "gemma2", "gemma3"]


class Module(torch.nn.Module):
    def __init__(self, group: int) -> None:
        super().__init__()
        self.num_key_value_groups = group
        self.is_causal = True


def inputs(group: int, count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(group + 10 * count)
    query, key, value = (
        torch.randn(3, heads, length, 8, generator=generator).to(dtype)
        for heads, length in ((2 * group, count), (2, 13), (2, 13))
    )
    mask = torch.rand(3, 1, count, 13, generator=generator) < 0.5
    mask[..., 0] = True
    return query, key, value, mask


@pytest.mark.parametrize(
    ("group", "count", "dtype", "additive"),
    [
        (1, 4, torch.float32, False),
        (2, 1, torch.bfloat16, False),
        (2, 4, torch.float64, True),
        (5, 1, torch.float32, True),
        (5, 4, torch.float32, False),
        # More queries than a head has dimensions are not folded.
        (5, 9, torch.float32, False),
    ],
)
def test_it_is_the_attention_of_transformers(group: int, count: int, dtype: torch.dtype, additive: bool) -> None:
    query, key, value, mask = inputs(group, count, dtype)
    if additive:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    arguments: dict[str, Any] = {"scaling": 0.3, "dropout": 0.0, "sliding_window": 4}
    # The arguments of a model may be views in any order.
    query = query.transpose(1, 2).contiguous().transpose(1, 2)
    found = grouped_attention(Module(group), query, key, value, mask, **arguments)[0]
    expected = sdpa_attention_forward(Module(group), query, key, value, mask, **arguments)[0]
    assert found.is_contiguous() and found.shape == expected.shape
    torch.testing.assert_close(found, expected)


def test_what_it_does_not_fold_is_left_to_transformers() -> None:
    query, key, value, mask = inputs(3, 4)
    bias = torch.randn(1, 6, 4, 13, generator=torch.Generator().manual_seed(0))
    for chosen, position_bias in ((None, None), (mask.expand(-1, 6, -1, -1), None), (mask, bias)):
        found, expected = (
            attention(Module(3), query, key, value, chosen, position_bias=position_bias)[0]
            for attention in (grouped_attention, sdpa_attention_forward)
        )
        assert torch.equal(found, expected)


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
        for width in (3, 1):
            attended.clear()
            model.forward(torch.ones(2, width, dtype=torch.int64), torch.arange(width).expand(2, -1), 1)
        cache = [each for layer in model.key_values for each in (layer.keys, layer.values)]
        return attended == [each.untyped_storage().data_ptr() for each in cache]

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watching)
    model = language_model(tiny(family))
    with torch.inference_mode():
        assert reads_its_cache(model) and reads_its_cache(model.first_layers(1))
        monkeypatch.setattr("torch_specops.hf.models.use_grouped_attention", lambda model: None)
        assert not reads_its_cache(language_model(tiny(family)))


def test_a_compiled_forward_copies_nothing_either(fresh_dynamo: None) -> None:
    model = language_model(tiny("llama"))
    shapes: list[tuple[int, ...]] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        calls = [node for node in graph.graph.nodes if "scaled_dot_product_attention" in str(node.target)]
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
    assert shapes == [(2, config.num_key_value_heads, 40, head_dim)] * config.num_hidden_layers
