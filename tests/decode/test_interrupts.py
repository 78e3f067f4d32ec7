"""An interrupt at any line leaves nothing half-made: the model stays its owner's, and the next call is right."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType, MethodType
from typing import Any

import pytest
import torch
from tiny_eagle3 import trained_head
from tiny_models import PairModel, padded, perturbed, random_table, tiny
from torch import nn
from transformers import PreTrainedModel

import torch_specops
from torch_specops import Request, SpeculativeDecoder
from torch_specops.beam import beam_search
from torch_specops.decode.requests import Handle
from torch_specops.drafts import Eagle3, EarlyExit, PromptLookup
from torch_specops.drafts.hierarchical import HierarchicalDraft
from torch_specops.hf import custom_generate, language_model

IDS, MASK = padded([[1, 17, 5, 17, 5], [1, 29]], "left")

Line = tuple[str, int]
# A call that decodes, and returns all that it gave.
Call = Callable[[], Any]


def traced(call: Call, places: tuple[str, ...], at_line: Callable[[Line], None]) -> Any:
    """The result of a call, with `at_line` called before each line of these files and folders that it passes."""
    paths = tuple(str(Path(torch_specops.__file__).parent / place) for place in places)

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(paths):
            return None
        if event == "line":
            at_line((frame.f_code.co_filename, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return call()
    finally:
        sys.settrace(before)


def interrupted(call: Call, line: Line, visit: int) -> None:
    """Make a call that gets a KeyboardInterrupt before it passes a line for the `visit`-th time, counted from 0."""
    left = visit

    def interrupt(passed: Line) -> None:
        nonlocal left
        if passed == line:
            left -= 1
            if left == -1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        traced(call, (line[0],), interrupt)


def owned(model: Any) -> dict[Any, Any]:
    """All that belongs to the owner of a model: classes, modes, and the objects in every attribute and collection."""
    found: dict[Any, Any] = {}
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        found[name] = type(module)
        for key, value in vars(module).items():
            parts = [(key, id(part)) for key, part in value.items()] if isinstance(value, dict) else []
            found[name, key] = value if isinstance(value, bool) else (id(value), parts)
    return found


def trained() -> PreTrainedModel:
    """A model in training, whose dropout would show, with a hook and a forward of its owner's."""
    model = tiny("llama", attention_dropout=0.5).train()
    model.model.layers[1].register_forward_hook(lambda *call: None)
    mlp = model.model.layers[0].mlp
    mlp.forward = partial(MethodType(type(mlp).forward, mlp))
    return model


def parts(output: Any) -> list[list[Any]]:
    return [output.sequences.tolist(), output.logprobs.nan_to_num().round(decimals=4).tolist()]


def generate(make_draft: Callable[[PreTrainedModel], Any], new: int = 2) -> Callable[[PreTrainedModel], Call]:
    def of(model: PreTrainedModel) -> Call:
        decoder = SpeculativeDecoder(model, make_draft(model), num_draft_tokens=1, schedule="constant")
        return lambda: parts(decoder.generate(IDS, attention_mask=MASK, max_new_tokens=new, seed=1, logprobs="raw"))

    return of


def of_transformers(model: PreTrainedModel) -> Call:
    """With a draft model and compiled code that is kept, and that runs as it stands in this test."""
    draft = perturbed(model)
    options = {"attention_mask": MASK, "pad_token_id": 0, "max_new_tokens": 3, "do_sample": False, "compile": True}
    return lambda: model.generate(IDS, **options, custom_generate=custom_generate, draft_model=draft).tolist()


def of_beams(model: PreTrainedModel) -> Call:
    def call() -> list[list[int]]:
        output = beam_search(
            model, IDS, attention_mask=MASK, num_beams=2, max_new_tokens=3, draft=model, num_draft_tokens=1
        )
        return output.sequences.tolist()

    return call


def session(model: Any, draft: Any) -> Call:
    """Three requests for two rows, with one more that is cancelled and one that is refused. Whoever waits for one hears
    of its end, whatever happens to the session."""
    # Another schedule goes by the clock, and the lines that a call passes go by the schedule.
    decoder = SpeculativeDecoder(model, draft, num_draft_tokens=1, schedule="constant")
    requests = [Request([1, 7, 5], 2, seed=1), Request([1, 2], 1, seed=1), Request([1], 1, seed=1)]
    requests += [Request([1, 5], 3), Request([99])]

    def call() -> list[Any]:
        with decoder.session(2, max_length=16, logprobs="raw") as opened:
            handles = list[Handle]()
            try:
                for request in requests:
                    handles.append(opened.submit(request))
                handles[3].cancel()
                while not opened.is_idle:
                    opened.step()
            finally:
                opened.close()
                # A handle that nobody would ever end raises a TimeoutError.
                ended = [handle.result(timeout=0) for handle in handles]
        return [[done.finish_reason, done.tokens.tolist(), done.logprobs.tolist()] for done in ended]

    return call


CALLS: dict[str, Callable[[Any], Call]] = {
    "early exit": generate(lambda model: EarlyExit(1), 1),
    "eagle 3": generate(lambda model: Eagle3(trained_head())),
    "hierarchical": generate(lambda model: HierarchicalDraft(language_model(perturbed(model)))),
    "prompt lookup": generate(lambda model: PromptLookup(min_ngram=1)),
    "transformers": of_transformers,
    "beam search": of_beams,
    "session": lambda model: session(model, perturbed(model)),
    "session of a table": lambda table: session(table, PromptLookup(min_ngram=1)),
}
# The places of the package where a call is interrupted.
QUICK = {
    "session of a table": (
        "decode/session.py",
        "decode/requests.py",
        "decode/guard.py",
    ),
}
CASES = [
    *QUICK.items(),
    *(pytest.param(name, ("hf/", "drafts/", "decode/", "beam/"), marks=pytest.mark.slow) for name in CALLS),
]


@pytest.mark.parametrize("name, places", CASES)
def test_interrupt_leaves_the_model_right(name: str, places: tuple[str, ...], uncompiled: None) -> None:
    model = PairModel(random_table(12, seed=5)) if name == "session of a table" else trained()
    call = CALLS[name](model)
    expected, before = call(), owned(model)
    weights = {key: value.clone() for key, value in model.state_dict().items()} if before else {}
    passed: Counter[Line] = Counter()
    assert traced(call, places, lambda line: passed.update([line])) == expected
    assert len(passed) > 100
    wrong = []
    for line, visits in passed.items():
        interrupted(call, line, visits // 2)
        is_owners = owned(model) == before and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        if not is_owners or call() != expected or owned(model) != before:
            wrong.append(f"{Path(line[0]).name}:{line[1]}")
        if not is_owners:
            torch.set_grad_enabled(True)
            break
    assert not wrong
    assert all(torch.equal(value, weights[key]) for key, value in (model.state_dict() if before else {}).items())


def test_interrupt_at_a_lock_leaves_it_free() -> None:
    """Where a Condition ends a block, an interrupt in Python's own code would leave it locked for other threads."""

    def interrupt(frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code.co_filename == threading.__file__ and frame.f_code.co_name == "__exit__":
            raise KeyboardInterrupt

    decoder, free = SpeculativeDecoder(PairModel(random_table(12, seed=5))), list[bool]()
    with decoder.session(2, max_length=16) as session:
        handle = session.submit([1, 2])
        for call in (lambda: session.num_free, handle.cancel):
            before = sys.gettrace()
            sys.settrace(interrupt)
            try:
                with contextlib.suppress(KeyboardInterrupt):
                    call()
            finally:
                sys.settrace(before)

        def take(lock: Any) -> None:
            free.append(lock.acquire(timeout=10))
            if free[-1]:
                lock.release()

        for lock in (session._lock, handle._lock):
            thread = threading.Thread(target=take, args=(lock,))
            thread.start()
            thread.join()
    assert free == [True, True]
