"""Speculative sampling in plain PyTorch, in many spellings of each part, and near misses of it.

A part is a function of `Values`, which holds what the parts before it computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Values:
    """What the code has computed so far."""

    t: Tensor  # [B, K+1, V] target logits
    x: Tensor  # [B, K] draft tokens
    d: Tensor  # [B, K, V] draft logits
    u: Tensor  # [B, K]
    s: Tensor  # [B]
    temperature: Tensor  # [B]
    p: Tensor  # [B, K+1, V]
    q: Tensor  # [B, K, V]
    p_x: Tensor  # [B, K]
    q_x: Tensor  # [B, K]
    ratio: Tensor  # [B, K]
    accepted: Tensor  # [B, K]
    n: Tensor  # [B]
    weights: Tensor  # [B, V]
    next_token: Tensor  # [B]

    @property
    def k(self) -> int:
        return self.x.shape[1]

    @property
    def rows(self) -> Tensor:
        return torch.arange(self.x.shape[0], device=self.x.device)

    @property
    def p_n(self) -> Tensor:
        return self.p[self.rows, self.n]

    @property
    def q_n(self) -> Tensor:
        """q of the first rejected row, and the last one after K acceptances."""
        return self.q[self.rows, self.n.clamp(max=self.k - 1)]

    @property
    def padded_q(self) -> Tensor:
        return F.pad(self.q, (0, 0, 0, 1))

    @property
    def residual(self) -> Tensor:
        """max(p_n - q_n, 0), and p_K after K acceptances."""
        return F.relu(self.p_n - self.padded_q[self.rows, self.n])


Part = Callable[[Values], Any]


def soft(make: Callable[[Tensor, Values], Tensor]) -> Part:
    def part(v: Values) -> None:
        v.p, v.q = make(v.t, v), make(v.d, v)

    return part


def by_hand(z: Tensor, v: Values) -> Tensor:
    e = torch.exp(z - z.max(-1, keepdim=True).values)
    return e / e.sum(-1, keepdim=True)


def target_alone(v: Values) -> None:
    v.p, v.q = torch.softmax(v.t / v.temperature[:, None, None], -1), torch.softmax(v.d, -1)


def more_draft_rows(v: Values) -> None:
    v.p = torch.softmax(v.t, -1)
    v.q = torch.softmax(torch.cat([v.d, v.d[:, :1]], 1), -1)[:, :-1]


# The temperature of the call is used by those with "temperature" in their name.
PROBABILITIES: dict[str, Part] = {
    "softmax": soft(lambda z, v: torch.softmax(z, -1)),
    "softmax over dimension 2": soft(lambda z, v: F.softmax(z, dim=2)),
    "float32 softmax": soft(lambda z, v: torch.softmax(z, -1, dtype=torch.float32)),
    "float64 softmax": soft(lambda z, v: torch.softmax(z.double(), -1)),
    "float softmax": soft(lambda z, v: torch.softmax(z.float(), -1)),
    "exp of log_softmax": soft(lambda z, v: torch.log_softmax(z, -1).exp()),
    "written by hand": soft(by_hand),
    "masked logits": soft(lambda z, v: torch.softmax(z.masked_fill(z < -3, -torch.inf), -1)),
    "temperature per row": soft(lambda z, v: torch.softmax(z / v.temperature[:, None, None], -1)),
    "temperature per row, viewed": soft(lambda z, v: torch.softmax(z / v.temperature.view(-1, 1, 1), -1)),
    "temperature of the target alone": target_alone,
    "temperature 0.7": soft(lambda z, v: torch.softmax(z / 0.7, -1)),
    "temperature as a factor": soft(lambda z, v: torch.softmax(z * (1 / 0.7), -1)),
    "temperature as a tensor": soft(lambda z, v: torch.softmax(z / v.temperature[0], -1)),
    "more draft rows": more_draft_rows,
}


def gathered(v: Values) -> None:
    v.p_x = v.p[:, :-1].gather(-1, v.x.unsqueeze(-1)).squeeze(-1)
    v.q_x = v.q.gather(-1, v.x.unsqueeze(-1)).squeeze(-1)
    v.ratio = v.p_x / v.q_x


def gathered_of_all_rows(v: Values) -> None:
    index = v.x[:, :, None]
    v.p_x, v.q_x = v.p.gather(2, index)[..., 0], v.q.gather(2, index)[..., 0]
    v.ratio = v.p_x / v.q_x


def indexed(v: Values) -> None:
    positions = torch.arange(v.k)
    v.p_x, v.q_x = v.p[v.rows[:, None], positions, v.x], v.q[v.rows[:, None], positions[None], v.x]
    v.ratio = v.p_x / v.q_x


def viewed(v: Values) -> None:
    batch = v.x.shape[0]
    index = v.x.view(batch, -1, 1)
    v.p_x, v.q_x = (each.gather(2, index).view(batch, -1) for each in (v.p[:, :-1], v.q))
    v.ratio = v.p_x / v.q_x


def along_dim(v: Values) -> None:
    index = v.x.unsqueeze(-1)
    v.p_x, v.q_x = (torch.take_along_dim(each, index, -1).squeeze(-1) for each in (v.p[:, : v.k], v.q))
    v.ratio = v.p_x / v.q_x


def ratio_of_rows(v: Values) -> None:
    gathered(v)
    v.ratio = (v.p[:, :-1] / v.q).gather(2, v.x.unsqueeze(2)).squeeze(2)


GATHERS: dict[str, Part] = {
    "gather": gathered,
    "gather without a slice": gathered_of_all_rows,
    "gather, viewed": viewed,
    "index": indexed,
    "take_along_dim": along_dim,
    "ratio of rows": ratio_of_rows,
}


def log_p_x(v: Values) -> Tensor:
    return torch.log_softmax(v.t[:, :-1], -1).gather(2, v.x.unsqueeze(2)).squeeze(2)


def log_q_x(v: Values) -> Tensor:
    return torch.log_softmax(v.d, -1).gather(2, v.x.unsqueeze(2)).squeeze(2)


ACCEPTANCES: dict[str, Callable[[Values], Tensor]] = {
    "u < p / q": lambda v: v.u < v.ratio,
    "p / q > u": lambda v: v.ratio > v.u,
    "u < clamp(p / q, max=1)": lambda v: v.u < v.ratio.clamp(max=1.0),
    "u < minimum(1, p / q)": lambda v: v.u < torch.minimum(torch.ones_like(v.ratio), v.ratio),
    "u < minimum(p / q, 1)": lambda v: v.u < torch.minimum(v.ratio, torch.ones(())),
    "u q < p": lambda v: v.u * v.q_x < v.p_x,
    "p > q u": lambda v: v.p_x > v.q_x * v.u,
    "not u >= p / q": lambda v: ~(v.u >= v.ratio),
    "logical_not": lambda v: torch.logical_not(v.ratio <= v.u),
    "compared after gathering": lambda v: (v.u.unsqueeze(-1) < v.ratio.unsqueeze(-1)).squeeze(-1),
    "log u < log p - log q": lambda v: v.u.log() < v.p_x.log() - v.q_x.log(),
    "log u < log(p / q)": lambda v: v.u.log() < torch.log(v.ratio),
    "log-softmax": lambda v: v.u.log() < log_p_x(v) - log_q_x(v),
    "log-softmax, sum": lambda v: v.u.log() + log_q_x(v) < log_p_x(v),
    "log-softmax, at most 0": lambda v: v.u.log() < (log_p_x(v) - log_q_x(v)).clamp(max=0.0),
    "exp of log-softmax": lambda v: v.u < torch.exp(log_p_x(v) - log_q_x(v)),
    "exp of log-softmax, at most 0": lambda v: v.u < torch.exp(torch.clamp(log_p_x(v) - log_q_x(v), max=0)),
}
# These use their own softmax at temperature 1.
OWN_SOFTMAX = {name for name in ACCEPTANCES if "log-softmax" in name}


def closed(v: Values) -> Tensor:
    return torch.cat([~v.accepted, torch.ones_like(v.accepted[:, :1])], 1)


COUNTS: dict[str, Callable[[Values], Tensor]] = {
    "cumsum of rejections < 1": lambda v: ((~v.accepted).cumsum(1) < 1).sum(1),
    "cumsum of rejections == 0": lambda v: ((~v.accepted).int().cumsum(-1) == 0).sum(-1),
    "not cumsum of rejections > 0": lambda v: (~((~v.accepted).cumsum(-1) > 0)).sum(-1),
    "not any rejection so far": lambda v: (~(~v.accepted).cumsum(1).bool()).sum(1),
    "1 - accepted": lambda v: ((1 - v.accepted.int()).cumsum(1) < 1).long().sum(1),
    "cumsum == 1, 2, ..": lambda v: (v.accepted.cumsum(1) == torch.arange(1, v.k + 1)).sum(1),
    "cumprod": lambda v: v.accepted.long().cumprod(1).sum(1),
    "cumprod == 1": lambda v: (v.accepted.int().cumprod(1) == 1).sum(1),
    "cumprod of 1 and 0": lambda v: torch.where(v.accepted, 1, 0).cumprod(1).sum(1),
    "cumsum of 0 and 1": lambda v: (torch.where(v.accepted, 0, 1).cumsum(1) < 1).sum(1),
    "cumprod, float": lambda v: torch.cumprod(v.accepted.float(), dim=-1).sum(-1).long(),
    "cumprod, keepdim": lambda v: v.accepted.int().cumprod(1).sum(1, keepdim=True).squeeze(1),
    "argmax of rejections, closed": lambda v: closed(v).int().argmax(1),
    "argmin of acceptances, closed": lambda v: (~closed(v)).long().argmin(1),
    "where all": lambda v: torch.where(v.accepted.all(1), v.k, (~v.accepted).int().argmax(1)),
}


def normalised(w: Tensor) -> Tensor:
    return w / w.sum(-1, keepdim=True)


def picked(z: Tensor, index: Tensor) -> Tensor:
    return z.gather(1, index[:, None, None].expand(-1, 1, z.shape[-1])).squeeze(1)


def all_rows(v: Values) -> Tensor:
    return torch.cat([F.relu(v.p[:, :-1] - v.q), v.p[:, -1:]], 1)[v.rows, v.n]


def all_rows_normalised(v: Values) -> Tensor:
    residual = (v.p[:, :-1] - v.q).clamp(min=0)
    residual = residual / residual.sum(-1, keepdim=True)
    return picked(torch.cat([residual, v.p[:, -1:]], 1), v.n)


def guarded(v: Values) -> Tensor:
    total = v.residual.sum(-1, keepdim=True)
    return torch.where(total > 0, v.residual / total, v.p_n)


def guarded_by_equality(v: Values) -> Tensor:
    total = v.residual.sum(-1, keepdim=True)
    return normalised(torch.where(total == 0, v.p_n, v.residual))


def by_condition(condition: Callable[[Values], Tensor]) -> Callable[[Values], Tensor]:
    return lambda v: normalised(torch.where(condition(v)[:, None], v.p[:, -1], (v.p_n - v.q_n).clamp(min=0)))


def by_rejection(condition: Callable[[Values], Tensor]) -> Callable[[Values], Tensor]:
    return lambda v: normalised(torch.where(condition(v)[:, None], F.relu(v.p_n - v.q_n), v.p[:, -1]))


WEIGHTS: dict[str, Callable[[Values], Tensor]] = {
    "padded q": lambda v: normalised(v.residual),
    "q and zeros": lambda v: normalised(F.relu(v.p_n - torch.cat([v.q, torch.zeros_like(v.q[:, :1])], 1)[v.rows, v.n])),
    "difference of all rows": lambda v: normalised(F.relu(v.p - v.padded_q)[v.rows, v.n]),
    "rows by gather": lambda v: normalised(F.relu(picked(v.p, v.n) - picked(v.padded_q, v.n))),
    "rows by take_along_dim": lambda v: normalised(
        F.relu(v.p_n - torch.take_along_dim(v.padded_q, v.n[:, None, None], 1)[:, 0])
    ),
    "maximum": lambda v: normalised(torch.maximum(v.p_n - v.padded_q[v.rows, v.n], torch.zeros(()))),
    "masked q": lambda v: normalised(F.relu(v.p_n - v.q_n * (v.n < v.k).float()[:, None])),
    "q or zero": lambda v: normalised(F.relu(v.p_n - torch.where((v.n < v.k)[:, None], v.q_n, 0.0))),
    "n == K": by_condition(lambda v: v.n == v.k),
    "n >= K": by_condition(lambda v: v.n >= v.k),
    "not n < K": by_condition(lambda v: ~(v.n < v.k)),
    "n != K": by_rejection(lambda v: v.n != v.k),
    "not all": by_rejection(lambda v: ~v.accepted.all(1)),
    "all": by_condition(lambda v: v.accepted.all(1)),
    "not any": by_condition(lambda v: ~(~v.accepted).any(-1)),
    "as many as K": by_condition(lambda v: v.accepted.sum(-1) == v.k),
    "all rows": lambda v: normalised(all_rows(v)),
    "all rows, normalised": all_rows_normalised,
    "floor under the sum": lambda v: v.residual / v.residual.sum(-1, keepdim=True).clamp(min=1e-20),
    "guarded": guarded,
    "guarded by equality": guarded_by_equality,
    "softmax of the row": lambda v: normalised(F.relu(torch.softmax(v.t[v.rows, v.n], -1) - v.padded_q[v.rows, v.n])),
}


def cdf(v: Values) -> Tensor:
    return v.weights.cumsum(-1)


DRAWS: dict[str, Callable[[Values], Tensor]] = {
    "argmax of cdf > s": lambda v: (cdf(v) > v.s[:, None]).int().argmax(-1),
    "argmax, viewed": lambda v: (cdf(v) > v.s.view(-1, 1)).int().argmax(-1),
    "argmax, float": lambda v: (v.s.unsqueeze(1) < cdf(v)).float().argmax(dim=1),
    "argmax, keepdim": lambda v: (cdf(v) > v.s[:, None]).long().argmax(-1, keepdim=True).squeeze(-1),
    "argmax, float64": lambda v: (v.weights.double().cumsum(-1) > v.s[:, None]).int().argmax(-1),
    "sum of cdf <= s": lambda v: (cdf(v) <= v.s[:, None]).sum(-1),
    "sum, clamped": lambda v: (cdf(v) <= v.s[:, None]).sum(-1).clamp(max=v.p.shape[-1] - 1),
    "searchsorted": lambda v: torch.searchsorted(cdf(v), v.s[:, None], right=True).squeeze(1),
    "searchsorted, side": lambda v: torch.searchsorted(cdf(v), v.s.unsqueeze(-1), side="right")[:, 0],
    "s times the sum": lambda v: (cdf(v) > (v.s * v.weights.sum(-1))[:, None]).int().argmax(-1),
    "s times the last, selected": lambda v: (cdf(v) > (v.s * cdf(v)[:, -1])[:, None]).int().argmax(-1),
    "s times the last": lambda v: (cdf(v) > v.s[:, None] * cdf(v)[:, -1:]).int().argmax(-1),
}


def scattered(v: Values) -> Tensor:
    kept = torch.where(torch.arange(v.k + 1) < v.n[:, None], F.pad(v.x, (0, 1)), -1)
    return kept.scatter(1, v.n[:, None], v.next_token[:, None])


def by_mask(v: Values) -> Tensor:
    mask = v.accepted.long().cumprod(1)
    kept = torch.where(mask.bool(), v.x, -1)
    return torch.cat([kept, torch.full_like(kept[:, :1], -1)], 1).scatter(1, v.n[:, None], v.next_token[:, None])


def by_condition_on_position(v: Values) -> Tensor:
    position = torch.arange(v.k + 1)[None]
    ends = v.n.unsqueeze(1)
    after = torch.where(position == ends, v.next_token.unsqueeze(1), -1)
    return torch.where(position < ends, F.pad(v.x, (0, 1)), after)


OUTPUTS: dict[str, Callable[[Values], Tensor]] = {
    "scattered": scattered,
    "by the mask of acceptances": by_mask,
    "by position": by_condition_on_position,
}

PARTS: dict[str, dict[str, Any]] = {
    "probabilities": PROBABILITIES,
    "gather": GATHERS,
    "acceptance": ACCEPTANCES,
    "count": COUNTS,
    "weights": WEIGHTS,
    "draw": DRAWS,
    "output": OUTPUTS,
}
Function = Callable[..., tuple[Tensor, ...]]


def spelled(**chosen: Any) -> Function:
    """The function (target_logits, draft_tokens, draft_logits, u, s, temperature) -> (output_tokens, n), of the parts
    with these names, or of these functions; the first spelling of the others."""
    parts = {}
    for name, table in PARTS.items():
        choice = chosen.get(name, next(iter(table)))
        parts[name] = table[choice] if isinstance(choice, str) else choice

    def verify(t: Tensor, x: Tensor, d: Tensor, u: Tensor, s: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        v = Values()
        v.t, v.x, v.d, v.u, v.s, v.temperature = t, x, d, u, s, temperature
        parts["probabilities"](v)
        parts["gather"](v)
        v.accepted = parts["acceptance"](v)
        v.n = parts["count"](v)
        v.weights = parts["weights"](v)
        v.next_token = parts["draw"](v)
        return parts["output"](v), v.n

    return verify


def with_output(make: Callable[[Values], Tensor]) -> Function:
    """The first spelling, with a third output."""

    def verify(*args: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        kept: list[Tensor] = []

        def output(v: Values) -> Tensor:
            kept.append(make(v))
            return scattered(v)

        output_tokens, n = spelled(output=output)(*args)
        return output_tokens, n, kept[0]

    return verify


def without_dimension(v: Values) -> None:
    v.p, v.q = torch.softmax(v.t, 1), torch.softmax(v.d, 1)


def low_precision(dtype: torch.dtype) -> Part:
    return soft(lambda z, v: torch.softmax(z.to(dtype), -1).float())


def low_draft(v: Values) -> None:
    v.p, v.q = torch.softmax(v.t, -1), torch.softmax(v.d.bfloat16(), -1).float()


def other_token(v: Values) -> None:
    v.p_x = v.p[:, :-1].gather(2, v.x[:, :, None]).squeeze(2)
    v.q_x = v.q.gather(2, v.x.roll(1, 1)[:, :, None]).squeeze(2)
    v.ratio = v.p_x / v.q_x


def next_row(v: Values) -> None:
    v.p_x = v.p[:, 1:].gather(2, v.x[:, :, None]).squeeze(2)
    v.q_x = v.q.gather(2, v.x[:, :, None]).squeeze(2)
    v.ratio = v.p_x / v.q_x


def two_uniforms(v: Values) -> Tensor:
    bonus = (v.p[:, -1].cumsum(-1) > v.u[:, :1]).int().argmax(-1)
    recovered = (cdf(v) > v.s[:, None]).int().argmax(-1)
    return torch.where(v.n == v.k, bonus, recovered)


def own_uniform(v: Values) -> Tensor:
    """The uniform number of the position where the walk ended."""
    s = torch.cat([v.u, v.s[:, None]], 1).gather(1, v.n[:, None])
    return (cdf(v) > s).int().argmax(-1)


def race(v: Values) -> Tensor:
    return (v.weights / torch.empty_like(v.weights).exponential_()).argmax(-1)


def gumbel(v: Values) -> Tensor:
    return (v.weights.log() - (-torch.rand_like(v.weights).log()).log()).argmax(-1)


def other_temperature(v: Values) -> Tensor:
    q = F.pad(torch.softmax(v.d / 0.7, -1), (0, 0, 0, 1))
    return normalised(F.relu(v.p_n - q[v.rows, v.n]))


# name: (the parts that differ, what its refusal says)
NEAR_MISSES: dict[str, tuple[dict[str, Any], str]] = {
    "softmax over positions": ({"probabilities": without_dimension}, "not over the vocabulary"),
    "softmax over the batch": ({"probabilities": soft(lambda z, v: torch.softmax(z, 0))}, "not over the vocabulary"),
    "bfloat16 softmax": ({"probabilities": low_precision(torch.bfloat16)}, "below float32"),
    "float16 softmax": ({"probabilities": low_precision(torch.float16)}, "below float32"),
    "bfloat16 draft softmax": ({"probabilities": low_draft}, "below float32"),
    "probabilities, not logits": ({"probabilities": soft(lambda z, v: z.abs())}, "not rows of a softmax"),
    "u <= p / q": ({"acceptance": lambda v: v.u <= v.ratio}, "on <="),
    "not u > p / q": ({"acceptance": lambda v: ~(v.u > v.ratio)}, "on <="),
    "u q <= p": ({"acceptance": lambda v: v.u * v.q_x <= v.p_x}, "on <="),
    "log u <= log p - log q": ({"acceptance": lambda v: v.u.log() <= v.p_x.log() - v.q_x.log()}, "on <="),
    "u < q / p": ({"acceptance": lambda v: v.u < v.q_x / v.p_x}, "q(x) / p(x)"),
    "u > p / q": ({"acceptance": lambda v: v.u > v.ratio}, "q(x) / p(x)"),
    "u < p": ({"acceptance": lambda v: v.u < v.p_x}, "not u < p(x) / q(x)"),
    "u < p - q": ({"acceptance": lambda v: v.u < v.p_x - v.q_x}, "not u < p(x) / q(x)"),
    "u < log p - log q": ({"acceptance": lambda v: v.u < v.p_x.log() - v.q_x.log()}, "uniforms are not"),
    "u < (p / q) ** 2": ({"acceptance": lambda v: v.u < v.ratio * v.ratio}, "not u < p(x) / q(x)"),
    "u < min(p / q, 0.9)": ({"acceptance": lambda v: v.u < v.ratio.clamp(max=0.9)}, "not u < p(x) / q(x)"),
    "lenient": ({"acceptance": lambda v: 0.5 * v.u * v.q_x < v.p_x}, "not u < p(x) / q(x)"),
    "q with an epsilon": ({"acceptance": lambda v: v.u < v.p_x / (v.q_x + 1e-8)}, "not u < p(x) / q(x)"),
    "accepted or likely": ({"acceptance": lambda v: (v.u < v.ratio) | (v.p_x > 0.5)}, "not one comparison"),
    "other tokens": ({"gather": other_token}, "not u < p(x) / q(x)"),
    "the row after": ({"gather": next_row}, "not u < p(x) / q(x)"),
    "all acceptances": ({"count": lambda v: v.accepted.sum(1)}, "no single number of leading"),
    "cumsum of rejections < 2": (
        {"count": lambda v: ((~v.accepted).cumsum(1) < 2).sum(1).clamp(max=v.k)},
        "no single number of leading",
    ),
    "cumsum of rejections == 1": ({"count": lambda v: ((~v.accepted).cumsum(1) == 1).sum(1)}, "no single number"),
    "cumsum of acceptances < 1": ({"count": lambda v: (v.accepted.cumsum(1) < 1).sum(1)}, "on <="),
    "walk over the batch": ({"count": lambda v: ((~v.accepted).cumsum(0) < 1).sum(1)}, "no single number of leading"),
    "argmax, not closed": ({"count": lambda v: (~v.accepted).int().argmax(1)}, "no single number of leading"),
    "residual without a clamp": (
        {"weights": lambda v: normalised(v.p_n - v.padded_q[v.rows, v.n])},
        "not clamped at zero",
    ),
    "absolute residual": (
        {"weights": lambda v: normalised((v.p_n - v.padded_q[v.rows, v.n]).abs())},
        "no single number",
    ),
    "residual q - p": ({"weights": lambda v: normalised(F.relu(v.padded_q[v.rows, v.n] - v.p_n))}, "last row"),
    "residual q - p, bonus from p": (
        {
            "weights": lambda v: normalised(
                torch.where((v.n == v.k)[:, None], v.p[:, -1], F.relu(v.q_n - v.p_n)),
            )
        },
        "residual q - p",
    ),
    "no residual": ({"weights": lambda v: v.p_n}, "not a residual"),
    "residual of the first row": ({"weights": lambda v: normalised(F.relu(v.p[:, 0] - v.q[:, 0]))}, "no single number"),
    "residual of the row before": (
        {"weights": lambda v: normalised(F.relu(v.p_n - v.padded_q[v.rows, (v.n - 1).clamp(min=0)]))},
        "first rejected",
    ),
    "residual of another temperature": ({"weights": other_temperature}, "not u < p(x) / q(x)"),
    "u from the probabilities": ({"acceptance": lambda v: 1 - v.p_x < v.ratio}, "computed from probabilities"),
    "residual after K acceptances": ({"weights": lambda v: normalised(F.relu(v.p_n - v.q_n))}, "last row"),
    "bonus from the row before": (
        {
            "weights": lambda v: normalised(
                torch.where((v.n == v.k)[:, None], v.p[:, -2], F.relu(v.p_n - v.q_n)),
            )
        },
        "last row",
    ),
    "a row too early": (
        {
            "weights": lambda v: normalised(
                torch.where((v.n >= v.k - 1)[:, None], v.p[:, -1], F.relu(v.p_n - v.q_n)),
            )
        },
        "not a residual",
    ),
    "not normalised": ({"weights": lambda v: v.residual}, "not normalised"),
    "normalised over the batch": (
        {"weights": lambda v: v.residual / v.residual.sum(0, keepdim=True)},
        "not normalised",
    ),
    "sum with an epsilon": ({"weights": lambda v: v.residual / (v.residual.sum(-1, keepdim=True) + 1e-6)}, "not"),
    "high floor under the sum": (
        {"weights": lambda v: v.residual / v.residual.sum(-1, keepdim=True).clamp(min=1e-3)},
        "not",
    ),
    "guarded by q": (
        {"weights": lambda v: torch.where(v.residual.sum(-1, keepdim=True) > 0, normalised(v.residual), v.q_n)},
        "without mass",
    ),
    "cdf >= s": ({"draw": lambda v: (cdf(v) >= v.s[:, None]).int().argmax(-1)}, "cdf > s"),
    "sum of cdf < s": ({"draw": lambda v: (cdf(v) < v.s[:, None]).sum(-1)}, "cdf > s"),
    "searchsorted from the left": ({"draw": lambda v: torch.searchsorted(cdf(v), v.s[:, None]).squeeze(1)}, "cdf > s"),
    "cdf < s": ({"draw": lambda v: (cdf(v) < v.s[:, None]).int().argmax(-1)}, "cdf > s"),
    "cdf over the batch": (
        {"draw": lambda v: (v.weights.cumsum(0) > v.s[:, None]).int().argmax(-1)},
        "not over the vocabulary",
    ),
    "first of the batch": ({"draw": lambda v: (cdf(v) > v.s[:, None]).int().argmax(0)[: v.x.shape[0]]}, "both cases"),
    "cdf of the token excluded": (
        {"draw": lambda v: (cdf(v) - v.weights > v.s[:, None]).int().argmax(-1)},
        "first whose cumulative",
    ),
    "1 - s": ({"draw": lambda v: (cdf(v) > 1 - v.s[:, None]).int().argmax(-1)}, "uniforms are not"),
    "multinomial": ({"draw": lambda v: torch.multinomial(v.weights, 1).squeeze(1)}, "random numbers"),
    "exponential race": ({"draw": race}, ""),
    "Gumbel noise": ({"draw": gumbel}, "not the first whose"),
    "two uniforms": ({"weights": lambda v: normalised(F.relu(v.p_n - v.q_n)), "draw": two_uniforms}, "different"),
    "a uniform per position": ({"draw": own_uniform}, "different uniforms"),
    "greedy": ({"draw": lambda v: v.weights.argmax(-1)}, "first whose cumulative"),
}
