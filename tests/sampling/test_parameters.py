"""`SamplingParams`: what it accepts, and the tensors that the ops take."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from tiny_models import raised
from transformers import GenerationConfig

from torch_specops import SamplingParams
from torch_specops.sampling.generation_config import ALWAYS_READ, READ_IF_SAMPLED, TAKEN, TAKEN_IF_SAMPLED

NAN = math.nan
FILTERS = {"top_k": torch.int64, "top_p": torch.float32, "min_p": torch.float32}
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
NUMBERS = ("temperature", *FILTERS, *PENALTIES, "no_repeat_ngram_size", "min_new_tokens")


def test_defaults() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert torch.equal(params.tensors(batch=3).temperature, torch.ones(3))
    assert SamplingParams(top_k=[0, 0], top_p=torch.ones(2), min_p=0).tensors(batch=2).filters == {}
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("temperature", 0, [0.0, 0.0]),
        ("temperature", (0, 2), [0.0, 2.0]),
        ("temperature", torch.tensor([0.5, 2.0], dtype=torch.bfloat16), [0.5, 2.0]),
        ("top_k", 50, [50, 50]),
        ("top_k", torch.tensor([7, 0], dtype=torch.int32), [7, 0]),
        ("top_p", [1, 0.25], [1.0, 0.25]),
        ("min_p", (0.0, 1.0), [0.0, 1.0]),
        ("min_p", torch.tensor([0.5, 0.25], dtype=torch.float64), [0.5, 0.25]),
    ],
)
def test_values_of_a_batch(field: str, value: Any, expected: list[float]) -> None:
    params = SamplingParams(**{field: value})
    found = getattr(params.tensors(batch=2), field)
    assert found.dtype == FILTERS.get(field, torch.float32) and found.is_contiguous() and found.tolist() == expected
    assert getattr(params.tensors(batch=2, device="meta"), field).device.type == "meta"
    # A filter that no row uses is None, and costs nothing.
    assert list(params.tensors(batch=2).filters) == ([field] if field in FILTERS else [])


def test_values_for_another_number_of_rows() -> None:
    for name in ("temperature", *FILTERS):
        params = SamplingParams(**{name: [1, 1, 1]})
        for batch in (1, 2, 4):
            with pytest.raises(ValueError, match=rf"{name}: expected one number or {batch}, got shape \[3\]"):
                params.tensors(batch)


NO_NUMBERS = [None, "0.5", ["a", "b"], True, [True], 1j, torch.ones(2, 2), torch.tensor([True]), {"a": 1}, [[1.0]]]
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    *(
        ({name: value}, TypeError, f"{name}: expected a number or one per sequence, got ")
        for name in NUMBERS
        for value in NO_NUMBERS
    ),
    # 1e300 is infinite in float32, 1e-50 is zero, and logits divided by 1e-38 overflow.
    *(
        ({"temperature": value}, ValueError, r"temperature: expected 0 \(greedy\) or finite numbers >= 1e-30, got")
        for value in (-0.1, NAN, math.inf, [0.5, -1.0], torch.tensor([0.5, NAN]), 1e-50, 1.2e-38, 1e300)
    ),
    *(({name: 10**400}, ValueError, f"{name}: expected numbers of 64 bits") for name in NUMBERS),
    *(({name: [1, 2**63]}, ValueError, f"{name}: expected numbers of 64 bits") for name in NUMBERS),
    *(({"top_k": value}, ValueError, "top_k: expected integers >= 0") for value in (-1, [3, -2])),
    *(({"top_k": value}, TypeError, "top_k: expected an integer or one") for value in (2.0, torch.ones(2), NAN)),
    *(({"top_p": value}, ValueError, r"top_p: expected numbers in \(0, 1\]") for value in (0.0, 1.0001, [0.5, NAN])),
    *(({"min_p": value}, ValueError, r"min_p: expected numbers in \[0, 1\]") for value in (-0.1, [0.5, 2.0], NAN)),
    *(
        ({"repetition_penalty": value}, ValueError, r"repetition_penalty: expected numbers in \[1e-30, 1e\+30\]")
        for value in (0.0, [1.0, -1.0], math.inf, NAN, 1e-50, 1e-38, 1e31)
    ),
    *(
        ({name: value}, ValueError, rf"{name}: expected numbers in \[-1e\+30, 1e\+30\]")
        for name in PENALTIES[1:]
        for value in (NAN, [1e300], -1e38)
    ),
    *(({name: -1}, ValueError, f"{name}: expected integers >= 0") for name in NUMBERS[-2:]),
    *(({name: [1.0]}, TypeError, f"{name}: expected an integer or one") for name in NUMBERS[-2:]),
    *(({"logit_bias": value}, TypeError, "logit_bias: expected a dict") for value in (3, [[1, 2.0]], [(1, 2.0)])),
    *(({"logit_bias": {token: 1.0}}, TypeError, "logit_bias: expected tokens to be") for token in (1.5, "a", True)),
    ({"logit_bias": [None, {-1: 1.0}]}, ValueError, r"logit_bias: expected tokens in \[0, 2\*\*31\), got -1"),
    *(({"logit_bias": {1: value}}, TypeError, "logit_bias: expected a number for") for value in ("a", None, True)),
    *(({"logit_bias": {1: value}}, ValueError, "logit_bias: expected a finite") for value in (NAN, math.inf, 1e39)),
    *(
        ({"bad_words": value}, TypeError, "bad_words: expected sequences of")
        for value in (3, "ab", [3], ["a"], [[3], 4])
    ),
    *(
        ({"bad_words": value}, TypeError, "bad_words: expected tokens to be")
        for value in ([["a"]], [[1.0]], [[[1], [True]]])
    ),
    *(({"bad_words": value}, ValueError, "bad_words: expected a token in") for value in ([[1], []], [[[1], []]])),
    ({"bad_words": [[1, -2]]}, ValueError, r"bad_words: expected tokens in \[0, 2\*\*31\), got -2"),
]


def test_a_generation_config_means_what_transformers_means() -> None:
    def taken(**fields: Any) -> SamplingParams:
        return SamplingParams.from_generation_config(GenerationConfig(**fields))

    neutral = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "bad_words_ids": [], "num_beams": 1}
    filters = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1}
    assert taken(do_sample=True, **filters, **neutral) == SamplingParams(**filters)
    # Its defaults, which are in no config.
    assert taken(do_sample=True) == SamplingParams(top_k=50)
    # Greedy decoding reads no filter.
    assert taken(temperature=0.7, top_k=20, typical_p=0.5) == taken() == SamplingParams(temperature=0.0)
    # The defaults of Qwen2.5-Instruct.
    qwen = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}
    assert taken(do_sample=True, eos_token_id=[5, 3], pad_token_id=3, **qwen) == SamplingParams(**qwen)
    # Biases of one token, and -inf for several.
    sizes = {"no_repeat_ngram_size": 3, "min_new_tokens": 2}
    words = {"bad_words_ids": [[1, 2], [3]], "suppress_tokens": [4, -1]}
    assert taken(**sizes, **words, sequence_bias=[[[5], 1.5], [[6, 7], -math.inf]]) == SamplingParams(
        temperature=0.0, **sizes, logit_bias={5: 1.5, 4: -math.inf}, bad_words=([1, 2], [3], [6, 7])
    )
    with pytest.raises(ValueError, match=r"config: .* has no min_length = 3, no sequence_bias \(1, 2\): 0\.5"):
        taken(min_length=3, sequence_bias={(1, 2): 0.5, (3,): 1.0})
    with pytest.raises(ValueError, match=r"config: SamplingParams has no typical_p = 0\.5"):
        taken(do_sample=True, typical_p=0.5)
    with pytest.raises(TypeError, match="config: expected a GenerationConfig of transformers, got <class 'dict'>"):
        SamplingParams.from_generation_config({"do_sample": True})


# How drafts are made, caches, beams, outputs, and what the loop is told in arguments of its own. The last two change no
# law: logits that are not finite have a meaning here, and a softmax has no use for normalised logits.
NO_PART_OF_THE_LAW = """
assistant_confidence_threshold assistant_early_exit assistant_lookbehind is_assistant max_matching_ngram_size
num_assistant_tokens num_assistant_tokens_schedule prompt_lookup_num_tokens speculation_type target_lookbehind use_mtp
cache_config cache_implementation compile_config continuous_batching_config disable_compile low_memory max_cache_len
prefill_chunk_size use_cache transformers_version
diversity_penalty early_stopping length_penalty num_beam_groups num_return_sequences
output_attentions output_hidden_states output_logits output_scores return_dict_in_generate
bos_token_id decoder_start_token_id eos_token_id pad_token_id max_length max_new_tokens max_time stop_strings
remove_invalid_values renormalize_logits
"""


def test_every_field_of_a_generation_config_is_known() -> None:
    """A processor of a new release would otherwise be left out silently."""
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    taken = {*TAKEN, *TAKEN_IF_SAMPLED, "bad_words_ids", "sequence_bias", "suppress_tokens"}
    known = {"do_sample", *taken, *ALWAYS_READ, *READ_IF_SAMPLED}
    assert fields - known == set(NO_PART_OF_THE_LAW.split()) & fields


def test_bad_values() -> None:
    assert raised(lambda bad: SamplingParams(**bad), BAD) == []
