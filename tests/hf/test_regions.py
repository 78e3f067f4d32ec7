"""The layers of a model are compiled once, whatever their number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from marks import slow
from tiny_hybrids import PROMISED, tiny_hybrid
from tiny_models import PROMPTS, padded, tiny
from torch import Tensor
from torch._inductor.compile_fx import compile_fx

from torch_specops.hf import TransformersModel, regions
from torch_specops.hf.hybrid import HybridModel

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.skipif(not regions.ARE_AVAILABLE, reason="before torch 2.13 no region could write to its inputs"),
]


def model_of(family: str) -> TransformersModel:
    if family in PROMISED:
        return HybridModel(tiny_hybrid(family))
    kinds = {"layer_types": ["sliding_attention", "full_attention"]} if family == "gemma3" else {}
    return TransformersModel(tiny(family, num_hidden_layers=2, **kinds))


@pytest.mark.parametrize(
    ("family", "num_regions", "inductor"),
    [
        slow("llama", 1, False),
        slow("gemma3", 1, False),
        # A kind of layer with a state, and one with attention.
        ("lfm2", 2, False),
        slow("qwen3_5_text", 2, False),
        slow("llama", 1, True),
        slow("granitemoehybrid", 2, True),
    ],
)
def test_one_region_for_all_layers(
    family: str, num_regions: int, inductor: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anything that a region took from its own layer as a constant would make a region of its own. The second forward
    reads what the first one wrote to every cache."""
    monkeypatch.setattr(regions, "MIN_WEIGHTS", 0)
    regions_called: list[object] = []

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        calls = [node for node in module.graph.nodes if node.target is torch.ops.higher_order.invoke_subgraph]
        regions_called.extend(call.args[0].target for call in calls)
        return compile_fx(module, inputs) if inductor else module.forward

    model = model_of(family)

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
            written = [tensor.clone() for state in model._row_states() for tensor in state.static_tensors()]
            found.append([*logits, *written])
    assert len(regions_called) == 2 * model.num_layers and len(set(regions_called)) == num_regions
    # Rotary embeddings and states are float32.
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
