"""A transformers model that changes between two calls of a decoder, or in an open session.

`ROWS` in helpers/changes_table.py is the table of docs/models.md with examples of each kind of change. A trial uses a
decoder, makes the change, and uses the decoder again. This second call must give what a forward of the changed model
gives, without a cache and in evaluation mode; or the row's error. No call may change anything in the user's model.
"""

from __future__ import annotations

import copy
import functools
import gc
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from changes_table import NO_TEXT_RUNS, NOT_RECOMPILED, REFUSED, ROWS, Change, Row
from marks import slow
from model_changes import (
    adapted,
    adapter_of,
    add_parametrization,
    granite,
    llama,
    replace_attention,
    replace_head,
    shard,
)
from model_state import changed, state_of
from tiny_loops import GREEDY, new_tokens
from tiny_models import VOCAB, tiny
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.utils import parametrize
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP
from ways_to_decode import (
    PROMPTS,
    WAYS,
    WIDTH,
    Found,
    Way,
    by_beam_search,
    by_custom_generate,
    by_generate,
    by_session,
    difference,
    found_of,
    own_logprobs,
    requests,
    until_done,
)

from torch_specops import SpeculativeDecoder, compilation
from torch_specops.compilation import compile_piece
from torch_specops.drafts import EarlyExit
from torch_specops.hf import language_model

TRIALS = [(row, name) for row in ROWS for name in ROWS[row].changes]


def test_the_docs_have_the_table_of_changes() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    _, table = page.split("| change between two calls | at the next call | in an open session | in compiled steps |\n")
    rows = {}
    for line in table.split("\n\n")[0].splitlines()[1:]:
        change, *promises = (cell.strip() for cell in line.strip("|").split("|"))
        rows[change.split(":")[0].replace("`", "")] = promises
    assert rows == {name: [row.next_call, row.session, row.compiled] for name, row in ROWS.items()}


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def traced(fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled is traced, and runs as it is."""
    monkeypatch.setattr(compilation, "compile_piece", partial(compile_piece, backend="eager"))


# A trial.


def why_not_trained(model: PreTrainedModel) -> list[str]:
    try:
        model(PROMPTS, use_cache=False).logits.sum().backward()
    except RuntimeError as error:
        return [f"training: {error}"]
    has_gradients = any(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad()
    return [] if has_gradients else ["training: no gradients"]


def used_calls(change: Change, target: Any, draft: Any, ways: Iterable[str], is_refused: bool, compile: bool) -> Any:
    """By way: a call that was made once."""
    calls: dict[str, Way] = {}
    for way in ways:
        make, kind = WAYS[way]
        if kind != "model" and change.needs_draft:
            continue
        try:
            call = make(target, draft if kind == "model" else kind, compile)
            call(2)
        except ValueError as error:
            # Some of what compiled steps refuse is there before the change.
            if not (compile and is_refused and str(error).startswith("compile: ")):
                raise
        else:
            calls[way] = call
    return calls


def problem_of(call: Way, change: Change, is_refused: bool, target: PreTrainedModel, has_draft: bool) -> str:
    """Why the next call is not what its row promises; empty = it is."""
    try:
        found = call(5)
    except Exception as error:
        is_promised = is_refused and re.match(change.error or "compile: ", str(error))
        return "" if is_promised else f"{type(error).__name__}: {str(error)[:200]}"
    if is_refused:
        return "not refused"
    if (far := difference(found, target)) > change.tolerance:
        return f"differs by {far:.1e}"
    # The draft is the target's twin. In 16 bits, the two may differ by rounding.
    is_twin = has_draft and change.tolerance < 1e-3
    return "the draft is as before" if is_twin and not found.all_accepted else ""


def problems(row: Row, change: Change, ways: Iterable[str], compile: bool = False) -> list[str]:
    target, draft, twin = (change.make() for _ in range(3))
    before, state = own_logprobs(twin, PROMPTS), state_of(target, draft)
    calls = used_calls(change, target, draft, ways, row.compiled == REFUSED, compile)
    found = changed(state, target, draft, swaps_weights=change.swaps_weights)
    # The change.
    take_back = []
    for model, of in ((target, "target"), (draft, "draft")):
        if change.of in (of, "both"):
            torch.manual_seed(1)
            take_back.append(partial(change.apply(model) or (lambda model: None), model))
    if not change.error:
        # Some changes are complete after a forward, which has to be the loop's: the twin is asked, not the target.
        change.apply(twin)
        after = own_logprobs(twin, PROMPTS)[..., :VOCAB]
        assert (after - before).abs().max() > 1e-2, "nothing can be seen of this change"
    # The next call.
    state, num_graphs = state_of(target, draft), counters["stats"]["unique_graphs"]
    for way, call in calls.items():
        promise = row.compiled if compile else row.session if way == "session" else row.next_call
        problem = problem_of(call, change, promise == REFUSED, target, WAYS[way][1] == "model")
        found += [f"{way}: {problem}"] if problem else []
        found += [f"{way}: {each}" for each in changed(state, target, draft, swaps_weights=change.swaps_weights)]
        if promise == NOT_RECOMPILED and counters["stats"]["unique_graphs"] != num_graphs:
            found.append(f"{way}: recompiled")
    # What was refused is read again when the change is taken back. The error has ended a session.
    if change.error:
        for undo in take_back:
            undo()
        for way, call in calls.items():
            if way != "session" and difference(call(5), target) > change.tolerance:
                found.append(f"{way}: is not as before")
    return found + why_not_trained(target)


@pytest.mark.parametrize(("row", "name"), TRIALS)
def test_a_change_does_what_the_table_says(row: str, name: str) -> None:
    # The first change of a row is tried in all ways.
    is_first = name == next(iter(ROWS[row].changes))
    ways = WAYS if is_first else ("generate with a model", "session")
    assert problems(ROWS[row], ROWS[row].changes[name], ways) == []


# Dynamo takes a second or two for each step.
@pytest.mark.slow
@pytest.mark.parametrize(("row", "name"), TRIALS)
@pytest.mark.usefixtures("traced")
def test_compiled_steps_do_too(row: str, name: str) -> None:
    change = ROWS[row].changes[name]
    ways = ("generate with a model",) if change.needs_draft else ("generate", "custom_generate")
    assert problems(ROWS[row], change, ways, compile=True) == []


# Compiled steps.


def scaled(module: nn.Module, given: Any, *rest: Any) -> Tensor:
    """A hook that gets the module's keywords or not, and gives something else then."""
    return rest[-1] * (0.5 if len(rest) == 2 else 1.5)


def code_changes(model: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[], object]]:
    """To be made one after another."""
    hooks: list[Any] = []

    def double_mlp(module: nn.Module, given: Any, output: Tensor) -> Tensor | None:
        return output * 2 if isinstance(module, LlamaMLP) else None

    def patch_class() -> None:
        own = LlamaMLP.forward
        monkeypatch.setattr(LlamaMLP, "forward", lambda self, states: own(self, states) * 2)

    return {
        "a string of an adapter": lambda: setattr(adapter_of(model), "only", "b"),
        "a hook": lambda: hooks.append(model.lm_head.register_forward_hook(scaled)),
        "no hook": lambda: hooks.pop().remove(),
        # The same function, which gets other arguments.
        "a hook with keywords": lambda: hooks.append(model.lm_head.register_forward_hook(scaled, with_kwargs=True)),
        "a hook of all modules": lambda: hooks.append(nn.modules.module.register_module_forward_hook(double_mlp)),
        "no hook of all modules": lambda: hooks.pop().remove(),
        "a patched class": patch_class,
        # The last, because its `forward` is without the hook.
        "another class": lambda: ROWS["the class of a module"].changes["__class__"].apply(model),
    }


def test_changed_code_has_another_compile_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compiled for a key runs for it alone. torch's guards see the string."""
    model = adapted()
    adapter, kinds, seen = language_model(model), [], list[Any]()
    for change in (lambda: None, *code_changes(model, monkeypatch).values()):
        change()
        adapter.look()
        key = adapter.compile_key
        seen += [] if key in seen else [key]
        kinds.append(seen.index(key))
    assert kinds == [0, 0, 1, 0, 2, 3, 2, 4, 5]


@pytest.mark.parametrize("num_changes", [3, slow(8)])
@pytest.mark.usefixtures("traced")
def test_compiled_session_sees_changed_code(num_changes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted()
    call = by_session(model, None, compile=True)
    assert difference(call(2), model) < 1e-4
    found, before = [], own_logprobs(model, PROMPTS)
    for name, change in list(code_changes(model, monkeypatch).items())[:num_changes]:
        change()
        after = own_logprobs(model, PROMPTS)
        assert (after - before).abs().max() > 1e-2, name
        before, num_graphs = after, counters["stats"]["unique_graphs"]
        if (far := difference(call(5), model)) > 1e-4:
            found.append(f"{name}: differs by {far:.1e}")
        # What was compiled before the hook is used again.
        if name.startswith("no hook") and counters["stats"]["unique_graphs"] != num_graphs:
            found.append(f"{name}: recompiled")
    assert found == []


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_compiled_steps_see_more_changes_than_graphs() -> None:
    """torch keeps `recompile_limit` graphs for a function."""
    model = adapted()
    call = by_generate(model, None, compile=True)
    with torch._dynamo.config.patch(recompile_limit=2):
        for scale in (1.0, 2.0, 3.0, 4.0, 1.0):
            adapter_of(model).scaling["a"] = scale
            assert difference(call(3), model) < 1e-4


# While texts run.


@pytest.mark.parametrize(
    ("row", "name"),
    [("the dtype", "bfloat16"), ("layers or heads", "appended"), ("a submodule replaced", "head")],
)
def test_a_change_while_a_text_runs(row: str, name: str) -> None:
    """All rows go on with the changed model once the next text has begun. A change of the head alone leaves the cache
    as it is, so that this can be computed."""
    change = ROWS[row].changes[name]
    model = change.make()
    with SpeculativeDecoder(model, sampling=GREEDY, compile=False).session(2, max_length=40, logprobs="raw") as session:
        first = session.submit(requests(12)[0])
        while len(first.new_tokens) < 4:
            session.step()
        before, end = copy.deepcopy(model), WIDTH + len(first.new_tokens)
        change.apply(model)
        second = session.submit(requests(6)[1])
        if ROWS[row].session == NO_TEXT_RUNS:
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
    with pytest.raises(ValueError, match=r"model: its weights are sharded \(fully_shard\) over several ranks"):
        SpeculativeDecoder(model)


# What the loop reads of the model.


@pytest.mark.parametrize("change", [replace_attention, replace_head, lambda model: model.float()])
def test_early_exit_of_a_changed_model(change: Callable[[Any], object]) -> None:
    model = tiny("llama")
    decoder = SpeculativeDecoder(model, EarlyExit(1), sampling=GREEDY, compile=False)
    options: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": ()}
    before = new_tokens(decoder.generate(PROMPTS, **options))
    change(model)
    fresh = SpeculativeDecoder(copy.deepcopy(model), EarlyExit(1), sampling=GREEDY, compile=False)
    output, expected = (each.generate(PROMPTS, **options) for each in (decoder, fresh))
    assert new_tokens(output) == new_tokens(expected)
    assert output.stats.num_accepted == expected.stats.num_accepted
    assert change.__name__ == "<lambda>" or new_tokens(output) != before


def test_changed_configs_are_copied_and_freed() -> None:
    model = tiny("qwen3")
    adapter = language_model(model)
    for number in range(10):
        config = copy.deepcopy(model.config)
        config.note = {"number": [number]}
        model.config = model.model.config = config
        adapter.look()
        copied = adapter.prepared.config
        assert copied is adapter.prepared.model.config is not config
        for name in ("note", "layer_types", "rope_parameters"):
            assert vars(copied)[name] == vars(config)[name]
    # Those that the modules have now, and no others.
    assert len(adapter._copy.newest.configs) <= 3
    config.lengths = torch.arange(2)
    adapter.look()
    assert torch.equal(adapter.prepared.config.lengths, config.lengths)
    config.lock = (number for number in range(2))
    with pytest.raises(ValueError, match="model: Qwen3Config cannot be copied: cannot pickle 'generator'"):
        adapter.look()


def test_hooks_write_to_the_users_model() -> None:
    """A hook that reaches the model by its closure gets the model, not the copy."""
    model = llama()
    call = by_generate(model, None)

    def note(module: nn.Module, given: Any, output: Tensor) -> None:
        model.newest = output

    model.lm_head.register_forward_hook(note)
    for _ in range(2):
        model.newest = None
        call(3)
        assert isinstance(model.newest, Tensor)


class Scaled(nn.Linear):
    def forward(self, states: Tensor) -> Tensor:
        return super().forward(states) * self.function.scale


@pytest.mark.parametrize("kind", ["function", "partial"])
def test_copied_functions_keep_their_attributes(kind: str) -> None:
    model = llama()
    call, head = by_generate(model, None), model.lm_head
    function: Any = (lambda head=head: head) if kind == "function" else partial(lambda head: head, head)
    function.scale = 0.3
    head.__class__, head.function = Scaled, function
    # A cache of functions has no attributes to copy.
    model.cached = functools.lru_cache(maxsize=None)(model.get_input_embeddings)
    assert difference(call(3), model) < 1e-4


class NoMask(LlamaAttention):
    """Right for one text alone."""

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, **named: Any) -> Any:
        return super().forward(hidden_states, attention_mask=None, **named)


def test_changed_attention_is_checked() -> None:
    model = llama()
    call = by_generate(model, None)
    call(1)
    model.model.layers[0].self_attn.__class__ = NoMask
    for use in (partial(call, 2), lambda: by_generate(model, None)):
        with pytest.raises(ValueError, match="LlamaForCausalLM does not read ragged rows right"):
            use()
    model.model.layers[0].self_attn.__class__ = LlamaAttention
    assert difference(call(3), model) < 1e-4


@pytest.mark.usefixtures("quick_collection")
@pytest.mark.parametrize("of", ["the model", "a module"])
def test_removed_code_is_freed(of: str) -> None:
    model = llama()
    module = model if of == "the model" else model.lm_head
    adapter, own = language_model(model), module.forward
    freed = []
    for _ in range(3):
        # Functions are rebuilt with their defaults.
        weight = torch.zeros(3)
        module.forward = lambda *given, kept=weight, **named: own(*given, **named)
        freed.append(weakref.ref(weight))
        adapter.start(2, 16)
        del module.forward, weight
    for _ in range(2):
        adapter.start(2, 16)
    gc.collect()
    assert [each() for each in freed] == [None] * 3
