"""Rotary embeddings that change with the length of a text: every row is read as `generate` reads it alone."""

from __future__ import annotations

import copy
import pickle
from functools import cache

import pytest
import torch
import transformers
from packaging.version import Version
from tiny_models import VOCAB, greedy_alone, padded, perturbed
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import torch_specops
from torch_specops import SamplingParams, hf
from torch_specops.drafts import EarlyExit, PromptLookup
from torch_specops.hf import TransformersModel
from torch_specops.hf.cache import cache_argument
from torch_specops.models.reading import read_beginnings

SWITCH = 24
NEW = 14
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 10_000.0}
LONGROPE |= {"original_max_position_embeddings": SWITCH}
# Phi-3 reads a text again at the switch, Llama keeps its cache, and dynamic frequencies change with every token beyond.
# Before, `generate` dropped the cache at the switch, and read the newest token alone.
of_generate = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.20"), reason="before transformers read the text again"
)
KINDS = {
    "phi3": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": SWITCH}),
    "llama": ("Llama", {"rope_parameters": LONGROPE}),
    "dynamic": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}}
        | {"max_position_embeddings": SWITCH},
    ),
}
TOKENS = torch.randint(3, VOCAB, (60,), generator=torch.Generator().manual_seed(0))
# On either side of the switch, across it, and at it.
PROMPTS = [TOKENS[:length].tolist() for length in (12, 40, SWITCH - 1, SWITCH, SWITCH + 1)]


@cache
def model_of(kind: str) -> PreTrainedModel:
    prefix, fields = KINDS[kind]
    config = getattr(transformers, f"{prefix}Config")(**({"max_position_embeddings": 96} | SIZES | fields))
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 0.35)
    model.generation_config.eos_token_id = None
    return model


def adapter_of(model: PreTrainedModel) -> TransformersModel:
    adapter = hf.language_model(model)
    assert adapter.reads_beyond
    # Dynamic frequencies change where the positions of the config end, which would be warned of.
    adapter.max_length = None
    return adapter


@cache
def texts_alone(kind: str) -> list[list[int]]:
    # transformers keeps the frequencies of the longest text that a model has read.
    return [greedy_alone(copy.deepcopy(model_of(kind)), prompt, NEW) for prompt in PROMPTS]


@pytest.mark.parametrize("kind", [pytest.param("phi3", marks=of_generate), "llama", "dynamic"])
def test_a_row_has_the_text_that_it_has_alone(kind: str) -> None:
    model = model_of(kind)
    expected = texts_alone(kind)
    ids, mask = padded(PROMPTS, "left")
    options = {"max_new_tokens": NEW, "sampling": SamplingParams(temperature=0.0), "eos_token_id": ()}
    options |= {"num_draft_tokens": 5, "schedule": "constant"}
    for draft in (None, PromptLookup(1, 1), adapter_of(perturbed(model, 0.01)), EarlyExit(1)):
        output = torch_specops.generate(adapter_of(model), ids, attention_mask=mask, draft=draft, **options)
        assert [output.new_tokens(row) for row in range(len(PROMPTS))] == expected, draft
        assert draft is None or sum(output.stats.accepted_at) > 0


@of_generate
def test_copies_of_a_prompt_cross_the_switch() -> None:
    """Their tokens are copied too, because the whole sequence is read again."""
    ids, mask = padded([PROMPTS[2], *PROMPTS[:1] * 3], "left")
    options = {"max_new_tokens": NEW, "sampling": SamplingParams(temperature=0.0), "eos_token_id": ()}
    output = torch_specops.generate(adapter_of(model_of("phi3")), ids, attention_mask=mask, **options)
    expected = texts_alone("phi3")
    assert [output.new_tokens(row) for row in range(4)] == [expected[2], *expected[:1] * 3]


@pytest.mark.filterwarnings("ignore:max_new_tokens")
@pytest.mark.parametrize("kind", ["llama", "dynamic"])
def test_a_copied_decoder_reads_as_the_first_one(kind: str) -> None:
    """Behind the first call the copies of the modules are others."""
    options = {"max_new_tokens": NEW, "eos_token_id": ()}
    decoder = torch_specops.SpeculativeDecoder(
        copy.deepcopy(model_of(kind)), EarlyExit(1), sampling=SamplingParams(temperature=0.0)
    )
    ids, mask = padded(PROMPTS, "left")
    for each in (decoder, copy.deepcopy(decoder), pickle.loads(pickle.dumps(decoder))):
        output = each.generate(ids, attention_mask=mask, **options)
        assert [output.new_tokens(row) for row in range(len(PROMPTS))] == texts_alone(kind)


def test_a_start_after_a_reading_that_never_ended() -> None:
    """As a process has it that another thread of its parent has forked."""
    adapter, ids = hf.language_model(model_of("phi3")), torch.tensor([PROMPTS[1]])
    decoder = torch_specops.SpeculativeDecoder(adapter, sampling=SamplingParams(temperature=0.0))
    expected = decoder.generate(ids, max_new_tokens=2).sequences
    adapter._cache, adapter._is_long = adapter._prefixes.short, False
    assert torch.equal(decoder.generate(ids, max_new_tokens=2).sequences, expected)


@torch.no_grad()
def log_probabilities(kind: str, tokens: Tensor, prompt_length: int) -> Tensor:
    """Of every new token in a text [n], as `generate` computes them, with its cache."""
    model, past = copy.deepcopy(model_of(kind)), DynamicCache()
    rows, num_read = [], 0
    for length in range(prompt_length, len(tokens)):
        if kind == "phi3" and num_read <= SWITCH < length:
            past, num_read = DynamicCache(), 0
        logits = model(tokens[None, num_read:length], **{cache_argument(model.forward): past}).logits[0, -1]
        rows.append(logits.log_softmax(-1)[tokens[length]])
        num_read = length
    return torch.stack(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_are_those_of_the_row_alone(kind: str) -> None:
    model = model_of(kind)
    ids, mask = padded(PROMPTS, "right")
    output = torch_specops.generate(
        adapter_of(model),
        ids,
        attention_mask=mask,
        draft=adapter_of(perturbed(model, 0.01)),
        max_new_tokens=NEW,
        logprobs="raw",
        eos_token_id=(),
        seed=0,
    )
    assert output.logprobs is not None
    for row, (prompt, length) in enumerate(zip(PROMPTS, output.lengths.tolist(), strict=True)):
        expected = log_probabilities(kind, output.sequences[row, :length], len(prompt))
        found = output.logprobs[row, len(prompt) : length]
        torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [pytest.param("phi3", marks=of_generate), "llama"])
def test_rows_that_begin_later_are_read_as_if_alone(kind: str) -> None:
    model = model_of(kind)
    decoder = torch_specops.SpeculativeDecoder(model, model, sampling=SamplingParams(temperature=0.0))
    requests = [torch_specops.Request(prompt, max_new_tokens=NEW, eos_token_id=()) for prompt in PROMPTS]
    found = {done.index: done.new_tokens.tolist() for done in decoder.generate_many(requests, batch_size=2)}
    assert [found[index] for index in range(len(PROMPTS))] == texts_alone(kind)


@pytest.mark.filterwarnings("ignore:max_new_tokens")
@pytest.mark.parametrize("kind", [pytest.param("phi3", marks=of_generate), "llama", "dynamic"])
def test_a_text_that_is_read_again_keeps_its_prompt(kind: str) -> None:
    """Only the prompt was read at the prompt's length. `test_turns.py` has what does not depend on it."""
    options = {"max_new_tokens": NEW, "eos_token_id": ()}
    decoder = torch_specops.SpeculativeDecoder(adapter_of(model_of(kind)), sampling=SamplingParams(temperature=0.0))
    found: list[list[int]] = [[] for _ in PROMPTS]
    for step in decoder.stream(PROMPTS, **options):
        for text, tokens in zip(found, step.tokens, strict=True):
            text += tokens
        decoder.generate([[5, 6]], **options | {"max_new_tokens": 1})
    assert found == texts_alone(kind)


def test_equal_texts_of_other_prompts_are_read_apart() -> None:
    adapter = adapter_of(model_of("dynamic"))
    adapter.start(2, 64)
    text, lengths = TOKENS[:40].expand(2, -1), torch.tensor([40, 40])
    for prompt_lengths, are_equal in ((lengths, True), (torch.tensor([30, 40]), False)):
        read_beginnings(adapter, text, lengths, 1, prompt_lengths)
        keys = adapter.key_values[0].keys[:, :, :39]
        assert torch.equal(keys[0], keys[1]) == are_equal


def test_a_text_is_read_again_once() -> None:
    """Also if drafts cross the switch and are rejected. Features are those of the last reading."""
    model = copy.deepcopy(model_of("phi3"))
    adapter = hf.language_model(model)
    adapter.keep_features((0, 1))
    counts: list[int] = []
    watch = model.register_forward_pre_hook(
        lambda model, arguments, named: counts.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    adapter.start(1, 60)
    with torch.inference_mode():
        for first, length in ((0, 20), (20, 5), (21, 5), (22, 5), (24, 2), (26, 1), (23, 3), (26, 1)):
            guess = TOKENS[None, first : first + length].clone()
            guess[:, 1:] += 1 - 2 * (guess[:, 1:] == VOCAB - 1)
            guess = guess if first == 20 else TOKENS[None, first : first + length]
            adapter.forward(guess, torch.arange(first, first + length).unsqueeze(0))
        watch.remove()
        hidden = model(TOKENS[None, :27], output_hidden_states=True, use_cache=False).hidden_states
    features = adapter.features[:, :27]
    torch.testing.assert_close(features, torch.cat(hidden[:2], 2))
    # The short and the long prefixes of each forward.
    assert counts == [20, *(4, 25), *(3, 5), *(2, 5), 2, 1, *(1, 3), 1]
