"""Plain PyTorch speculative sampling inside `torch.compile` becomes the op: an opt-in pass for Inductor.

Nothing happens on import. Inside `with rewrite():`, or between `install()` and `uninstall()`, whatever Inductor
compiles is searched for speculative sampling written in plain PyTorch: two softmaxes of logits, their values at the
draft tokens, the test u < p / q, the leading acceptances, the residual max(p - q, 0) of the first rejected row, and a
draw by inverse CDF. Its number of accepted drafts and its next token are then taken from
`torch.ops.specops.verify_exact`, called with the code's own logits and uniform numbers. All else stays as it was
written, such as how the output is put together; what nothing needs any more is removed.

The tokens are those of the plain code, except where float32 rounding decides, and where the plain code has no law:

- a residual without mass is 0 / 0 there; the op then draws from p;
- a sum of rounded weights that stays below the uniform number gives token 0, or V, there; here the last token of
  positive weight;
- a draft token of draft probability zero, a token outside [0, V), a uniform number outside [0, 1), a temperature of 0
  or below, a NaN or +inf logit, a row without a finite one: docs/math.md says what the op does.

What is recognised, and what is refused for which reason, is a table in docs/design.md; `counters` says what was found.
Only 3-dimensional logits, [B, K+1, V] and [B, K, V], are looked for.

A graph is rewritten when it is compiled, which is at the first call, and stays as it was compiled. A graph that
Inductor takes from its cache was rewritten when it was put there, so nothing is counted. torch may keep its settings
per thread: the pass works for compilations of the thread that installed it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from .rewriter import Counters

__all__ = ["Counters", "counters", "install", "rewrite", "uninstall"]

#: What the pass did in this process.
counters = Counters()

_listening: list[Counters] = [counters]


class _Installed(threading.local):
    """Of each `install` not yet undone: the pass it set and what was set before; (None, None) if ours was set."""

    def __init__(self) -> None:
        self.stack: list[tuple[Any, Any]] = []


_installed = _Installed()


def _report(found: Counters) -> None:
    for each in _listening:
        each.matched += found.matched
        each.refused.update(found.refused)


def install() -> None:
    """Set Inductor's `joint_custom_pre_pass` to ours, which runs a pass that was set before first. May be called again;
    each call wants its `uninstall`.

    Example:
        >>> import torch_specops.inductor
        >>> torch_specops.inductor.install()
        >>> torch_specops.inductor.uninstall()
    """
    from torch._inductor import config

    from .graph_pass import RewritePass

    before = config.joint_custom_pre_pass
    if isinstance(before, RewritePass):
        _installed.stack.append((None, None))
        return
    others = tuple(before) if isinstance(before, (list, tuple)) else () if before is None else (before,)
    ours = RewritePass(others, _report)
    config.joint_custom_pre_pass = ours
    _installed.stack.append((ours, before))


def uninstall() -> None:
    """Undo one `install`: the last one restores what was set before. A pass that was set since is left alone.

    Raises:
        RuntimeError: nothing is installed.
    """
    from torch._inductor import config

    if not _installed.stack:
        raise RuntimeError("uninstall: nothing is installed in this thread")
    ours, before = _installed.stack.pop()
    if ours is not None and config.joint_custom_pre_pass is ours:
        config.joint_custom_pre_pass = before


@contextlib.contextmanager
def rewrite() -> Iterator[Counters]:
    """Rewrite what is compiled inside, and count it.

    Yields:
        The counters of this context: `matched`, and `refused` by reason.

    Example:
        >>> import torch, torch_specops.inductor
        >>> with torch_specops.inductor.rewrite() as counted:
        ...     y = torch.compile(torch.square, backend="eager")(torch.ones(1))
        >>> counted.matched, dict(counted.refused)
        (0, {})
    """
    found = Counters()
    install()
    _listening.append(found)
    try:
        yield found
    finally:
        # Not `remove`: counters of nested contexts may be equal.
        _listening[:] = [each for each in _listening if each is not found]
        uninstall()
