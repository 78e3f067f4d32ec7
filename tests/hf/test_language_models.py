"""Transformers models as language models of the loop."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from tiny_loops import GREEDY
from tiny_models import (
    FAMILIES,
    POSITIONS,
    PROMPTS,
    TOKENS,
    VOCAB,
    encoder_inputs,
    full_logits,
    padded,
    raised,
    shared_tiny,
    tiny,
    untested,
)
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel

import torch_specops
from torch_specops import hf
from torch_specops.drafts import EarlyExit, LanguageModel
from torch_specops.hf.architecture import max_length
from torch_specops.models.base import placed

CAPACITY = 32


@pytest.mark.parametrize(
    ("family", "attention"),
    [*((family, None) for family in FAMILIES), *((family, "eager") for family in ("gemma3", "gpt2", "t5"))],
)
@torch.inference_mode()
def test_any_way_of_reading_gives_the_same_logits(family: str, attention: str | None) -> None:
    """Rows read at positions of their own, in pieces of many widths, each after a wrong guess that is rolled back; and
    batches before, of other sizes, with inputs of their own for the encoder."""
    model, inputs = shared_tiny(family, attention=attention), encoder_inputs(family)
    expected = full_logits(model, TOKENS, inputs)
    adapter = hf.language_model(model)
    assert isinstance(adapter, LanguageModel)
    for change in (lambda values: values[1:], lambda values: values.flip(0), torch.clone):
        own = None if inputs is None else {name: change(value) for name, value in inputs.items()}
        tokens = change(TOKENS[:, :6])
        adapter.start(len(tokens), CAPACITY, own)
        logits = adapter.forward(tokens, torch.arange(6).expand(len(tokens), -1))
        torch.testing.assert_close(logits, full_logits(model, tokens, own), rtol=1e-5, atol=1e-5)
    starts = torch.tensor([0, 0, 0])
    for widths in ([5, 5, 5], [1, 4, 2], [4, 4, 1], [3, 1, 2], [3, 3, 3], [1, 1, 1], [4, 4, 4]):
        # One width per call: a row that takes fewer reads the rest as a guess.
        width = max(widths)
        positions = starts.unsqueeze(1) + torch.arange(width)
        right = TOKENS.gather(1, positions)
        adapter.forward((right + 1) % VOCAB, positions, 1)
        beyond = torch.arange(width) >= torch.tensor(widths).unsqueeze(1)
        logits = adapter.forward(torch.where(beyond, 7, right), positions)
        assert logits.dtype == torch.float32 and logits.shape == (3, width, VOCAB)
        for row, own in enumerate(widths):
            at = slice(int(starts[row]), int(starts[row]) + own)
            torch.testing.assert_close(logits[row, :own], expected[row, at], rtol=1e-5, atol=1e-5)
        starts += torch.tensor(widths)
    # Back to the middle, each row elsewhere; and the last two logits alone.
    positions = torch.tensor([[9], [3], [12]]) + torch.arange(4)
    logits = adapter.forward(TOKENS.gather(1, positions), positions, 2)
    at = positions[:, 2:, None].expand(-1, -1, VOCAB)
    torch.testing.assert_close(logits, expected.gather(1, at), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["whisper", "t5"])
def test_the_sequences_of_one_prompt_share_the_encoder(family: str) -> None:
    model, inputs = tiny(family), encoder_inputs(family)
    assert inputs is not None
    encoded: list[int] = []
    model.get_encoder().register_forward_hook(lambda encoder, given, output: encoded.append(len(output[0])))
    options = {"max_new_tokens": 6, "sampling": GREEDY, "compile": False, "eos_token_id": ()}
    alone = torch_specops.generate(model, torch.ones(3, 1, dtype=torch.int64), inputs=inputs, **options)
    # The third input is the first again, but no neighbour of it.
    again = {name: torch.cat([value, value[:1]]) for name, value in inputs.items()}
    ids = torch.ones(4, 1, dtype=torch.int64)
    output = torch_specops.generate(model, ids, inputs=again, num_return_sequences=2, **options)
    assert encoded == [3, 4]
    assert torch.equal(output.sequences, alone.sequences[[0, 0, 1, 1, 2, 2, 0, 0]])


def test_bad_inputs_are_refused() -> None:
    with pytest.raises(RuntimeError, match="nothing can be read before start"):
        hf.language_model(shared_tiny("llama")).forward(TOKENS, torch.arange(24).expand(3, -1))
    llama = "inputs: a decoder-only model reads tokens alone, got input_features"
    cases: list[Any] = [(("llama", 3, {"input_features": TOKENS}), ValueError, llama)]
    for family, name in (("whisper", "input_features"), ("t5", "input_ids")):
        for missing in (None, {}, {"attention_mask": TOKENS}):
            cases.append(((family, 3, missing), ValueError, f"inputs: expected {name} for the encoder"))
        other = f"inputs: expected {name} for 2 rows, got 3"
        cases.append(((family, 2, encoder_inputs(family)), ValueError, other))

    def start(case: tuple[str, int, dict[str, Tensor] | None]) -> None:
        hf.language_model(shared_tiny(case[0])).start(case[1], CAPACITY, case[2])

    assert raised(start, cases) == []


def test_what_a_model_says_of_itself() -> None:
    for family in FAMILIES:
        adapter = hf.language_model(shared_tiny(family))
        assert adapter.vocab_size == VOCAB and adapter.device == torch.device("cpu")
        # T5 has relative positions: any length.
        assert adapter.max_length == (None if family == "t5" else POSITIONS), family
        # Rotary positions are computed, others are learned.
        assert adapter.reads_beyond == (family not in ("gpt2", "opt", "whisper", "t5")), family
        assert adapter.eos_token_ids == () and adapter.pad_token_id == 0
    # Beyond, it goes by the length of a cache, which rows of different lengths do not have.
    llama4 = transformers.Llama4TextConfig(floor_scale=16)
    assert max_length(llama4)[0] == 15
    llama4.attn_temperature_tuning = False
    assert max_length(llama4) == (llama4.max_position_embeddings, None)
    model = tiny("llama")
    for own, expected in ((5, (5,)), ([3, 4], (3, 4)), (None, ())):
        model.generation_config.eos_token_id = own
        assert hf.language_model(model).eos_token_ids == expected


@pytest.mark.parametrize(("dtype", "attention"), [(torch.bfloat16, "sdpa"), (torch.float16, "eager")])
@torch.inference_mode()
def test_half_precision_logits_stay_in_half_precision(dtype: torch.dtype, attention: str) -> None:
    adapter = hf.language_model(tiny("llama", attention=attention).to(dtype))
    adapter.start(3, CAPACITY)
    logits = adapter.forward(TOKENS[:, :5], torch.arange(5).expand(3, -1))
    assert logits.dtype == dtype and logits.isfinite().all()


def test_eager_forward_reads_no_slot_beyond() -> None:
    adapter = hf.language_model(tiny("llama"))
    adapter.start(2, 500)
    widths: list[int] = []
    adapter.model.register_forward_pre_hook(
        lambda model, args, kwargs: widths.append(kwargs["attention_mask"].shape[-1]), with_kwargs=True
    )
    for positions in (torch.tensor([[0, 1, 2], [4, 5, 6]]), torch.tensor([[3], [1]])):
        adapter.forward(torch.ones_like(positions), positions)
    assert widths == [7, 4]


# The model belongs to the user.


def everything_of(model: PreTrainedModel) -> list[Any]:
    """What a forward or `generate` of the model could depend on."""
    return [
        (
            name,
            module,
            module.training,
            sorted(vars(module)),
            [id(tensor) for tensor in (*module._parameters.values(), *module._buffers.values())],
            [
                (value, value.to_dict(), value._attn_implementation)
                for value in vars(module).values()
                if isinstance(value, transformers.PreTrainedConfig)
            ],
        )
        for name, module in model.named_modules()
    ]


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("family", ["llama", "gemma3", "whisper", "t5"])
def test_the_model_is_not_changed(family: str) -> None:
    model = tiny(family).train()
    inputs, (ids, mask) = encoder_inputs(family), padded(PROMPTS, "left")
    during, weights = list[Any](), copy.deepcopy(model.state_dict())
    model.get_decoder().register_forward_hook(lambda *call: during.append(everything_of(model)))
    before, prompt = everything_of(model), {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 6}
    for options in ({"draft": EarlyExit(1), "compile": False}, {"compile": True}):
        torch_specops.generate(model, **prompt, eos_token_id=(), inputs=inputs, **options)
        if inputs is None:
            own = {"custom_generate": hf.custom_generate, "pad_token_id": 0, "compile": options["compile"]}
            GenerationMixin.generate(model, **prompt, **own)
    assert len(during) > 5 and all(each == before for each in (*during, everything_of(model)))
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


LONGROPE = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("rope", [{"rope_type": "dynamic", "factor": 4.0}, {"rope_type": "longrope"} | LONGROPE])
def test_growing_rotary_stays_in_the_copy(rope: dict[str, object]) -> None:
    model = tiny("llama", rope_parameters={"rope_theta": 10_000.0} | rope)
    with torch.no_grad():
        expected = full_logits(model, TOKENS)
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        adapter = hf.language_model(model)
        adapter.start(1, 200)
        adapter.max_length = None
        for length in (144, 5):
            adapter.forward(TOKENS.repeat(1, 6)[:1, :length], torch.arange(length).unsqueeze(0))
            assert all(torch.equal(buffer, before) for buffer, before in buffers)
        assert torch.equal(full_logits(model, TOKENS), expected)


# What cannot be read.


def test_an_architecture_is_checked_once() -> None:
    sizes = {"hidden_size": 40, "intermediate_size": 48, "num_key_value_heads": 2}
    model = untested("Granite", **sizes)
    reads: list[Tensor] = []

    def reads_of(model: PreTrainedModel) -> int:
        """Forwards of one call of `generate`, with the check if there is one."""
        reads.clear()
        watch = model.model.register_forward_pre_hook(lambda *call: reads.append(call))
        torch_specops.generate(model, torch.tensor([[5, 6, 7]]), max_new_tokens=2, sampling=GREEDY)
        watch.remove()
        return len(reads)

    checked = reads_of(model)
    alone = reads_of(model)
    assert checked > alone and reads_of(untested("Granite", **sizes)) == alone
    layer = model.model.layers[0].self_attn
    for change in (
        lambda: model.bfloat16(),
        lambda: model.set_attn_implementation("eager"),
        # As an adapter does.
        lambda: setattr(layer, "q_proj", nn.Sequential(layer.q_proj)),
    ):
        change()
        assert reads_of(model) > alone
        assert reads_of(model) == alone
    # What a forward of its own does cannot be known.
    model.forward = model.forward
    assert reads_of(model) > alone and reads_of(model) > alone
    del model.forward
    model.config.sliding_window = 4
    with pytest.raises(ValueError, match="model: GraniteForCausalLM does not read ragged rows right"):
        hf.language_model(model)


def test_the_check_crosses_the_lengths_at_which_a_model_changes() -> None:
    # Granite's config may name a window, but its layers have none.
    sizes = {"intermediate_size": 56, "num_key_value_heads": 2, "max_position_embeddings": 96}
    model = untested("Granite", **sizes)
    model.config.sliding_window = 30
    ids = TOKENS[:1, :20] % 50
    refused = r"within the 30 that the target reads, got 36; its cache or masks .* \(sliding_window\)"
    with pytest.raises(ValueError, match=refused):
        torch_specops.generate(model, ids, max_new_tokens=16, sampling=GREEDY)
    torch_specops.generate(model, ids, max_new_tokens=8, sampling=GREEDY)
    assert model.config.sliding_window == 30
    adapter = hf.language_model(untested("Starcoder2", **sizes, sliding_window=30))
    assert (adapter.max_length, adapter.limited_by) == (96, None)


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.18"), reason="before Doge always had a mask")
def test_window_of_a_models_masks() -> None:
    sizes = {"intermediate_size": 56, "num_key_value_heads": 2, "max_position_embeddings": 96}
    adapter = hf.language_model(untested("Doge", **sizes, keep_window_size=30))
    assert adapter.max_length == adapter.first_layers(1).max_length == 30


def test_a_family_that_reads_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # Bloom computes its biases from a mask of two dimensions.
    with pytest.raises(ValueError, match="model: BloomForCausalLM takes no cache and mask of ragged rows"):
        hf.language_model(untested("Bloom"))
    # Its windows of 256 tokens end where the cache ends.
    layers = {"num_layers": 2, "attention_types": [[["global", "local"], 1]]}
    with pytest.raises(ValueError, match="model: GPTNeoForCausalLM does not read ragged rows right"):
        hf.language_model(untested("GPTNeo", **layers))
    # A model that goes by the length of its cache, as one with positions of its own would. Read right before.
    model = untested("Granite", intermediate_size=48, num_key_value_heads=2)
    hf.language_model(model)
    right = model.forward

    def wrong(**arguments: object) -> object:
        if arguments["use_cache"]:
            arguments["position_ids"] = torch.zeros_like(arguments["position_ids"])
        return right(**arguments)

    monkeypatch.setattr(model, "forward", wrong)
    with pytest.raises(ValueError, match="model: GraniteForCausalLM does not read ragged rows right"):
        hf.language_model(model)


def around(prefix: str, family: str) -> PreTrainedModel:
    """A model of images and text around a text model."""
    vision = {"model_type": "siglip_vision_model", "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"hidden_size": 32, "intermediate_size": 32, "image_size": 28, "patch_size": 14, "projection_dim": 32}
    text, config_class = shared_tiny(family), getattr(transformers, f"{prefix}Config")
    config = config_class(text_config=text.config.to_dict(), vision_config=vision, projection_dim=32)
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).double().eval()
    model.get_decoder().load_state_dict(text.get_decoder().state_dict())
    model.get_output_embeddings().load_state_dict(text.get_output_embeddings().state_dict())
    return model


def test_a_model_around_a_text_model_is_checked() -> None:
    model, ids = around("Llava", "llama"), TOKENS[:, :6]
    text = torch_specops.generate(shared_tiny("llama"), ids, max_new_tokens=8, sampling=GREEDY)
    output = torch_specops.generate(model, ids, max_new_tokens=8, sampling=GREEDY)
    assert torch.equal(output.sequences, text.sequences)
    call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    call["custom_generate"] = hf.custom_generate
    assert torch.equal(model.generate(ids, **call), text.sequences)
    with pytest.raises(ValueError, match="input_ids: expected placeholders"):
        model.generate(ids, **call, pixel_values=torch.zeros(3, 3, 28, 28, dtype=torch.float64))
    # It lets all tokens of a prompt see each other.
    with pytest.raises(ValueError, match="model: PaliGemmaForConditionalGeneration does not read ragged rows right"):
        hf.language_model(around("PaliGemma", "gemma"))


def changed(**attributes: object) -> PreTrainedModel:
    """A model with other attributes, of its own or (by `config_...`) of its config."""
    model = tiny("llama")
    for name, value in attributes.items():
        setattr(model.config if name.startswith("config_") else model, name.removeprefix("config_"), value)
    return model


def test_models_that_cannot_be_read_are_refused() -> None:
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2}
    cannot = "cannot be rolled back: .*{}.*; decode with transformers alone"
    one_device = "model: expected all weights on one device, got"
    offloaded, alora = type("CpuOffload", (), {})(), SimpleNamespace(alora_invocation_tokens=[5])
    kinds = ["linear_attention", "full_attention"]
    models = [
        (
            transformers.RwkvForCausalLM(transformers.RwkvConfig(**sizes)),
            f"model: RwkvForCausalLM {cannot.format('a state outside of the cache')}",
        ),
        (changed(config_model_type="zamba2"), f"model: LlamaForCausalLM {cannot.format('other states')}"),
        (changed(config_model_type="inkling_text"), f"model: LlamaForCausalLM {cannot.format('equally long')}"),
        (changed(config_layer_types=kinds), f"model: LlamaForCausalLM {cannot.format('linear_attention')}"),
        # Setting it properly would need the package behind it.
        (
            changed(config__attn_implementation="flash_attention_2"),
            "model: attention 'flash_attention_2' takes no mask",
        ),
        (transformers.LlamaModel(tiny("llama").config), "model: expected a model with a language head, got LlamaModel"),
        (changed(lm_head=nn.Linear(32, VOCAB, device="meta")), f"{one_device} cpu, meta.*offload"),
        (tiny("llama").to("meta"), f"{one_device} meta.*offload"),
        (changed(_hf_hook=offloaded), f"{one_device} cpu.*offload"),
        (
            changed(peft_config={"default": alora}),
            "model: an aLoRA adapter depends .*; decode with peft_model.generate",
        ),
    ]
    # Without weights yet, and without a forward in Python.
    models += [
        (changed(lm_head=nn.LazyLinear(64)), "model: LazyLinear has no weights yet"),
        (changed(lm_head=torch.jit.script(nn.Linear(2, 2))), "model: expected modules of Python"),
    ]
    cases = [(model, ValueError, message) for model, message in models]
    cases.append((nn.Linear(2, 2), TypeError, r"(model|target|draft): expected a transformers model.*, got .*Linear"))
    for use in (
        hf.language_model,
        torch_specops.SpeculativeDecoder,
        lambda draft: torch_specops.SpeculativeDecoder(shared_tiny("llama"), draft),
    ):
        assert raised(use, cases) == []


def test_growing_rotary_is_not_compiled() -> None:
    dynamic = tiny("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0})
    reason = "the 'dynamic' rotary embedding of LlamaForCausalLM looks at the lengths of texts"
    for models in ((dynamic,), (tiny("llama"), dynamic)):
        decoder = torch_specops.SpeculativeDecoder(*models)
        assert decoder.generate(TOKENS[:, :4], max_new_tokens=4).stats.compiled == f"eager: {reason}"
        with pytest.raises(ValueError, match=f"compile: expected False or 'auto', got True: {reason}"):
            torch_specops.SpeculativeDecoder(*models, compile=True)


def test_placed_tensors_follow_the_model() -> None:
    """A model may have another dtype, device or batch than before."""
    old, new = torch.zeros(2), torch.ones(2)
    assert placed(old, new) is old and torch.equal(old, new)
    for other in (torch.ones(2, device="meta"), torch.ones(2).double(), torch.ones(3)):
        assert placed(old, other) is other
    assert placed(None, new) is new
