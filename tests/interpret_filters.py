"""Runs the launcher of `filter_logits` under the interpreter, on poisoned memory; prints one JSON line.

    TRITON_INTERPRET=1 python tests/interpret_filters.py DTYPE TILE VOCAB_SIZE

Every top_p and min_p lies halfway between two tokens, so that no float32 rounding decides: the result must equal the
oracle's bit for bit. Rows are unaligned or strided in turn.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator

import oracle
import torch
from cuda_stand_in import interpreter
from torch import Tensor

from torch_specops import reference
from torch_specops.arguments import Filters
from torch_specops.kernels.filter import filter_logits

INF, NAN = math.inf, math.nan
LARGEST = torch.finfo(torch.float32).max

# One row each: temperature, top_k, and which of the kept tokens top_p and min_p cut behind (None: off).
ROWS = (
    (1.0, 5, None, None),
    (0.7, 0, 0.2, None),
    (1.3, 0, None, 0.1),
    (1.0, 9, 0.4, None),
    (2.0, 30, 0.3, 0.2),
    (0.5, 1, 0.9, 0.0),
    (1.0, 10_000, 0.0, None),
    (0.0, 3, 0.2, 0.1),
    (-1.0, 3, 0.2, 0.1),
)


def spread(x: Tensor) -> None:
    x.mul_(3.0)


def tie(x: Tensor) -> None:
    """A few distinct values, both zeros among them."""
    x.mul_(1.5).round_()


def level(x: Tensor) -> None:
    """All tokens tie: what stays is a matter of ids alone."""
    x.fill_(-2.5)


def exclude(x: Tensor) -> None:
    """Excluded entries, several infinite ones, rows without any finite entry and rows with one."""
    spread(x)
    x[:, ::3], x[:, 1::7] = -INF, NAN
    x[0, 2::11], x[1, -1], x[4, 2::5] = INF, INF, INF
    # The law of +inf is that of the largest float32, of which 16-bit types have none.
    x[0, 5::12], x[4, 4::12], x[6, 4::16], x[6, 5::16] = LARGEST, LARGEST, INF, LARGEST
    x[2], x[3] = -INF, NAN
    x[5, :-1] = -INF


def overflow(x: Tensor) -> None:
    """The whole range of the dtype, its ends included."""
    largest = torch.finfo(torch.float16).max
    x.mul_(largest / 2).clamp_(-largest, largest)


CONTENTS: tuple[Callable[[Tensor], None], ...] = (spread, tie, level, exclude, overflow)


def threshold(z: Tensor, share: float | None, by_mass: bool) -> float:
    """top_p or min_p halfway between the token at `share` of the likely tokens, in the filters' order, and the next."""
    if share is None:
        return 1.0 if by_mass else 0.0
    finite = sorted((value for value in z.tolist() if value > -INF), reverse=True)
    if not finite or share == 0:
        return 0.0 if by_mass else 0.05
    weights = [math.exp(value - finite[0]) for value in finite]
    total = sum(weights)
    values = [weight / total for weight in weights]
    if by_mass:
        likely = [i for i, value in enumerate(values) if value > 1e-4]
        chosen = likely[int(share * len(likely))]
        return (sum(values[:chosen]) + sum(values[: chosen + 1])) / 2
    distinct = [w for i, w in enumerate(weights) if w > 1e-6 and (i == 0 or w < 0.99 * weights[i - 1])]
    chosen = int(share * len(distinct))
    return (distinct[chosen] + (distinct[chosen + 1] if chosen + 1 < len(distinct) else 0.0)) / 2


def filters(logits: Tensor) -> dict[str, Tensor]:
    rows = []
    for r, (t, k, p, m) in enumerate(ROWS):
        z = reference.scaled_logits(logits[r], t if t > 0 else 1.0)
        after_top_k = reference.filtered(logits[r], 1.0, k)
        likely = torch.where(after_top_k > -INF, z, -INF)
        rows.append((t, k, threshold(likely, p, by_mass=True), threshold(likely, m, by_mass=False)))
    t, k, p, m = zip(*rows, strict=True)
    return {
        "temperature": torch.tensor(t),
        "top_k": torch.tensor(k),
        "top_p": torch.tensor(p),
        "min_p": torch.tensor(m),
    }


def layouts(x: Tensor, turn: int) -> Tensor:
    """Rows next to each other, off the 16-byte boundary by an odd stride, and strided themselves."""
    rows, vocab_size = x.shape
    if turn % 3 == 1:
        longer = torch.zeros(rows, vocab_size + 4 + vocab_size % 2, dtype=x.dtype)
        longer[:, 1 : 1 + vocab_size] = x
        return longer[:, 1 : 1 + vocab_size]
    return x.T.contiguous().T if turn % 3 == 2 else x


def cases(dtype: torch.dtype, vocab_size: int) -> Iterator[tuple[str, dict[str, Tensor]]]:
    generator = torch.Generator().manual_seed(vocab_size)
    for turn, fill in enumerate(CONTENTS):
        values = torch.randn(len(ROWS), vocab_size, generator=generator)
        fill(values)
        logits = layouts(values.to(dtype), turn)
        given = filters(logits)
        yield fill.__name__, {"logits": logits, **given}
        if fill is tie:
            # Each filter alone, without temperatures; top_k also as int32; a filter that is no number.
            alone = filters(logits) | {"temperature": torch.ones(len(ROWS))}
            yield "top_k", {"logits": logits, "top_k": given["top_k"].int()}
            yield "top_p", {"logits": logits, "top_p": alone["top_p"].fill_(0.5)}
            alone["min_p"][::2] = NAN
            yield "min_p", {"logits": logits, "min_p": alone["min_p"]}


def main(dtype: torch.dtype, tile: int, vocab_size: int) -> None:
    interpreter.prepare()
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    report = {"cases": 0, "rows": 0, "kept": 0, "removed": 0}
    wrong = []
    for name, args in cases(dtype, vocab_size):
        filters = Filters(**{name: value for name, value in args.items() if name != "logits"})
        with oracle.poison_memory():
            got = filter_logits(args["logits"], filters, tile=tile)
        expected = reference.filter_logits(**args)
        report["cases"] += 1
        report["rows"] += len(got)
        report["kept"] += int((expected > -INF).sum())
        report["removed"] += int((args["logits"] > -INF).sum() - (expected > -INF).sum())
        equal = (got.view(bits) == expected.view(bits)).all(1)
        if not equal.all():
            wrong.append({"case": name, "rows": (~equal).nonzero().flatten().tolist()})
    print(json.dumps({**report, "wrong": wrong}))


if __name__ == "__main__":
    main(getattr(torch, sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
