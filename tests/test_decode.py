"""The decoding loop: greedy output is plain greedy decoding, sampled output has the target's law, stops are exact."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import pytest
import torch
from conftest import Report
from test_drafts import TableModel
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import torch_specops
from torch_specops import decode as decode_module
from torch_specops.decode import DecodeStats, GreedyDifference, Step, check_greedy, decode
from torch_specops.drafts import Draft, DraftSource, ModelDraft, PromptLookup
from torch_specops.hf import CachedTransformer
from torch_specops.sampling import SamplingParams
from torch_specops.testing import chi_square

GREEDY = SamplingParams(temperature=0.0)
VOCAB = 40
PROMPT = torch.tensor([[3, 17, 5, 3, 17, 9, 22, 3, 17]])


@functools.cache
def tiny_model(family: str, seed: int = 0) -> PreTrainedModel:
    """A random model in float64, so that a wider forward never breaks a tie the other way; sharpened weights make it
    say something else than its last token."""
    torch.manual_seed(seed)
    if family == "llama":
        model: PreTrainedModel = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCAB,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=128,
                initializer_range=0.4,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
    else:
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCAB,
                n_embd=32,
                n_layer=2,
                n_head=4,
                n_positions=128,
                initializer_range=0.4,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
    return model.double().eval()


@functools.cache
def noisy_copy(family: str) -> PreTrainedModel:
    """A draft that agrees with the target often, but not always."""
    model = tiny_model(family, seed=1)
    model.load_state_dict(tiny_model(family).state_dict())
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


def make_draft(name: str, family: str) -> DraftSource | None:
    if name == "prompt lookup":
        return PromptLookup(min_ngram=1)
    if name == "nothing":
        return None
    models = {"noisy copy": noisy_copy(family), "itself": tiny_model(family), "stranger": tiny_model(family, seed=3)}
    return ModelDraft(CachedTransformer(models[name]))


def plain_greedy(family: str, max_new_tokens: int, eos_token_id: list[int] | None = None) -> list[int]:
    """By transformers, not by ours."""
    output = tiny_model(family).generate(
        PROMPT,
        attention_mask=torch.ones_like(PROMPT),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=eos_token_id,
        pad_token_id=0,
    )
    return output[0, PROMPT.shape[1] :].tolist()


def run(family: str, draft: DraftSource | None, **arguments: Any) -> DecodeStats:
    defaults: dict[str, Any] = {"sampling": GREEDY, "max_new_tokens": 48}
    return DecodeStats(
        list(decode(CachedTransformer(tiny_model(family)), PROMPT, draft=draft, **(defaults | arguments)))
    )


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("draft", ["nothing", "prompt lookup", "noisy copy", "itself", "stranger"])
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 8])
def test_greedy_is_plain_greedy(family: str, draft: str, num_draft_tokens: int) -> None:
    stats = run(family, make_draft(draft, family), num_draft_tokens=num_draft_tokens)
    assert stats.tokens == plain_greedy(family, 48)
    assert all(len(step.tokens) == step.num_accepted + 1 for step in stats.steps)
    assert all(step.num_accepted <= step.num_proposed <= num_draft_tokens for step in stats.steps)
    if num_draft_tokens == 0 or draft == "nothing":
        assert stats.num_steps == 48
        assert stats.acceptance_rate is None
        assert stats.mean_acceptance_length == 1.0


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_tiny_models_try_the_loop(family: str) -> None:
    """The tests above would pass for drafts that are always or never accepted: here they are neither."""
    assert len(set(plain_greedy(family, 48))) > 3
    rates = {}
    for name in ("prompt lookup", "noisy copy", "stranger"):
        stats = run(family, make_draft(name, family), num_draft_tokens=3)
        rates[name] = stats.acceptance_rate
        if name != "stranger":
            assert len({step.num_accepted for step in stats.steps}) > 1, name
    assert rates["prompt lookup"] is not None and rates["prompt lookup"] > 0
    assert rates["noisy copy"] is not None and 0 < rates["noisy copy"] < 1


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_draft_tokens", [1, 4])
def test_a_target_that_drafts_for_itself_accepts_everything(
    family: str, temperature: float, num_draft_tokens: int
) -> None:
    """p = q up to rounding, so every draft is accepted; a draft cache that lags breaks this."""
    stats = run(
        family,
        make_draft("itself", family),
        num_draft_tokens=num_draft_tokens,
        sampling=SamplingParams(temperature=temperature),
        seed=11,
        max_new_tokens=60,
    )
    assert stats.acceptance_rate == 1.0
    assert stats.num_steps == -(-60 // (num_draft_tokens + 1))


@pytest.mark.parametrize("eos_at", [0, 1, 2, 3, 6, 7])
@pytest.mark.parametrize("draft", ["nothing", "itself", "prompt lookup"])
def test_an_eos_stops_inside_an_accepted_run(eos_at: int, draft: str) -> None:
    greedy = plain_greedy("llama", 48)
    eos = greedy[eos_at]
    expected = greedy[: greedy.index(eos) + 1]
    stats = run("llama", make_draft(draft, "llama"), num_draft_tokens=4, eos_token_id=eos)
    assert stats.tokens == expected == plain_greedy("llama", 48, [eos])
    if draft == "itself" and len(expected) % 5:
        assert len(stats.steps[-1].tokens) <= stats.steps[-1].num_accepted, "the eos was no accepted draft"


def test_several_eos_tokens() -> None:
    greedy = plain_greedy("llama", 48)
    several: list[Collection[int]] = [{greedy[5], greedy[2]}, [greedy[2]], (greedy[2],)]
    for eos in several:
        assert run("llama", PromptLookup(), eos_token_id=eos).tokens == plain_greedy("llama", 48, [greedy[2], *eos])


@pytest.mark.parametrize("max_new_tokens", range(1, 12))
def test_the_limit_is_exact(max_new_tokens: int) -> None:
    stats = run("gpt2", make_draft("itself", "gpt2"), num_draft_tokens=4, max_new_tokens=max_new_tokens)
    assert stats.tokens == plain_greedy("gpt2", max_new_tokens)


def test_the_limit_of_the_model_can_be_used_up() -> None:
    free = 128 - PROMPT.shape[1]
    for draft in ("prompt lookup", "itself"):
        stats = run("gpt2", make_draft(draft, "gpt2"), num_draft_tokens=8, max_new_tokens=free)
        assert stats.tokens == plain_greedy("gpt2", free)
    with pytest.raises(ValueError, match=f"max_new_tokens: expected at most {free} after a prompt of 9 tokens"):
        run("gpt2", None, max_new_tokens=free + 1)


def test_a_prompt_of_one_token() -> None:
    target = CachedTransformer(tiny_model("llama"))
    prompt = torch.tensor([[7]])
    stats = DecodeStats(list(decode(target, prompt, draft=PromptLookup(), max_new_tokens=20, sampling=GREEDY)))
    assert check_greedy(target, prompt, stats.tokens).identical


def test_the_seed_decides_a_sampled_text() -> None:
    texts = [
        run("llama", make_draft("noisy copy", "llama"), sampling=SamplingParams(temperature=1.0), seed=seed).tokens
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


class OneWideOnly(TableModel):
    def forward(self, tokens: Tensor, position: int, num_logits: int) -> Tensor:
        assert num_logits == 1 and (position == 0 or tokens.shape[1] == 1), "read over padding"
        return super().forward(tokens, position, num_logits)


def test_no_draft_found_costs_no_wide_forward() -> None:
    # The token after x is x + 1: no token comes twice, so prompt lookup never finds anything.
    table = torch.eye(32).roll(1, 1)
    steps = list(
        decode(OneWideOnly(table), torch.tensor([[0, 1]]), draft=PromptLookup(), max_new_tokens=20, sampling=GREEDY)
    )
    assert DecodeStats(steps).tokens == list(range(2, 22))
    assert {step.num_proposed for step in steps} == {0}


def test_the_target_reads_the_newest_token_and_the_drafts_alone() -> None:
    table = torch.randn(6, 6, generator=torch.Generator().manual_seed(3))
    target, source = TableModel(table), ModelDraft(TableModel(table + 0.5 * table.flip(1)))
    prompt = torch.tensor([[1, 2, 3, 4]])
    length, readings = 4, []
    for step in decode(target, prompt, draft=source, max_new_tokens=30, num_draft_tokens=3, seed=1):
        readings.append((length - 1, step.num_proposed + 1) if readings else (0, 4 + step.num_proposed))
        length += len(step.tokens)
    assert target.readings == readings


def test_stats_count_what_was_emitted_and_verified() -> None:
    stats = DecodeStats([Step([1, 2, 3], 2, 4, 0.5), Step([4], 0, 0, 0.25), Step([5, 6], 3, 4, 0.25)])
    assert stats.tokens == [1, 2, 3, 4, 5, 6]
    assert stats.num_steps == 3
    assert stats.mean_acceptance_length == 2.0
    assert stats.acceptance_rate == 5 / 8
    assert stats.seconds == 1.0
    assert stats.tokens_per_second == 6.0


# The law of sampled text. The target and the draft are tables: the next token depends on the last one alone.
V = 4
TRIALS = 2000
# The wrong loops are far off: fewer texts show it.
WRONG_TRIALS = 500
ALPHA = 1e-5
TEMPERATURE = 0.7


def tables() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    target = torch.randn(V, V, generator=generator)
    return target, -target


def joint_p_value(draft_class: type[ModelDraft] | None, trials: int) -> float:
    """The first three tokens of as many texts against their exact joint law; K = 2, so texts cross step boundaries."""
    target_table, draft_table = tables()
    counts = torch.zeros(V, V, V)
    for seed in range(trials):
        draft = PromptLookup(min_ngram=1) if draft_class is None else draft_class(TableModel(draft_table))
        steps = decode(
            TableModel(target_table),
            torch.tensor([[1, 0, 2, 0, 3, 0]]),
            draft=draft,
            max_new_tokens=3,
            num_draft_tokens=2,
            sampling=SamplingParams(temperature=TEMPERATURE),
            seed=seed,
        )
        first, second, third = DecodeStats(list(steps)).tokens
        counts[first, second, third] += 1
    p = torch.softmax(target_table.double() / TEMPERATURE, -1)
    return chi_square(counts, p[0][:, None, None] * p[:, :, None] * p[None])


@pytest.mark.parametrize("draft_class", [ModelDraft, None])
def test_sampled_text_has_the_law_of_the_target(draft_class: type[ModelDraft] | None, report: Report) -> None:
    p_value = joint_p_value(draft_class, TRIALS)
    report.p_values[f"decode, {'prompt lookup' if draft_class is None else 'opposite draft'}"] = p_value
    assert p_value > ALPHA


class WrongTemperature(ModelDraft):
    """Draws from one q and shows the loop another."""

    def propose(self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, *rest: Tensor) -> Draft:
        draft = super().propose(tokens, lengths, num_draft_tokens, *rest)
        return Draft(draft.tokens, None if draft.logits is None else 3 * draft.logits)


def test_a_draft_that_shows_another_law_is_caught(report: Report) -> None:
    p_value = joint_p_value(WrongTemperature, WRONG_TRIALS)
    report.wrong_p_values["decode, q at another temperature"] = p_value
    assert p_value < ALPHA


def test_uniforms_used_twice_are_caught(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    def shared(seeds: Tensor, positions: Tensor, n: int, stream: str) -> Tensor:
        return torch_specops.uniforms(seeds, positions, n, "propose")

    monkeypatch.setattr(decode_module, "uniforms", shared)
    p_value = joint_p_value(ModelDraft, WRONG_TRIALS)
    report.wrong_p_values["decode, the draft's uniforms used again"] = p_value
    assert p_value < ALPHA


def test_check_greedy_finds_a_wrong_token_and_checks_the_rest() -> None:
    target = CachedTransformer(tiny_model("llama"))
    greedy = plain_greedy("llama", 30)
    assert check_greedy(target, PROMPT, greedy).identical
    wrong = [*greedy[:12], (greedy[12] + 1) % VOCAB]
    # After the wrong token the text goes on greedily, so that there is one difference.
    context = torch.cat([PROMPT, torch.tensor([wrong])], 1)
    wrong += DecodeStats(list(decode(target, context, max_new_tokens=10, sampling=GREEDY))).tokens
    check = check_greedy(target, PROMPT, wrong)
    assert [(difference.index, difference.expected_token) for difference in check.differences] == [(12, greedy[12])]
    assert check.num_tokens == 23
    assert not check.identical and not check.only_rounding


def test_check_greedy_tells_near_ties_from_defects() -> None:
    table = torch.zeros(5, 5)
    table[1, 2], table[1, 3], table[1, 4] = 1.0, 1.0 - 2e-6, 1.0 - 1e-3
    prompt = torch.tensor([[1]])
    near, far = (check_greedy(TableModel(table), prompt, [token]) for token in (3, 4))
    assert not near.identical and near.only_rounding
    assert not far.identical and not far.only_rounding
    assert isinstance(near.differences[0], GreedyDifference)
    assert near.differences[0].logit_gap == pytest.approx(2e-6, rel=0.1)


GOOD: dict[str, Any] = {"input_ids": torch.tensor([[1, 2]]), "max_new_tokens": 4}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"input_ids": torch.ones(2, 3, dtype=torch.int64)},
            ValueError,
            r"input_ids: .* one sequence, .* got \[2, 3\]",
        ),
        (
            {"input_ids": torch.ones(3, dtype=torch.int64)},
            ValueError,
            r"input_ids: expected \[1, P\] .* got shape \[3\]",
        ),
        (
            {"input_ids": torch.ones(1, 0, dtype=torch.int64)},
            ValueError,
            r"input_ids: expected .* P >= 1, got shape \[1, 0\]",
        ),
        ({"input_ids": torch.ones(1, 3)}, TypeError, "input_ids: expected an int64 tensor .* got torch.float32"),
        ({"input_ids": [[1, 2]]}, TypeError, "input_ids: expected an int64 tensor .* got <class 'list'>"),
        ({"input_ids": torch.tensor([[1, V]])}, ValueError, r"input_ids: expected tokens in \[0, 4\), got 1..4"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens: expected a number >= 1, got 0"),
        ({"max_new_tokens": 2.0}, TypeError, "max_new_tokens: expected an int, got <class 'float'>"),
        ({"num_draft_tokens": -1}, ValueError, "num_draft_tokens: expected a number >= 0, got -1"),
        ({"num_draft_tokens": True}, TypeError, "num_draft_tokens: expected an int, got <class 'bool'>"),
        ({"seed": 2**63}, ValueError, "seed: expected a 64-bit number, got 9223372036854775808"),
        ({"seed": "x"}, TypeError, "seed: expected an int, got <class 'str'>"),
        ({"sampling": SamplingParams(temperature=[0.5, 1.0])}, ValueError, "temperature: expected one number or 1"),
    ],
)
def test_bad_arguments_are_refused_at_the_call(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    everything = GOOD | arguments
    with pytest.raises(error, match=message):
        decode(TableModel(tables()[0]), everything.pop("input_ids"), **everything)


def test_a_target_without_a_law_is_an_error() -> None:
    table = torch.zeros(4, 4)
    table[0] = torch.nan
    table[2, 0] = 5.0
    with pytest.raises(RuntimeError, match="target: no finite logit after 3 tokens"):
        list(decode(TableModel(table), torch.tensor([[1, 2]]), max_new_tokens=4, sampling=GREEDY))


def test_another_vocabulary_of_the_draft_is_an_error() -> None:
    draft = ModelDraft(TableModel(torch.zeros(5, 5)))
    with pytest.raises(ValueError, match=r"draft_logits: expected \[B, K, V\] = \[1, 3, 4\], got shape \[1, 3, 5\]"):
        list(decode(TableModel(torch.zeros(4, 4)), torch.tensor([[1, 2]]), draft=draft, max_new_tokens=4))
