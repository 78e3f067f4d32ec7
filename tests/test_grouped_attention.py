"""Grouped queries: no copy of the keys for every query head. That it is the right attention is tested in test_hf.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny
from torch import Tensor

from torch_specops.hf import language_model
from torch_specops.hf.models import TransformersModel

GROUPED_FAMILIES = ["llama", "qwen2", "qwen2 sliding", "qwen3", "mistral", "gemma", "gemma2", "gemma3"]


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
