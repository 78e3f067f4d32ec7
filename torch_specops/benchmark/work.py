"""What is measured, and what comes of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..drafts import DraftSource
from ..sampling import SamplingParams

if TYPE_CHECKING:
    from ..hf import TransformersModel

__all__ = ["Difference", "Measurement", "Pair", "Workload"]


@dataclass(frozen=True)
class Pair:
    """A target, a draft, and what gives transformers the same draft.

    Args:
        target: the adapter of a transformers model.
        make_draft: builds the draft with a cache of its own.
        assistant: the transformers model that drafts; None = the draft is no model, or the target itself.
        assistance: from K to the fields of transformers' generation config that ask for this draft; None = transformers
            has no such draft.
    """

    target: TransformersModel
    make_draft: Callable[[], DraftSource]
    assistant: nn.Module | None = None
    assistance: Callable[[int], dict[str, Any]] | None = None


@dataclass(frozen=True)
class Workload:
    """What is decoded.

    Args:
        prompts: tokens [P] int64 each; row b of a batch is prompt b, from the first again when there are fewer.
        max_new_tokens: tokens that every row gets, >= 1.
        num_draft_tokens: K >= 1.
        temperature: 0 = greedy.
        seed: of the first round; each round has the next one.
        top_k, top_p, min_p: what of the law is left, as in `SamplingParams`.
        verify: how this package verifies: "exact", "block" or "sigmoid".
        schedule: how this package chooses the drafts of a step, at most num_draft_tokens unless it is "heuristic".
    """

    prompts: Sequence[Tensor]
    max_new_tokens: int = 64
    num_draft_tokens: int = 5
    temperature: float = 0.0
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    verify: str = "exact"
    schedule: str = "constant"

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(self.temperature, self.top_k, self.top_p, self.min_p)


@dataclass(frozen=True)
class Difference:
    """A token of a greedy output that plain greedy decoding would not have given there (`GreedyDifference`)."""

    row: int
    index: int
    token: int
    expected_token: int
    logit_gap: float
    rounding_bound: float


@dataclass
class Measurement:
    """One provider at one batch size.

    Args:
        provider, batch_size: what was measured.
        compiled: whether the provider's steps ran compiled.
        new_tokens: decoded per run, all rows together.
        seconds: of each round, reading the prompts included.
        num_steps: forwards of the target after the prompts were read; for transformers, all of its forwards.
        mean_acceptance_length: tokens per row and step, the next token included.
        acceptance_rate: accepted / verified drafts; transformers does not say.
        outside_seconds_per_step: time outside the forwards of both models, per step; None where it was not measured: a
            compiled step is one piece.
        compile_seconds: what compiling took in the warm-up.
        peak_memory_bytes: of the first run. On a CPU what the process held; on CUDA the device's tensors, without those
            that were there before, the models among them.
        greedy: "identical" to all others or to plain greedy decoding, "near ties" within float32 rounding, "different"
            beyond it, "rounding" = different in 16 bits, where nothing follows; None = sampled, not compared.
        differences: from plain greedy decoding, in order.
        note: why there is nothing.
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
    differences: list[Difference] = field(default_factory=list)
    note: str = ""

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens of all rows / the median of the rounds; None before the first one."""
        return self.new_tokens / statistics.median(self.seconds) if self.seconds else None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"tokens_per_second": self.tokens_per_second}
