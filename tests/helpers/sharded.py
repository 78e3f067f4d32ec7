"""Processes that hold shards of logits, and what they return against the op on the whole logits."""

from __future__ import annotations

import functools
import importlib
import io
import multiprocessing
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from op_cases import op_arguments
from torch import Tensor

from torch_specops import vocab_parallel
from torch_specops.testing import Case, poison_memory

NUM_RANKS = 4
# Two of the four, so that a rank of the group is not the rank of the process.
PAIR = (1, 3)
TIMEOUT = 240

Result = tuple[Tensor, Tensor]


@functools.cache
def ranks() -> list[Connection]:
    """Connections to the processes of one group, which end with the tests."""
    context, folder = multiprocessing.get_context("forkserver"), tempfile.mkdtemp()
    # One process imports what they all need, which takes longer than most tests.
    context.set_forkserver_preload(["test_vocab_parallel", "torch._dynamo"])
    connections = []
    for rank in range(NUM_RANKS):
        own, other = context.Pipe()
        context.Process(target=serve, args=(rank, f"{folder}/store", other), daemon=True).start()
        connections.append(own)
    return connections


def in_ranks(function: Callable[..., Any], *args: Any) -> list[Any]:
    """What a function of a test module returns in each of four processes, which are started once."""
    call = packed((function.__module__, function.__name__, args))
    for connection in ranks():
        connection.send_bytes(call)
    answers = []
    for rank, connection in enumerate(ranks()):
        assert connection.poll(TIMEOUT), f"rank {rank} does not answer"
        answers.append(unpacked(connection.recv_bytes()))
    errors = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(answers) if error is not None]
    assert not errors, "\n".join(errors)
    return [result for _, result in answers]


def serve(rank: int, store: str, connection: Connection) -> None:
    # As pyproject.toml says of the tests' own process.
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "`torch.jit.script(_method)?` is (deprecated|not supported)")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=TIMEOUT)
    )
    global pair
    pair = dist.new_group(list(PAIR))
    while True:
        module, name, args = unpacked(connection.recv_bytes())
        error = result = None
        try:
            result = getattr(importlib.import_module(module), name)(*args)
        except Exception:
            error = traceback.format_exc()
        connection.send_bytes(packed((error, result)))


def packed(values: Any) -> bytes:
    """Tensors keep their strides and offsets."""
    stream = io.BytesIO()
    torch.save(values, stream)
    return stream.getvalue()


def unpacked(values: bytes) -> Any:
    return torch.load(io.BytesIO(values), weights_only=False)


@dataclass(frozen=True)
class Split:
    """How the logits lie: over four ranks or two, the draft's sharded or whole."""

    vocab_size: int
    num_ranks: int = NUM_RANKS
    draft_is_whole: bool = False

    def group(self) -> dist.ProcessGroup | None:
        """None on a rank that does not take part."""
        if self.num_ranks == NUM_RANKS:
            return dist.group.WORLD
        return pair if dist.get_rank() in PAIR else None

    def cut(self, args: dict[str, Any], group: dist.ProcessGroup) -> dict[str, Any]:
        """The arguments as one rank has them: a view of its columns, as `torch.chunk` splits them."""
        names = {"logits", "target_logits"} | (set() if self.draft_is_whole else {"draft_logits"})
        own = {name: self._chunk(args[name], group.rank()) for name in names if args.get(name) is not None}
        return args | own | {"group": group, "vocab_size": self.vocab_size}

    def _chunk(self, logits: Tensor, rank: int) -> Tensor:
        chunks = logits.chunk(self.num_ranks, -1)
        return chunks[rank] if rank < len(chunks) else logits[..., :0]


def run_cases(cases: list[Case], split: Split) -> list[tuple[Tensor, ...]] | None:
    """Results of the cases, on a rank of the split's group."""
    group = split.group()
    if group is None:
        return None
    with poison_memory():
        return [getattr(vocab_parallel, case.op)(**split.cut(case.args, group)) for case in cases]


def agreed(results: list[Any]) -> list[tuple[Tensor, ...]]:
    """What the ranks that took part returned, which must be the same bit for bit."""
    first, *others = [result for result in results if result is not None]
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    return first


def base_case(vocab_size: int, **edits: Any) -> dict[str, Any]:
    """Arguments of 64 rows of three drafts, of which every other one is sampled."""
    arguments = op_arguments("verify_exact", 64, 3, vocab_size, filtered=False) | edits
    return {name: value for name, value in arguments.items() if "lenience" not in name}
