"""Patch transformers' `generate` so that it passes all its arguments to a `custom_generate` function.

`generate` accepts `streamer`, `assistant_model`, `tokenizer` and `assistant_tokenizer`, but silently drops them if
there is a custom function (transformers 5.17 to 5.24). There would be no draft, and a thread that reads the streamer
would wait forever. This module wraps the method of `generate` that gets all four arguments before the first token. It
also wraps a method that refuses drafts for models with recurrent states and for several sequences per prompt, because
only transformers' loop has these limits.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import transformers
from transformers.generation import GenerationMode

from ...decode.keywords import IN_CUSTOM_GENERATE
from ..images import image_inputs, reads_images

METHOD = "_extract_generation_mode_kwargs"
VALIDATE = "_validate_generation_mode"
PARAMETERS = {
    METHOD: ("self", "custom_generate", "kwargs", "synced_gpus", "assistant_model", "streamer"),
    VALIDATE: ("self", "generation_mode", "generation_config", "generation_mode_kwargs"),
}


def hand_on_arguments(mixin: type, function: Callable[..., Any]) -> None:
    """Make the `generate` of `mixin` pass more arguments to `custom_generate=function`, and accept drafts in every
    call.

    The arguments are `assistant_model` (as `draft_model`), `streamer` (as `token_streamer`), `tokenizer`, `has_mask`
    (whether the caller gave a mask) and `image_inputs` (the images, if this loop reads images with the model). Calls
    with another function do not change. Warns if the mixin lacks one of the methods or its parameters differ.
    """
    methods: dict[str, Any] = {name: getattr(mixin, name, None) for name in PARAMETERS}
    extract, validate = methods.values()
    if any(
        method is None or tuple(inspect.signature(method).parameters) != PARAMETERS[name]
        for name, method in methods.items()
    ):
        warnings.warn(
            f"transformers {transformers.__version__} does not hand streamer= and assistant_model= on to "
            "custom_generate; pass token_streamer= and draft_model=",
            RuntimeWarning,
            stacklevel=2,
        )
        return

    @functools.wraps(extract)
    def extract_more(
        self: Any, custom_generate: Any, kwargs: dict[str, Any], synced_gpus: Any, assistant_model: Any, streamer: Any
    ) -> dict[str, Any]:
        more: dict[str, Any] = {}
        # Users may wrap the function in a `functools.partial`.
        if getattr(custom_generate, "func", custom_generate) is function:
            for name in kwargs.keys() & IN_CUSTOM_GENERATE.keys():
                raise TypeError(f"{name}: custom_generate has no such argument; pass {IN_CUSTOM_GENERATE[name]}")
            if kwargs.get("assistant_tokenizer") is not None:
                raise NotImplementedError(
                    "assistant_tokenizer: expected None; a draft with other tokens is draft_model=TokenMap(...)"
                )
            token_streamer = None if streamer is None else _after_the_prompt(streamer)
            passed_on = (
                (assistant_model, "assistant_model", "draft_model"),
                (token_streamer, "streamer", "token_streamer"),
            )
            for value, given_as, name in passed_on:
                if value is not None and kwargs.get(name) is not None:
                    raise ValueError(f"{given_as}: expected None beside {name}, which is the same, got {type(value)}")
                if value is not None:
                    more[name] = value
            more["tokenizer"] = kwargs.get("tokenizer")
            mask = "decoder_attention_mask" if self.config.is_encoder_decoder else "attention_mask"
            more["has_mask"] = kwargs.get(mask) is not None
            # Take the images out of the arguments here. After this method, `generate` may encode them and would then
            # not pass them to the function.
            images = image_inputs(self) if reads_images(self) else ()
            more["image_inputs"] = {name: kwargs.pop(name) for name in images if kwargs.get(name) is not None}
        return extract(self, custom_generate, kwargs, synced_gpus, assistant_model, streamer) | more

    @functools.wraps(validate)
    def validate_less(self: Any, mode: GenerationMode, config: Any, mode_kwargs: dict[str, Any]) -> None:
        # Only calls of our function have `has_mask`. Check them as greedy search, which leaves out the checks of the
        # assistant model.
        if mode is GenerationMode.ASSISTED_GENERATION and "has_mask" in mode_kwargs:
            mode = GenerationMode.GREEDY_SEARCH
        validate(self, mode, config, mode_kwargs)

    setattr(mixin, METHOD, extract_more)
    setattr(mixin, VALIDATE, validate_less)


def _after_the_prompt(streamer: Any) -> Any:
    """Wrap a streamer so that it ignores the first `put`, which would send the prompt a second time."""
    puts = chain([lambda tokens: None], repeat(streamer.put))
    return SimpleNamespace(put=lambda tokens: next(puts)(tokens), end=streamer.end)
