"""What a step reads and did not make itself is in `static_tensors`, or a CUDA graph would read freed memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny_images
import torch
from tiny_hybrids import tiny_hybrid
from tiny_models import VOCAB, encoder_inputs, shared_tiny
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from torch_specops import hf

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: shared_tiny("llama"),
    "t5": lambda: shared_tiny("t5"),
    "whisper": lambda: shared_tiny("whisper"),
    # The limits of a time step hold in prompts only, so its lengths are read.
    "hybrid": lambda: tiny_hybrid("mamba2", time_step_limit=(0.0, 0.1)),
    "images": lambda: tiny_images.vision_model("qwen2_5_vl"),
}


class Foreign(TorchDispatchMode):
    """Keeps the tensors that an operator gets and no operator before it has made."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.known = {each.untyped_storage().data_ptr() for each in known}
        self.made: list[Tensor] = []
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in self.known:
                self.tensors.append(each)
        result = function(*args, **(kwargs or {}))
        new = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        # Hold them, so that no address is used again.
        self.made += new
        self.known.update(each.untyped_storage().data_ptr() for each in new)
        return result


@pytest.mark.parametrize("kind", MODELS)
def test_static_tensors_are_all_that_a_step_reads(kind: str) -> None:
    model = hf.language_model(MODELS[kind]())
    inputs = encoder_inputs(kind) if kind in ("t5", "whisper") else None
    if kind == "t5":
        assert inputs is not None
        inputs |= {"attention_mask": torch.ones_like(inputs["input_ids"])}
    else:
        model.keep_features((0, model.num_layers))
    model.expect(2)
    tokens = torch.randint(3, VOCAB, (3, 5), generator=torch.Generator().manual_seed(0))
    index = torch.arange(5).expand(3, -1)
    with torch.no_grad():
        model.start(3, 16, inputs)
        model.begin_texts(torch.full((3,), 3))
        model.forward(tokens[:, :3], index[:, :3])
        step = tokens[:, 3:].contiguous(), index[:, 3:].contiguous()
        with Foreign(*step, *model.static_tensors()) as foreign:
            model.forward(*step)
    assert [list(each.shape) for each in foreign.tensors] == []
