"""What is decoded, and what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ...drafts import DraftSource
from ...sampling import SamplingParams
from ..greedy import GreedyDifference

if TYPE_CHECKING:
    from ...hf import TransformersModel

__all__ = ["Measurement", "Models", "Workload"]


@dataclass(frozen=True)
class Models:
    """A target, a draft, and how transformers gets the same draft.

    Args:
        target: the adapter of a transformers model.
        make_draft: the draft; each caller gets a cache of its own.
        assistant: the transformers model that drafts; None = the draft is not a model, or is the target itself.
        assistance: from K to the fields of transformers' generation config that ask for this draft; None = transformers
            has no such draft.
    """

    target: TransformersModel
    make_draft: Callable[[], DraftSource | nn.Module]
    assistant: nn.Module | None = None
    assistance: Callable[[int], dict[str, Any]] | None = None


@dataclass(frozen=True)
class Workload:
    """What is decoded.

    Args:
        prompts: [P] int64 tokens each; row b of a batch is prompt b, starting over when there are fewer.
        max_new_tokens: tokens that every row gets, >= 1.
        num_draft_tokens: K >= 1.
        sampling: temperature, top-k, top-p and min-p, for everybody.
        seed: of the first round; the next rounds have the next seeds.
        verify: how this package verifies: "exact" or "block".
        schedule: how this package chooses the number of drafts: "constant", "heuristic" or "optimal".
    """

    prompts: Sequence[Tensor]
    max_new_tokens: int = 64
    num_draft_tokens: int = 5
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    seed: int = 0
    verify: str = "exact"
    schedule: str = "constant"

    @property
    def greedy(self) -> bool:
        return bool(self.sampling.temperature == 0)

    def rows(self, batch_size: int) -> list[Tensor]:
        return [self.prompts[row % len(self.prompts)] for row in range(batch_size)]


@dataclass
class Measurement:
    """One provider at one batch size.

    Args:
        provider, batch_size: what was measured.
        compiled: whether the provider's steps ran compiled.
        new_tokens: decoded per run, all rows together.
        seconds: of each round, reading the prompts included.
        num_steps: forwards of the target after the prompts were read; for transformers, all forwards of the target.
        mean_acceptance_length: tokens per row and step, the next token included.
        acceptance_rate: accepted / verified drafts; None = no drafts, or transformers, which does not report it.
        outside_seconds_per_step: time outside the forwards of the models, per step; None for a compiled step, which
            cannot be taken apart.
        compile_seconds: spent compiling in the warm-up.
        peak_memory_bytes: on CUDA, of the tensors in the first run without those that were there before (the models).
        greedy: None = sampled, so not compared. "identical" to all others or to plain greedy decoding; "near ties" =
            different within float32 rounding; "different" beyond it; "rounding" = different in 16 bits, where no bound
            is known.
        differences: from plain greedy decoding, in order.
    """

    provider: str
    batch_size: int
    compiled: bool
    new_tokens: int
    seconds: list[float] = field(default_factory=list)
    num_steps: int | None = None
    mean_acceptance_length: float | None = None
    acceptance_rate: float | None = None
    outside_seconds_per_step: float | None = None
    compile_seconds: float = 0.0
    peak_memory_bytes: int | None = None
    greedy: str | None = None
    differences: list[GreedyDifference] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens of all rows / the median of the rounds; None before the first round."""
        return self.new_tokens / statistics.median(self.seconds) if self.seconds else None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"tokens_per_second": self.tokens_per_second}
