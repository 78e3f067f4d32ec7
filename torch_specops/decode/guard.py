"""Keeps a model in one thread at a time, and tells streams apart that take turns with its models."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.amp import is_autocast_available

from ..drafts import DraftSource
from ..drafts.model import SampledDraft
from ..models import LanguageModel
from .models import check_read_once, evaluating, look_at, mode_of, models_of, versions_of

Autocast = torch.dtype | None

# Shared by all decoders of a model, because it has one cache: the "thread" at work, the "stream" whose texts it has
# read, and "in_step" while it reads. A transformers model gets an adapter, and with it a cache, for each decoder.
_uses: WeakKeyDictionary[object, dict[str, Any]] = WeakKeyDictionary()
_guards: WeakSet[Guard] = WeakSet()
_lock = threading.Lock()


@dataclass(frozen=True, eq=False)
class Stream:
    """The texts of one call.

    Args:
        autocast: the `torch.autocast` that it began under.
    """

    autocast: Autocast


class Guard:
    """Lets one thread at a time work with a target and a draft, in evaluation mode.

    Attributes:
        uses: who uses the models and the drafts with caches; the target's comes first.
    """

    def __init__(self, target: LanguageModel, draft: DraftSource | LanguageModel | None) -> None:
        self._parts = target, draft
        self._device = target.device
        self._mode = mode_of(target, draft)
        self.uses = [_use_of(part) for part in [target, *models_of(draft)] if _has_cache(part)]
        with _lock:
            _guards.add(self)

    def __reduce__(self) -> tuple[type[Guard], tuple[LanguageModel, DraftSource | LanguageModel | None]]:
        # Make a new guard: the shared state belongs to its process.
        return Guard, self._parts

    def bind(self, draft: DraftSource) -> None:
        """Bind the guarded draft to the target, before any call. Other streams of the draft read their texts again.

        Raises:
            ValueError: a model would be read in two places.
            RuntimeError: as of `working`, for the draft alone.
        """
        check_read_once(self._parts[0], draft)
        uses = self.uses[1:]
        with self._free(uses):
            for use in uses:
                use.pop("stream", None)
            draft.bind(self._parts[0])

    def begin_stream(self) -> Stream:
        """Begin a stream or a session with models that were looked at. Called while this thread is at work."""
        stream = Stream(autocast_of(self._device))
        self.take_models(stream)
        return stream

    def take_models(self, stream: Stream) -> bool:
        """Called before the models read for a stream; returns whether they have read for another stream since."""
        has_changed = any(use.get("stream") is not stream for use in self.uses)
        for use in self.uses:
            use["stream"] = stream
        return has_changed

    def look(self) -> RuntimeError | None:
        """`look_at` the models before texts begin in rows. Called outside `computing`, whose mode it decides."""
        misfit = look_at(*self._parts)
        # Ask once for all steps: a model looks for its first parameter.
        self._device = self._parts[0].device
        self._mode = mode_of(*self._parts)
        return misfit

    def look_for_call(self) -> None:
        """`look` before the texts of a call begin. If a model has changed, other streams read their texts again, even
        where the call is refused."""
        before = versions_of(*self._parts)
        try:
            self.look()
        finally:
            if versions_of(*self._parts) != before:
                for use in self.uses:
                    use.pop("stream", None)

    @contextmanager
    def computing(self, stream: Stream) -> Iterator[None]:
        """`working`, in a step or while prompts are read: without gradients (`mode_of`), under the stream's autocast,
        and on the target's device: Triton launches on the current device, and streams of CUDA belong to it."""
        on_device = torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
        with self.working(), self._in_step(), self._mode(), on_device, _autocast(self._device, stream.autocast):
            yield

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        try:
            for use in self.uses:
                use["in_step"] = True
            yield
        finally:
            for use in self.uses:
                use.pop("in_step", None)

    def working(self) -> AbstractContextManager[None]:
        """May be nested in one thread, but not inside `computing`.

        Raises:
            RuntimeError: this thread is inside `computing`; or, when it is entered, another thread is at work.
        """
        return self._free(self.uses)

    def _free(self, uses: Sequence[dict[str, Any]]) -> AbstractContextManager[None]:
        thread = threading.get_ident()
        if any("in_step" in use and use.get("thread") == thread for use in uses):
            raise RuntimeError(
                "SpeculativeDecoder: a step of this decoder, or of another with its target or draft, is under way and "
                "has called this code (a grammar, a processor, a draft, a rule), which would overwrite what they have "
                "read; make another decoder for it (they may share transformers models)"
            )
        # A call inside a call may use further models.
        free = [use for use in uses if use.get("thread") != thread]
        return self._working(free, thread) if free else nullcontext()

    @contextmanager
    def _working(self, uses: list[dict[str, Any]], thread: int) -> Iterator[None]:
        try:
            try:
                # Atomic: of several threads the first is stored.
                if any(use.setdefault("thread", thread) != thread for use in uses):
                    raise RuntimeError(
                        "SpeculativeDecoder: another thread is using this decoder or its target or draft, which have "
                        "one state; make a decoder for each thread (they may share transformers models)"
                    )
                with evaluating(*self._parts):
                    yield
            finally:
                _release(uses, thread)
        finally:
            # Once more, because an interrupt may have come in between.
            _release(uses, thread)


def _release(uses: list[dict[str, Any]], thread: int) -> None:
    for use in uses:
        if use.get("thread") == thread:
            use.pop("in_step", None)
            del use["thread"]


def _has_cache(part: object) -> bool:
    """Whether calls leave something in a model or draft that they read again."""
    return not isinstance(part, DraftSource) or isinstance(part, SampledDraft) or len(part.feature_layers) > 0


def _use_of(model: object) -> dict[str, Any]:
    use: dict[str, Any] = {}
    # A model that cannot be hashed (a dataclass that compares by value) is guarded within one decoder only.
    with _lock, suppress(TypeError):
        use = _uses.setdefault(model, use)
    return use


def _begin_child() -> None:
    """In a forked process only the forking thread runs on. What other threads were reading is incomplete."""
    _lock.release()
    thread = threading.get_ident()
    for guard in _guards:
        for use in guard.uses:
            if use.get("thread", thread) != thread:
                use.clear()


# Windows has no fork.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_begin_child)


def autocast_of(device: torch.device) -> Autocast:
    """The `torch.autocast` of this thread, as far as it concerns a device; None = it is off."""
    if not is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def _autocast(device: torch.device, wanted: Autocast) -> AbstractContextManager[Any]:
    """Another thread, or a caller who has left the block, must not change what a text is computed in."""
    if autocast_of(device) == wanted:
        return nullcontext()
    return torch.autocast(device.type, dtype=wanted, enabled=wanted is not None)
