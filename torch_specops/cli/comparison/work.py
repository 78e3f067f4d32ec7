"""The texts to decode, and the measurements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ...drafts import DraftSource
from ...sampling import SamplingParams
from ..greedy import GreedyDifference

if TYPE_CHECKING:
    from ...hf import TransformersModel


@dataclass(frozen=True)
class Models:
    """A target, a draft, and how transformers gets the same draft."""

    target: TransformersModel
    # Each call makes a draft with its own cache.
    make_draft: Callable[[], DraftSource | nn.Module]
    # The transformers model that drafts; None = the draft is not a model, or is the target itself.
    assistant: nn.Module | None = None
    # From K to the fields of transformers' generation config for this draft; None = transformers has no such draft.
    assistance: Callable[[int], dict[str, Any]] | None = None


@dataclass(frozen=True)
class Case:
    """Prompts of one category, in batches of one size, at one temperature."""

    batches: Sequence[Sequence[Tensor]]  # batch_size prompts [P] int64 in each
    sampling: SamplingParams
    category: str = ""

    @property
    def batch_size(self) -> int:
        return len(self.batches[0])

    @property
    def temperature(self) -> float:
        return float(self.sampling.temperature)  # type: ignore[arg-type]


def batches_of(prompts: Sequence[Tensor], batch_size: int) -> list[list[Tensor]]:
    """All prompts in their order. The last batch is filled up with the first prompts."""
    if batch_size < 1:
        raise ValueError(f"batch_sizes: expected a number >= 1, got {batch_size}")
    return [
        [prompts[(first + row) % len(prompts)] for row in range(batch_size)]
        for first in range(0, len(prompts), batch_size)
    ]


@dataclass(frozen=True)
class Workload:
    """The work of all providers; `verify` and `schedule` are for this package, the seed is for the first round."""

    cases: Sequence[Case]
    max_new_tokens: int  # of every row
    num_draft_tokens: int
    seed: int = 0
    verify: str = "exact"
    schedule: str = "constant"


@dataclass
class Run:
    """One provider on one batch."""

    new_tokens: int  # of all rows together
    # Seconds of each round, including reading the prompts, without compiling.
    seconds: list[float] = field(default_factory=list)
    # Forwards of the target after the prompts were read; for transformers, all forwards of the target.
    num_steps: int | None = None
    # The same, summed over the rows that took part.
    num_row_steps: int | None = None
    # Drafts at the first position of a step, the second, ...; empty = no drafts, or transformers, which does not say.
    proposed_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    # Outside the models' forwards; None for compiled steps, in which they cannot be timed.
    outside_seconds: float | None = None
    compile_seconds: float = 0.0
    # On CUDA, of the tensors of the first run, without those that existed before (the models).
    peak_memory_bytes: int | None = None
    # "identical", "near ties", "rounding" or "different", as the help of `bench` explains; None = sampled.
    greedy: str | None = None
    # Differences from plain greedy decoding, in order.
    differences: list[GreedyDifference] = field(default_factory=list)


@dataclass(frozen=True)
class Measurement:
    """One provider on the batches of a case."""

    provider: str
    compiled: bool
    category: str
    temperature: float
    batch_size: int
    runs: list[Run] = field(default_factory=list)
