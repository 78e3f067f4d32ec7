"""Which rows `verify_exact` reads when it sums two of each side first, in Triton's interpreter; prints a JSON line.

A script of its own because TRITON_INTERPRET must be set before a kernel is defined:
    TRITON_INTERPRET=1 python tests/helpers/interpret_reads.py
"""

import json
from typing import Any

import numpy as np
import torch
import triton_interpreter
from torch import Tensor

from torch_specops.ops.arguments import VerifyArguments
from torch_specops.ops.cuda import exact, launch

NUM_DRAFTS, VOCAB_SIZE, TILE = 4, 67, 32
# Of each sequence: drafts before the padding, and how many of these are accepted.
SEQUENCES = [(4, 0), (4, 1), (4, 2), (4, 3), (4, 4), (3, 3), (3, 1), (2, 2), (1, 1), (1, 0), (0, 0)]


def arguments(kind: str) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    batch = len(SEQUENCES)
    target = torch.randn(batch, NUM_DRAFTS + 1, VOCAB_SIZE, generator=g)
    draft = torch.randn(batch, NUM_DRAFTS, VOCAB_SIZE, generator=g)
    tokens = target[:, :-1].argmax(-1)
    for b, (num_valid, accepted) in enumerate(SEQUENCES):
        if accepted < num_valid:
            target[b, accepted, tokens[b, accepted]] = -torch.inf
        tokens[b, num_valid:] = -1
    return {
        "target_logits": target,
        "draft_logits": None if kind == "one-hot" else draft,
        "draft_tokens": tokens,
        "accept_uniforms": torch.zeros(batch, NUM_DRAFTS),
        "sample_uniforms": torch.full((batch,), 0.5),
        "temperature": torch.full((batch,), float(kind != "greedy")),
        "draft_lse": draft.logsumexp(-1) if kind == "draft_lse" else None,
    }


def rows_read(logits: Tensor | None, loaded: np.ndarray) -> list[list[int]]:
    """Of each sequence the rows of which more was loaded than the draft's own logit."""
    if logits is None:
        return [[] for _ in SEQUENCES]
    counts = np.histogram(loaded, logits.data_ptr() + 4 * VOCAB_SIZE * np.arange(logits[..., 0].numel() + 1))[0]
    assert set(counts) <= {0, 1, VOCAB_SIZE}
    return [np.flatnonzero(rows == VOCAB_SIZE).tolist() for rows in counts.reshape(logits.shape[:2])]


def run(kind: str) -> dict[str, Any]:
    given = arguments(kind)
    with triton_interpreter.record_loads() as addresses:
        _, num_accepted = exact.verify_exact(VerifyArguments(**given), tile=TILE)
    assert num_accepted.tolist() == [accepted for _, accepted in SEQUENCES]
    loaded = np.unique(np.concatenate(addresses).astype(np.int64))
    return {side: rows_read(given[f"{side}_logits"], loaded) for side in ("target", "draft")}


if __name__ == "__main__":
    triton_interpreter.prepare()
    # So that a program takes several tiles although there are few.
    launch.RESIDENT_PROGRAMS = 5
    exact.EARLY_EXIT_TILES = 1
    kinds = ("draft rows", "draft_lse", "one-hot", "greedy")
    print(json.dumps({"sequences": SEQUENCES, "rows": {kind: run(kind) for kind in kinds}}))
