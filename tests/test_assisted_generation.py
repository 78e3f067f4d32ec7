"""Transformers' assisted generation through the ops: the same text for a seed, the target's law, and nothing left
behind in transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import Any

import pytest
import torch
from tiny_models import encoder_inputs, perturbed, raised, tiny
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation import utils as generation

from torch_specops import reference
from torch_specops.hf import assisted, assisted_generation
from torch_specops.laws import chi_square

ORIGINAL = generation._speculative_sampling
PROMPT = torch.tensor([[1, 17, 5, 33, 17, 5, 48]])


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    assert generation._speculative_sampling is ORIGINAL
    assert assisted._open == []


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
    "llama": ("llama", {}),
    "temperature and top-k": ("llama", {"temperature": 0.7, "top_k": 7}),
    "top-p": ("gpt2", {"top_p": 0.8, "top_k": 0}),
    "an eos that comes early": ("llama", EARLY_EOS),
    "t5": ("t5", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_exact_gives_the_text_that_transformers_gives_for_a_seed(case: str) -> None:
    family, options = CASES[case]
    models = pair(family)
    plain = [sampled(models, seed, **options) for seed in range(4)]
    counted = []
    for method in ("exact", "transformers"):
        with assisted_generation(method) as stats:
            assert [sampled(models, seed, **options) for seed in range(4)] == plain
        counted.append((stats.calls, stats.num_draft_tokens, stats.num_accepted, stats.num_new_tokens))
    # Enough steps for a difference to show, with accepted and rejected drafts among them.
    calls, num_draft_tokens, num_accepted, _ = counted[0]
    assert calls > 8 and 0 < num_accepted < num_draft_tokens
    assert counted[0] == counted[1]


Call = tuple[Tensor, Tensor, int, Tensor, bool]


def recorded_calls(models: list[PreTrainedModel], seeds: range, **options: Any) -> list[tuple[Call, Any]]:
    """The arguments of each call of the sampling function under "exact", and what it returned."""
    calls = []
    with assisted_generation("exact"), pytest.MonkeyPatch.context() as patch:
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
    for (ids, _, num_drafts, _, done), (tokens, num_matches) in calls:
        drafts = ids[0, -num_drafts:].tolist()
        own = tokens[0].tolist()
        # How many of the first tokens are drafts. No recovered token equals the draft that it replaces.
        kept += sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(own, drafts, strict=False)))
        assert int(num_matches) == len(own) - 1
        num_ended += bool(done) and own == drafts
    assert num_ended > 0
    with assisted_generation() as stats:
        assert stats.calls == 0 and math.isnan(stats.acceptance_rate) and math.isnan(stats.mean_acceptance_length)
        length = sum(len(sampled(models, seed, **EARLY_EOS)) for seed in range(4))
    assert stats.calls == len(calls) == len(stats.step_seconds)
    assert stats.num_draft_tokens == sum(call[2] for call, _ in calls)
    assert stats.num_accepted == kept and 0 < kept < stats.num_draft_tokens
    # Where one token is left there are no drafts, and the last token is drawn elsewhere.
    assert length - 4 <= stats.num_new_tokens <= length
    assert stats.acceptance_rate == kept / stats.num_draft_tokens
    assert stats.mean_acceptance_length == stats.num_new_tokens / stats.calls
    assert stats.seconds == sum(stats.step_seconds) > 0


def test_sigmoid_is_what_the_oracle_says() -> None:
    """On the calls of real steps, for the uniform numbers that the global generator gives."""
    accepted = [0, 0]
    for call, found in recorded_calls(pair(), range(4)):
        ids, candidate_logits, num_drafts, new_logits, done = call
        for alpha, beta in ((-10.0, 10.0), (-1e3, 1e3)):
            torch.manual_seed(num_drafts)
            uniforms = torch.rand(1, num_drafts), torch.rand(1)
            expected, n = reference.verify_sigmoid(
                new_logits, ids[:, -num_drafts:], candidate_logits, *uniforms, alpha, beta
            )
            torch.manual_seed(num_drafts)
            with assisted_generation("sigmoid", alpha, beta) as stats:
                tokens, num_matches = generation._speculative_sampling(*call)
            if bool(done) and int(n) == num_drafts:
                assert tokens.tolist() == ids[:, -num_drafts:].tolist() and int(num_matches) == num_drafts - 1
            else:
                assert tokens[0].tolist() == expected[0, : int(n) + 1].tolist() and int(num_matches) == int(n)
            accepted[0] += stats.num_accepted
        accepted[1] += 2 * int(found[1])
    # At these scales nearly every draft is kept.
    assert accepted[0] > 1.3 * accepted[1]


LAW_K, TRIALS = 2, 2000
# A draft that is often rejected, and a residual of two tokens.
TARGET_LAW = torch.tensor([[0.25, 0.25, 0.3, 0.2], [0.3, 0.2, 0.25, 0.25], [0.1, 0.2, 0.3, 0.4]])
DRAFT_LAW = torch.tensor([[0.5, 0.3, 0.1, 0.1], [0.1, 0.1, 0.5, 0.3]])


def law_p_value(next_token: str, wrong: Callable[..., tuple[Tensor, Tensor]] | None = None) -> float:
    """Chi-square of the first two tokens of a step, completed by draws from the target, whose law they must have."""
    p, q = TARGET_LAW, DRAFT_LAW
    target, draft = p.log().unsqueeze(0), q.log().unsqueeze(0)
    torch.manual_seed(11)
    drafts = torch.stack([torch.multinomial(row, TRIALS, replacement=True) for row in q], 1)
    counts = torch.zeros(4, 4, dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        if wrong is not None:
            patch.setattr(assisted, "verify_exact", wrong)
        with assisted_generation("exact", next_token=next_token):  # type: ignore[arg-type]
            for row in drafts:
                ids = torch.cat([torch.tensor([3, 0, 2]), row]).unsqueeze(0)
                tokens, _ = generation._speculative_sampling(ids, draft, LAW_K, target, False)
                text = tokens[0].tolist()
                if len(text) < 2:
                    text.append(int(torch.multinomial(p[1], 1)))
                counts[text[0], text[1]] += 1
    return chi_square(counts.flatten(), (p[0].unsqueeze(1) * p[1]).flatten())


def sides_swapped(target: Tensor, drafts: Tensor, draft: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    swapped = torch.cat([draft, target[:, -1:]], 1)
    return reference.verify_exact(swapped, drafts, target[:, :-1], *rest)


def one_number_for_two_purposes(
    target: Tensor, drafts: Tensor, draft: Tensor, accept: Tensor, sample: Tensor
) -> tuple[Tensor, Tensor]:
    return reference.verify_exact(target, drafts, draft, accept, accept[:, 0])


def unscaled_draft(target: Tensor, drafts: Tensor, draft: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """q at another temperature than the drafts were drawn at."""
    return reference.verify_exact(target, drafts, draft * 2, *rest)


def drafts_not_looked_at(target: Tensor, drafts: Tensor, draft: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return reference.verify_exact(target, torch.zeros_like(drafts), draft, *rest)


@pytest.mark.parametrize("next_token", ["multinomial", "uniform"])
def test_exact_has_the_law_of_the_target(next_token: str) -> None:
    assert law_p_value(next_token) > 1e-3


@pytest.mark.parametrize(
    ("wrong", "next_token"),
    [
        (sides_swapped, "uniform"),
        (sides_swapped, "multinomial"),
        (one_number_for_two_purposes, "uniform"),
        (unscaled_draft, "uniform"),
        (unscaled_draft, "multinomial"),
        (drafts_not_looked_at, "uniform"),
    ],
)
def test_a_wrong_mapping_has_another_law(wrong: Callable[..., tuple[Tensor, Tensor]], next_token: str) -> None:
    assert law_p_value(next_token, wrong) < 1e-6


def test_a_residual_of_zero_gives_a_token_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding may reject where p and q are equal; transformers would divide by zero."""
    monkeypatch.setattr(assisted, "_count", lambda *arguments: torch.zeros(1, dtype=torch.int64))
    logits = torch.full((1, 2, 5), -torch.inf)
    logits[..., 3] = 0.0
    with assisted_generation("exact"):
        tokens, _ = generation._speculative_sampling(torch.tensor([[1, 3]]), logits[:, :1], 1, logits, False)
    assert tokens.tolist() == [[3]]


# What replaces transformers' function, and what must not be taken for it.


def test_the_function_comes_back_after_an_exception() -> None:
    with pytest.raises(KeyError), assisted_generation():
        raise KeyError
    assert generation._speculative_sampling is ORIGINAL
    # A context that was made and not entered changes nothing.
    assisted_generation("sigmoid")


def test_the_innermost_context_counts() -> None:
    models = pair()
    with assisted_generation("exact") as outer:
        with assisted_generation("sigmoid") as inner:
            text = sampled(models, 0)
        assert inner.calls > 0 and outer.calls == 0
        assert sampled(models, 0) != text and outer.calls > 0


def test_contexts_may_close_in_any_order() -> None:
    first, second = assisted_generation("exact"), assisted_generation("transformers")
    first.__enter__()
    stats = second.__enter__()
    first.__exit__(None, None, None)
    sampled(pair(), 0)
    assert stats.calls > 0
    second.__exit__(None, None, None)


def in_thread(function: Callable[[], Any]) -> Any:
    """What a function returns in a thread of its own, or the exception that it raises there."""
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(function)
        return call.exception() or call.result()


def test_each_thread_has_its_own_context() -> None:
    models = pair()
    # A thread without one uses the only one, as behind a streamer.
    with assisted_generation() as stats:
        in_thread(lambda: sampled(models, 3))
    assert stats.calls > 0

    def other_thread() -> tuple[int, Any]:
        with assisted_generation("sigmoid") as own:
            sampled(models, 0)
            return own.calls, in_thread(lambda: sampled(models, 0))

    with assisted_generation("exact") as stats:
        calls, third = in_thread(other_thread)
        assert calls > 0 and stats.calls == 0
        # It is not clear which of the two is meant.
        assert isinstance(third, RuntimeError) and "several others have" in str(third)
        sampled(models, 0)
        assert stats.calls > 0


def test_another_patch_is_not_undone() -> None:
    """One that came meanwhile stays, and what it wrapped then is transformers' own function."""
    models = pair()
    plain = sampled(models, 1)
    with pytest.MonkeyPatch.context() as patch:
        with assisted_generation("sigmoid") as stats:
            wrapped = generation._speculative_sampling
            other = lambda *arguments, **named: wrapped(*arguments, **named)  # noqa: E731
            patch.setattr(generation, "_speculative_sampling", other)
            sampled(models, 1)
        calls = stats.calls
        assert calls > 0 and generation._speculative_sampling is other
        assert sampled(models, 1) == plain and stats.calls == calls
        # Not the function that is known: whoever patches it has to leave first.
        with pytest.raises(RuntimeError, match=r"is not the _speculative_sampling of transformers 5\.17"):
            assisted_generation().__enter__()
    # Undoing the patch put back what it had found.
    assert generation._speculative_sampling is wrapped
    with assisted_generation():
        assert sampled(models, 1) == plain


def unknown(candidate_input_ids: Tensor, candidate_logits: Tensor, *rest: Any) -> tuple[Tensor, int]:
    return candidate_input_ids, candidate_logits.shape[1]


def test_a_function_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {}
    exec("def _speculative_sampling(*arguments): pass", names)
    is_not_known = f"is not the _speculative_sampling of transformers 5.17.*{assisted.code_digest(unknown)}"
    does_not_sample = r"does not sample in transformers\.generation\.utils\._speculative_sampling"
    for place, name, other, message in (
        (generation, "_speculative_sampling", unknown, is_not_known),
        (generation, "_speculative_sampling", names["_speculative_sampling"], "cannot read the source of"),
        (generation, "_speculative_sampling", None, does_not_sample),
        (GenerationMixin, "_assisted_decoding", lambda self, *arguments: None, does_not_sample),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, other)
            with pytest.raises(RuntimeError, match=message):
                assisted_generation().__enter__()


def test_a_mixture_of_the_laws_is_refused() -> None:
    models = pair()
    refused = pytest.raises(NotImplementedError, match=r"assistant_ensemble_weight: .* got 0.5")
    with assisted_generation("exact"), refused:
        sampled(models, 0, assistant_ensemble_weight=0.5)
    with assisted_generation("transformers") as stats:
        sampled(models, 0, assistant_ensemble_weight=0.5)
    assert stats.calls > 0


def test_bad_arguments_are_refused() -> None:
    logits = torch.zeros(1, 4, 9)
    with assisted_generation(), pytest.raises(ValueError, match="draft_tokens: expected"):
        generation._speculative_sampling(torch.tensor([[1, 4, 8]]), logits[:, :3], 2, logits, False)
    cases = [
        ({"method": "greedy"}, ValueError, r"method: expected .* got 'greedy'"),
        ({"next_token": "gumbel"}, ValueError, r"next_token: expected .* got 'gumbel'"),
        ({"method": "sigmoid", "next_token": "multinomial"}, ValueError, r"next_token: .*got 'multinomial'"),
        ({"method": "transformers", "next_token": "uniform"}, ValueError, r"next_token: .*got 'uniform'"),
        ({"method": "transformers", "compile": True}, ValueError, r"compile: .*got True"),
        ({"method": "sigmoid", "alpha": 0.0}, ValueError, "alpha, beta: expected .* got 0.0 and 1000.0"),
        *(({"alpha": -1.0, "beta": beta}, ValueError, "alpha, beta: expected") for beta in (math.inf, math.nan)),
        ({"alpha": "-1"}, TypeError, "alpha: expected a number"),
    ]
    assert raised(lambda arguments: assisted_generation(**arguments), cases) == []


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"next_token": "uniform"}, {"method": "sigmoid"}], ids=str)
def test_compiled_the_text_is_the_same(options: dict[str, Any]) -> None:
    models = pair()
    with assisted_generation(**options):
        eager = [sampled(models, seed) for seed in range(3)]
    with assisted_generation(**options, compile=True) as stats:
        assert [sampled(models, seed) for seed in range(3)] == eager
    assert stats.calls > 6
