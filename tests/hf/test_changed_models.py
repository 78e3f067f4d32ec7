"""A model that changes between two calls of a decoder: the table in docs/models.md, row by row.

What a call gives is compared with a forward of the changed model itself, without a cache and in evaluation mode.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from model_changes import CHANGES, adapted, adapter_of, add_parametrization, granite, llama, shard
from model_state import changed, state_of
from tiny_models import VOCAB
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from torch_specops import Request, SamplingParams, Session, SpeculativeDecoder, compilation
from torch_specops.beam import beam_search
from torch_specops.compilation import compile_piece
from torch_specops.decode import Handle
from torch_specops.drafts import PromptLookup
from torch_specops.hf import custom_generate

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEADER = "| change between two calls | at the next call | in an open session | in compiled steps |\n"
NEXT_TEXT, NO_TEXT_RUNS, AS_THEY_ARE, REFUSED = (
    "from the next text",
    "while no text runs",
    "yes, as they are",
    "refused",
)
# By columns. Other answers are promises that nothing here tries.
ANSWERS = (
    {"yes", "as in `eval()`", REFUSED},
    {"at the next step", NEXT_TEXT, NO_TEXT_RUNS, "as in `eval()`", REFUSED},
    {"yes", AS_THEY_ARE, "as in `eval()`", REFUSED},
)
# In both rows the first tokens come again.
PROMPTS = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5], [9, 4, 17, 33, 9, 4, 17, 33, 9]])
WIDTH = PROMPTS.shape[1]
GREEDY = SamplingParams(temperature=0.0)


def table() -> dict[str, list[str]]:
    """The answers of each row, by what it says before its colon."""
    rows = {}
    for line in PAGE.read_text().split(HEADER)[1].splitlines()[1:]:
        if not line.startswith("|"):
            break
        change, *answers = (cell.strip() for cell in line.strip("|").split("|"))
        rows[change.split(":")[0].replace("`", "")] = answers
    return rows


ROWS = table()
TRIES = [(row, name) for row, changes in CHANGES.items() for name in changes]


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def traced(fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled is traced, and runs as it is."""
    monkeypatch.setattr(compilation, "compile_piece", partial(compile_piece, backend="eager"))


# The ways in.


class Found(NamedTuple):
    """Texts [2, L], the raw log-probabilities of their new tokens [2, n], whether all drafts were accepted."""

    texts: Tensor
    logprobs: Tensor | None
    all_accepted: bool = True


Way = Callable[[int], Found]


def by_generate(target: PreTrainedModel, draft: Any, compile: bool = False) -> Way:
    decoder = SpeculativeDecoder(target, draft, num_draft_tokens=3, sampling=GREEDY, compile=compile)

    def call(new: int) -> Found:
        output = decoder.generate(PROMPTS, max_new_tokens=new, eos_token_id=(), logprobs="raw")
        assert output.logprobs is not None
        accepted = output.stats.num_accepted == output.stats.num_proposed
        return Found(output.sequences, output.logprobs[:, WIDTH:], accepted)

    return call


def requests(new: int) -> list[Request]:
    return [Request(prompt, new, eos_token_id=()) for prompt in PROMPTS]


def found_of(completions: Any) -> Found:
    own = sorted(completions, key=lambda completion: completion.index)
    for completion in own:
        if completion.error is not None:
            raise ValueError(completion.error)
    return Found(*(torch.stack([getattr(each, name) for each in own]) for name in ("tokens", "logprobs")))


def by_generate_many(target: PreTrainedModel, draft: Any, compile: bool = False) -> Way:
    decoder = SpeculativeDecoder(target, draft, num_draft_tokens=3, sampling=GREEDY, compile=compile)
    return lambda new: found_of(decoder.generate_many(requests(new), batch_size=2, max_length=40, logprobs="raw"))


def until_done(session: Session, *handles: Handle) -> list[Any]:
    while not all(handle.done for handle in handles):
        session.step()
    return [handle.result() for handle in handles]


def by_session(target: PreTrainedModel, draft: Any, compile: bool = False) -> Way:
    decoder = SpeculativeDecoder(target, draft, num_draft_tokens=3, sampling=GREEDY, compile=compile)
    session = decoder.session(2, max_length=40, logprobs="raw")
    return lambda new: found_of(until_done(session, *map(session.submit, requests(new))))


def by_custom_generate(target: PreTrainedModel, draft: Any, compile: bool = False) -> Way:
    options: dict[str, Any] = {"custom_generate": custom_generate, "draft_model": draft, "num_draft_tokens": 3}
    options |= {"compile": compile, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(PROMPTS)}
    # Steps that keep logits are not compiled.
    options |= {"return_dict_in_generate": True, "output_logits": not compile}

    def call(new: int) -> Found:
        output = target.generate(PROMPTS, max_new_tokens=new, **options)
        if compile:
            return Found(output.sequences, None)
        logprobs = torch.stack(output.logits, 1).log_softmax(-1)
        return Found(output.sequences, logprobs.gather(2, output.sequences[:, WIDTH:, None]).squeeze(2))

    return call


# How a way is made, and its draft.
WAYS: dict[str, tuple[Callable[..., Way], Any]] = {
    "generate": (by_generate, None),
    "generate with PromptLookup": (by_generate, PromptLookup(min_ngram=1)),
    "generate with a model": (by_generate, "model"),
    "generate_many": (by_generate_many, "model"),
    "session": (by_session, "model"),
    "custom_generate": (by_custom_generate, "model"),
}


# What is expected.


def own_logprobs(model: PreTrainedModel, texts: Tensor) -> Tensor:
    """Of all tokens after each token of texts [2, L], from the model itself in the mode that it is in."""
    torch.manual_seed(0)
    with torch.no_grad():
        return model(texts, use_cache=False).logits.float().log_softmax(-1)


def difference(found: Found, model: PreTrainedModel, start: int = WIDTH) -> float:
    """How far the log-probabilities of the tokens from a place on are from the model's in evaluation mode, and these
    tokens from its greedy ones."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    expected = own_logprobs(model, found.texts)[:, start - 1 : -1]
    for module, training in modes:
        module.training = training
    own = expected.gather(2, found.texts[:, start:, None]).squeeze(2)
    differences = [expected.amax(2) - own]
    if found.logprobs is not None:
        differences.append((found.logprobs - own).abs())
    return float(torch.stack(differences).amax())


def why_not_trained(model: PreTrainedModel) -> list[str]:
    try:
        model(PROMPTS, use_cache=False).logits.sum().backward()
    except RuntimeError as error:
        return [f"training: {error}"]
    has_gradients = any(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad()
    return [] if has_gradients else ["training: no gradients"]


def failures(row: str, name: str, ways: Iterable[str], compile: bool = False) -> list[str]:
    """The ways in that do not do what the table says, and what they leave behind in the models."""
    change, answers = CHANGES[row][name], ROWS[row]
    target, draft, twin = (change.make() for _ in range(3))
    before, state = own_logprobs(twin, PROMPTS), state_of(target, draft)
    calls: dict[str, Way] = {}
    for way in ways:
        make, kind = WAYS[way]
        if kind == "model" or not change.needs_draft:
            try:
                calls[way] = make(target, draft if kind == "model" else kind, compile)
                calls[way](2)
            except ValueError as error:
                # Some of what is refused in compiled steps is there from the beginning.
                if not (compile and answers[2] == REFUSED and str(error).startswith("compile: ")):
                    raise
                calls.pop(way, None)
    wrong, undo = changed(state, target, draft, swaps_weights=change.swaps_weights), []
    for model, of in ((target, "target"), (draft, "draft")):
        if change.of in (of, "both"):
            torch.manual_seed(1)
            undo.append((change.apply(model), model))
    if not change.error:
        # Not of the target: some changes are complete after a forward, which has to be the loop's.
        change.apply(twin)
        after = own_logprobs(twin, PROMPTS)[..., :VOCAB]
        assert (after - before).abs().max() > 1e-2, "nothing can be seen of this change"
    state, num_graphs = state_of(target, draft), counters["stats"]["unique_graphs"]
    for way, call in calls.items():
        answer = answers[2 if compile else 1 if way == "session" else 0]
        try:
            found = call(5)
        except Exception as error:
            if answer != REFUSED or not re.match(change.error or "compile: ", str(error)):
                wrong.append(f"{way}: {type(error).__name__}: {str(error)[:200]}")
        else:
            if answer == REFUSED:
                wrong.append(f"{way}: not refused")
            elif (far := difference(found, target)) > change.tolerance:
                wrong.append(f"{way}: differs by {far:.1e}")
            # In 16 bits, the two may differ by rounding.
            elif not found.all_accepted and WAYS[way][1] == "model" and change.tolerance < 1e-3:
                wrong.append(f"{way}: the draft is as before")
        wrong += [f"{way}: {each}" for each in changed(state, target, draft, swaps_weights=change.swaps_weights)]
        if answer == AS_THEY_ARE and counters["stats"]["unique_graphs"] != num_graphs:
            wrong.append(f"{way}: compiled anew")
    if change.error:
        for take_back, model in undo:
            take_back(model)
        for way, call in calls.items():
            # The error has ended a session.
            if way != "session" and difference(call(5), target) > change.tolerance:
                wrong.append(f"{way}: is not as before")
    return wrong + why_not_trained(target)


# The rows.


def test_every_row_is_tried() -> None:
    assert list(ROWS) == list(CHANGES)
    for row, answers in ROWS.items():
        assert all(answer in known for answer, known in zip(answers, ANSWERS, strict=True)), row


@pytest.mark.parametrize(("row", "name"), TRIES)
def test_a_change_does_what_the_table_says(row: str, name: str) -> None:
    # The first change of a row is tried in all ways.
    is_first = name == next(iter(CHANGES[row]))
    wrong = failures(row, name, WAYS if is_first else ("generate with a model", "session"))
    assert not wrong, "\n".join(wrong)


# Dynamo takes a second or two for each step.
@pytest.mark.slow
@pytest.mark.parametrize(("row", "name"), TRIES)
@pytest.mark.usefixtures("traced")
def test_compiled_steps_do_too(row: str, name: str) -> None:
    ways = ("generate with a model",) if CHANGES[row][name].needs_draft else ("generate", "custom_generate")
    wrong = failures(row, name, ways, compile=True)
    assert not wrong, "\n".join(wrong)


@pytest.mark.usefixtures("traced")
def test_compiled_custom_generate_sees_a_config() -> None:
    assert failures("a field of the config", "sliding_window", ["custom_generate"], compile=True) == []


@pytest.mark.usefixtures("traced")
def test_a_compiled_session_sees_one_change_after_another() -> None:
    model = adapted()
    call = by_session(model, None, compile=True)
    assert difference(call(2), model) < 1e-4
    wrong, before = [], own_logprobs(model, PROMPTS)
    # The class of the head is the last, because it has a `forward` without the hook.
    for row, name in (
        ("an adapter", "a string"),
        ("a hook", "added"),
        ("a hook", "removed"),
        ("the class of a module", "__class__"),
    ):
        CHANGES[row][name].apply(model)
        after = own_logprobs(model, PROMPTS)
        assert (after - before).abs().max() > 1e-2
        before, num_graphs = after, counters["stats"]["unique_graphs"]
        if (far := difference(call(5), model)) > 1e-4:
            wrong.append(f"{name}: differs by {far:.1e}")
        # What was compiled before the hook is used again.
        if name == "removed" and counters["stats"]["unique_graphs"] != num_graphs:
            wrong.append(f"{name}: compiled anew")
    assert wrong == []


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_compiled_steps_see_more_changes_than_torch_keeps_graphs_for() -> None:
    model = adapted()
    call = by_generate(model, None, compile=True)
    with torch._dynamo.config.patch(recompile_limit=2):
        for scale in (1.0, 2.0, 3.0, 4.0, 1.0):
            adapter_of(model).scaling["a"] = scale
            assert difference(call(3), model) < 1e-4


# While texts run.


@pytest.mark.parametrize(
    ("row", "name"),
    [("the dtype", "bfloat16"), ("layers or heads", "appended"), ("a submodule replaced", "head"), ("a hook", "added")],
)
def test_a_change_while_a_text_runs(row: str, name: str) -> None:
    """All rows go on with the changed model once the next text has begun. A change of the head alone leaves the cache
    as it is, so that this can be computed."""
    change = CHANGES[row][name]
    model = change.make()
    with SpeculativeDecoder(model, sampling=GREEDY, compile=False).session(2, max_length=40, logprobs="raw") as session:
        first = session.submit(requests(12)[0])
        while len(first.new_tokens) < 4:
            session.step()
        before, end = copy.deepcopy(model), WIDTH + len(first.new_tokens)
        change.apply(model)
        second = session.submit(requests(6)[1])
        if ROWS[row][1] == NO_TEXT_RUNS:
            with pytest.raises(RuntimeError, match=r"target: .* while texts run"):
                until_done(session, second)
            return
        texts, logprobs, _ = found_of(until_done(session, first))
        assert difference(found_of(until_done(session, second)), model) < 1e-4
    assert difference(Found(texts[:, :end], logprobs[:, : end - WIDTH]), before) < 1e-4
    assert difference(Found(texts, logprobs[:, end - WIDTH :]), model, end) < 1e-4


# What the user's own code keeps.


class Lazy(nn.Module):
    """Computes a table when it first runs, and keeps it where a copy of the module finds it too."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.kept = base, dict[str, Tensor]()

    def forward(self, states: Tensor) -> Tensor:
        if "scale" not in self.kept:
            self.kept["scale"] = torch.linspace(0.5, 3, states.shape[-1], dtype=states.dtype).exp()
        return self.base(states) * self.kept["scale"]


def by_beam_search(target: PreTrainedModel, draft: Any) -> Way:
    return lambda new: beam_search(target, PROMPTS, num_beams=2, max_new_tokens=new)


@pytest.mark.parametrize(
    ("make", "make_way"),
    [
        *((llama, way) for way in (by_generate, by_session, by_custom_generate, by_beam_search)),
        (granite, by_generate),
    ],
)
def test_what_a_call_computes_can_be_trained_on(make: Callable[[], Any], make_way: Callable[..., Any]) -> None:
    """What hooks have seen, also in the check of an untested family, and what modules keep."""
    model, kept = make(), list[Tensor]()
    model.model.layers[0].mlp = Lazy(model.model.layers[0].mlp)
    model.lm_head.register_forward_pre_hook(lambda module, given: kept.append(given[0]))
    add_parametrization(model)
    with parametrize.cached():
        make_way(model, None)(2)
        assert len(kept) > 1
        for states in kept:
            weights = torch.ones_like(states, requires_grad=True)
            (states * weights).sum().backward()
        assert why_not_trained(model) == []


def test_weights_sharded_over_several_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    shard(model)
    # A mesh of one rank that says two, because this is one process.
    monkeypatch.setattr(dist.device_mesh.DeviceMesh, "size", lambda mesh, dim=None: 2)
    with pytest.raises(ValueError, match=r"model: its weights are sharded \(fully_shard\) over 2 ranks"):
        SpeculativeDecoder(model)
