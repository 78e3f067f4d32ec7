"""A quantised copy as the draft: the target's output, with drafts that nearly always agree. And as the target."""

from __future__ import annotations

import copy
import gc
import io
import sys
import weakref
from typing import Any

import pytest
import torch
from marks import slow
from tiny_loops import GREEDY, decode, new_tokens
from tiny_models import PROMPTS, encoder_inputs, greedy_alone, padded, raised, tiny
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config as inductor_config
from transformers import PreTrainedModel

import torch_specops
from torch_specops.cli.greedy import ROUNDING, check_greedy
from torch_specops.drafts import quantised_copy
from torch_specops.hf import language_model

pytest.importorskip("torchao", reason="torchao is not installed")

# Tied heads (OPT, Whisper, T5) beside untied ones. Groups of 16 divide the 32 and 48 inputs of the tiny layers.
CASES = [
    ("llama", "int8", None),
    ("llama", "int8", 16),
    ("llama", "int4", 16),
    ("gemma2", "int8", None),
    ("opt", "int4", 16),
    ("whisper", "int8", 16),
    ("t5", "int8", None),
]


def float_model(family: str) -> PreTrainedModel:
    return tiny(family).float()


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}


@pytest.mark.parametrize(("family", "weights", "group_size"), CASES)
def test_greedy_is_that_of_the_target_alone(family: str, weights: str, group_size: int | None) -> None:
    target = float_model(family)
    before, settings = copy.deepcopy(target.state_dict()), inductor_config.get_config_copy()
    clone = quantised_copy(target, weights, group_size)
    # Inductor's settings belong to the whole process.
    assert inductor_config.get_config_copy() == settings
    inputs = encoder_inputs(family)
    if family == "whisper":
        inputs = {name: value.float() for name, value in inputs.items()}
    output, alone = (decode(draft, 3, family=family, target=target, inputs=inputs) for draft in (clone, None))
    assert torch.equal(output.sequences, alone.sequences)
    rate = output.stats.acceptance_rate
    # 4 bits are coarse for sharp random weights; even so a stranger would agree with one token in sixty.
    assert rate is not None and rate > (0.6 if weights == "int8" else 0.04)

    # Every linear layer is quantised, a tied head too, and in the copy alone. Its embedding is not.
    assert type(clone) is type(target)
    embedding = clone.get_input_embeddings().weight
    assert type(embedding) is nn.Parameter and torch.equal(embedding, target.get_input_embeddings().weight)
    assert {type(layer.weight) for layer in linear_layers(target).values()} == {nn.Parameter}
    after = target.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    levels = 256 if weights == "int8" else 16
    for name, layer in linear_layers(clone).items():
        weight, original = layer.weight.dequantize(), linear_layers(target)[name].weight.detach()
        assert weight.dtype == torch.float32
        # In each group only so many values, and none far from the weight it stands for.
        groups = weight.unfold(1, group_size or weight.shape[1], group_size or weight.shape[1]).flatten(0, 1)
        step = groups.abs().amax(1) / (levels // 2 - 1)
        assert max(len(group.unique()) for group in groups) <= levels, name
        error = (weight - original).abs().unfold(1, groups.shape[1], groups.shape[1]).flatten(0, 1)
        assert bool((error <= 1.01 * step.unsqueeze(1)).all()), name
        assert not torch.equal(weight, original), name


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_quantised_copy_can_be_copied_and_saved(weights: str) -> None:
    """A copy of the copy compiles as it does, and keeps none of its layers alive."""
    target, ids = float_model("llama"), torch.tensor(PROMPTS[:1])
    clone, file = quantised_copy(target, weights, 16), io.BytesIO()
    expected, layer = clone(ids).logits, weakref.ref(clone.lm_head)
    torch.save(clone, file)
    file.seek(0)
    again = [copy.deepcopy(clone), torch.load(file, weights_only=False)]
    del clone
    gc.collect()
    assert layer() is None
    for each in again:
        assert torch.equal(each(ids).logits, expected)
        torch_specops.SpeculativeDecoder(target, each, compile=True)


def quantised(model: PreTrainedModel, weights: str) -> PreTrainedModel:
    if weights != "float8":
        return quantised_copy(model, weights, 16 if weights == "int4" else None)
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    clone = copy.deepcopy(model)
    quantize_(clone, Float8WeightOnlyConfig(set_inductor_config=False))
    return clone


@pytest.mark.parametrize(
    ("target_weights", "backend"),
    [
        # With one draft a step has all its parts, and compiles in half the time.
        ("float8", "eager"),
        slow("int8", "inductor"),
    ],
)
@pytest.mark.usefixtures("fresh_dynamo")
def test_quantised_models_in_one_compiled_step(
    target_weights: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exact relative to the quantised target: its own greedy text, which is not that of the model it was made from."""
    model = tiny("llama", num_hidden_layers=1).float()
    target, draft = quantised(model, target_weights), quantised(model, "int4")
    counter, compile = CompileCounterWithBackend(backend), torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, **given: compile(f, **(given | {"backend": counter, "options": None}))
    )
    decoder = torch_specops.SpeculativeDecoder(
        target, draft, num_draft_tokens=1, sampling=GREEDY, compile=True, one_graph=True
    )
    ids, mask = padded(PROMPTS, "left")
    output = decoder.generate(ids, attention_mask=mask, max_new_tokens=10, seed=0)
    assert counter.frame_count == 1
    expected, of_the_model = ([greedy_alone(each, prompt, 10) for prompt in PROMPTS] for each in (target, model))
    assert new_tokens(output) == expected != of_the_model


@pytest.mark.gpu
@pytest.mark.not_rehearsed("torchao on CUDA", runs=False)
@pytest.mark.parametrize("target_weights", ["int8", "int4", "float8"])
def test_a_quantised_target_and_draft_on_cuda(target_weights: str) -> None:
    if target_weights == "float8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("float8 needs compute capability 8.9")
    # Packed int4 takes bfloat16, and layers of whole tiles.
    dtype = torch.bfloat16 if target_weights == "int4" else torch.float32
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
    model = tiny("llama", **sizes).to("cuda", dtype)
    target = quantised_copy(model, "int4", 32) if target_weights == "int4" else quantised(model, target_weights)
    decoder = torch_specops.SpeculativeDecoder(
        target, quantised(model, "int8"), num_draft_tokens=2, sampling=GREEDY, compile=True
    )
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device="cuda")
        output = decoder.generate(ids, max_new_tokens=16)
        differences = check_greedy(language_model(target), ids, output.new_tokens(0))
        # Two tokens this near each other may swap between a forward over one token and one over three.
        slack = max(8 * torch.finfo(dtype).eps / ROUNDING, 1.0)
        assert all(each.logit_gap <= slack * each.rounding_bound for each in differences)


def test_what_cannot_be_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = float_model("llama")
    cases: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        ((llama, "int2"), ValueError, "weights: expected 'int8' or 'int4', got 'int2'"),
        ((llama, "int8", 0), ValueError, "group_size: expected a number >= 1, got 0"),
        ((llama, "int8", 1.5), TypeError, "group_size: expected an int, got <class 'float'>"),
        ((llama, "int8", 32), ValueError, "group_size: expected a divisor of the 48 inputs of model.layers.0.mlp.down"),
        ((llama, "int4"), ValueError, r"group_size: expected a divisor of the 48 inputs of .*, got 32"),
        ((tiny("llama"),), ValueError, "model: expected float32, .* weights, got torch.float64 in model"),
        ((float_model("gpt2"),), ValueError, "model: .* in GPT2LMHeadModel they hold 0% of those outside embeddings"),
        (("llama",), TypeError, "model: expected a torch module, got <class 'str'>"),
        ((float_model("llama").to("meta"), "int4", 16), NotImplementedError, "weights: int4 is made for CPU and CUDA"),
    ]
    assert raised(lambda arguments: quantised_copy(*arguments), cases) == []
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ModuleNotFoundError, match="a quantised copy needs torchao; run: pip install torchao"):
        quantised_copy(llama)
