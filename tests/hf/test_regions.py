"""The layers of a model are compiled once, whatever their number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import PROMPTS, padded, tiny
from torch import Tensor
from torch._inductor.compile_fx import compile_fx

from torch_specops.hf import TransformersModel, regions

LAYERS = 4

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.skipif(not regions.ARE_AVAILABLE, reason="before torch 2.13 no region could write to its inputs"),
]


@pytest.mark.parametrize(
    ("family", "inductor"),
    [("llama", False), ("gemma3", False), pytest.param("llama", True, marks=pytest.mark.slow)],
)
def test_one_region_stands_for_the_layers_of_two_forwards(
    family: str, inductor: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anything that a region took from its own layer as a constant would make a region of its own. The second forward
    reads what the first one wrote to every cache."""
    monkeypatch.setattr(regions, "MIN_WEIGHTS", 0)
    regions_called: list[object] = []

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        calls = [node for node in module.graph.nodes if node.target is torch.ops.higher_order.invoke_subgraph]
        regions_called.extend(call.args[0].target for call in calls)
        return compile_fx(module, inputs) if inductor else module.forward

    layer_types = ["sliding_attention", "full_attention"] * (LAYERS // 2)
    model = TransformersModel(
        tiny(family, num_hidden_layers=LAYERS, **({"layer_types": layer_types} if family == "gemma3" else {}))
    )

    def two_tokens(tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        first = model.forward(tokens, positions)
        return first, model.forward(first[:, -1:].argmax(2), positions + 1)

    found = []
    tokens, _ = padded(PROMPTS, "left")
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    for function in (two_tokens, torch.compile(two_tokens, backend=backend, fullgraph=True)):
        with torch.inference_mode():
            model.start(len(PROMPTS), 16)
            model.forward(tokens[:, :-1], positions[:, :-1])
            logits = function(tokens[:, -1:].contiguous(), positions[:, -1:].contiguous())
            found.append(
                [*logits, *(tensor.clone() for layer in model.key_values for tensor in (layer.keys, layer.values))]
            )
    assert len(regions_called) == 2 * LAYERS and len(set(regions_called)) == 1
    # Rotary embeddings are float32.
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
