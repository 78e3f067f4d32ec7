"""The loop under the compiler: no graph break, no recompilation, the same tokens as eager."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, VOCAB, perturbed, tiny
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from torch_specops import SamplingParams, SpeculativeDecoder, compilation
from torch_specops.compilation import compile_piece
from torch_specops.decode import runner
from torch_specops.decode.step import speculative_step
from torch_specops.drafts import DraftSource, ModelDraft, NGram, PromptLookup
from torch_specops.hf import language_model

PROMPTS = torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1]])
SAMPLING = SamplingParams(temperature=[0.0, 0.8])


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def source(kind: str, target: torch.nn.Module) -> DraftSource:
    if kind == "model":
        return ModelDraft(language_model(perturbed(target, 0.05)))
    if kind == "n-gram":
        text = torch.randint(0, VOCAB, (400,), generator=torch.Generator().manual_seed(1))
        return NGram.from_tokens(text, vocab_size=VOCAB, probabilities=True)
    return PromptLookup(min_ngram=1)


def decode(decoder: SpeculativeDecoder, prompts: Tensor = PROMPTS, mask: Tensor = MASK, **options: Any) -> Tensor:
    settings: dict[str, Any] = {"max_new_tokens": 16, "seed": 5} | options
    return decoder.generate(prompts, attention_mask=mask, **settings).sequences


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "graphs"), [("model", 4), ("prompt lookup", 2)])
def test_pieces_are_compiled_once_each_and_give_the_eager_tokens(kind: str, graphs: int) -> None:
    target = tiny("llama", num_hidden_layers=1)
    eager = SpeculativeDecoder(target, source(kind, target), num_draft_tokens=3, sampling=SAMPLING, compile=False)
    compiled = SpeculativeDecoder(target, source(kind, target), num_draft_tokens=3, sampling=SAMPLING, compile=True)
    assert torch.equal(decode(compiled), decode(eager))
    # For a model: its forward over two tokens and over one, the uniforms, the verification.
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]

    # Other prompts, longer and shorter, up to the capacity: nothing is compiled again.
    with torch.compiler.set_stance("fail_on_recompile"):
        for width, new_tokens in [(3, 30), (20, 25), (1, 44)]:
            prompts = torch.randint(3, VOCAB, (2, width), generator=torch.Generator().manual_seed(width))
            mask = torch.ones_like(prompts)
            again = decode(compiled, prompts, mask, max_new_tokens=new_tokens)
            assert torch.equal(again, decode(eager, prompts, mask, max_new_tokens=new_tokens))
    assert counters["stats"]["unique_graphs"] == graphs


def check_one_graph(family: str, kind: str, num_draft_tokens: int, **options: Any) -> None:
    """A step traces as one graph, and some steps give the records of eager ones."""
    backend = CompileCounterWithBackend("eager")
    target = tiny(family)
    inputs = None
    if family == "whisper":
        inputs = {"input_features": torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(2)).double()}
    elif family == "t5":
        inputs = {"input_ids": PROMPTS, "attention_mask": MASK}
    records = []
    for wrap in (lambda step: step, lambda step: torch.compile(step, backend=backend, fullgraph=True, dynamic=False)):
        decoder = SpeculativeDecoder(
            target, source(kind, target), num_draft_tokens=num_draft_tokens, sampling=SAMPLING, compile=False, **options
        )
        decoder.stream(PROMPTS, attention_mask=MASK, max_new_tokens=30, seed=5, inputs=inputs)
        step = wrap(speculative_step)
        with torch.inference_mode():
            arguments = (decoder.target, decoder.draft, decoder._runner.state, num_draft_tokens, decoder._runner.verify)
            records.append([step(*arguments) for _ in range(4)])
    assert backend.frame_count == 1
    for expected, found in zip(*records, strict=True):
        assert torch.equal(expected, found)


IN_SHORT = ("llama", "gemma3", "t5")


@pytest.mark.parametrize(
    "family", [family if family in IN_SHORT else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]
)
def test_a_step_of_every_family_traces_as_one_graph(family: str) -> None:
    check_one_graph(family, "model", 2)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("prompt lookup", {}),
        ("n-gram", {"verify": "block"}),
        ("n-gram", {"verify": "sigmoid"}),
        ("n-gram", {"lenience": 0.5, "argmax_lenience": 0.3}),
    ],
)
def test_a_step_of_every_draft_and_verifier_traces_as_one_graph(kind: str, options: dict[str, Any]) -> None:
    check_one_graph("llama", kind, 3, **options)


def test_more_drafts_are_not_more_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny("llama", num_hidden_layers=1)
    graphs = {}
    for num_draft_tokens in (5, 10):
        torch._dynamo.reset()
        backend = CompileCounterWithBackend("eager")
        monkeypatch.setattr(compilation, "compile_piece", partial(compile_piece, backend=backend))
        draft = source("model", target)
        decode(SpeculativeDecoder(target, draft, num_draft_tokens=num_draft_tokens, sampling=SAMPLING, compile=True))
        graphs[num_draft_tokens] = backend.frame_count
    # The draft's forward over two tokens and over one, the uniforms, the verification.
    assert graphs == {5: 4, 10: 4}


GREEDY, FILTERED = SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, top_p=0.9)


@pytest.mark.parametrize("kind", [pytest.param("model", marks=pytest.mark.slow), "n-gram"])
def test_every_shape_has_graphs_of_its_own(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A decoder that meets many batch sizes, lengths and ways to sample never runs out of graphs."""
    monkeypatch.setattr(compilation, "compile_piece", partial(compile_piece, backend="eager"))
    target = tiny("llama", num_hidden_layers=1)
    eager = SpeculativeDecoder(target, source(kind, target), num_draft_tokens=1, compile=False)
    compiled = SpeculativeDecoder(target, source(kind, target), num_draft_tokens=1, compile=True)
    calls = [(1, 9, GREEDY), (2, 9, GREEDY), (2, 70, GREEDY), (2, 9, FILTERED)]

    def same_as_eager(batch: int, new_tokens: int, sampling: SamplingParams) -> bool:
        prompts, mask = PROMPTS[:batch], MASK[:batch]
        options = {"max_new_tokens": new_tokens, "sampling": sampling}
        return torch.equal(decode(compiled, prompts, mask, **options), decode(eager, prompts, mask, **options))

    with torch._dynamo.config.patch(recompile_limit=1):
        assert all(same_as_eager(*call) for call in calls)
    graphs = counters["stats"]["unique_graphs"]
    # Met again, in another order: all of them were kept.
    assert all(same_as_eager(*call) for call in reversed(calls))
    assert counters["stats"]["unique_graphs"] == graphs


def test_pieces_do_not_share_the_limit_of_recompilations() -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    shapes = [torch.zeros(width) for width in range(2, 2 + torch._dynamo.config.recompile_limit + 1)]
    for shape in shapes:
        assert torch.equal(compile_piece(double, backend="eager")(shape), shape)
    # What would happen without copies.
    shared = torch.compile(double, backend="eager", fullgraph=True, dynamic=False)
    for shape in shapes[:-1]:
        shared(shape)
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        shared(shapes[-1])


def test_auto_compiles_on_a_cpu_when_enough_steps_are_done_or_certain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(runner, "STEPS_THAT_PAY", 12)
    prompt = PROMPTS[:1]

    def stats_of(decoder: SpeculativeDecoder, max_new_tokens: int) -> tuple[bool, str]:
        output = decoder.generate(prompt, max_new_tokens=max_new_tokens, eos_token_id=())
        return decoder.compiled, output.stats.compiled

    # Without drafts every token is a step.
    assert stats_of(SpeculativeDecoder(tiny("llama")), 11) == (
        False,
        "eager: on cpu compiling pays after about 12 steps, and 11 are done or certain",
    )
    assert stats_of(SpeculativeDecoder(tiny("llama")), 12)[0]
    # With three drafts a step may emit four tokens, so 47 tokens are certain to need 11.75 steps, no more.
    assert not stats_of(SpeculativeDecoder(tiny("llama"), tiny("llama"), num_draft_tokens=3), 47)[0]
    assert stats_of(SpeculativeDecoder(tiny("llama"), tiny("llama"), num_draft_tokens=3), 48)[0]
    # Padding among the drafts costs a compiled step as much as drafts do.
    assert not stats_of(SpeculativeDecoder(tiny("llama"), PromptLookup(), num_draft_tokens=3), 48)[0]
    # The steps of earlier prompts count, and what was compiled stays.
    decoder = SpeculativeDecoder(tiny("llama"))
    assert [stats_of(decoder, length)[0] for length in (6, 5, 1, 1)] == [False, False, True, True]
    assert not SpeculativeDecoder(tiny("llama"), compile=False).compiled
