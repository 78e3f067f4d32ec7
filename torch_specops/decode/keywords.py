"""The error of a call that gets a keyword it does not have: it says what to pass instead."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from difflib import get_close_matches
from typing import ParamSpec, TypeVar

from ..sampling import SamplingParams
from .inputs import GenerateArguments

P = ParamSpec("P")
R = TypeVar("R")

_CUSTOM_GENERATE = "model.generate(..., custom_generate=torch_specops.hf.custom_generate) takes it"
# Names that other libraries have for an argument, and what to pass: an argument of ours, or a sentence.
INSTEAD = {field.name: f"sampling=SamplingParams({field.name}=...)" for field in fields(SamplingParams)} | {
    **dict.fromkeys(("lenience", "argmax_lenience"), 'verify=torch_specops.Verifier("exact", lenience=...)'),
    **dict.fromkeys(("alpha", "beta"), 'verify=torch_specops.Verifier("sigmoid", alpha=..., beta=...)'),
    "assistant_early_exit": "draft=torch_specops.drafts.EarlyExit(...)",
    "assistant_model": "draft=...",
    "bad_words_ids": "sampling=SamplingParams(bad_words=...)",
    "do_sample": "sampling=SamplingParams(temperature=0.0) for greedy text; the default is to sample",
    "draft_model": "draft=...",
    "generation_config": "sampling=SamplingParams.from_generation_config(...)",
    "logits_processor": _CUSTOM_GENERATE,
    "max_length": "max_new_tokens=..., which does not count the prompt",
    "max_tokens": "max_new_tokens=...",
    "n": "num_return_sequences=...",
    "num_assistant_tokens": "num_draft_tokens=...",
    "num_beams": "beam search is torch_specops.beam.beam_search(target, input_ids, num_beams=...)",
    "num_speculative_tokens": "num_draft_tokens=...",
    "pixel_values": "inputs={...}, with all that the processor gives for images",
    "prefix_allowed_tokens_fn": _CUSTOM_GENERATE,
    "prompt_lookup_num_tokens": "draft=torch_specops.drafts.PromptLookup() with num_draft_tokens=...",
    "return_dict_in_generate": "an output with statistics is what the call returns",
    "stop": "stop_strings=... with tokenizer=...",
    "stop_token_ids": "eos_token_id=...",
    "stopping_criteria": _CUSTOM_GENERATE,
    "token_streamer": "streamer=...",
    "token_type_ids": "the tokenizer leaves it out with return_token_type_ids=False",
}
# The same for `custom_generate`. transformers takes these for inputs of the model.
IN_CUSTOM_GENERATE = {
    "draft": "assistant_model=... or draft_model=...",
    "logprobs": "output_logits=True with return_dict_in_generate=True",
    "max_tokens": INSTEAD["max_tokens"],
    "sampling": "do_sample=..., temperature=..., top_k=..., top_p=..., min_p=...",
    "stop": INSTEAD["stop"],
}
# The keywords of each call that is checked.
_KEYWORDS: dict[str, list[str]] = {}


def check_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which raises a TypeError that names it and what to pass for a keyword that it does not have. Its
    `**` are `GenerateArguments`."""
    call = function.__qualname__.removesuffix(".__init__")
    keywords = _KEYWORDS[call] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            keywords += GenerateArguments.__annotations__
        elif parameter.name != "self":
            keywords.append(parameter.name)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in keywords:
                raise TypeError(f"{name}: {call} has no such argument; {_advice(name, call)}")
        return function(*args, **kwargs)

    return checked


def _advice(name: str, call: str) -> str:
    if name in INSTEAD:
        argument = re.match(r"(\w+)=", INSTEAD[name])
        if argument is None:
            return INSTEAD[name]
        return f"pass {INSTEAD[name]}" + ("" if argument[1] in _KEYWORDS[call] else _receivers(argument[1], call))
    if receivers := _receivers(name, call):
        return f"pass it{receivers}"
    near = get_close_matches(name, _KEYWORDS[call], 1)
    return f"did you mean {near[0]}?" if near else f"expected one of {', '.join(_KEYWORDS[call])}"


def _receivers(name: str, call: str) -> str:
    """Which other calls take a keyword, as the end of a sentence: if possible, what makes the decoder or requests."""
    calls = [other for other, keywords in _KEYWORDS.items() if name in keywords]
    made_before = ["SpeculativeDecoder"] + ["Request"] * call.endswith((".session", ".generate_many"))
    calls = [other for other in calls if other in made_before] or calls
    return f" to {' or '.join(calls)}" if calls else ""
