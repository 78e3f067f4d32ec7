"""What the verification benchmarks are timed on: sizes, inputs, how many bytes they need, and how an answer is checked.

Bytes model: what must be read of [V] rows, of s_p and s_q bytes an entry, for B sequences of K drafts
    sampled           B V ((K+1) s_p + K s_q)
    sampled, lse      B V ((K+1) s_p + s_q)
    one-hot, greedy, gumbel   B V (K+1) s_p
    top-k, top-p, min-p   as sampled; finding what is kept needs more than one pass over a row, which is not counted
    sigmoid           V (s_p + s_q) for a sequence with a rejection, V s_p for the others
The pair of rows that the residual needs is read again, from cache, and is not counted. `Problem.bytes` counts all rows;
`Problem.needed_bytes` leaves out those behind a sequence's first rejection, which decide nothing.

How many drafts are accepted is part of the inputs. Without `acceptance`, even sequences are rejected at the last draft
and odd ones accept all, so stopping early saves one row of every other sequence and no more. With it, a draft that was
reached is accepted with that probability: n is at least i with probability acceptance ** i, and the batch holds the
quantiles of that law, in random order. A single sequence gets its median.

Numbers: for "sampled" a provider draws its own in the call that is timed, as a step of the loop does. For the other
kinds whether a draft is accepted depends on the numbers, so they are given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from timing import number_of_sets
from torch import Tensor

import torch_specops
from torch_specops.ops.uniforms import verification_uniforms
from torch_specops.testing import Case, compare

Inputs = dict[str, Tensor]
Result = tuple[Tensor, Tensor]
Provider = Callable[[Inputs], Result]

KINDS = ("sampled", "one-hot", "greedy", "gumbel", "sigmoid", "top-k", "top-p", "min-p")
# Kinds with an op of their own.
OPS = {"gumbel": "verify_gumbel", "sigmoid": "verify_sigmoid"}
FILTERS = {"top-k": ("top_k", 50), "top-p": ("top_p", 0.9), "min-p": ("min_p", 0.05)}
# The float64 reference walks over a row in Python: large batches are compared on so many rows, spread over the batch.
# A filtered row takes it seconds.
CHECKED_ROWS = 4
CHECKED_FILTERED_ROWS = 2


@dataclass(frozen=True)
class Problem:
    kind: str
    batch: int
    num_draft_tokens: int
    vocab: int
    dtype: str
    acceptance: float | None = None
    # The target's logits are normal numbers times this.
    scale: float = 3

    @property
    def has_draft_logits(self) -> bool:
        return self.kind in ("sampled", "sigmoid", *FILTERS)

    @property
    def num_accepted(self) -> list[int]:
        """Of every sequence, in the order of the quantiles."""
        batch, num_drafts = self.batch, self.num_draft_tokens
        if self.acceptance is None:
            return [num_drafts - 1 + b % 2 for b in range(batch)]
        reached = [self.acceptance ** (i + 1) for i in range(num_drafts)]
        return [sum(share > (b + 0.5) / batch for share in reached) for b in range(batch)]

    @property
    def acceptance_rate(self) -> float:
        """Accepted / verified drafts."""
        return sum(self.num_accepted) / (self.batch * self.num_draft_tokens)

    def bytes(self, with_lse: bool = False) -> int:
        """All rows, whatever is accepted."""
        if self.kind == "sigmoid":
            return self.needed_bytes()
        draft_rows = (1 if with_lse else self.num_draft_tokens) if self.has_draft_logits else 0
        return self.batch * (self.num_draft_tokens + 1 + draft_rows) * self._row_bytes

    def needed_bytes(self, with_lse: bool = False) -> int:
        """Rows up to the first rejection."""
        if self.kind == "sigmoid":
            return sum(1 + (n < self.num_draft_tokens) for n in self.num_accepted) * self._row_bytes
        rows = 0
        for n in self.num_accepted:
            rejected = n < self.num_draft_tokens
            rows += n + 1
            if self.has_draft_logits:
                rows += int(rejected) if with_lse else n + rejected
        return rows * self._row_bytes

    def read_bytes(self, with_lse: bool = False) -> int:
        """What `verify_exact` reads on CUDA: all rows, or of a large batch two of each side, and the others where both
        drafts were accepted."""
        from torch_specops.ops.cuda import launch
        from torch_specops.ops.cuda.exact import rest_rows

        num_rows = self.num_draft_tokens + 1
        summed_draft = self.has_draft_logits and not with_lse
        rows = num_rows + self.num_draft_tokens if summed_draft else num_rows
        logits = torch.empty(self.batch, num_rows, self.vocab, dtype=getattr(torch, self.dtype), device="meta")
        tiles = launch.num_tiles(logits, launch.tile_size(self.vocab, self.batch * rows))
        rest = rest_rows(self.batch * tiles, num_rows, rows)
        total = 0
        for n in self.num_accepted:
            total += rows - (rest if n < 2 else 0)
            # That of the rejection, which no sum was taken of.
            total += with_lse and n < self.num_draft_tokens
        return total * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return self.vocab * int(getattr(torch, self.dtype).itemsize)


def make_inputs(problem: Problem, device: torch.device, seed: int) -> Inputs:
    """Drafts that are accepted up to the first rejection of `Problem.num_accepted`, which is certain.

    For "sampled" it is certain whatever the uniform numbers, so also for a provider that draws its own: accepted drafts
    have p > q, and the refused one has no probability under p. For "gumbel" accepted drafts are those of the noise.
    """
    # Large batches are made where they are used: a CPU would take minutes.
    g = torch.Generator(device=device).manual_seed(seed)
    batch, num_drafts, vocab = problem.batch, problem.num_draft_tokens, problem.vocab
    dtype = getattr(torch, problem.dtype)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device=device)

    target_logits = (problem.scale * random(batch, num_drafts + 1, vocab)).to(dtype)
    draft_logits = (target_logits[:, :-1].float() + random(batch, num_drafts, vocab)).to(dtype)
    num_accepted = torch.tensor(problem.num_accepted, device=device)
    if problem.acceptance is not None:
        num_accepted = num_accepted[torch.randperm(batch, generator=g, device=device)]

    wanted, refused = target_logits[:, :-1].argmax(-1), target_logits[:, :-1].argmin(-1)
    if problem.has_draft_logits:
        if problem.kind in FILTERS:
            # The token of the highest p, made that of the highest q as well, is one that every filter keeps.
            draft_logits.scatter_(2, wanted.unsqueeze(-1), draft_logits.amax(-1, keepdim=True))
        above = target_logits[:, :-1].float().softmax(-1) - draft_logits.float().softmax(-1)
        refused = above.argmin(-1)
        wanted = wanted if problem.kind in FILTERS else above.argmax(-1)
    rejected = torch.arange(num_drafts, device=device) == num_accepted.unsqueeze(-1)
    b, i = rejected.nonzero(as_tuple=True)
    target_logits[b, i, refused[b, i]] = -1000
    seeds, positions = torch.randint(2**62, (2, batch), generator=g, device=device)
    if problem.kind == "gumbel":
        places = positions.unsqueeze(1) + torch.arange(num_drafts, device=device)
        rows = (target_logits[:, :-1].flatten(0, 1), seeds.repeat_interleave(num_drafts), places.flatten())
        wanted = torch_specops.sample_gumbel(*rows).view(batch, num_drafts)
    inputs = {
        "target_logits": target_logits,
        "draft_tokens": torch.where(rejected, refused, wanted),
        "draft_logits": draft_logits,
        "accept_uniforms": torch.where(rejected, 1 - 2**-24, 0.0),
        "sample_uniforms": torch.rand(batch, generator=g, device=device),
        # Which is an argument, as in the decoding loop: the kernels have another build without one.
        "temperature": torch.full((batch,), 0.0 if problem.kind == "greedy" else 1.0, device=device),
        "draft_lse": draft_logits.float().logsumexp(-1),
        **{name: torch.full((batch,), value, device=device) for name, value in FILTERS.values()},
        "num_accepted": num_accepted,
        "seeds": seeds,
        "positions": positions,
    }
    return with_own_numbers(inputs) if problem.kind == "sampled" else inputs


def with_own_numbers(inputs: Inputs) -> Inputs:
    """The same with the numbers that a step of the loop draws for a verification."""
    num_drafts = inputs["draft_tokens"].shape[1]
    accept, sample = verification_uniforms(inputs["seeds"], inputs["positions"], num_drafts)
    return inputs | {"accept_uniforms": accept, "sample_uniforms": sample}


def copies(inputs: Inputs, device: torch.device) -> list[Inputs]:
    """As many sets as leave the last cache cold. Their contents do not matter for the time, their addresses do."""
    count = number_of_sets(sum(value.nbytes for value in inputs.values()), device)
    return [inputs] + [{name: value.clone() for name, value in inputs.items()} for _ in range(count - 1)]


def determined(inputs: Inputs, residual: bool = False) -> Inputs:
    """The same with logits that leave nothing to a uniform number or a generator.

    Each p is one-hot at its maximum a, each accepted draft is a, and so is the next token; the rejected draft x is
    another token, which the draft alone is sure of. With `residual` the weights at the rejection are 1 for a and
    exp(-8) for b in p, 1 for a and exp(-9) for x in q: x is rejected, and b is the only token with p above q, though p
    all but never draws it. With filters, one-hot drafts and greedy sequences that leaves something to chance.
    """
    target, draft = (torch.full_like(inputs[name], -1000) for name in ("target_logits", "draft_logits"))
    vocab, num_drafts = target.shape[-1], draft.shape[1]
    first = inputs["target_logits"].argmax(-1)
    rejected = torch.arange(num_drafts, device=first.device) == inputs["num_accepted"].unsqueeze(-1)
    refused = (first[:, :-1] + 1) % vocab
    tokens = torch.where(rejected, refused, first[:, :-1])
    target.scatter_(2, first.unsqueeze(-1), 1000)
    draft.scatter_(2, tokens.unsqueeze(-1), 1000)
    if residual:
        b, i = rejected.nonzero(as_tuple=True)
        a, recovered = first[b, i], (first[b, i] + 2) % vocab
        target[b, i, a], target[b, i, recovered] = 0, -8
        draft[b, i, a], draft[b, i, tokens[b, i]] = 0, -9
    lse = draft.float().logsumexp(-1)
    return inputs | {"target_logits": target, "draft_logits": draft, "draft_tokens": tokens, "draft_lse": lse}


def op_arguments(kind: str, inputs: Inputs, with_lse: bool = False) -> dict[str, Any]:
    if kind == "gumbel":
        names = ("target_logits", "draft_tokens", "seeds", "positions", "temperature")
    else:
        names = ("target_logits", "draft_tokens", "draft_logits", "accept_uniforms", "sample_uniforms", "temperature")
    arguments: dict[str, Any] = {name: inputs[name] for name in names}
    if kind in ("one-hot", "greedy"):
        arguments["draft_logits"] = None
    if kind in FILTERS:
        name, _ = FILTERS[kind]
        arguments[name] = inputs[name]
    if with_lse:
        arguments["draft_lse"] = inputs["draft_lse"]
    return arguments


def checked_rows(batch: int, kind: str = "sampled") -> list[int]:
    """Some of the sequences, the first and the last among them; all of few."""
    most = CHECKED_FILTERED_ROWS if kind in FILTERS else CHECKED_ROWS
    if batch <= most:
        return list(range(batch))
    return [b * (batch - 1) // (most - 1) for b in range(most)]


def check_answer(
    name: str, problem: Problem, inputs: Inputs, answer: Result, with_lse: bool = False, op: str = "verify_exact"
) -> None:
    """Raise RuntimeError unless the checked sequences are those of the float64 reference."""
    rows = checked_rows(problem.batch, problem.kind)
    arguments = {
        key: value[rows] if isinstance(value, Tensor) else value
        for key, value in op_arguments(problem.kind, inputs, with_lse).items()
    }
    comparison = compare(Case(name, op, arguments), tuple(part[rows] for part in answer))
    if comparison.wrong:
        raise RuntimeError(f"{problem}: {name} is wrong in rows {[rows[r] for r in comparison.wrong]}")
