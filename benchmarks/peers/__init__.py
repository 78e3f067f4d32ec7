"""Other implementations of the verification step, each behind one adapter; none of their code is here.

    for peer in all_peers():
        reason = peer.unavailable(device)          # why it is skipped, or None

`protocol.py` says what an adapter is, README.md where the peers come from.
"""

from __future__ import annotations

from collections.abc import Iterator

from .flashinfer import FlashInfer
from .paper import PaperExact, PaperSigmoid
from .protocol import Peer
from .sglang import SGLang
from .specops import Specops
from .transformers import Transformers
from .vllm import VLLM
from .vllm_cpu import VLLMCPU

__all__ = ["Peer", "Specops", "all_peers"]


def all_peers() -> Iterator[Peer]:
    """Ours first."""
    yield Specops()
    yield Specops(with_lse=True)
    yield Specops(compiled=True)
    yield Specops(with_lse=True, compiled=True)
    yield Transformers()
    yield Transformers(compiled=True)
    yield FlashInfer()
    yield VLLM()
    yield VLLM(copied=False)
    yield VLLMCPU()
    yield VLLMCPU(given="draft")
    yield VLLMCPU(given="all")
    yield SGLang()
    yield PaperExact()
    yield PaperSigmoid()
