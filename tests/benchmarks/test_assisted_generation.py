"""Transformers' assisted generation through the ops, as the papers' scripts run it: the same text for a seed, the
target's law, and nothing left behind in transformers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import pytest
import torch
from benchmark_scripts import BENCHMARKS, needs_benchmarks, script
from marks import slow
from tiny_models import encoder_inputs, perturbed, tiny
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation import utils as generation

from torch_specops import reference

pytestmark = needs_benchmarks
assisted = script("assisted") if BENCHMARKS.exists() else None
ORIGINAL = generation._speculative_sampling
PROMPT = torch.tensor([[1, 17, 5, 33, 17, 5, 48]])


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    assert generation._speculative_sampling is ORIGINAL


def pair(family: str = "llama") -> list[PreTrainedModel]:
    """A target and a draft that agree in part."""
    # The cache that transformers makes for T5 has as many layers as the encoder.
    target = tiny(family, **({"num_layers": 2} if family == "t5" else {}))
    draft = perturbed(target, 0.1)
    draft.generation_config.num_assistant_tokens = 4
    draft.generation_config.num_assistant_tokens_schedule = "heuristic"
    draft.generation_config.assistant_confidence_threshold = 0.0
    return [target, draft]


def sampled(models: list[PreTrainedModel], seed: int, max_new_tokens: int = 24, **options: Any) -> list[int]:
    """The new tokens of `generate` for a seed."""
    target, draft = models
    inputs: dict[str, Any] = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}
    start = PROMPT.shape[1]
    if target.config.is_encoder_decoder:
        inputs, start = encoder_inputs(target.config.model_type, slice(1)) or {}, 1
    # The heuristic's number outlives a call.
    number = draft.generation_config.num_assistant_tokens
    torch.manual_seed(seed)
    options |= {"do_sample": True, "max_new_tokens": max_new_tokens, "pad_token_id": 0}
    output = GenerationMixin.generate(target, **inputs, assistant_model=draft, **options)
    draft.generation_config.num_assistant_tokens = number
    return output[0, start:].tolist()


# Tokens at which some drafts that are accepted end a text.
EARLY_EOS = {"eos_token_id": [33, 50, 59, 44]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "temperature and top-k": ("llama", {"temperature": 0.7, "top_k": 7}),
    "top-p": ("gpt2", {"top_p": 0.8, "top_k": 0}),
    "an eos that comes early": ("llama", EARLY_EOS),
    "t5": ("t5", {}),
}


@pytest.mark.parametrize("case", [case if case == "t5" else slow(case) for case in CASES])
def test_exact_gives_transformers_text_for_a_seed(case: str) -> None:
    family, options = CASES[case]
    models = pair(family)
    plain = [sampled(models, seed, **options) for seed in range(2)]
    counted = []
    for method in ("exact", "transformers"):
        with assisted.assisted_generation(method) as stats:
            assert [sampled(models, seed, **options) for seed in range(2)] == plain
        counted.append((stats.calls, stats.num_draft_tokens, stats.num_accepted, stats.num_new_tokens))
    # Enough steps for a difference to show, with accepted and rejected drafts among them.
    calls, num_draft_tokens, num_accepted, _ = counted[0]
    assert calls > 8 and 0 < num_accepted < num_draft_tokens
    assert counted[0] == counted[1]


def recorded_calls(models: list[PreTrainedModel], seeds: range, **options: Any) -> list[tuple[Any, Any]]:
    """The arguments of each call of the sampling function under "exact", and what it returned."""
    calls = []
    with assisted.assisted_generation("exact"), pytest.MonkeyPatch.context() as patch:
        routed = generation._speculative_sampling

        def recording(*arguments: Any, **named: Any) -> Any:
            found = routed(*arguments, **named)
            calls.append((arguments, found))
            return found

        patch.setattr(generation, "_speculative_sampling", recording)
        for seed in seeds:
            sampled(models, seed, **options)
    return calls


def test_the_numbers_are_those_of_the_calls() -> None:
    models = pair()
    calls = recorded_calls(models, range(4), **EARLY_EOS)
    kept = num_ended = 0
    # Releases after 5.17 do not say whether the drafts end the text.
    for (ids, _, num_drafts, _, *done), (tokens, num_matches) in calls:
        drafts = ids[0, -num_drafts:].tolist()
        own = tokens[0].tolist()
        # How many of the first tokens are drafts. No recovered token equals the draft that it replaces.
        kept += sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(own, drafts, strict=False)))
        assert int(num_matches) == len(own) - 1
        num_ended += done != [] and bool(done[0]) and own == drafts
    assert num_ended > 0 or done == []
    with assisted.assisted_generation() as stats:
        length = sum(len(sampled(models, seed, **EARLY_EOS)) for seed in range(4))
    assert stats.calls == len(calls) == len(stats.step_seconds)
    assert stats.num_draft_tokens == sum(call[2] for call, _ in calls)
    assert stats.num_accepted == kept and 0 < kept < stats.num_draft_tokens
    # Where one token is left there are no drafts, and the last token is drawn elsewhere.
    assert length - 4 <= stats.num_new_tokens and (done == [] or stats.num_new_tokens <= length)
    assert all(seconds > 0 for seconds in stats.step_seconds)


def test_sigmoid_is_what_the_oracle_says() -> None:
    """On the calls of real steps, for the uniform numbers that the global generator gives."""
    accepted = [0, 0]
    for call, found in recorded_calls(pair(), range(4)):
        ids, candidate_logits, num_drafts, new_logits, *done = call
        for alpha, beta in ((-10.0, 10.0), (-1e3, 1e3)):
            torch.manual_seed(num_drafts)
            uniforms = torch.rand(1, num_drafts), torch.rand(1)
            expected, n = reference.verify_sigmoid(
                new_logits, ids[:, -num_drafts:], candidate_logits, *uniforms, alpha, beta
            )
            torch.manual_seed(num_drafts)
            with assisted.assisted_generation("sigmoid", alpha, beta) as stats:
                tokens, num_matches = generation._speculative_sampling(*call)
            if done and bool(done[0]) and int(n) == num_drafts:
                assert tokens.tolist() == ids[:, -num_drafts:].tolist() and int(num_matches) == num_drafts - 1
            else:
                assert tokens[0].tolist() == expected[0, : int(n) + 1].tolist() and int(num_matches) == int(n)
            accepted[0] += stats.num_accepted
        accepted[1] += 2 * int(found[1])
    # At these scales nearly every draft is kept.
    assert accepted[0] > 1.3 * accepted[1]


def test_zero_residual_gives_a_target_token() -> None:
    """Rounding may reject where p and q are equal; transformers would divide by zero."""
    logits = torch.full((1, 2, 5), -torch.inf)
    logits[..., 3] = 0.0
    none_accepted = lambda *_: torch.zeros(1, dtype=torch.int64)  # noqa: E731
    tokens, _ = assisted._sample(none_accepted, True, torch.tensor([[1, 3]]), logits[:, :1], 1, logits)
    assert tokens.tolist() == [[3]]


def test_a_mixture_of_the_laws_is_refused() -> None:
    models = pair()
    refused = pytest.raises(NotImplementedError, match=r"assistant_ensemble_weight: .* got 0.5")
    with assisted.assisted_generation("exact"), refused:
        sampled(models, 0, assistant_ensemble_weight=0.5)
    with assisted.assisted_generation("transformers") as stats:
        sampled(models, 0, assistant_ensemble_weight=0.5)
    assert stats.calls > 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"next_token": "uniform"}, {"method": "sigmoid"}], ids=str)
def test_compiled_the_text_is_the_same(options: dict[str, Any]) -> None:
    models = pair()
    with assisted.assisted_generation(**options):
        eager = [sampled(models, seed) for seed in range(3)]
    with assisted.assisted_generation(**options, compile=True) as stats:
        assert [sampled(models, seed) for seed in range(3)] == eager
    assert stats.calls > 6
