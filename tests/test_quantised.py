"""A quantised copy as the draft: the target's output, with drafts that nearly always agree. And as the target."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from tiny_models import PROMPTS, encoder_inputs, greedy_alone, padded, tiny
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import PreTrainedModel

import torch_specops
from torch_specops.cli.greedy import ROUNDING, check_greedy
from torch_specops.decode import GenerationOutput
from torch_specops.decode.state import speculative_step
from torch_specops.drafts import quantised_copy
from torch_specops.hf import language_model

pytest.importorskip("torchao", reason="torchao is not installed")

GREEDY = torch_specops.SamplingParams(temperature=0.0)
# With most of their weights in Linear layers, and tied heads (OPT, Whisper, T5) beside untied ones.
FAMILIES = ["llama", "qwen3", "gemma2", "phi", "opt", "whisper", "t5"]
# Groups of 16 divide the 32 and 48 inputs of the tiny layers.
KINDS = [("int8", None), ("int8", 16), ("int4", 16)]


def float_model(family: str) -> PreTrainedModel:
    return tiny(family).float()


def run(target: PreTrainedModel, family: str, draft: nn.Module | None) -> GenerationOutput:
    ids, mask = padded(PROMPTS, "left")
    inputs = encoder_inputs(family)
    if inputs is not None and "input_features" in inputs:
        inputs["input_features"] = inputs["input_features"].float()
    return torch_specops.generate(
        target,
        ids,
        draft=draft,
        attention_mask=mask,
        max_new_tokens=24,
        num_draft_tokens=3,
        sampling=GREEDY,
        inputs=inputs,
        compile=False,
    )


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("weights", "group_size"), KINDS)
def test_greedy_is_that_of_the_target_alone(family: str, weights: str, group_size: int | None) -> None:
    target = float_model(family)
    output = run(target, family, quantised_copy(target, weights, group_size))
    assert torch.equal(output.sequences, run(target, family, None).sequences)
    rate = output.stats.acceptance_rate
    # 4 bits are coarse for sharp random weights; even so a stranger would agree with one token in sixty.
    assert rate is not None and rate > (0.6 if weights == "int8" else 0.04)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("weights", "group_size"), KINDS)
def test_every_linear_layer_is_quantised_in_the_copy_alone(family: str, weights: str, group_size: int | None) -> None:
    target = float_model(family)
    before = copy.deepcopy(target.state_dict())
    clone = quantised_copy(target, weights, group_size)
    assert type(clone) is type(target)
    assert {type(layer.weight) for layer in linear_layers(target).values()} == {nn.Parameter}
    after = target.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
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


@pytest.mark.parametrize("family", ["opt", "whisper", "t5"])
def test_a_tied_head_is_quantised_and_its_embedding_is_not(family: str) -> None:
    target = float_model(family)
    embedding = target.get_input_embeddings().weight
    assert target.get_output_embeddings().weight is embedding
    clone = quantised_copy(target)
    assert type(clone.get_input_embeddings().weight) is nn.Parameter
    assert torch.equal(clone.get_input_embeddings().weight, embedding)
    assert type(clone.get_output_embeddings().weight) is not nn.Parameter


def quantised(model: PreTrainedModel, weights: str) -> PreTrainedModel:
    if weights != "float8":
        return quantised_copy(model, weights, 16 if weights == "int4" else None)
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    clone = copy.deepcopy(model)
    quantize_(clone, Float8WeightOnlyConfig(set_inductor_config=False))
    return clone


def compiled_texts(
    target: PreTrainedModel, draft: PreTrainedModel, num_drafts: int, backend: object, max_new_tokens: int
) -> list[list[int]]:
    """What steps compiled as one graph emit after PROMPTS, at temperature 0."""
    decoder = torch_specops.SpeculativeDecoder(
        target, draft, num_draft_tokens=num_drafts, sampling=GREEDY, compile=False
    )
    ids, mask = padded(PROMPTS, "left")
    ids, mask = ids.to(target.device), mask.to(target.device)
    decoder.stream(ids, attention_mask=mask, max_new_tokens=max_new_tokens, seed=0)
    state = decoder._runner.state
    torch._dynamo.reset()
    step = torch.compile(speculative_step, backend=backend, fullgraph=True, dynamic=False)
    with torch.inference_mode():
        while not bool(state.finished.all()):
            step(decoder.target, decoder.draft, state, num_drafts, decoder._runner.verify)
    torch._dynamo.reset()
    return [
        row[length - max_new_tokens : length].tolist()
        for row, length in zip(state.tokens, state.lengths.tolist(), strict=True)
    ]


@pytest.mark.parametrize(
    ("target_weights", "draft_weights", "num_drafts", "backend"),
    [
        ("float8", "int4", 2, "eager"),
        # With one draft it has all its parts, and compiles in half the time.
        pytest.param("int8", "int4", 1, "inductor", marks=pytest.mark.slow),
    ],
)
def test_a_quantised_target_and_draft_in_one_compiled_step(
    target_weights: str, draft_weights: str, num_drafts: int, backend: str
) -> None:
    """Exact relative to the quantised target: its own greedy text, which is not that of the model it was made from."""
    model = tiny("llama", num_hidden_layers=1).float()
    target, draft = quantised(model, target_weights), quantised(model, draft_weights)
    counter = CompileCounterWithBackend(backend)
    found = compiled_texts(target, draft, num_drafts, counter, 10)
    assert counter.frame_count == 1
    assert found == [greedy_alone(target, prompt, 10) for prompt in PROMPTS]
    assert found != [greedy_alone(model, prompt, 10) for prompt in PROMPTS]


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
        check = check_greedy(language_model(target), ids, output.new_tokens(0))
        # Two tokens this near each other may swap between a forward over one token and one over three.
        slack = max(8 * torch.finfo(dtype).eps / ROUNDING, 1.0)
        assert all(each.logit_gap <= slack * each.rounding_bound for each in check.differences)


def test_int8_is_finer_than_int4() -> None:
    target = float_model("llama")
    tokens = torch.tensor([[5, 9, 33]])
    with torch.inference_mode():
        logits = target(tokens).logits
        distance = {
            kind: float((quantised_copy(target, *kind)(tokens).logits - logits).abs().mean())
            for kind in [("int8", None), ("int4", 16)]
        }
    assert 0 < 4 * distance["int8", None] < distance["int4", 16]


def test_inductor_settings_are_left_alone() -> None:
    from torch._inductor import config

    before = config.get_config_copy()
    quantised_copy(float_model("llama"), "int8")
    quantised_copy(float_model("llama"), "int4", 16)
    assert config.get_config_copy() == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_models(dtype: torch.dtype) -> None:
    clone = quantised_copy(tiny("llama").to(dtype), "int8")
    with torch.inference_mode():
        assert clone(torch.tensor([[3, 4]])).logits.dtype == dtype


@pytest.mark.parametrize(
    ("weights", "group_size", "error", "message"),
    [
        ("int2", None, ValueError, "weights: expected 'int8' or 'int4', got 'int2'"),
        ("int8", 0, ValueError, "group_size: expected a number >= 1, got 0"),
        ("int8", 1.5, TypeError, "group_size: expected an int or None, got <class 'float'>"),
        ("int8", 32, ValueError, r"group_size: expected a divisor of the 48 inputs of model.layers.0.mlp.down_proj"),
        ("int4", None, ValueError, r"group_size: expected a divisor of the 48 inputs of .*, got 32"),
    ],
)
def test_arguments_that_cannot_be(weights: str, group_size: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        quantised_copy(float_model("llama"), weights, group_size)  # type: ignore[arg-type]


def test_models_that_cannot_be_quantised() -> None:
    with pytest.raises(ValueError, match=r"expected float32, bfloat16 or float16 weights, got torch.float64 in model"):
        quantised_copy(tiny("llama"))
    with pytest.raises(ValueError, match=r"in GPT2LMHeadModel they hold 0% of those outside embeddings"):
        quantised_copy(float_model("gpt2"))
    with pytest.raises(TypeError, match="model: expected a torch module, got <class 'str'>"):
        quantised_copy("llama")  # type: ignore[type-var]
    with pytest.raises(NotImplementedError, match="weights: int4 is made for CPU and CUDA, got a model on meta"):
        quantised_copy(float_model("llama").to("meta"), "int4", 16)


def test_a_missing_torchao_names_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ModuleNotFoundError, match="a quantised copy needs torchao; run: pip install torchao"):
        quantised_copy(float_model("llama"))
