"""transformers' own `generate` with the loop behind it: the same tensor, and an error for what it cannot do."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from chains import expect_caught, expect_laws
from generate_calls import arguments, ours, plain
from report import Report
from tiny_dflash import BLOCK, new_muse
from tiny_loops import TokenStreamer, streamed
from tiny_models import PROMPTS, VOCAB, encoder_inputs, padded, perturbed, raised, shared_tiny, tiny
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)

import torch_specops
from torch_specops import SamplingParams, Verifier, compilation
from torch_specops.decode import Step
from torch_specops.decode.kept import _kept
from torch_specops.drafts import DFlash, PromptLookup
from torch_specops.drafts.early_exit import EarlyExit
from torch_specops.hf import custom_generate
from torch_specops.hf.cache import cache_argument
from torch_specops.hf.door import generate
from torch_specops.testing import chi_square

PROMPT = torch.tensor([[3, 17, 5, 3, 17]])
ONE_PROMPT = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT), "max_new_tokens": 9}


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "whisper", "t5"])
def test_greedy_is_what_transformers_returns(family: str) -> None:
    target = shared_tiny(family)
    options = {**arguments(family), "max_new_tokens": 14, "pad_token_id": 11}
    free = plain(target, **options)
    # Tokens that end the rows at different places, and none at the limit.
    eos = [int(free[row, place - 14]) for row, place in enumerate((3, 6, 1))]
    for expected, ends in ((free, {}), (plain(target, **options, eos_token_id=eos), {"eos_token_id": eos})):
        for draft in (None, perturbed(target), EarlyExit(1)):
            output = ours(target, **options, **ends, draft_model=draft, num_draft_tokens=3)
            assert output.dtype == expected.dtype and torch.equal(output, expected)
    assert bool((expected[:, -1] == 11).any()) and expected.shape[1] < free.shape[1]


@pytest.mark.usefixtures("uncompiled")
def test_assistants_by_transformers_names() -> None:
    target = tiny("llama")
    expected = plain(target, **arguments("llama"), max_new_tokens=14)

    def proposed(**named: Any) -> list[int]:
        options = {"max_new_tokens": 14, "schedule": "constant", "return_dict_in_generate": True}
        output = ours(target, **arguments("llama"), **options, **named)
        assert torch.equal(output.sequences, expected)
        return output.stats.proposed_at

    lookup = proposed(draft_model=PromptLookup(3, 1, repeat=False), num_draft_tokens=4)
    assert proposed(prompt_lookup_num_tokens=4, max_matching_ngram_size=3) == lookup and sum(lookup) > 0
    assert proposed(assistant_early_exit=1, compile=True) == proposed(draft_model=EarlyExit(1))
    kept = _kept[target].decoder
    assert proposed(assistant_early_exit=1, compile=True) and _kept[target].decoder is kept


def test_num_assistant_tokens_of_transformers() -> None:
    """A default of transformers is nobody's wish, and the generation config of the draft counts as well."""
    target = shared_tiny("llama")
    draft = perturbed(target)

    def proposed(own: dict[str, Any] | None = None, **options: Any) -> list[int]:
        asked = copy.copy(draft)
        asked.generation_config = GenerationConfig(**(own or {}))
        steps: list[Step] = []
        call = ONE_PROMPT | {"assistant_model": asked, "token_streamer": steps.append}
        ours(target, **call, **options)
        return [step.num_proposed[0] for step in steps[:2]]

    constant, three = proposed(), proposed(num_draft_tokens=3)
    assert constant == proposed(num_draft_tokens=5, schedule="constant") and constant[0] == 5
    heuristic = proposed(num_draft_tokens=3, schedule="heuristic")
    assert len({tuple(each) for each in (constant, three, heuristic)}) == 3
    config = {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "heuristic_transient"}
    cases: list[tuple[list[int], dict[str, Any] | None, dict[str, Any]]] = [
        (three, None, {"num_assistant_tokens": 3, "assistant_confidence_threshold": 0.0}),
        (three, {"num_assistant_tokens": 3}, {}),
        (three, config | {"num_assistant_tokens": 7}, {"num_draft_tokens": 3, "schedule": "constant"}),
        (three, {"num_assistant_tokens": 7}, {"generation_config": GenerationConfig(num_assistant_tokens=3)}),
        (constant, None, {"generation_config": GenerationConfig(assistant_confidence_threshold=0.4)}),
        (heuristic, None, config),
        (heuristic, config, {}),
        (heuristic, {"num_assistant_tokens": 3}, {"num_assistant_tokens_schedule": "heuristic"}),
        (proposed(num_draft_tokens=20), None, {"num_assistant_tokens": 20}),
        (proposed(num_draft_tokens=20), {"num_assistant_tokens": 20}, {}),
    ]
    for expected, own, options in cases:
        assert proposed(own, **options) == expected, (own, options)
    threshold = "assistant_confidence_threshold: expected None or 0, got 0.6"
    bad: list[tuple[tuple[Any, dict[str, Any]], type[Exception], str]] = [
        ((None, {"assistant_confidence_threshold": 0.6}), NotImplementedError, threshold),
        (({"assistant_confidence_threshold": 0.6}, {}), NotImplementedError, threshold),
        ((None, {"num_assistant_tokens": 3, "num_draft_tokens": 3}), ValueError, "num_assistant_tokens: .* num_draft"),
        ((None, config | {"schedule": "heuristic"}), ValueError, "num_assistant_tokens_schedule: .* beside schedule"),
        ((None, {"num_assistant_tokens_schedule": "none"}), ValueError, "num_assistant_tokens_schedule: expected one"),
        (({"num_assistant_tokens": 0}, {}), ValueError, "num_assistant_tokens: expected a number >= 1, got 0"),
    ]
    assert raised(lambda case: proposed(case[0], **case[1]), bad) == []
    for name in ("num_draft_tokens", "num_assistant_tokens"):
        with pytest.raises(ValueError, match=f"{name}: expected None beside prompt_lookup_num_tokens"):
            ours(target, **ONE_PROMPT, prompt_lookup_num_tokens=3, **{name: 4})


def test_texts_longer_than_the_model_was_made_for() -> None:
    """transformers goes on where positions are computed, and fails where they were learned."""
    long = {**ONE_PROMPT, "max_new_tokens": 24}
    target = tiny("llama", max_position_embeddings=20)
    expected = plain(target, **long)
    for draft in (None, shared_tiny("llama")):
        with pytest.warns(UserWarning, match="may become 29, and the target was made for 20"):
            assert torch.equal(ours(target, **long, draft_model=draft), expected)
    with pytest.raises(ValueError, match="within the 20 that the target reads, got 29"):
        ours(tiny("gpt2", n_positions=20), **long)


def test_right_padded_prompts_stay_as_given() -> None:
    """Each row goes on after its own last token, where transformers would go on after the padding."""
    target = shared_tiny("llama")
    left = plain(target, **arguments("llama", "left"), max_new_tokens=9)
    output = ours(target, **arguments("llama", "right"), max_new_tokens=9, draft_model=target)
    width = output.shape[1] - 9
    assert torch.equal(output[:, :width], arguments("llama", "right")["input_ids"])
    assert torch.equal(output[:, width:], left[:, width:])


@pytest.mark.parametrize("family", ["whisper", "t5"])
def test_the_encoder_runs_once_or_not_at_all(family: str) -> None:
    target = copy.deepcopy(shared_tiny(family))
    calls = []
    target.get_encoder().register_forward_hook(lambda *call: calls.append(1))
    options = arguments(family)
    ours(target, **options, max_new_tokens=4)
    assert len(calls) == 1
    # Its output in place of its input.
    with torch.no_grad():
        name = target.main_input_name
        mask = {"attention_mask": options["attention_mask"]} if "attention_mask" in options else {}
        options["encoder_outputs"] = target.get_encoder()(options.pop(name), **mask)
    expected = plain(shared_tiny(family), **arguments(family), max_new_tokens=8)
    assert torch.equal(ours(target, **options, max_new_tokens=8), expected) and len(calls) == 2
    with pytest.raises(ValueError, match=f"inputs: expected {name} for the encoder"):
        ours(target, **options, max_new_tokens=8, draft_model=perturbed(target))


def test_whispers_own_generate() -> None:
    target = copy.deepcopy(shared_tiny("whisper"))
    target.generation_config.suppress_tokens = [5, 9]
    target.generation_config.begin_suppress_tokens = [7]
    features = encoder_inputs("whisper")
    assert features is not None
    options = {**features, "decoder_input_ids": arguments("whisper")["decoder_input_ids"], "max_new_tokens": 10}
    expected = target.generate(**options)
    output = target.generate(**options, custom_generate=custom_generate, draft_model=perturbed(target))
    assert torch.equal(output, expected)


def test_several_sequences_of_one_prompt() -> None:
    target = shared_tiny("llama")
    options = {**arguments("llama"), "max_new_tokens": 8, "do_sample": True, "top_k": 0, "num_return_sequences": 4}
    output, again, other = (ours(target, **options, draft_model=perturbed(target), seed=seed) for seed in (3, 3, 4))
    assert output.shape == (12, 15)
    assert torch.equal(output[:, :7], padded(PROMPTS, "left")[0].repeat_interleave(4, 0))
    assert len({tuple(row) for row in output[:4].tolist()}) > 1
    assert torch.equal(output, again) and not torch.equal(output, other)
    # transformers refuses the two together.
    assert torch.equal(output, ours(target, **options, assistant_model=perturbed(target), seed=3))
    # A draft with an encoder of its own, which reads the input of each sequence.
    target, steps = shared_tiny("t5"), list[Step]()
    options = {**arguments("t5"), "max_new_tokens": 8, "do_sample": True, "top_k": 0, "num_return_sequences": 2}
    output = ours(target, **options, draft_model=copy.deepcopy(target), seed=3, token_streamer=steps.append)
    assert all(step.num_accepted == step.num_proposed for step in steps)
    assert streamed(steps, 6) == output[:, 3:].tolist()


@pytest.mark.parametrize(
    ("filters", "verify"),
    [
        ({}, "exact"),
        ({"top_k": 4}, "block"),
        ({"top_k": 0, "top_p": 0.7}, "exact"),
        ({"top_k": 0}, "sigmoid"),
        ({"top_k": 30, "top_p": 0.9, "min_p": 0.05}, "exact"),
    ],
    ids=str,
)
def test_filters_are_those_of_sampling_params(filters: dict[str, Any], verify: str) -> None:
    """Without a top_k, transformers' own default of 50 filters."""
    target = shared_tiny("llama")
    # A draft whose tokens are rejected under these bounds, and rarely under the default ones.
    draft, verifier = perturbed(target, 0.2), Verifier("sigmoid", alpha=-2.0, beta=0.5)
    both: dict[str, Any] = {**arguments("llama"), "max_new_tokens": 12, "seed": 3}
    both |= {"verify": verifier if verify == "sigmoid" else verify}
    own = both | {"draft": draft, "sampling": SamplingParams(temperature=1.5, **({"top_k": 50} | filters))}
    output = ours(target, **both, do_sample=True, temperature=1.5, **filters, draft_model=draft)
    same = torch_specops.generate(target, **own)
    if verify == "sigmoid":
        assert torch_specops.generate(target, **own | {"verify": verify}).stats.num_steps < same.stats.num_steps
    for row in range(len(output)):
        text = same.new_tokens(row)
        assert output[row, both["input_ids"].shape[1] :][: len(text)].tolist() == text


def test_the_temperature_is_the_targets_law(report: Report) -> None:
    """The first new token's law, at a temperature that is not 1, over many rows."""
    target = shared_tiny("llama")
    ids = PROMPT.repeat(1500, 1)
    options = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": True, "top_k": 0, "seed": 1}
    with torch.no_grad():
        law = (target(PROMPT).logits[0, -1] / 2.5).softmax(-1)

    def p_value(temperature: float) -> float:
        draft = {"draft_model": perturbed(target), "num_draft_tokens": 1, "max_new_tokens": 2}
        output = ours(target, **options, **draft, temperature=temperature)
        return chi_square(torch.bincount(output[:, 5], minlength=VOCAB), law)

    expect_laws(report, "custom_generate", {"first token": p_value(2.5)})
    expect_caught(report, "custom_generate at another temperature", {"first token": p_value(1.0)})


@pytest.mark.usefixtures("uncompiled")
def test_a_compiled_decoder_is_kept_for_its_model() -> None:
    # Not a copy of the shared model: transformers may have hung hooks on that, which no pickle holds.
    target, draft = tiny("llama"), shared_tiny("llama")
    options = {**arguments("llama"), "max_new_tokens": 6, "draft_model": draft, "compile": True}
    expected = plain(target, **arguments("llama"), max_new_tokens=6)
    assert torch.equal(ours(target, **options), expected)
    kept = _kept[target].decoder
    # Another temperature or text changes nothing that was compiled, and an eager call keeps nothing.
    ours(target, **options, do_sample=True, top_k=0, temperature=0.5)
    ours(target, **(options | {"compile": False}))
    assert torch.equal(ours(target, **options), expected)
    assert _kept[target].decoder is kept
    # Nothing stays suppressed.
    tokens = expected[:, 7].tolist()
    for suppressed in ({"suppress_tokens": tokens}, {"begin_suppress_tokens": tokens[:1]}, {}):
        wanted = plain(target, **arguments("llama"), max_new_tokens=6, **suppressed)
        assert torch.equal(ours(target, **options, **suppressed), wanted)
    # What changes in the model is followed.
    target.set_output_embeddings(copy.deepcopy(tiny("llama", seed=5).get_output_embeddings()))
    changed = plain(target, **arguments("llama"), max_new_tokens=6)
    assert torch.equal(ours(target, **options), changed) and not torch.equal(changed, expected)
    ours(target, **options, num_draft_tokens=2)
    assert _kept[target].decoder is not kept
    duplicate = pickle.loads(pickle.dumps(target))
    assert duplicate not in _kept and torch.equal(ours(duplicate, **options), changed)


@pytest.mark.usefixtures("uncompiled")
def test_a_call_within_a_call_has_a_decoder_of_its_own() -> None:
    target = tiny("llama")
    options = {**ONE_PROMPT, "compile": True}
    expected = ours(target, **options)
    kept, found = _kept[target].decoder, []
    inner = {**options, "token_streamer": lambda step: found.append(target in _kept)}
    again = ours(target, **{**options, "token_streamer": lambda step: found or ours(target, **inner)})
    # The call inside the other one made a decoder of its own, because the first one was in use.
    assert found and not any(found) and torch.equal(again, expected)
    assert _kept[target].decoder is kept


def test_a_drafter_of_transformers_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any batch, eager and compiled."""
    calls: list[Any] = []
    own = generate.read_drafter
    monkeypatch.setattr(generate, "read_drafter", lambda *given: calls.append(given) or own(*given))
    monkeypatch.setattr(compilation, "compile_piece", lambda function, **options: function)
    target, muse = tiny("llama"), new_muse()
    batch = arguments("llama") | {"max_new_tokens": 14}
    options = {"assistant_model": muse, "speculation_type": "dflash", "schedule": "constant"}
    options |= {"return_dict_in_generate": True}
    expected = ours(target, **batch)
    for compile in (False, True, True):
        output = ours(target, **batch, **options, compile=compile)
        assert torch.equal(output.sequences, expected)
        assert len(output.stats.accepted_at) == BLOCK - 1
        kept = _kept.get(target)
    assert len(calls) == 1 and kept is not None
    draft = kept.decoder.draft
    assert isinstance(draft, DFlash) and draft.head.fc.weight.data_ptr() == muse.encoder.fc.weight.data_ptr()
    assert torch.equal(ours(target, **batch, assistant_model=DFlash(draft.head), speculation_type="dflash"), expected)
    # The same network, sampled, is another draft.
    output = ours(target, **batch, **(options | {"assistant_model": DFlash(draft.head, sampled=True)}), compile=True)
    assert torch.equal(output.sequences, expected) and _kept[target].decoder is not kept.decoder
    assert len(ours(target, **batch, **options, num_draft_tokens=2).stats.accepted_at) == 2
    with pytest.raises(ValueError, match="num_draft_tokens: this draft has at most 8 tokens per step, got 9"):
        ours(target, **batch, **options, num_draft_tokens=9)
    with pytest.raises(ValueError, match=r"config: expected architectures .* got \[\], None and 'llama'"):
        ours(target, **batch, assistant_model=tiny("llama"), speculation_type="dflash")


ENSEMBLE = {"assistant_model": EarlyExit(1), "assistant_ensemble_weight": 0.5}
NOT_DONE: list[tuple[dict[str, Any], str]] = [
    (
        {"num_beams": 2},
        "generation_config: expected greedy decoding or sampling, got beam_search .*torch_specops.beam.beam_search",
    ),
    ({"speculation_type": "medusa"}, "speculation_type: expected None or 'dflash', got 'medusa'"),
    ({"return_dict_in_generate": True, "output_attentions": True}, "output_attentions: expected False"),
    (ENSEMBLE, "assistant_ensemble_weight: .* got 0.5"),
    ({"assistant_model": EarlyExit(1), "assistant_tokenizer": 1}, "assistant_tokenizer: .*TokenMap"),
]
# Arguments of our interface, and of other libraries.
WRONG_TYPES: list[tuple[dict[str, Any], str]] = [
    ({"draft": PromptLookup()}, "draft: custom_generate has no such argument; pass assistant_model="),
    ({"stop": "a"}, "stop: custom_generate has no such argument; pass stop_strings="),
    ({"speculation_type": "dflash"}, "assistant_model: expected a DFlash drafter of .*, got <class 'NoneType'>"),
    ({"draft_model": "prompt-lookup"}, r"draft: expected a model, .* got .*'str'>; .*PromptLookup\(\)"),
]
BESIDE = "expected None beside"
WRONG_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"draft_model": EarlyExit(1), "prompt_lookup_num_tokens": 3}, f"prompt_lookup_num.*: {BESIDE} draft_model, got 3"),
    ({"assistant_early_exit": 1, "prompt_lookup_num_tokens": 3}, f"assistant_early_exit: {BESIDE} prompt_lookup_num"),
    ({"assistant_model": EarlyExit(1), "draft_model": EarlyExit(1)}, f"assistant_model: {BESIDE} draft_model"),
    ({"streamer": TokenStreamer(), "token_streamer": print}, f"streamer: {BESIDE} token_streamer"),
    (
        {cache_argument(shared_tiny("llama").forward): DynamicCache()},
        "(past_key_values|cache): the loop has a cache of its own",
    ),
    ({"position_ids": torch.tensor([[1, 2, 3, 4, 5]])}, "position_ids: expected each row's tokens counted from 0"),
    ({"inputs_embeds": torch.zeros(1, 5, 32, dtype=torch.float64)}, "inputs_embeds: this loop does not pass it"),
]


def test_what_is_not_done_is_an_error() -> None:
    cases = [(options, NotImplementedError, message) for options, message in NOT_DONE]
    cases += [(options, TypeError, message) for options, message in WRONG_TYPES]
    cases += [(options, ValueError, message) for options, message in WRONG_VALUES]
    assert raised(lambda options: ours(shared_tiny("llama"), **(ONE_PROMPT | options)), cases) == []


def test_a_wrapper_that_changes_the_inputs_is_refused() -> None:
    # So PEFT's wrappers put their virtual tokens before the prompt.
    target, wrapper = tiny("llama"), tiny("llama")
    target.prepare_inputs_for_generation = wrapper.prepare_inputs_for_generation
    with pytest.raises(ValueError, match=r"model: a wrapper .* changes its inputs"):
        ours(target, **ONE_PROMPT)
    del target.prepare_inputs_for_generation
    assert torch.equal(ours(target, **ONE_PROMPT), plain(target, **ONE_PROMPT))


def test_adapters_of_single_rows_are_refused() -> None:
    """PEFT's wrapper keeps `adapter_names` for itself, and hands them to its layers in hooks."""
    target = tiny("llama")

    def name(module: Any, args: Any, kwargs: Any, adapter_names: Any) -> Any:
        return args, kwargs

    hook = functools.partial(name, adapter_names=["default"])
    handle = target.model.layers[1].mlp.register_forward_pre_hook(hook, with_kwargs=True)
    with handle, pytest.raises(NotImplementedError, match=r"adapter_names: .* expected None, and a call for each"):
        ours(target, **ONE_PROMPT)
    assert torch.equal(ours(target, **ONE_PROMPT), plain(target, **ONE_PROMPT))


def test_criteria_of_the_user_and_what_moves_no_maximum() -> None:
    target = shared_tiny("llama")
    options = {
        **arguments("llama"),
        "max_new_tokens": 9,
        "renormalize_logits": True,
        "remove_invalid_values": True,
        "logits_processor": LogitsProcessorList([TemperatureLogitsWarper(3.0)]),
    }
    # The prompts have seven tokens, and one comes at least.
    for limits, length in (((13, 11), 11), ((7,), 8)):
        options["stopping_criteria"] = StoppingCriteriaList([MaxLengthCriteria(limit) for limit in limits])
        output = ours(target, **options, draft_model=target)
        assert torch.equal(output, plain(target, **options)) and output.shape == (3, length)
