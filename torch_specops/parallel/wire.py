"""The bytes that the exchanges take."""

from __future__ import annotations

from typing import Literal

__all__ = ["wire_bytes"]

Draft = Literal["logits", "lse", "one_hot"]


def wire_bytes(
    batch: int, num_draft_tokens: int, num_ranks: int, draft: Draft = "logits", temperature: bool = True
) -> int:
    """Bytes that each rank receives in one call of `torch_specops.parallel.verify_exact`.

    Every rank sends each other one 8 B c bytes, c numbers of 8 bytes per sequence, and so receives 8 B c (R - 1):

    | exchange | numbers per sequence |
    | --- | --- |
    | 1 | 3 K + 2, and with a `temperature` K + 1; K with `draft_lse`, 3 K without it, 0 for one-hot drafts |
    | 2 | 3 (1 where K = 0) |
    | 3 | 2 |

    An all-gather of the logits would bring each rank B (K + 1) (V - V_r) of the target's and B K (V - V_r) of the
    draft's.

    Args:
        batch: B.
        num_draft_tokens: K.
        num_ranks: R.
        draft: "logits" (also where every rank has them whole), "lse" if `draft_lse` is given too, "one_hot" for None.
        temperature: whether a temperature is given.

    Raises:
        ValueError: another draft, or a number out of range.

    Example:
        >>> from torch_specops.parallel import wire_bytes
        >>> wire_bytes(1, 5, 4)
        1032
    """
    per_draft = {"logits": 3, "lse": 1, "one_hot": 0}
    if draft not in per_draft:
        raise ValueError(f"draft: expected one of {', '.join(per_draft)}, got {draft!r}")
    if batch < 0 or num_draft_tokens < 0 or num_ranks < 1:
        raise ValueError(
            "batch, num_draft_tokens, num_ranks: expected at least 0, 0 and 1, "
            f"got {batch}, {num_draft_tokens}, {num_ranks}"
        )
    k = num_draft_tokens
    first = 3 * k + 2 + (k + 1 if temperature else 0) + per_draft[draft] * k
    second = 3 if k > 0 else 1
    return 8 * batch * (first + second + 2) * (num_ranks - 1)
