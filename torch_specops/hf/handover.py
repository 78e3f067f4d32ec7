"""Arguments of transformers' `generate` that it keeps to itself when `custom_generate` is a function.

`generate` takes `streamer`, `assistant_model`, `tokenizer` and `assistant_tokenizer`, and calls a custom function
without them and without a word: no draft, and a reader of the streamer waits for ever (transformers 5.17 to 5.23). One
of its methods sees them all before the first token, and it gets an addition here. Only calls with a function that asked
for it see a difference.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import transformers
from torch import Tensor
from transformers.generation import GenerationMixin

__all__ = ["check_ensemble_weight", "extend", "takes_all_arguments"]

METHOD = "_extract_generation_mode_kwargs"
PARAMETERS = ("self", "custom_generate", "kwargs", "synced_gpus", "assistant_model", "streamer")

_functions: set[Callable[..., Any]] = set()


def takes_all_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lets `generate` hand `assistant_model` to `function` as `draft_model`, `streamer` as `token_streamer`, and
    `tokenizer`."""
    if not _functions:
        extend(GenerationMixin)
    _functions.add(function)
    return function


def extend(mixin: type) -> None:
    """Adds to the method of `mixin`; warns if it has no method of that name and those parameters."""
    extract = getattr(mixin, METHOD, None)
    if extract is None or tuple(inspect.signature(extract).parameters) != PARAMETERS:
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
        tokenizer, assistant_tokenizer = kwargs.get("tokenizer"), kwargs.get("assistant_tokenizer")
        found: dict[str, Any] = extract(self, custom_generate, kwargs, synced_gpus, assistant_model, streamer)
        # The function may be behind a `functools.partial`.
        if getattr(custom_generate, "func", custom_generate) not in _functions:
            return found
        if assistant_tokenizer is not None:
            raise NotImplementedError(
                "assistant_tokenizer: expected None; a draft with other tokens is draft_model=TokenMap(...)"
            )
        heard = None if streamer is None else PromptHeard(streamer)
        more = {"draft_model": (assistant_model, "assistant_model"), "token_streamer": (heard, "streamer")}
        for name, (value, given_as) in more.items():
            if value is not None and found.get(name) is not None:
                raise ValueError(f"{given_as}: expected None beside {name}, which is the same, got {type(value)}")
            if value is not None:
                found[name] = value
        return found if tokenizer is None else found | {"tokenizer": tokenizer}

    setattr(mixin, METHOD, extract_more)


def check_ensemble_weight(weight: float | None) -> None:
    # A weight of 1 is the target alone.
    if weight not in (None, 1.0):
        raise NotImplementedError(
            f"assistant_ensemble_weight: verifying against a mixture is another law, got {weight}"
        )


class PromptHeard:
    """A streamer that got the prompt from `generate` already."""

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self._is_prompt = True

    def put(self, tokens: Tensor) -> None:
        if not self._is_prompt:
            self._streamer.put(tokens)
        self._is_prompt = False

    def end(self) -> None:
        self._streamer.end()
