"""The loop under the compiler: no graph break, no recompilation, the same tokens as eager."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from marks import slow
from tiny_loops import DRAFTS
from tiny_models import FAMILIES, VOCAB, TracedPairs, encoder_inputs, perturbed, random_table, shared_tiny, tiny
from torch import Tensor
from torch._dynamo.utils import counters

from torch_specops import SamplingParams, SpeculativeDecoder, Verifier, compilation
from torch_specops.compilation import compile_errors_named
from torch_specops.decode import compiled as compiled_steps
from torch_specops.decode.batch import Batch
from torch_specops.drafts import HierarchicalDraft, LookupElse, PromptLookup, SuffixLookup
from torch_specops.schedules.costs import StepCosts

PROMPTS = torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1]])
SAMPLING = SamplingParams(temperature=[0.0, 0.8])


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def decoders(kind: str, num_draft_tokens: int, **options: Any) -> list[SpeculativeDecoder]:
    """An eager and a compiled one."""
    options = {"num_draft_tokens": num_draft_tokens, "schedule": "constant"} | options
    found = []
    for compile in (False, True):
        # One layer is enough.
        target = tiny("llama", num_hidden_layers=1)
        draft = perturbed(target) if kind == "perturbed" else DRAFTS[kind]("llama")
        found.append(SpeculativeDecoder(target, draft, compile=compile, **options))
    return found


def decoders_of_pairs(draft: Any, **options: Any) -> list[SpeculativeDecoder]:
    """The same, where it does not matter what the target computes."""
    table = random_table(VOCAB, seed=5)
    return [SpeculativeDecoder(TracedPairs(table), draft, compile=compile, **options) for compile in (False, True)]


def decode(decoder: SpeculativeDecoder, prompts: Tensor = PROMPTS, mask: Tensor = MASK, **options: Any) -> Tensor:
    settings: dict[str, Any] = {"max_new_tokens": 16, "seed": 5} | options
    return decoder.generate(prompts, attention_mask=mask, **settings).sequences


def parts_of(decoder: SpeculativeDecoder) -> list[weakref.ref[Any]]:
    target: Any = decoder.target
    parts = (decoder, target, target.model, target.prepared, target.key_values[0].keys, decoder._newest.state.tokens)
    return [weakref.ref(part) for part in (*parts, target.model.lm_head.weight)]


def still_there(parts: list[weakref.ref[Any]]) -> list[type]:
    gc.collect()
    return [type(part()) for part in parts if part() is not None]


class LooksAtData(TracedPairs):
    """No compiler can trace it in one graph."""

    def forward(self, *arguments: Any) -> Tensor:
        values = super().forward(*arguments)
        return values if float(values.max()) > 1e9 else -values


# Tracing fails before Inductor begins.
@pytest.mark.usefixtures("without_inductor")
def test_a_compile_error_ends_with_where_and_why() -> None:
    target = LooksAtData(random_table(VOCAB, seed=5))
    decoder = SpeculativeDecoder(target, PromptLookup(), schedule="constant", compile=True)
    place = r"test_compiled_loop.py:\d+ \(return values if float\(values.max\(\)\) > 1e9 else -values\)"
    with pytest.raises(RuntimeError, match=rf"^compile: .*{place}: .*\(compile=False runs it eagerly\)$"):
        decode(decoder)

    def refusing(graph: Any, inputs: Any) -> Any:
        raise ValueError("no graphs today")

    with pytest.raises(RuntimeError, match=r"^compile: .*: ValueError: no graphs today \("), compile_errors_named():
        torch.compile(lambda x: x + 1, backend=refusing)(torch.ones(1))
    with pytest.raises(RuntimeError, match="an error of another kind"), compile_errors_named():
        raise RuntimeError("an error of another kind")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "graphs"), [("perturbed", 4), ("prompt lookup", 2), ("lookup else", 6)])
def test_compiled_pieces_give_the_eager_tokens(kind: str, graphs: int) -> None:
    eager, compiled = decoders(kind, 3, sampling=SAMPLING)
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

    parts = parts_of(compiled)
    del compiled
    assert still_there(parts) == []


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("make", [PromptLookup, partial(SuffixLookup, memory=10**5)])
def test_compiled_steps_with_looked_up_drafts(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default schedule has two graphs, for no draft and for K. The text repeats a token."""
    # On a machine with other work to do, drafts may seem not to pay.
    for cost in ("extra", "risk"):
        monkeypatch.setattr(StepCosts, cost, lambda *arguments: 0.0)
    sampling = SamplingParams(temperature=0.0, logit_bias={5: 1e4})
    eager, compiled = decoders_of_pairs(make(min_ngram=1), num_draft_tokens=6, sampling=sampling)
    for _ in range(2):
        assert torch.equal(decode(compiled, max_new_tokens=80), decode(eager, max_new_tokens=80))
    assert compiled._schedule.buckets == (0, 6)
    assert compiled.stats.mean_acceptance_length > 2
    # What is verified may be fewer drafts than were looked up, so both are made ready before they are.
    with mock.patch.object(Batch, "_prepare", autospec=True, side_effect=Batch._prepare) as prepare:
        decode(compiled, max_new_tokens=80)
    assert [call.args[1] for call in prepare.call_args_list[:2]] == [0, 6]
    with torch.compiler.set_stance("fail_on_recompile"):
        decode(compiled, max_new_tokens=80)


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize(
    "make",
    [
        HierarchicalDraft,
        lambda model, lookup: LookupElse(model, min_match=1, lookup=lookup),
        lambda model, lookup: LookupElse(lookup, min_match=1),
    ],
)
def test_lookups_on_the_host_inside_drafts_of_compiled_steps(make: Any) -> None:
    model, lookup = TracedPairs(random_table(VOCAB, seed=5)), SuffixLookup(min_ngram=1, memory=10**5)
    draft = make(model, lookup)
    greedy = SamplingParams(temperature=0.0)
    eager, compiled = decoders_of_pairs(draft, num_draft_tokens=3, schedule="constant", sampling=greedy)
    texts = [decode(decoder) for decoder in (compiled, eager, compiled)]
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])
    assert lookup.num_remembered > 0 and counters["stats"]["unique_graphs"] > 0
    with pytest.raises(NotImplementedError, match="one_graph: expected False with a draft that proposes on the host"):
        SpeculativeDecoder(eager.target, draft, one_graph=True)


IN_SHORT = ("t5",)


@pytest.mark.parametrize(
    ("family", "kind", "options"),
    [
        # The draft of a family is the same class as its target, so one family has a model as its draft.
        *(
            pytest.param(family, "prompt lookup", {}, marks=[pytest.mark.slow] * (family not in IN_SHORT))
            for family in FAMILIES
        ),
        ("llama", "a model", {}),
        slow("llama", "n-gram", {}),
        slow("llama", "over a model", {}),
        ("llama", "n-gram with counts", {"verify": "block"}),
        slow("llama", "n-gram with counts", {"verify": "sigmoid"}),
        ("llama", "n-gram with counts", {"verify": Verifier("exact", 0.5, 0.3)}),
    ],
)
@pytest.mark.usefixtures("without_inductor")
def test_a_step_traces_as_one_graph(family: str, kind: str, options: dict[str, Any]) -> None:
    # One layer is enough where the draft is what differs, and no model where the table or the op is.
    draft: Any = tiny("llama", num_hidden_layers=1) if kind == "a model" else DRAFTS[kind](family)
    if kind == "prompt lookup":
        target: Any = tiny("t5", num_decoder_layers=1) if family == "t5" else shared_tiny(family)
    else:
        target = TracedPairs(random_table(VOCAB, seed=5))
    options = {"num_draft_tokens": 2, "schedule": "constant", "sampling": SAMPLING} | options
    eager, compiled = (
        decode(
            SpeculativeDecoder(target, draft, compile=compile, one_graph=compile, **options),
            inputs=encoder_inputs(family, slice(2)),
        )
        for compile in (False, True)
    )
    assert torch.equal(compiled, eager)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.usefixtures("without_inductor", "quick_collection")
def test_nothing_is_left_of_a_deleted_decoder() -> None:
    """Neither the models, if nobody else has them, nor their caches, nor the batch."""
    # More drafts are not more graphs: the draft's forward over two tokens and over one, the uniforms, the verification.
    for num_graphs in (4, 0):
        counters.clear()
        target, draft = tiny("llama", num_hidden_layers=1), TracedPairs(random_table(VOCAB, seed=5))
        options: dict[str, Any] = {"num_draft_tokens": 6, "schedule": "constant", "sampling": SAMPLING}
        decoder = SpeculativeDecoder(target, draft, compile=num_graphs > 0, **options)
        del target, draft
        decode(decoder, logprobs="raw")
        assert counters["stats"]["unique_graphs"] == num_graphs
        parts = parts_of(decoder)
        assert still_there(parts[:1]) != []
        del decoder
        assert still_there(parts) == []


@pytest.mark.usefixtures("without_inductor")
def test_every_shape_has_graphs_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that meets many batch sizes, lengths and ways to sample never runs out of graphs."""
    monkeypatch.setattr(compiled_steps, "LEAST_CAPACITY", 64)
    eager, compiled = decoders_of_pairs(None)
    greedy, filtered = SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, top_p=0.9)
    calls = [(1, 9, greedy), (2, 9, greedy), (2, 70, greedy), (2, 9, filtered)]

    def is_as_eager(batch: int, new_tokens: int, sampling: SamplingParams) -> bool:
        prompts = PROMPTS[:batch], MASK[:batch]
        options = {"max_new_tokens": new_tokens, "sampling": sampling}
        return torch.equal(decode(compiled, *prompts, **options), decode(eager, *prompts, **options))

    with torch._dynamo.config.patch(recompile_limit=1):
        assert all(is_as_eager(*call) for call in calls)
    graphs = counters["stats"]["unique_graphs"]
    # Met again, in another order: all of them were kept.
    assert all(is_as_eager(*call) for call in reversed(calls))
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.usefixtures("uncompiled")
def test_compile_auto_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "STEPS_THAT_PAY", 12)

    def is_compiled(max_new_tokens: int, *draft: Any) -> bool:
        decoder = SpeculativeDecoder(tiny("llama"), *draft, num_draft_tokens=3)
        decoder.generate(PROMPTS[:1], max_new_tokens=max_new_tokens, eos_token_id=())
        return decoder.compiled

    # Without drafts every token is a step.
    assert [is_compiled(11), is_compiled(12)] == [False, True]
    # With three drafts a step may emit four tokens, so 47 tokens are certain to need 11.75 steps, no more.
    assert [is_compiled(47, tiny("llama")), is_compiled(48, tiny("llama"))] == [False, True]
    # Padding among the drafts costs a compiled step as much as drafts do.
    assert not is_compiled(48, PromptLookup())
    # The steps of earlier prompts count, and what was compiled stays.
    decoder = SpeculativeDecoder(tiny("llama"))
    calls = ((6, "eager"), (5, "eager"), (1, "compiled"), (1, "compiled"))
    for max_new_tokens, way in calls:
        output = decoder.generate(PROMPTS[:1], max_new_tokens=max_new_tokens, eos_token_id=())
        assert output.stats.compiled.startswith(f"{way}: on cpu compiling pays after about 12 steps")
        assert decoder.compiled == (way == "compiled")
    assert not SpeculativeDecoder(tiny("llama"), compile=False).compiled


def test_capacities() -> None:
    """Slots for a text and the five drafts and the next token of a step."""
    target = TracedPairs(random_table(VOCAB, seed=5))

    def capacity(longest: int, max_length: int | None = None, made_for: int | None = None, compile: bool = True) -> int:
        target.max_length = made_for
        decoder = SpeculativeDecoder(target, PromptLookup(), num_draft_tokens=5, compile=compile)
        return decoder._compiled_steps.capacity(longest, max_length)

    assert [capacity(length) for length in (10, 250, 251, 506, 507, 5000)] == [256, 256, 512, 512, 1024, 8192]
    # No more than the target was made for, unless a text is longer: some targets can read on.
    assert [capacity(length, made_for=300) for length in (10, 251, 300, 301)] == [256, 320, 320, 320]
    assert [capacity(10, max_length) for max_length in (20, 58, 59, 1000)] == [64, 64, 128, 1024]
    assert [capacity(10, compile=False), capacity(10, 20, compile=False)] == [16, 26]
