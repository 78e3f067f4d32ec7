"""Models with layers that keep a state of the text: `generate`'s tokens, and states that are rolled back."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from unittest import mock

import pytest
import torch
from chains import expect_caught, expect_laws
from report import Report
from tiny_hybrids import PROMISED, tiny_hybrid
from tiny_laws import FEWER_TRIALS, V, first_tokens, model_laws, p_values
from tiny_models import greedy_alone, padded, perturbed
from torch import Tensor, nn

from torch_specops import SamplingParams, SpeculativeDecoder
from torch_specops.drafts import PromptLookup
from torch_specops.hf import custom_generate, language_model, recurrences
from torch_specops.hf.hybrid import HybridModel

# One of each recurrence: gated delta rule, Mamba2, Mamba1, convolution.
RECURRENCES = ("qwen3_5_text", "granitemoehybrid", "jamba", "lfm2")
GREEDY = SamplingParams(temperature=0.0)
PROMPTS = ([5, 6, 7, 8, 5, 6, 7, 8, 9, 5, 6], [3], [11, 12, 13, 11, 12, 13, 11, 12], [4, 9] * 65)
NEW = 12

shared = cache(tiny_hybrid)


@pytest.mark.parametrize(
    "kind", [kind if kind in RECURRENCES else pytest.param(kind, marks=pytest.mark.slow) for kind in PROMISED]
)
def test_greedy_text_is_that_of_generate(kind: str) -> None:
    """Rows of 1 to 130 tokens accept and reject drafts at their own places."""
    model = shared(kind)
    expected = [greedy_alone(model, prompt, NEW) for prompt in PROMPTS]
    ids, mask = padded(PROMPTS, "left")
    for num_drafts, draft in (
        (1, None),
        (8, PromptLookup(1, 1)),
        (1, perturbed(model, 0.01)),
        (4, perturbed(model, 0.02)),
    ):
        decoder = SpeculativeDecoder(model, draft, num_draft_tokens=num_drafts, sampling=GREEDY)
        output = decoder.generate(ids, attention_mask=mask, max_new_tokens=NEW, pad_token_id=0)
        assert [output.new_tokens(row) for row in range(len(PROMPTS))] == expected
        assert output.stats.state_bytes > 0
    assert 0 < output.stats.num_accepted < output.stats.num_proposed


def test_copies_of_a_prompt_go_on_by_themselves() -> None:
    """Rows whose prompt was read in another row have read it too: those that go on alone begin no text."""
    model, prompt, limits = shared("qwen3_5_text"), PROMPTS[0], [0, 0, 0, 12]
    expected = greedy_alone(model, prompt, 12)
    for draft in (None, PromptLookup(1, 1)):
        decoder = SpeculativeDecoder(model, draft, num_draft_tokens=8, sampling=GREEDY)
        output = decoder.generate(torch.tensor([prompt] * 4), max_new_tokens=limits, pad_token_id=0)
        assert output.new_tokens(3) == expected


def test_hybrid_type_with_attention_alone() -> None:
    """Its class says that it is stateful."""
    model = tiny_hybrid("granitemoehybrid", layer_types=["full_attention"] * 2, num_hidden_layers=2)
    output = SpeculativeDecoder(model, perturbed(model, 0.02), num_draft_tokens=3, sampling=GREEDY).generate(
        torch.tensor([PROMPTS[0]]), max_new_tokens=8, pad_token_id=0
    )
    assert output.new_tokens(0) == greedy_alone(model, PROMPTS[0], 8) and output.stats.state_bytes == 0


# The formula of docs/models.md: numbers in a state of the two layers that have one, recurrent and of convolutions.
STATE_SIZES = {
    # value heads * key width * value width; (2 * key heads * key width + value heads * value width) * kernel.
    "qwen3_5_text": (2 * 4 * 8 * 8, 2 * (2 * 2 * 8 + 4 * 8) * 4),
    # heads * head width * state size; (heads * head width + 2 * groups * state size) * kernel.
    "granitemoehybrid": (2 * 8 * 8 * 8, 2 * (8 * 8 + 2 * 1 * 8) * 4),
}


@pytest.mark.parametrize("kind", STATE_SIZES)
def test_memory_of_the_ring_is_what_the_page_says(kind: str) -> None:
    batch, num_drafts, (recurrent, conv) = 2, 5, STATE_SIZES[kind]
    decoder = SpeculativeDecoder(shared(kind), PromptLookup(), num_draft_tokens=num_drafts, sampling=GREEDY)
    stats = decoder.generate(torch.tensor([PROMPTS[0]] * batch), max_new_tokens=1, pad_token_id=0).stats
    # The models are float64.
    assert stats.state_bytes == batch * (num_drafts + 2) * (4 * recurrent + 8 * conv)


def test_a_model_without_attention_behind_generate() -> None:
    model, prompt = shared("mamba2"), torch.tensor([[5, 6, 7, 8, 5, 6]])
    output = model.generate(prompt, max_new_tokens=8, do_sample=False, custom_generate=custom_generate)
    assert output[0, 6:].tolist() == greedy_alone(model, prompt[0].tolist(), 8)


@pytest.mark.parametrize("kind", ["granitemoehybrid", "qwen3_5_text"])
def test_steps_run_under_autocast(kind: str) -> None:
    """A prompt may leave states of 16 bits, and steps compute in float32. Near ties of 16 bits are not compared."""
    model, prompt = tiny_hybrid(kind).float(), torch.tensor([PROMPTS[0]])
    assistant = perturbed(model, 0.01)
    # The check at first use compares logits. Sharp random weights make much of the rounding of 16 bits.
    for each in (model, assistant):
        language_model(each)
    with torch.autocast("cpu", torch.bfloat16):
        texts = [
            SpeculativeDecoder(model, draft, num_draft_tokens=3, sampling=GREEDY)
            .generate(prompt, max_new_tokens=8, pad_token_id=0)
            .new_tokens(0)
            for draft in (None, assistant)
        ]
    assert len(texts[0]) == len(texts[1]) == 8


# The texts of two rows, and what a step reads behind them; of its drafts, 1 and 3 are accepted.
TEXTS = ([5, 6, 7, 8, 5, 6, 7], [11, 12, 13])
STEP = torch.tensor([[20, 21, 22, 23, 24], [30, 31, 32, 33, 34]])
KEPT = torch.tensor([[1], [3]])
NEXT = torch.tensor([[40, 41, 42, 43, 44], [50, 51, 52, 53, 54]])


def test_time_steps_are_limited_in_prompts_alone() -> None:
    """transformers limits the time steps of Mamba2 where it reads a prompt, its last token included, and not where it
    decodes. A loop reads that token in its first step."""
    for kind, limit in (("mamba2", {"time_step_limit": (0.5, 0.9)}), ("nemotron_h", {"time_step_min": 0.5})):
        model = tiny_hybrid(kind, **limit)
        expected = [greedy_alone(model, text, 8) for text in TEXTS]
        ids, mask = padded(TEXTS, "left")
        for draft in (None, perturbed(model, 0.02)):
            decoder = SpeculativeDecoder(model, draft, num_draft_tokens=3, sampling=GREEDY)
            output = decoder.generate(ids, attention_mask=mask, max_new_tokens=8, pad_token_id=0)
            assert [output.new_tokens(row) for row in range(len(TEXTS))] == expected


def begun(kind: str) -> HybridModel:
    model = language_model(shared(kind))
    assert isinstance(model, HybridModel)
    model.expect(STEP.shape[1])
    model.start(2, 64)
    for row, text in enumerate(TEXTS):
        model.forward(torch.tensor([text]), torch.arange(len(text)).unsqueeze(0), 1, torch.tensor([row]))
    return model


def after_a_rejection(kind: str, step: Tensor, following: Tensor = NEXT) -> tuple[Tensor, list[Tensor]]:
    """The logits of a step behind the accepted drafts of `step`, and the states behind its tokens."""
    model, index = begun(kind), torch.arange(STEP.shape[1])
    lengths = torch.tensor([[len(text)] for text in TEXTS])
    model.forward(step, lengths + index)
    lengths += KEPT + 1
    logits = model.forward(following, lengths + index)
    rows, slots = torch.arange(2).unsqueeze(1), (lengths + index + 1) % model._require_cache().num_slots
    return logits, [ring[rows, slots] for ring in model._require_cache().rings]


@torch.no_grad()
@pytest.mark.parametrize("kind", RECURRENCES)
def test_a_rejected_draft_leaves_nothing(kind: str) -> None:
    """Bit for bit: states and logits are those of a text that never had it. Rows know nothing of each other."""
    logits, states = after_a_rejection(kind, STEP)
    rejected = torch.arange(STEP.shape[1]) > KEPT
    others = torch.where(rejected, STEP + 5, STEP)
    found, found_states = after_a_rejection(kind, others)
    assert torch.equal(found, logits) and all(map(torch.equal, found_states, states))
    neighbour = torch.stack([others[0], STEP[1] + 3])
    found, found_states = after_a_rejection(kind, neighbour, torch.stack([NEXT[0], NEXT[1] + 1]))
    assert torch.equal(found[0], logits[0]) and not torch.equal(found[1], logits[1])
    assert all(torch.equal(one[0], two[0]) for one, two in zip(found_states, states, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("kind", RECURRENCES)
def test_states_are_those_of_single_tokens(kind: str) -> None:
    """Within float32 rounding, in which transformers keeps states: a step at once, and its tokens one after another,
    which also pass around the ring."""
    model, one_by_one = begun(kind), begun(kind)
    lengths = torch.tensor([[len(text)] for text in TEXTS])
    positions = lengths + torch.arange(STEP.shape[1])
    for tokens in (STEP, NEXT):
        at_once = model.forward(tokens, positions)
        singly = [one_by_one.forward(tokens[:, [i]], positions[:, [i]]) for i in range(STEP.shape[1])]
        torch.testing.assert_close(torch.cat(singly, 1), at_once, rtol=1e-4, atol=1e-4)
        positions = positions + STEP.shape[1]


def behind_a_rejected_draft(positions: Tensor, num_slots: int) -> Tensor:
    """A rejected draft is not undone."""
    return (positions + 1) % num_slots


def one_behind(positions: Tensor, num_slots: int) -> Tensor:
    return (positions - 1) % num_slots


def without_the_last_draft(positions: Tensor, num_slots: int) -> Tensor:
    """A step without drafts begins with the state that the step before it began with."""
    return positions % num_slots if positions.shape[1] > 1 else one_behind(positions, num_slots)


WRONG = (behind_a_rejected_draft, one_behind, without_the_last_draft)


def sampling_hybrid() -> nn.Module:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 1}
    sizes |= {"num_key_value_heads": 1, "layer_types": ["linear_attention", "full_attention"]}
    sizes |= {"linear_num_value_heads": 1, "linear_num_key_heads": 1}
    return tiny_hybrid("qwen3_5_text", vocab=V, **sizes).float()


@pytest.mark.parametrize("wrong", [None, WRONG[0], *(pytest.param(each, marks=pytest.mark.slow) for each in WRONG[1:])])
def test_sampled_text_has_the_law_of_the_model(wrong: Callable[..., Tensor] | None, report: Report) -> None:
    model = sampling_hybrid()
    draft, laws = perturbed(model, 0.2), model_laws(model, 0.8)
    # The check at first use would refuse a wrong loop.
    language_model(model)
    slots = recurrences.slots_before if wrong is None else wrong
    with mock.patch.object(recurrences, "slots_before", slots):
        trials = FEWER_TRIALS if wrong is None else FEWER_TRIALS // 4
        found = p_values(first_tokens(model, draft, 1, 0.8, trials), laws)
    if wrong is None:
        expect_laws(report, "loop, hybrid", found)
    else:
        expect_caught(report, f"loop, hybrid, {wrong.__name__}", found)
