"""Keeps a decoder in one thread at a time, and puts the user's modules into evaluation mode while it works."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..drafts import DraftSource, LanguageModel, TokenMap
from ..drafts.checked import CheckedDraft

__all__ = ["Guard", "evaluating", "modules_of"]


class _Use:
    """Shared by all decoders of a target, because it has one cache. A transformers model gets an adapter, and with it a
    cache, for each decoder."""

    def __init__(self) -> None:
        # The thread at work, under the key None. A lock would not tell whose it is: an interrupt right after it was
        # taken would leave it taken.
        self.thread: dict[None, int] = {}
        self.num_streams = 0

    def release(self, thread: int) -> None:
        if self.thread.get(None) == thread:
            del self.thread[None]


_uses: WeakKeyDictionary[object, _Use] = WeakKeyDictionary()
_uses_lock = threading.Lock()


class Guard:
    """Lets one thread at a time work with a target and a draft, and only the newest stream or session continue."""

    def __init__(self, target: LanguageModel, draft: DraftSource | None) -> None:
        self._parts = target, draft
        self._use = _Use()
        # A target that cannot be hashed (a dataclass that compares by value) is guarded within this decoder only.
        with _uses_lock, suppress(TypeError):
            self._use = _uses.setdefault(target, self._use)

    def __reduce__(self) -> tuple[type[Guard], tuple[LanguageModel, DraftSource | None]]:
        # What decoders share belongs to their process.
        return Guard, self._parts

    def begin_stream(self) -> int:
        """Begin a stream or a session, which ends all others; returns its number."""
        self._use.num_streams += 1
        return self._use.num_streams

    def is_newest(self, stream: int) -> bool:
        return stream == self._use.num_streams

    def check_is_newest(self, stream: int) -> None:
        if not self.is_newest(stream):
            raise RuntimeError("stream: another one has begun with this decoder or its target, which has one state")

    @contextmanager
    def computing(self) -> Iterator[None]:
        """`working`, in inference mode and on the target's device: Triton launches on the current one, and streams
        belong to it."""
        device = self._parts[0].device
        on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with self.working(), torch.inference_mode(), on_device:
            yield

    @contextmanager
    def working(self) -> Iterator[None]:
        """May be nested in one thread.

        Raises:
            RuntimeError: another thread is at work.
        """
        use, thread = self._use, threading.get_ident()
        is_outermost = use.thread.get(None) != thread
        if not is_outermost:
            yield
            return
        try:
            try:
                # Atomic: of several threads one is stored.
                if use.thread.setdefault(None, thread) != thread:
                    raise RuntimeError(
                        "SpeculativeDecoder: another thread is using this decoder or its target, which has one state; "
                        "make a decoder for each thread (they may share transformers models)"
                    )
                with evaluating(modules_of(*self._parts)):
                    yield
            finally:
                use.release(thread)
        finally:
            # Once more, because an interrupt may have come in between.
            use.release(thread)


@contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Puts modules into evaluation mode, and restores the mode of each submodule afterwards."""
    training = [module for own in modules for module in own.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def modules_of(*parts: object) -> list[nn.Module]:
    """The models and drafts that are modules. A transformers model is none of them: its adapter reads a copy."""
    found: list[nn.Module] = []
    for part in parts:
        if isinstance(part, nn.Module):
            found.append(part)
        if isinstance(part, CheckedDraft):
            found += modules_of(part.source)
        elif isinstance(part, (DraftSource, TokenMap)):
            found += modules_of(*(getattr(part, name, None) for name in ("model", "inner")))
    return found
