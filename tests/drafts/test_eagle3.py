"""EAGLE-3 heads in the loop: what they draft is what a plain computation over the whole text gives, and nothing but
speed depends on it."""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import Any

import pytest
import torch
from chains import expect_caught, expect_laws
from report import Report
from tiny_eagle3 import new_head, plain_logits, trained_head
from tiny_laws import FEWER_TRIALS, V, first_tokens, model_laws, p_values, tiny_transformer
from tiny_loops import GREEDY, LENGTH, Given, Recording, decode, expected_rows, new_tokens
from tiny_models import PROMPTS, VOCAB, PairModel, padded, random_table, shared_tiny, tiny
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from torch_specops import SamplingParams, SpeculativeDecoder, compilation
from torch_specops.compilation import compile_piece
from torch_specops.drafts import Draft, DraftSource, Eagle3, FeatureModel, LanguageModel
from torch_specops.hf import language_model, regions
from torch_specops.models.base import static_tensors_of

INPUT_IDS, MASK = padded(PROMPTS, "left")
MIXED = SamplingParams(temperature=[0.0, 1.0, 0.7])


class Recorder(Recording, Eagle3):
    pass


VARIANTS: dict[str, dict[str, Any]] = {
    "fewer tokens, Qwen's norms": {"draft_vocab_size": 20, "normalises_queries": True, "fc_norm": True},
    "normed feedback, window": {"norm_before_feedback": True, "windows": (4,), "norm_before_residual": True},
}


def head_of(variant: str) -> Any:
    if variant == "trained":
        return trained_head()
    head = new_head(**VARIANTS[variant])
    # A head with all tokens needs no map.
    count = head.config.draft_vocab_size
    head.draft_of_target = torch.full((VOCAB,), -1)
    head.draft_of_target[torch.randperm(VOCAB)[:count]] = torch.arange(count)
    return head


@pytest.mark.parametrize(
    ("variant", "counts", "compiled"),
    [
        ("trained", [3], False),
        ("trained", [3], True),
        # Fewer drafts after more, and steps without any.
        ("trained", [3, 1, 5, 0, 0, 2, 0, 1], False),
        ("trained", [2, 1, 2, 0, 0, 2, 0, 1], True),
        ("fewer tokens, Qwen's norms", [2], False),
        ("normed feedback, window", [4], False),
    ],
)
def test_drafts_are_those_of_a_plain_computation(
    variant: str, counts: list[int], compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row's, in every step, over the whole text: so features are those of the text, and what was computed for
    drafts that were rejected, or from the head's own output, is seen by no later step."""
    monkeypatch.setattr(compilation, "compile_piece", lambda function, **options: function)
    target, head = shared_tiny("llama"), head_of(variant)
    draft = Recorder(head)
    decoder = SpeculativeDecoder(target, draft, schedule=Given(counts), sampling=MIXED, compile=compiled)
    # The second batch begins with what the first one left.
    for limits in ((15, 9, 12), (8, 15, 4)):
        output = decoder.generate(INPUT_IDS, attention_mask=MASK, max_new_tokens=limits, seed=4)
        assert output.stats.num_accepted > 0 or variant != "trained"
        checked = 0
        for tokens, lengths, proposed in draft.seen:
            assert proposed.logits is not None and proposed.lse is not None
            for row, length in enumerate(lengths.tolist()):
                if length < 2 or length >= output.lengths[row]:
                    continue
                expected = plain_logits(head, target, tokens[row, :length], proposed.tokens[row])
                torch.testing.assert_close(proposed.logits[row], expected, rtol=1e-4, atol=1e-4)
                checked += 1
        assert checked > 10


@pytest.mark.parametrize("family", ["qwen2", "qwen2 sliding", "qwen3", "gemma3", "gpt2", "t5"])
def test_greedy_is_that_of_transformers(family: str) -> None:
    """Llama is among the drafts of test_generate.py."""
    # Training a head takes longer than the texts.
    trains = family == "qwen2 sliding"
    for num_draft_tokens in (1, 8):
        draft = Eagle3(trained_head(family) if trains else new_head())
        output = decode(draft, num_draft_tokens, family=family)
        assert new_tokens(output) == expected_rows(family=family)
        assert not trains or output.stats.mean_acceptance_length > 1.3


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("sampling", "counts", "one_graph", "num_graphs"),
    [
        # The forward over pairs and over a draft, the uniforms, the verification.
        pytest.param(MIXED, [2], False, 4, marks=pytest.mark.slow),
        # A graph for few drafts, made before the first step of more, reads what these gave.
        pytest.param(
            *(GREEDY, [1, 2], True, 2), marks=pytest.mark.skipif(not regions.ARE_AVAILABLE, reason="before torch 2.13")
        ),
    ],
)
def test_compiled_steps_give_the_eager_tokens(
    sampling: SamplingParams, counts: list[int], one_graph: bool, num_graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a second batch compiles nothing."""
    monkeypatch.setattr(regions, "MIN_WEIGHTS", 0 if one_graph else 2**40)
    backend = CompileCounterWithBackend("eager")
    monkeypatch.setattr(compilation, "compile_piece", partial(compile_piece, backend=backend))
    found, keys = [], []
    for compile in (False, True):
        options: dict[str, Any] = {"sampling": sampling, "compile": compile, "one_graph": one_graph}
        draft = Eagle3(trained_head())
        decoder = SpeculativeDecoder(shared_tiny("llama"), draft, schedule=Given(counts), **options)
        for seed in (1, 2):
            output = decoder.generate(INPUT_IDS, attention_mask=MASK, max_new_tokens=20, seed=seed)
            found.append((output.sequences.tolist(), output.stats.accepted_at))
            assert backend.frame_count == (num_graphs if compile else 0)
        # The newest pairs may be those of drafts.
        keys.append(draft._caches[0].keys[:, :, : int(output.lengths.min()) - 7])
    assert found[:2] == found[2:]
    torch.testing.assert_close(*keys)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
def test_inductor_gives_the_eager_tokens() -> None:
    for one_graph in (False, True):
        options: dict[str, Any] = {"num_draft_tokens": 2, "sampling": GREEDY, "compile": True, "one_graph": one_graph}
        decoder = SpeculativeDecoder(shared_tiny("llama"), Eagle3(trained_head()), **options)
        output = decoder.generate(INPUT_IDS, attention_mask=MASK, max_new_tokens=LENGTH)
        assert new_tokens(output) == expected_rows()


# The law.


def small_head(**fields: Any) -> Any:
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "target_hidden_size"), 8)
    sizes |= {"num_heads": 1, "num_key_value_heads": 1}
    counts = {"vocab_size": V, "draft_vocab_size": V, "feature_layers": (0, 0, 0)}
    return new_head(**(sizes | counts | fields)).float()


def half_of_the_tokens() -> Any:
    head = small_head(draft_vocab_size=3)
    head.draft_of_target = torch.tensor([-1, 0, 1, -1, 2, -1])
    return head


class OffByOne(Eagle3):
    """Its tokens are one more than those that the logits are of: d2t counted from 1."""

    def propose(self, *arguments: Any) -> Draft:
        draft = super().propose(*arguments)
        return Draft((draft.tokens + 1) % V, draft.logits, draft.lse)


@pytest.mark.parametrize("head", [small_head, half_of_the_tokens])
def test_sampled_text_has_the_law_of_the_target(head: Any, report: Report) -> None:
    model = tiny_transformer()
    laws = model_laws(model, 0.8)
    tokens = first_tokens(model, Eagle3(head()), 2, 0.8, FEWER_TRIALS)
    expect_laws(report, f"loop, EAGLE-3, {head.__name__}", p_values(tokens, laws))


def test_the_law_test_catches_a_wrong_map(report: Report) -> None:
    model = tiny_transformer()
    tokens = first_tokens(model, OffByOne(half_of_the_tokens()), 2, 0.8, FEWER_TRIALS)
    expect_caught(report, "loop, EAGLE-3, d2t off by one", p_values(tokens, model_laws(model, 0.8)))


# Features.


def test_nothing_is_kept_where_no_draft_asks() -> None:
    target = language_model(tiny("llama"))
    hooks, num_tensors = [], []
    for draft in (None, Eagle3(trained_head()), tiny("llama")):
        decode(draft, 5, target=target, max_new_tokens=8)
        hooks.append([len(layer._forward_pre_hooks) for layer in target.prepared.model.layers])
        num_tensors.append(len(target.static_tensors()))
    assert hooks == [[0, 0], [1, 2], [0, 0]]
    assert num_tensors[0] == num_tensors[1] - 1 == num_tensors[2]
    # The user's model never has a hook.
    assert not any(module._forward_pre_hooks for module in target.model.modules())
    target.keep_features(())
    with pytest.raises(RuntimeError, match="features: none are kept; call keep_features, then start"):
        target.features  # noqa: B018


def test_what_a_cuda_graph_reads_stays_in_its_place() -> None:
    draft = Eagle3(trained_head())
    decoder = SpeculativeDecoder(shared_tiny("llama"), draft, sampling=GREEDY, max_length=40)
    places = []
    for _ in range(2):
        decoder.generate(INPUT_IDS, attention_mask=MASK, max_new_tokens=5)
        tensors = static_tensors_of(decoder.target, draft)
        assert tensors is not None
        places.append([tensor.data_ptr() for tensor in tensors])
        own = (decoder.target.features, draft._caches[0].keys, draft._caches[0].values, draft.head.fc.weight)  # type: ignore[attr-defined]
        assert {tensor.data_ptr() for tensor in own} <= set(places[-1])
    assert places[0] == places[1]


def of_target(name: str) -> Any:
    return property(attrgetter(f"target.{name}"))


class Wrapper(FeatureModel):
    """A model of a user's that hands on what a target must have, and its features."""

    vocab_size, device, start, forward = map(of_target, ("vocab_size", "device", "start", "forward"))
    num_layers, hidden_size, dtype = map(of_target, ("num_layers", "hidden_size", "dtype"))
    keep_features, features, embed, head = map(of_target, ("keep_features", "features", "embed", "head"))

    def __init__(self, target: LanguageModel) -> None:
        self.target = target


class Asks(DraftSource):
    """A user's draft that wants features."""

    feature_layers = (1,)

    def bind(self, target: Any) -> None:
        self.target = target

    def propose(self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, *rest: Any) -> Draft:
        # The input of a layer, where the newest token was read last.
        assert self.target.features.shape[2] == 32
        newest = tokens.gather(1, (lengths - 1).unsqueeze(1))
        return Draft(newest.expand(-1, num_draft_tokens))


def test_any_draft_may_ask_any_target_for_features() -> None:
    target = Wrapper(language_model(shared_tiny("llama")))
    for draft in (Asks(), Eagle3(trained_head())):
        assert new_tokens(decode(draft, 2, target=target)) == expected_rows()
    decoder = SpeculativeDecoder(PairModel(random_table(8, seed=5)), Asks())
    with pytest.raises(
        TypeError,
        match=r"target: the draft reads hidden states; expected a torch_specops.drafts.FeatureModel, got .*PairModel",
    ):
        decoder.generate(torch.tensor([[1, 2]]))
