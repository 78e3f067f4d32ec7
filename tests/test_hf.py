"""Transformers models as language models of the loop, and the default model as its package brings it."""

from __future__ import annotations

import pytest
import torch
import transformers
from tiny_models import DECODER_ONLY, FAMILIES, POSITIONS, VOCAB, encoder_inputs, shared_tiny, tiny
from torch import Tensor, nn
from transformers import PreTrainedModel

import torch_specops
from torch_specops import hf
from torch_specops.drafts import LanguageModel
from torch_specops.sampling import SamplingParams

CAPACITY = 32
TOKENS = torch.randint(0, VOCAB, (3, 24), generator=torch.Generator().manual_seed(0))


def full_logits(model: PreTrainedModel, tokens: Tensor, inputs: dict[str, Tensor] | None) -> Tensor:
    """One forward over whole texts, without a cache and without padding."""
    if inputs is None:
        return model(tokens, use_cache=False).logits.float()
    return model(**inputs, decoder_input_ids=tokens, use_cache=False).logits.float()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.inference_mode()
def test_any_way_of_reading_gives_the_same_logits(family: str, attention: str) -> None:
    """Rows read at positions of their own, in pieces of many widths, each after a wrong guess that is rolled back."""
    model, inputs = shared_tiny(family, attention=attention), encoder_inputs(family)
    expected = full_logits(model, TOKENS, inputs)
    adapter = hf.language_model(model)
    assert isinstance(adapter, LanguageModel)
    adapter.start(3, CAPACITY, inputs)
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


@torch.inference_mode()
def test_a_new_batch_forgets_the_one_before() -> None:
    adapter = hf.language_model(shared_tiny("gpt2"))
    positions = torch.arange(6).expand(3, -1)
    results = []
    for tokens in (TOKENS[:, :6], TOKENS[:, 6:12], TOKENS[:, :6]):
        adapter.start(3, CAPACITY)
        results.append(adapter.forward(tokens, positions))
    assert torch.equal(results[0], results[2]) and not torch.equal(results[0], results[1])


@pytest.mark.parametrize("family", ["whisper", "t5"])
@torch.inference_mode()
def test_a_new_batch_has_its_own_encoder_input(family: str) -> None:
    model, inputs = shared_tiny(family), encoder_inputs(family)
    assert inputs is not None
    flipped = {name: value.flip(0) for name, value in inputs.items()}
    two = {name: value[1:] for name, value in inputs.items()}
    adapter = hf.language_model(model)
    for each in (inputs, flipped, two, inputs):
        rows = len(next(iter(each.values())))
        tokens = TOKENS[:rows, :6]
        adapter.start(rows, CAPACITY, each)
        for _ in range(2):
            logits = adapter.forward(tokens, torch.arange(6).expand(rows, -1))
            torch.testing.assert_close(logits, full_logits(model, tokens, each), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["whisper", "t5"])
def test_bad_encoder_inputs_are_refused(family: str) -> None:
    inputs = encoder_inputs(family)
    assert inputs is not None
    name = next(iter(inputs))
    adapter = hf.language_model(shared_tiny(family))
    for missing in (None, {}, {"attention_mask": TOKENS}):
        with pytest.raises(ValueError, match=f"inputs: expected {name} for the encoder"):
            adapter.start(3, CAPACITY, missing)
    with pytest.raises(ValueError, match=f"inputs: expected {name} for 2 rows, got 3"):
        adapter.start(2, CAPACITY, inputs)


@pytest.mark.parametrize("family", DECODER_ONLY)
def test_a_decoder_only_model_reads_no_encoder_input(family: str) -> None:
    with pytest.raises(ValueError, match="inputs: a decoder-only model reads tokens alone, got input_features"):
        hf.language_model(shared_tiny(family)).start(3, CAPACITY, {"input_features": TOKENS})


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_model_says_of_itself(family: str) -> None:
    adapter = hf.language_model(shared_tiny(family))
    assert adapter.vocab_size == VOCAB and adapter.device == torch.device("cpu")
    # T5 has relative positions: any length.
    assert adapter.max_length == (None if family == "t5" else POSITIONS)
    assert adapter.eos_token_ids == () and adapter.pad_token_id == 0


def test_the_end_tokens_are_those_of_the_generation_config() -> None:
    model = tiny("llama")
    adapter = hf.language_model(model)
    for own, expected in ((5, (5,)), ([3, 4], (3, 4)), (None, ())):
        model.generation_config.eos_token_id = own
        assert adapter.eos_token_ids == expected


@torch.inference_mode()
def test_positions_beyond_the_last_are_read_without_an_error() -> None:
    """Drafts may stand there; what is said of them is never emitted, and what stands before stays right."""
    model = shared_tiny("gpt2")
    adapter = hf.language_model(model)
    text = torch.randint(0, VOCAB, (1, POSITIONS), generator=torch.Generator().manual_seed(1))
    adapter.start(1, POSITIONS + 4)
    adapter.forward(text[:, :-2], torch.arange(POSITIONS - 2).unsqueeze(0), 1)
    unread = torch.cat([text[:, -2:], torch.tensor([[4, 5, 6]])], 1)
    logits = adapter.forward(unread, torch.arange(POSITIONS - 2, POSITIONS + 3).unsqueeze(0))
    torch.testing.assert_close(logits[:, :2], full_logits(model, text, None)[:, -2:], rtol=1e-5, atol=1e-5)


def test_the_model_is_not_changed() -> None:
    model = tiny("gemma3")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config = model.config.to_dict()
    tokens = TOKENS[:1, :5]
    expected = full_logits(model, tokens, None)
    torch_specops.generate(model, tokens, draft=model, max_new_tokens=6, eos_token_id=())
    assert model.config.to_dict() == config
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(full_logits(model, tokens, None), expected)


def test_nothing_is_read_before_start() -> None:
    with pytest.raises(RuntimeError, match="nothing can be read before start"):
        hf.language_model(shared_tiny("llama")).forward(TOKENS, torch.arange(24).expand(3, -1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.inference_mode()
def test_half_precision_logits_stay_in_half_precision(dtype: torch.dtype, attention: str) -> None:
    adapter = hf.language_model(tiny("llama", attention=attention).to(dtype))
    adapter.start(3, CAPACITY)
    logits = adapter.forward(TOKENS[:, :5], torch.arange(5).expand(3, -1))
    assert logits.dtype == dtype and logits.isfinite().all()


def tiny_mamba() -> PreTrainedModel:
    config = transformers.MambaConfig(vocab_size=VOCAB, hidden_size=16, state_size=4, num_hidden_layers=1)
    return transformers.MambaForCausalLM(config)


def with_layers_of_another_kind() -> PreTrainedModel:
    model = tiny("qwen2")
    model.config.layer_types = ["linear_attention", "full_attention"]
    return model


def with_attention(name: str) -> PreTrainedModel:
    model = tiny("llama")
    # Setting it properly would need the package behind it.
    model.config._attn_implementation = name
    return model


SMALL = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def untested(prefix: str, **fields: object) -> PreTrainedModel:
    """A model of a family that TESTED_FAMILIES does not name."""
    config = getattr(transformers, f"{prefix}Config")(**(SMALL | fields), bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    return getattr(transformers, f"{prefix}ForCausalLM")(config).eval()


def test_a_family_without_tests_is_checked_when_it_is_used() -> None:
    model = untested("Granite", intermediate_size=48, num_key_value_heads=2)
    prompt = torch.tensor([[5, 6, 7]])
    output = torch_specops.generate(
        model, prompt, max_new_tokens=12, sampling=SamplingParams(temperature=0.0), eos_token_id=()
    )
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=12)
    assert torch.equal(output.sequences[:, : expected.shape[1]], expected)


def test_a_family_that_reads_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # Bloom computes its biases from a mask of two dimensions.
    with pytest.raises(ValueError, match="model: BloomForCausalLM takes no cache and mask of ragged rows"):
        hf.language_model(untested("Bloom"))
    # A model that goes by the length of its cache, as one with positions of its own would.
    model = untested("Granite", intermediate_size=48, num_key_value_heads=2)
    right = model.forward

    def wrong(**arguments: object) -> object:
        if arguments.get("past_key_values") is not None:
            arguments["position_ids"] = torch.zeros_like(arguments["position_ids"])
        return right(**arguments)

    monkeypatch.setattr(model, "forward", wrong)
    with pytest.raises(ValueError, match="model: GraniteForCausalLM does not read ragged rows right"):
        hf.language_model(model)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (tiny_mamba, "model: MambaForCausalLM has a recurrent state, which cannot be rolled back"),
        (with_layers_of_another_kind, "model: layers of the kind linear_attention cannot be rolled back"),
        (lambda: with_attention("flash_attention_2"), "model: attention 'flash_attention_2' takes no mask .*sdpa"),
        (lambda: with_attention("flex_attention"), "model: attention 'flex_attention' takes no mask .*sdpa"),
        (
            lambda: transformers.LlamaModel(tiny("llama").config),
            "model: expected a model with a language head, got LlamaModel",
        ),
    ],
)
def test_models_that_cannot_be_rolled_back_are_refused(make: object, message: str) -> None:
    assert callable(make)
    model = make()
    for use in (hf.language_model, torch_specops.SpeculativeDecoder):
        with pytest.raises(ValueError, match=message):
            use(model)
    with pytest.raises(ValueError, match=message):
        torch_specops.SpeculativeDecoder(shared_tiny("llama"), model)


def test_a_model_on_several_devices_is_refused() -> None:
    model = tiny("llama")
    model.lm_head = nn.Linear(32, VOCAB, bias=False, device="meta")
    with pytest.raises(ValueError, match="model: expected all weights on one device, got cpu, meta"):
        hf.language_model(model)


def test_a_model_whose_dtype_changed_gets_another_cache() -> None:
    model = tiny("llama").float()
    decoder = torch_specops.SpeculativeDecoder(model, compile=False)
    decoder.generate(TOKENS[:, :4], max_new_tokens=4)
    model.bfloat16()
    decoder.generate(TOKENS[:, :4], max_new_tokens=4)


@pytest.mark.parametrize("draft", [False, True])
def test_a_rotary_embedding_that_looks_at_positions_is_not_compiled(draft: bool) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    dynamic = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**tiny("llama").config.to_dict() | {"rope_parameters": rope})
    )
    models = (tiny("llama").float(), dynamic) if draft else (dynamic,)
    decoder = torch_specops.SpeculativeDecoder(*models)
    reason = "the 'dynamic' rotary embedding of LlamaForCausalLM depends on the longest text of a batch"
    assert decoder.generate(TOKENS[:, :4], max_new_tokens=4).stats.compiled == f"eager: {reason}"
    with pytest.raises(ValueError, match=f"compile: expected False or 'auto', got True: {reason}"):
        torch_specops.SpeculativeDecoder(*models, compile=True)


def test_what_is_no_transformers_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"model: expected a transformers model, got .*Linear"):
        hf.language_model(nn.Linear(2, 2))


def test_an_eager_forward_on_a_cpu_reads_no_slot_beyond_the_text() -> None:
    adapter = hf.language_model(tiny("llama"))
    adapter.start(2, 500)
    widths: list[int] = []
    adapter.model.register_forward_pre_hook(
        lambda model, args, kwargs: widths.append(kwargs["attention_mask"].shape[-1]), with_kwargs=True
    )
    for positions in (torch.tensor([[0, 1, 2], [4, 5, 6]]), torch.tensor([[3], [1]])):
        adapter.forward(torch.ones_like(positions), positions)
    assert widths == [7, 4]
