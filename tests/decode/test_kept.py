"""`generate` keeps the newest decoder of a model, and uses it again only where it decodes what a new one would."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from generate_calls import arguments, ours
from tiny_grammars import Allowing
from tiny_loops import new_tokens
from tiny_models import VOCAB, encoder_inputs, perturbed, tiny
from transformers import PreTrainedModel

from torch_specops import SamplingParams, Verifier, generate
from torch_specops.decode.kept import _kept
from torch_specops.drafts import EarlyExit, ModelDraft, PromptLookup, SuffixLookup
from torch_specops.hf import language_model
from torch_specops.schedules import Constant

pytestmark = pytest.mark.usefixtures("uncompiled")

PROMPTS = torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(0)).tolist()
GREEDY = SamplingParams(temperature=0.0)
CALL: dict[str, Any] = {"max_new_tokens": 5, "sampling": GREEDY, "num_draft_tokens": 3}


def decode(model: Any, compile: bool = True, **changes: Any) -> tuple[list[list[int]], bool]:
    """The new tokens, and whether steps had to be compiled."""
    output = generate(model, **{"input_ids": PROMPTS, **CALL, "compile": compile, **changes})
    return new_tokens(output), output.stats.compile_seconds > 0


def changed(change: Callable[[PreTrainedModel], object]) -> Callable[[PreTrainedModel], dict[str, Any]]:
    """A change of the model, and none of the call."""

    def apply(model: PreTrainedModel) -> dict[str, Any]:
        with torch.no_grad():
            change(model)
        return {}

    return apply


def other_weights(model: PreTrainedModel) -> None:
    for own, other in zip(model.parameters(), perturbed(model, 0.5).parameters(), strict=True):
        own.data = other.data


# What happens between two calls: the change, which returns arguments of the second call; whether the decoder is used.
USED_AGAIN: dict[str, tuple[Callable[[PreTrainedModel], dict[str, Any]], bool]] = {
    "nothing": (changed(lambda model: None), True),
    "another text": (lambda model: {"input_ids": [PROMPTS[1] * 2, PROMPTS[0]], "max_new_tokens": [3, 40]}, True),
    "eos tokens": (changed(lambda model: setattr(model.generation_config, "eos_token_id", list(range(20, 60)))), True),
    "weights in place": (changed(lambda model: model.load_state_dict(perturbed(model, 0.5).state_dict())), True),
    "weights replaced": (changed(other_weights), True),
    "the tensors of another head": (
        changed(lambda model: model.set_output_embeddings(copy.deepcopy(perturbed(model, 0.5).lm_head))),
        True,
    ),
    "an attribute, as of an adapter": (
        changed(lambda model: setattr(model.model.layers[0].self_attn, "scaling", 20.0)),
        True,
    ),
    "an equal lookup": (lambda model: {"draft": PromptLookup(min_ngram=1)}, True),
    "an equal verifier": (lambda model: {"verify": Verifier("gumbel")}, True),
    "the dtype": (changed(lambda model: model.to(torch.float32)), False),
    "the attention": (changed(lambda model: model.set_attn_implementation("eager")), True),
    "the number of drafts": (lambda model: {"num_draft_tokens": 2}, False),
    "an equal schedule": (lambda model: {"schedule": Constant(3)}, False),
    "the verification": (lambda model: {"verify": "exact"}, False),
    "another lookup": (lambda model: {"draft": PromptLookup(min_ngram=2)}, False),
    "a draft with a memory": (lambda model: {"draft": SuffixLookup()}, False),
    "the model itself as draft": (lambda model: {"draft": model}, False),
    "a draft model": (lambda model: {"draft": perturbed(model)}, False),
}


@pytest.mark.parametrize("change", USED_AGAIN)
def test_a_decoder_is_used_again(change: str) -> None:
    model, (apply, is_used) = tiny("llama"), USED_AGAIN[change]
    call = {"draft": PromptLookup(min_ngram=1), "schedule": "constant", "verify": Verifier("gumbel")}
    first, is_new = decode(model, **call)
    kept = _kept[model].decoder
    assert is_new and not decode(model, **call)[1] and _kept[model].decoder is kept
    call |= apply(model)
    # A new decoder for a call that compiles nothing.
    expected, _ = decode(model, compile=False, **call)
    found, _ = decode(model, **call)
    assert found == expected and (found != first or change not in CHANGE_THE_TEXT)
    assert (_kept[model].decoder is kept) == is_used


def test_settings_of_torch_make_a_new_decoder() -> None:
    """A captured product keeps its precision."""
    model = tiny("llama")
    decode(model)
    kept = _kept[model].decoder
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        decode(model)
    finally:
        torch.set_float32_matmul_precision(before)
    assert _kept[model].decoder is not kept


def test_wrong_arguments_are_refused_although_equal_ones_were_kept() -> None:
    model = tiny("llama")
    decode(model, num_draft_tokens=1)
    with pytest.raises(TypeError, match="num_draft_tokens"):
        decode(model, num_draft_tokens=True)
    with pytest.raises(ValueError, match="compile: expected True, False or 'auto', got 1"):
        decode(model, num_draft_tokens=1, compile=1)  # type: ignore[arg-type]


def test_calls_at_the_same_time_have_decoders_of_their_own() -> None:
    """Another thread, and a call within a step of the first."""
    model, draft = tiny("llama"), perturbed(tiny("llama"))
    expected, _ = decode(model, draft=draft)
    kept, found = _kept[model].decoder, []

    def call_again(step: Any) -> None:
        found.append(decode(model, draft=draft))
        found.append(model not in _kept or _kept[model].decoder is kept)

    def in_a_thread(step: Any) -> None:
        if not found:
            thread = threading.Thread(target=call_again, args=(step,))
            thread.start()
            thread.join()

    assert decode(model, draft=draft, streamer=in_a_thread) == (expected, False)
    assert found == [(expected, True), False] and _kept[model].decoder is kept


def test_an_error_drops_the_decoder() -> None:
    model = tiny("llama")
    expected, _ = decode(model)

    def interrupt(step: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decode(model, streamer=interrupt)
    assert model not in _kept and decode(model) == (expected, True)


def test_the_encoders_output_of_a_call_is_not_kept() -> None:
    """`custom_generate` hands it over, `generate` has the encoder's input."""
    model = tiny("t5")
    given = arguments("t5")
    ours(model, **given, max_new_tokens=4, compile=True)
    kept = _kept[model].decoder
    inputs = {name: tensor.flip(0) for name, tensor in encoder_inputs("t5").items()}
    call = {"inputs": inputs, "num_draft_tokens": None}
    found, _ = decode(model, input_ids=given["decoder_input_ids"], **call)
    assert _kept[model].decoder is kept
    assert found == decode(model, compile=False, input_ids=given["decoder_input_ids"], **call)[0]


def test_nothing_of_it_is_copied_with_the_model() -> None:
    model = tiny("llama")
    before = pickle.dumps(model), set(vars(model))
    decode(model, draft=model)
    assert (pickle.dumps(model), set(vars(model))) == before
    assert copy.deepcopy(model) not in _kept and pickle.loads(before[0]) not in _kept


def hooked(model: PreTrainedModel) -> None:
    """With a hook that refers to the model."""
    model.lm_head.register_forward_hook(lambda *call, model=model: None)


class Holding(PromptLookup):
    """A lookup that refers to a model, in a list in a partial."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        vars(self)["held"] = functools.partial(print, [model])


@pytest.mark.usefixtures("quick_collection")
@pytest.mark.parametrize(
    ("make_draft", "is_kept"),
    [
        (lambda model: model, True),
        (lambda model: EarlyExit(1), True),
        (lambda model: perturbed(model), True),
        (lambda model: ModelDraft(language_model(model)), False),
        (Holding, False),
        (hooked, False),
    ],
)
def test_the_model_is_freed(make_draft: Any, is_kept: bool) -> None:
    """Also where the decoder leads to the model: it is then not kept. A grammar of the call does."""
    model = tiny("llama")
    draft = make_draft(model)
    decode(model, draft=draft, grammar=[Allowing(lambda text, model=model: range(VOCAB)), None])
    assert (model in _kept) == is_kept
    freed = [weakref.ref(each) for each in (model, model.lm_head.weight)]
    del model, draft
    gc.collect()
    assert [each() for each in freed] == [None, None]


# Of `USED_AGAIN`.
CHANGE_THE_TEXT = {"another text", "eos tokens", "weights in place", "weights replaced", "the tensors of another head"}
CHANGE_THE_TEXT |= {"an attribute, as of an adapter"}
