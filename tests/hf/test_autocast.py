"""A batch is computed as it began: under `torch.autocast` or not, wherever its steps run."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from tiny_dflash import trained_drafter
from tiny_eagle3 import trained_head
from tiny_loops import GREEDY
from tiny_models import PROMPTS, encoder_inputs, padded, perturbed, shared_tiny, tiny

from torch_specops import Request, SpeculativeDecoder, hf
from torch_specops.compilation import compile_piece
from torch_specops.decode import GenerationOutput
from torch_specops.drafts import DFlash, Eagle3

# More tokens than `attend` reads with a mask, and a row of one.
LONG = [[1, *range(3, 43)], [7], [5, 6, 7, 5, 6]]
CALL: dict[str, Any] = dict(zip(("input_ids", "attention_mask"), padded(LONG, "left"), strict=True))
CALL |= {"max_new_tokens": 8, "logprobs": "raw", "seed": 1}


def autocast() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


State = Callable[[], AbstractContextManager[Any]]
STATES: tuple[State, ...] = (nullcontext, autocast, nullcontext)


def assert_same(found: GenerationOutput, expected: GenerationOutput) -> None:
    assert torch.equal(found.sequences, expected.sequences)
    assert found.logprobs is not None and expected.logprobs is not None
    assert torch.equal(found.logprobs.nan_to_num(), expected.logprobs.nan_to_num())


def in_both_states(new_decoder: Callable[[], SpeculativeDecoder], **call: Any) -> list[GenerationOutput]:
    """What a decoder gives without autocast and with it, each its first call."""
    outputs = []
    for state in STATES[:2]:
        with state():
            outputs.append(new_decoder().generate(**call))
    plain, cast = outputs
    assert plain.logprobs is not None and cast.logprobs is not None
    difference = (plain.logprobs - cast.logprobs)[:, :4].nan_to_num().abs().max()
    assert difference > 1e-4, difference
    return outputs


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "t5", "whisper"])
def test_autocast_may_change_between_calls(family: str) -> None:
    """Caches of keys and values, those of an encoder's output, and masks are of the dtype that the batch has."""
    model = tiny(family).float()
    call, inputs = CALL, encoder_inputs(family)
    if inputs is not None:
        inputs = {name: value.float() if value.is_floating_point() else value for name, value in inputs.items()}
        call = CALL | dict(zip(("input_ids", "attention_mask"), padded(PROMPTS, "left"), strict=True))
        call |= {"inputs": inputs}
    new_decoder = partial(SpeculativeDecoder, model, perturbed(model), num_draft_tokens=3)
    decoder, (plain, cast) = new_decoder(), in_both_states(new_decoder, **call)
    if inputs is None:
        with torch.no_grad(), autocast():
            logits = model(torch.tensor(LONG[:1])).logits[0, -1]
        assert cast.logprobs is not None
        token, found = cast.new_tokens(0)[0], cast.logprobs[0, len(LONG[0])]
        assert abs(found - logits.float().log_softmax(0)[token]) <= 2**-6 * logits.abs().max()
    for state, expected in zip(STATES, (plain, cast, plain), strict=True):
        with state():
            assert_same(decoder.generate(**call), expected)


def test_autocast_around_a_forward() -> None:
    """As accelerate does with mixed precision."""
    model = tiny("llama", attention="eager").float()
    decoder = SpeculativeDecoder(model)
    expected = decoder.generate(**CALL)
    model.forward = MethodType(autocast()(type(model).forward), model)
    wrapped = decoder.generate(**CALL)
    assert wrapped.logprobs is not None and expected.logprobs is not None
    assert not torch.equal(wrapped.logprobs.nan_to_num(), expected.logprobs.nan_to_num())
    del model.forward
    assert_same(decoder.generate(**CALL), expected)


def in_session(decoder: SpeculativeDecoder, begun: State, stepped: State, in_a_thread: bool = False) -> list[list[int]]:
    with begun():
        session = decoder.session(2, max_length=60)
    handles = [session.submit(Request(row, 8, seed=seed)) for seed, row in enumerate(LONG)]
    if in_a_thread:
        # Autocast belongs to a thread.
        threading.Thread(target=session.run).start()
        completions = [handle.result() for handle in handles]
        session.close()
    else:
        with stepped():
            while not session.is_idle:
                session.step()
        completions = [handle.result() for handle in handles]
    assert [completion.finish_reason for completion in completions] == ["length"] * 3
    return [completion.new_tokens.tolist() for completion in completions]


def test_a_batch_is_stepped_as_it_began() -> None:
    model = tiny("llama").float()
    new_decoder = partial(SpeculativeDecoder, model, perturbed(model), num_draft_tokens=3)
    expected = in_both_states(new_decoder, **CALL)
    decoder, texts = new_decoder(), []
    for begun, stepped, whole in zip(STATES, STATES[1:], expected, strict=False):
        with begun():
            steps = decoder.stream(**CALL)
        with stepped():
            list(steps)
        assert_same(decoder.output(), whole)
        texts.append(in_session(new_decoder(), begun, begun))
        assert in_session(decoder, begun, stepped) == texts[-1]
        assert in_session(decoder, begun, stepped, in_a_thread=True) == texts[-1]
    assert texts[0] != texts[1]


def test_autocast_change_within_a_text_is_refused() -> None:
    adapter = hf.language_model(tiny("llama").float())
    adapter.start(1, 8)
    adapter.forward(torch.tensor([[1, 2]]), torch.tensor([[0, 1]]))
    with autocast(), pytest.raises(RuntimeError, match=r"forward: .* torch\.float32 keys, .* gives torch\.bfloat16, "):
        adapter.forward(torch.tensor([[3]]), torch.tensor([[2]]))


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["nothing", "eagle 3"])
def test_compiled_pieces_are_of_one_autocast(draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_specops.compilation.compile_piece", partial(compile_piece, backend="eager"))
    model = tiny("llama").float()

    def new_decoder(compile: bool = False) -> SpeculativeDecoder:
        own = Eagle3(copy.deepcopy(trained_head()).float()) if draft == "eagle 3" else None
        return SpeculativeDecoder(model, own, num_draft_tokens=2, schedule="constant", sampling=GREEDY, compile=compile)

    expected = in_both_states(new_decoder, **CALL)
    decoder = new_decoder(compile=True)
    for state, eager in zip(STATES, [*expected, expected[0]], strict=True):
        with state():
            assert torch.equal(decoder.generate(**CALL).sequences, eager.sequences)


@pytest.mark.parametrize(("kind", "trained"), [(Eagle3, trained_head), (DFlash, trained_drafter)])
def test_heads_under_autocast(kind: Callable[[Any], Any], trained: Callable[[], Any]) -> None:
    model, head = (copy.deepcopy(module).float() for module in (shared_tiny("llama"), trained()))
    # The head was trained on their texts.
    call = CALL | dict(zip(("input_ids", "attention_mask"), padded(PROMPTS, "left"), strict=True))
    call |= {"sampling": GREEDY, "max_new_tokens": 14}
    new_decoder = partial(SpeculativeDecoder, model, num_draft_tokens=3, schedule="constant")
    decoder = new_decoder(kind(head))
    outputs = in_both_states(lambda: new_decoder(kind(head)), **call)
    for state, expected in zip(STATES, [*outputs, outputs[0]], strict=True):
        with state():
            found, alone = decoder.generate(**call), new_decoder().generate(**call)
        assert_same(found, expected)
        assert torch.equal(found.sequences, alone.sequences)
        assert found.stats.num_accepted > 10
