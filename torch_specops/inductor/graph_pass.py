"""The pass in the form Inductor's configuration takes. Importing this imports Inductor, and with it Triton."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from .rewriter import Counters, rewrite_graph


def digest(files: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()


@functools.cache
def source_digest() -> str:
    return digest(Path(__file__).parent.glob("*.py"))


class RewritePass(CustomGraphPass):
    """The user's own passes, then ours."""

    def __init__(self, others: tuple[Callable[[Graph], None], ...], report: Callable[[Counters], None]) -> None:
        self.others = others
        self.report = report

    def __call__(self, graph: Graph) -> None:
        for other in self.others:
            other(graph)
        self.report(rewrite_graph(graph))

    def uuid(self) -> Any:
        """Of our source and the other passes; None, which switches Inductor's cache off, if one of those has none."""
        uuids = [other.uuid() if isinstance(other, CustomGraphPass) else None for other in self.others]
        if not all(uuids):
            return None
        return ("torch_specops.inductor", source_digest(), *uuids)
