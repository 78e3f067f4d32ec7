"""What surrounds every piece of a decoder's work: one thread at a time, and the user's modules in evaluation mode."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ..drafts import DraftSource
from ..drafts.base import LanguageModelWrapper
from ..drafts.checked import CheckedDraft

__all__ = ["Guard", "evaluating"]


class Guard:
    """Lets one thread at a time work with a target and a draft, in evaluation mode.

    Args:
        parts: the target and the draft.
    """

    def __init__(self, *parts: object) -> None:
        self._parts = parts
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[type[Guard], tuple[object, ...]]:
        # A lock cannot be pickled.
        return Guard, self._parts

    @contextmanager
    def working(self) -> Iterator[None]:
        """May be nested in one thread.

        Raises:
            RuntimeError: another thread is at work.
        """
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "SpeculativeDecoder: another thread is using this decoder, which has one state; "
                "make a decoder for each thread (they may share the models)"
            )
        try:
            with evaluating(*self._parts):
                yield
        finally:
            self._lock.release()


@contextmanager
def evaluating(*parts: object) -> Iterator[None]:
    """Puts models and drafts that are modules themselves into evaluation mode, and afterwards each of their modules
    back into the mode it had. A transformers model is not touched: its adapter reads a copy."""
    training = [module for part in parts for own in _modules_of(part) for module in own.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _modules_of(part: object) -> Iterator[nn.Module]:
    while part is not None:
        if isinstance(part, nn.Module):
            yield part
        if isinstance(part, CheckedDraft):
            part = part.source
        else:
            wraps = isinstance(part, (DraftSource, LanguageModelWrapper))
            part = getattr(part, "model", None) if wraps else None
