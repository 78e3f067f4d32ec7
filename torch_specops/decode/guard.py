"""Lets one thread at a time use a model, and records which stream's sequences its cache holds."""

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

# One entry per model. All decoders that use a model share its entry, because the model has one cache. Keys: "thread" is
# the thread at work, "stream" is the stream whose sequences the cache holds, and "in_step" is set during a step.
# Decoders that use the same transformers model share no entry, because each has an adapter with a separate cache.
_uses: WeakKeyDictionary[object, dict[str, Any]] = WeakKeyDictionary()
_guards: WeakSet[Guard] = WeakSet()
_lock = threading.Lock()


@dataclass(frozen=True, eq=False)
class Stream:
    """Identifies the sequences of one call.

    Args:
        autocast: the dtype of `torch.autocast` when the call began; None = off.
    """

    autocast: Autocast


class Guard:
    """Lets one thread at a time work with a target and a draft, in evaluation mode.

    Attributes:
        uses: who uses which model now. The entry of `_uses` for the target comes first, then one entry for each model
            and draft source in the draft that has a cache.
    """

    def __init__(self, target: LanguageModel, draft: DraftSource | LanguageModel | None) -> None:
        self._parts = target, draft
        self._device = target.device
        self._mode = mode_of(target, draft)
        self.uses = [_use_of(part) for part in [target, *models_of(draft)] if _has_cache(part)]
        with _lock:
            _guards.add(self)

    def __reduce__(self) -> tuple[type[Guard], tuple[LanguageModel, DraftSource | LanguageModel | None]]:
        # Unpickling makes a new guard, because the entries of `_uses` belong to this process.
        return Guard, self._parts

    def bind(self, draft: DraftSource) -> None:
        """Bind the draft to the target before any call. Other streams that use the draft will prefill again.

        Raises:
            ValueError: a model with one cache would be used in two places.
            RuntimeError: as in `working`, but for the draft alone.
        """
        check_read_once(self._parts[0], draft)
        uses = self.uses[1:]
        with self._free(uses):
            for use in uses:
                use.pop("stream", None)
            draft.bind(self._parts[0])

    def begin_stream(self) -> Stream:
        """Begin a stream or a session. Called inside `working`, after `look`."""
        stream = Stream(autocast_of(self._device))
        self.take_models(stream)
        return stream

    def take_models(self, stream: Stream) -> bool:
        """Give the models to a stream before it uses them. Returns whether another stream has used them since this
        stream last did."""
        has_changed = any(use.get("stream") is not stream for use in self.uses)
        for use in self.uses:
            use["stream"] = stream
        return has_changed

    def look(self) -> RuntimeError | None:
        """Let the models adapt to changes (`look_at`) before sequences begin. Called outside `computing`, because it
        chooses the mode of `computing`."""
        misfit = look_at(*self._parts)
        # Read the device once for all steps, because a model searches its parameters for it.
        self._device = self._parts[0].device
        self._mode = mode_of(*self._parts)
        return misfit

    def look_for_call(self) -> None:
        """Run `look` when the user calls a method. If a model has changed, other streams will prefill again, even if
        this call is refused."""
        before = versions_of(*self._parts)
        try:
            self.look()
        finally:
            if versions_of(*self._parts) != before:
                for use in self.uses:
                    use.pop("stream", None)

    @contextmanager
    def computing(self, stream: Stream) -> Iterator[None]:
        """Claim the models, like `working`, for a step or a prefill. The step runs without gradients (`mode_of`) and
        under the stream's autocast. The target's device is made the current device, because Triton launches kernels on
        the current device."""
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
        """Claim the models for this thread. Calls may be nested, but not inside `computing`.

        Raises:
            RuntimeError: this thread is inside `computing`; or another thread is at work when the context is entered.
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
        # In a nested call, claim only the models that the outer call has not claimed.
        free = [use for use in uses if use.get("thread") != thread]
        return self._working(free, thread) if free else nullcontext()

    @contextmanager
    def _working(self, uses: list[dict[str, Any]], thread: int) -> Iterator[None]:
        try:
            try:
                if not _claim(uses, thread):
                    raise RuntimeError(
                        "SpeculativeDecoder: another thread is using this decoder or its target or draft, which have "
                        "one state; make a decoder for each thread (they may share transformers models)"
                    )
                with evaluating(*self._parts):
                    yield
            finally:
                _release(uses, thread)
        finally:
            # Release again, because an interrupt may have stopped the first release.
            _release(uses, thread)


def _claim(uses: list[dict[str, Any]], thread: int) -> bool:
    """Claim models for a thread. Returns whether no other thread has claimed one of them."""
    # `setdefault` is atomic, so only the first of several threads is stored. This is not in the `try` of `_working`,
    # because Python 3.14 runs no `finally` if an interrupt stops `all` or `any` between two elements.
    return all(use.setdefault("thread", thread) == thread for use in uses)


def _release(uses: list[dict[str, Any]], thread: int) -> None:
    for use in uses:
        if use.get("thread") == thread:
            use.pop("in_step", None)
            del use["thread"]


def _has_cache(part: object) -> bool:
    """Whether a model or draft keeps state from one call to the next."""
    return not isinstance(part, DraftSource) or isinstance(part, SampledDraft) or len(part.feature_layers) > 0


def _use_of(model: object) -> dict[str, Any]:
    use: dict[str, Any] = {}
    # A model that cannot be hashed (a dataclass that compares by value) gets an entry that no other decoder sees.
    with _lock, suppress(TypeError):
        use = _uses.setdefault(model, use)
    return use


def _begin_child() -> None:
    """Clear the entries of other threads in a forked process: these threads do not exist there, and their steps are
    incomplete."""
    _lock.release()
    thread = threading.get_ident()
    for guard in _guards:
        for use in guard.uses:
            if use.get("thread", thread) != thread:
                use.clear()


# Windows has no fork and no `register_at_fork`.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_begin_child)


def autocast_of(device: torch.device) -> Autocast:
    """The dtype of this thread's `torch.autocast` for a device; None = it is off."""
    if not is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def _autocast(device: torch.device, wanted: Autocast) -> AbstractContextManager[Any]:
    """Set autocast as it was when the stream began, because a later step may run in another thread or `autocast`
    block."""
    if autocast_of(device) == wanted:
        return nullcontext()
    return torch.autocast(device.type, dtype=wanted, enabled=wanted is not None)
