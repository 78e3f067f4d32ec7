"""What is decoded, and what was measured."""

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
    # Each caller gets a cache of its own.
    make_draft: Callable[[], DraftSource | nn.Module]
    # The transformers model that drafts; None = the draft is not a model, or is the target itself.
    assistant: nn.Module | None = None
    # From K to the fields of transformers' generation config that ask for this draft; None = it has no such draft.
    assistance: Callable[[int], dict[str, Any]] | None = None


@dataclass(frozen=True)
class Workload:
    """What everybody decodes; `verify` and `schedule` are for this package, and the seed counts up by rounds."""

    prompts: Sequence[Tensor]  # [P] int64 each
    max_new_tokens: int  # of every row
    num_draft_tokens: int
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    seed: int = 0
    verify: str = "exact"
    schedule: str = "constant"

    @property
    def greedy(self) -> bool:
        return bool(self.sampling.temperature == 0)

    def rows(self, batch_size: int) -> list[Tensor]:
        """Row b of a batch is prompt b, starting over when there are fewer."""
        return [self.prompts[row % len(self.prompts)] for row in range(batch_size)]


@dataclass
class Measurement:
    """One provider at one batch size, as `bench --json` writes it."""

    provider: str
    batch_size: int
    compiled: bool
    # Of a run, all rows together.
    new_tokens: int
    # Of each round, reading the prompts included.
    seconds: list[float] = field(default_factory=list)
    # Forwards of the target after the prompts were read; for transformers, all forwards of the target.
    num_steps: int | None = None
    mean_acceptance_length: float | None = None
    # None = no drafts, or transformers, which does not report it.
    acceptance_rate: float | None = None
    # Outside the forwards of the models; None for a compiled step, which cannot be taken apart.
    outside_seconds_per_step: float | None = None
    compile_seconds: float = 0.0
    # On CUDA, of the tensors in the first run without those that were there before (the models).
    peak_memory_bytes: int | None = None
    # "identical", "near ties", "rounding" or "different", as the help of `bench` explains; None = sampled.
    greedy: str | None = None
    # From plain greedy decoding, in order.
    differences: list[GreedyDifference] = field(default_factory=list)
