"""The decoding loop on a GPU: `make test-gpu`. Skipped where there is none."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from itertools import zip_longest

import pytest
import torch
from gpu_suite import no_synchronisation, size
from tiny_dflash import trained_drafter
from tiny_dspark import DFLASH2, DSPARK, new_head
from tiny_eagle3 import new_head as new_eagle3_head
from tiny_eagle3 import trained_head
from tiny_gemma4 import can_be_built, tiny_gemma4
from tiny_grammars import Allowing, by_turns
from tiny_hybrids import tiny_hybrid
from tiny_loops import limited, new_tokens, streamed
from tiny_models import VOCAB, perturbed, tiny
from tiny_mtp import tiny_mtp
from tiny_requests import many
from torch import Tensor

from torch_specops import GenerationOutput, Request, SamplingParams, SpeculativeDecoder, compilation, generate
from torch_specops.cli.greedy import check_greedy
from torch_specops.compilation import compile_piece
from torch_specops.decode import compiled
from torch_specops.decode.graphs import capture
from torch_specops.decode.step import StepPlan
from torch_specops.drafts import (
    MTP,
    DFlash,
    DraftSource,
    Eagle3,
    Gemma4Assistant,
    LookupElse,
    ModelDraft,
    PEagle,
    PromptLookup,
    SuffixLookup,
    feature,
)
from torch_specops.hf import attention as grouped
from torch_specops.hf import language_model
from torch_specops.ops import attention
from torch_specops.ops.attention import attend_causal

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_compiles")]

PROMPTS, OTHER_PROMPTS = torch.randint(3, VOCAB, (2, 3, 7), generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[1] * 7, [0] * 6 + [1], [1] * 4 + [0] * 3])
LIMITS = size("new tokens of three rows")
NUM_DRAFTS = size("drafts of a loop")
GREEDY, MIXED = SamplingParams(temperature=0.0), SamplingParams(temperature=[0.0, 0.8, 0.0])
FILTERED = SamplingParams(temperature=[0.0, 0.8, 1.3], top_k=[0, 9, 5])
PROCESSED = SamplingParams(
    temperature=[0.0, 0.8, 0.0],
    repetition_penalty=1.3,
    presence_penalty=0.5,
    frequency_penalty=0.2,
    no_repeat_ngram_size=2,
    min_new_tokens=3,
    logit_bias={5: 4.0},
    bad_words=[[5, 6]],
)


@pytest.fixture
def nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default steps are captured alone: Inductor takes half a minute for a loop, and one test is enough for it."""
    monkeypatch.setattr(compilation, "compile_piece", None)


def decoder(
    device: str, kind: str, layers: int = 2, dtype: torch.dtype = torch.float64, **options: object
) -> SpeculativeDecoder:
    if kind == "hybrid":
        layer_types = ["linear_attention", "full_attention"]
        model = tiny_hybrid("qwen3_5_text", num_hidden_layers=2, layer_types=layer_types).to(dtype)
    elif kind == "mtp":
        model = copy.deepcopy(tiny_mtp("qwen2", 2).model).to(dtype)
    elif kind == "assistant":
        model, assistant = (each.to(dtype) for each in tiny_gemma4(VOCAB, "ordered"))
    else:
        model = tiny("llama", num_hidden_layers=layers).to(dtype)
    draft: DraftSource | None = PromptLookup(min_ngram=1) if kind == "lookup" else None
    if kind in ("model", "hybrid"):
        draft = ModelDraft(language_model(perturbed(model, 0.05).to(device)))
    if kind == "history":
        draft = SuffixLookup(min_ngram=1, memory=10**5)
    if kind.startswith("lookup else"):
        lookup = SuffixLookup(min_ngram=1, memory=10**5) if kind == "lookup else, history" else None
        other = language_model(perturbed(model, 0.05).to(device))
        draft = LookupElse(other, min_match=1, lookup=lookup, num_other_tokens=2)
    if kind == "head":
        draft = Eagle3(copy.deepcopy(trained_head()).to(device, dtype))
    if kind == "block":
        draft = DFlash(copy.deepcopy(trained_drafter()).to(device, dtype))
    if kind == "markov":
        draft = DFlash(new_head(DSPARK | {"markov_head_type": "rnn"}).to(device, dtype), confidence=0.3)
    if kind == "selector":
        draft = DFlash(new_head(DFLASH2).to(device, dtype))
    if kind == "parallel":
        own = new_eagle3_head(windows=(None, 4), mask_token_id=VOCAB - 1)
        draft = PEagle(own.to(device, dtype), sampled=True)
    if kind == "mtp":
        draft = MTP.from_pretrained(model.to(device))
    if kind == "assistant":
        draft = Gemma4Assistant(assistant.to(device))
    settings = {"num_draft_tokens": NUM_DRAFTS, "schedule": "constant", "sampling": MIXED} | options
    return SpeculativeDecoder(model.to(device), draft, **settings)


def run(loop: SpeculativeDecoder, prompts: Tensor = PROMPTS, **options: object) -> GenerationOutput:
    device = loop.target.device
    settings = {"attention_mask": MASK.to(device), "max_new_tokens": LIMITS, "seed": 3} | options
    return loop.generate(prompts.to(device), **settings)


def of_the_cpu(kind: str = "model", prompts: Tensor = PROMPTS, layers: int = 2, **options: object) -> list[list[int]]:
    """The texts of an eager loop."""
    return new_tokens(run(decoder("cpu", kind, layers, compile=False, **options), prompts))


@pytest.mark.not_rehearsed("the code that Inductor makes for CUDA")
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_steps_give_the_tokens_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "compile_piece", compile_piece)
    loop = decoder("cuda", "model", layers=1, compile=True)
    first, second = run(loop), run(loop)
    assert loop._compiled_steps._graphs
    assert new_tokens(first) == new_tokens(second) == of_the_cpu(layers=1)
    assert first.stats.compile_seconds > 0 and second.stats.compile_seconds == 0


@pytest.mark.parametrize(
    ("kind", "sampling"),
    [
        *((kind, MIXED) for kind in ("none", "lookup", "lookup else", "head", "block", "markov", "mtp", "hybrid")),
        ("history", MIXED),
        # The draws of `verify="exact"` depend on what the lookup remembers.
        ("lookup else, history", GREEDY),
        *((kind, MIXED) for kind in ("selector", "parallel")),
        pytest.param("model", MIXED, marks=pytest.mark.smoke),
        pytest.param("assistant", MIXED, marks=can_be_built),
        *((kind, PROCESSED) for kind in ("model", "head", "block", "markov", "mtp")),
        # Drafts bring their bounds.
        ("lookup else", FILTERED),
    ],
)
def test_captured_steps_give_the_tokens_of_the_cpu(kind: str, sampling: SamplingParams) -> None:
    expected = of_the_cpu(kind, sampling=sampling)
    assert new_tokens(run(decoder("cuda", kind, compile=False, sampling=sampling))) == expected
    loop = decoder("cuda", kind, sampling=sampling)
    # The second batch replays what the first one captured.
    for captured in (run(loop), run(loop)):
        assert new_tokens(captured) == expected
    assert loop._compiled_steps._graphs
    assert captured.stats.compile_seconds == 0


def test_captured_steps_verify_what_the_host_looked_up() -> None:
    """The second batch has the texts of the first, which the lookup remembers."""
    accepted = []
    for device, options in (("cpu", {"compile": False}), ("cuda", {})):
        loop = decoder(device, "history", **options)
        accepted.append([run(loop).stats.num_accepted for _ in range(2)])
    assert accepted[0] == accepted[1] and accepted[0][1] > accepted[0][0]


def test_default_schedule_times_both_graphs() -> None:
    loop = decoder("cuda", "lookup", schedule=None)
    for captured in (run(loop), run(loop)):
        assert new_tokens(captured) == of_the_cpu("lookup")
    assert {count for count, _ in loop._compiled_steps._graphs} == {0, NUM_DRAFTS}
    assert all(seconds > 0 for seconds in loop._compiled_steps.ready.values())


@pytest.mark.parametrize("kind", ["none", "lookup", "history", "model"])
def test_steps_with_masks_give_the_tokens_of_the_cpu(kind: str) -> None:
    """Proposing and verifying are graphs of their own, and steps without grammars are one graph as before."""

    def masked(loop: SpeculativeDecoder) -> list[list[int]]:
        grammars = [Allowing(by_turns), None, Allowing(lambda text: by_turns((*text, 0)))]
        found = new_tokens(run(loop, grammar=grammars))
        assert all(grammar is None or list(grammar.text) == text for grammar, text in zip(grammars, found, strict=True))
        return found

    expected, without = masked(decoder("cpu", kind, compile=False)), of_the_cpu(kind)
    assert masked(decoder("cuda", kind, compile=False)) == expected
    loop = decoder("cuda", kind)
    for _ in range(2):
        assert masked(loop) == expected
        assert new_tokens(run(loop)) == without
    assert {is_masked for _, is_masked in loop._compiled_steps._graphs} == {False, True}


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["lookup", "head", "block", pytest.param("assistant", marks=can_be_built)])
def test_attention_to_spans_gives_the_tokens_of_a_mask(kind: str) -> None:
    """The models of the other tests are float64, which always has a mask."""
    expected = run(decoder("cpu", kind, compile=False, sampling=GREEDY))
    for use_spans in (True, False):
        loop = decoder("cuda", kind, dtype=torch.float32, sampling=GREEDY)
        loop.target.use_spans = use_spans
        found = run(loop)
        assert new_tokens(found) == new_tokens(expected)
        assert found.stats.num_accepted == expected.stats.num_accepted


@pytest.mark.parametrize("kind", ["none", "model", "head", "parallel"])
def test_long_prompts_are_read_by_causal_attention(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of different lengths, prompts that an eager step reads with its drafts, and new prompts in some rows. A
    head's layers read prompts in the same way, except the layer of "parallel" that sees four tokens."""
    counts: list[int] = []
    of_heads: list[int] = []

    def counting(found: list[int]) -> Callable[..., Tensor]:
        def counted(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
            found.append(queries.shape[2])
            return attend_causal(queries, keys, values, scale)

        return counted

    monkeypatch.setattr(grouped, "attend_causal", counting(counts))
    monkeypatch.setattr(feature, "attend_causal", counting(of_heads))
    monkeypatch.setattr(attention, "MIN_CAUSAL_TOKENS", 5)
    host = decoder("cpu", kind, dtype=torch.float32, compile=False, sampling=GREEDY)
    for compile, mask in (("auto", MASK), (False, torch.ones_like(MASK))):
        counts.clear()
        of_heads.clear()
        loop = decoder("cuda", kind, dtype=torch.float32, compile=compile, sampling=GREEDY)
        texts = [
            new_tokens(run(each, attention_mask=mask.to(each.target.device), max_new_tokens=3)) for each in (host, loop)
        ]
        assert texts[0] == texts[1]
        # The draft model reads one token less than the target.
        in_first_step = {"none": 7, "model": 7 + NUM_DRAFTS}
        assert max(counts) == (6 if compile else in_first_step.get(kind, 6))
        assert of_heads == [5] * (kind in ("head", "parallel"))

    counts.clear()
    requests = [Request([7, 5, 7, 4, 9, 8][: 6 - row % 2], 2, GREEDY) for row in range(4)]
    assert many(loop, requests, 2) == many(host, requests, 2)
    assert counts and max(counts) == 5


@pytest.mark.parametrize("kind", ["lookup", "history", "model", "head", "mtp"])
def test_rows_are_refilled_beside_captured_steps(kind: str) -> None:
    """A record is read when its row has another request already. The first filter captures other graphs, once, and so
    does the first penalty."""
    settings = [GREEDY, GREEDY, SamplingParams(), SamplingParams(0.8, top_k=20), SamplingParams(repetition_penalty=1.3)]
    requests = [Request([7, 5, 7], 2 + 2 * row, sampling, seed=row) for row, sampling in enumerate(settings)]
    loop = decoder("cuda", kind)
    assert many(loop, requests, 2) == many(decoder("cpu", kind, compile=False), requests, 2)
    assert loop._compiled_steps._graphs


@pytest.mark.parametrize("kind", ["lookup", "head"])
def test_streams_take_turns_with_captured_steps(kind: str) -> None:
    """Both have the tensors that the graphs read and write, which keep what one has when the other takes them."""
    loop = decoder("cuda", kind)
    calls = [{"attention_mask": MASK.cuda(), "max_new_tokens": max(LIMITS), "seed": seed} for seed in (3, 4)]
    expected = [new_tokens(loop.generate(PROMPTS.cuda(), **call)) for call in calls]
    streams = [loop.stream(PROMPTS.cuda(), **call) for call in calls]
    turns = zip(*zip_longest(*streams), strict=True)
    found = [streamed([step for step in steps if step is not None], len(PROMPTS)) for steps in turns]
    assert found == expected and loop._compiled_steps._graphs


@pytest.mark.parametrize("kind", ["model", "head"])
def test_a_step_waits_for_nothing(kind: str) -> None:
    loop = decoder("cuda", kind)
    run(loop)
    loop.stream(PROMPTS.cuda(), attention_mask=MASK.cuda(), max_new_tokens=max(LIMITS), seed=3)
    plan = StepPlan(NUM_DRAFTS, is_compiled=True)
    with no_synchronisation():
        for _ in range(size("replays")):
            loop._compiled_steps.run(loop._newest.state, plan)


def test_cuda_graph_for_each_schedule_bucket() -> None:
    loop = decoder("cuda", "model", schedule="heuristic", sampling=GREEDY)
    output = run(loop)
    assert len(loop._compiled_steps._graphs) >= 2
    assert new_tokens(output) == of_the_cpu("none", sampling=GREEDY)


@pytest.mark.parametrize("between", ["another decoder", "a greedy check"])
def test_the_models_of_a_loop_serve_others_too(between: str) -> None:
    """They get a cache of another size then, and another one again for the loop, whose graphs know the first. A text
    that is decoded from that is not the text of its prompt."""
    loop = decoder("cuda", "model")
    other = SpeculativeDecoder(loop.target, loop.draft, num_draft_tokens=2, sampling=GREEDY)
    for prompts in (PROMPTS, OTHER_PROMPTS):
        expected = of_the_cpu(prompts=prompts)
        assert new_tokens(run(loop, prompts)) == expected
        # The first row is greedy and has no padding.
        alone = prompts[:1].cuda()
        if between == "another decoder":
            assert new_tokens(other.generate(alone, max_new_tokens=LIMITS[0])) == expected[:1]
        else:
            assert check_greedy(loop.target, alone, expected[0]) == []


def test_an_encoder_reads_inputs_of_other_lengths() -> None:
    """Its states and their keys and values are then other tensors, which graphs of the length before do not know."""
    generator = torch.Generator().manual_seed(5)
    inputs = [torch.randint(3, VOCAB, (2, length), generator=generator) for length in (10, 14, 10)]
    start = torch.ones(2, 1, dtype=torch.int64)

    def all_texts(device: str, compile: bool | str) -> list[list[list[int]]]:
        target, draft = tiny("t5").to(device), perturbed(tiny("t5"), 0.05).to(device)
        loop = SpeculativeDecoder(target, draft, num_draft_tokens=3, sampling=GREEDY, compile=compile)
        call = {"max_new_tokens": LIMITS[0], "eos_token_id": ()}
        given = [{"input_ids": ids.to(device), "attention_mask": torch.ones_like(ids, device=device)} for ids in inputs]
        found = [new_tokens(loop.generate(start.to(device), inputs=own, **call)) for own in given]
        assert bool(loop._compiled_steps._graphs) == (device == "cuda")
        return found

    expected = all_texts("cpu", False)
    assert len({str(each) for each in expected}) == len(inputs)
    assert all_texts("cuda", "auto") == expected


def test_weights_that_were_replaced_are_read() -> None:
    """As after a model was moved away and back: a graph knows the addresses of the weights before."""
    model, other = tiny("llama").cuda(), perturbed(tiny("llama"), 0.5)
    loop = SpeculativeDecoder(model, sampling=GREEDY)
    before = new_tokens(run(loop))
    for own, new in zip(model.parameters(), other.parameters(), strict=True):
        own.data = new.data.cuda()
    expected = new_tokens(run(SpeculativeDecoder(other, sampling=GREEDY, compile=False)))
    assert new_tokens(run(loop)) == expected != before


def test_calls_that_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` captures nothing that the call before it has captured, and never decodes with an old graph."""
    captures: list[object] = []
    monkeypatch.setattr(compiled, "capture", lambda *given: captures.append(given) or capture(*given))
    model, draft = tiny("llama"), perturbed(tiny("llama"), 0.05)
    on_device, options = [each.cuda() for each in map(copy.deepcopy, (model, draft))], {"num_draft_tokens": 2}

    def num_captured(prompts: list[list[int]], max_new_tokens: int = 4) -> int:
        texts, captures[:] = [], []
        for target, own_draft in ((model, draft), on_device):
            call = options | {"max_new_tokens": max_new_tokens, "sampling": GREEDY, "compile": "auto"}
            texts.append(new_tokens(generate(target, prompts, draft=own_draft, **call)))
        assert texts[0] == texts[1]
        return len(captures)

    def replace_weights() -> None:
        for own, other in zip(on_device[0].parameters(), model.parameters(), strict=True):
            own.data = other.data.cuda()

    def change_weights() -> None:
        for each in (model, on_device[0]):
            with torch.no_grad():
                each.lm_head.weight.neg_()

    one, *others = PROMPTS.tolist()
    assert [num_captured([one]), num_captured([one])] == [1, 0]
    assert num_captured([others[0] * 2], 6) == 0
    change_weights()
    assert num_captured([one]) == 0
    replace_weights()
    assert num_captured([one]) == 1
    # Graphs are those of the newest batch size.
    assert [num_captured(others), num_captured([one])] == [1, 1]
    options["num_draft_tokens"] = 1
    assert [num_captured([one]), num_captured([one])] == [1, 0]
    on_device[0].float()
    model.float()
    draft.float()
    on_device[1].float()
    assert num_captured([one]) == 1


def test_a_step_that_cannot_be_captured() -> None:
    model = tiny("llama").cuda()
    model.lm_head.register_forward_hook(lambda module, given, output: output * float(output.max() < 1e9))
    message = r"^compile: the step could not be captured .*\(compile=False runs it eagerly\)$"
    with pytest.raises(RuntimeError, match=message):
        generate(model, PROMPTS.tolist(), max_new_tokens=4)


def test_capture_beside_another_thread() -> None:
    """A thread that serves something else allocates memory and reads results: no capture of ours may break its calls,
    nor they a capture."""
    stop, errors, rounds = threading.Event(), [], 0

    def something_else() -> None:
        nonlocal rounds
        stream = torch.cuda.Stream()
        try:
            with torch.cuda.stream(stream):
                while not stop.is_set():
                    rounds += 1
                    # Other sizes each time, so that the allocators ask CUDA for memory.
                    numbers = torch.ones(1000 * (1 + rounds % 200), device="cuda")
                    assert int(numbers[:2].sum()) == 2
                    torch.empty(len(numbers), pin_memory=True).copy_(numbers, non_blocking=True)
                    event = torch.cuda.Event()
                    event.record()
                    event.synchronize()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=something_else)
    thread.start()
    try:
        captured = [new_tokens(run(decoder("cuda", "model"))) for _ in range(2)]
    finally:
        stop.set()
        thread.join()
    assert not errors
    assert captured == [of_the_cpu()] * 2
    assert rounds > 1


def test_a_row_that_the_host_stops_keeps_its_text() -> None:
    """The next step is queued when the host stops it, and graphs go on reading lengths from where they were."""
    loop, whole = decoder("cuda", "model"), of_the_cpu()
    arguments = {"attention_mask": MASK.cuda(), "max_new_tokens": LIMITS, "seed": 3}
    for _ in range(2):
        # The prompts have 7, 1 and 4 tokens.
        output = loop.run(PROMPTS.cuda(), arguments, row_rules=[lambda texts: [len(text) == 8 for text in texts]])
        assert new_tokens(output) == limited(whole, [1, 7, 4])
    assert new_tokens(run(loop)) == whole


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_loop_runs_where_its_models_are() -> None:
    assert torch.cuda.current_device() == 0
    loop = decoder("cuda:1", "model")
    for _ in range(2):
        assert new_tokens(run(loop)) == of_the_cpu()
    assert loop._compiled_steps._graphs
    assert torch.cuda.current_device() == 0
