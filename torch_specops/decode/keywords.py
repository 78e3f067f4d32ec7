"""Raises the error for an unknown keyword argument. The message says what to pass instead."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches

from ..sampling import SamplingParams

_CUSTOM_GENERATE = "model.generate(..., custom_generate=torch_specops.hf.custom_generate) takes it"
# Maps argument names of other libraries to what a user should pass: an argument of this package, or a sentence.
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
# Names that `hf.custom_generate` refuses, and what to pass instead. transformers would pass these names to the model as
# inputs.
IN_CUSTOM_GENERATE = {
    "draft": "assistant_model=... or draft_model=...",
    "logprobs": "output_logits=True with return_dict_in_generate=True",
    "max_tokens": INSTEAD["max_tokens"],
    "sampling": "do_sample=..., temperature=..., top_k=..., top_p=..., min_p=...",
    "stop": INSTEAD["stop"],
}


def refuse_unknown(call: str, unknown: Mapping[str, object]) -> None:
    """Raise a TypeError that names the first unknown keyword and says what to pass instead."""
    for name in unknown:
        raise TypeError(f"{name}: {call} has no such argument; {_advice(name, call, _keywords())}")


def _keywords() -> dict[str, list[str]]:
    """The keyword arguments of each public call, by the name of the call."""
    # Import here, because these modules import this one.
    from .decoder import SpeculativeDecoder
    from .kept import generate
    from .requests import Request

    methods = (getattr(SpeculativeDecoder, name) for name in ("generate", "stream", "session", "generate_many"))
    return {
        call.__qualname__: [
            parameter.name
            for parameter in inspect.signature(call).parameters.values()
            if parameter.name != "self" and parameter.kind is not parameter.VAR_KEYWORD
        ]
        for call in (Request, generate, SpeculativeDecoder, *methods)
    }


def _advice(name: str, call: str, keywords: Mapping[str, list[str]]) -> str:
    if name in INSTEAD:
        argument = re.match(r"(\w+)=", INSTEAD[name])
        if argument is None:
            return INSTEAD[name]
        is_own = argument[1] in keywords[call]
        return f"pass {INSTEAD[name]}" + ("" if is_own else _receivers(argument[1], call, keywords))
    if receivers := _receivers(name, call, keywords):
        return f"pass it{receivers}"
    near = get_close_matches(name, keywords[call], 1)
    return f"did you mean {near[0]}?" if near else f"expected one of {', '.join(keywords[call])}"


def _receivers(name: str, call: str, keywords: Mapping[str, list[str]]) -> str:
    """The end of a sentence that names the calls with this keyword. Calls that a user makes before this call are
    preferred to others."""
    calls = [other for other in keywords if name in keywords[other]]
    made_before = ["SpeculativeDecoder"] + ["Request"] * call.endswith((".session", ".generate_many"))
    calls = [other for other in calls if other in made_before] or calls
    return f" to {' or '.join(calls)}" if calls else ""
