"""Step after step: whether they are compiled, how many drafts each has, and when the host looks at its record."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from torch import Tensor

from .. import schedules
from ..drafts import DraftSource, LanguageModel
from ..schedules import Schedule
from .output import Progress, RecordReader, Step
from .runner import StepRunner, resolve_compile
from .verify import Verifier

__all__ = ["Loop"]

# The capacity of compiled steps is rounded up to a multiple of this, so that prompts of similar length share a graph.
CAPACITY_MULTIPLE = 64


class Loop:
    """Runs the steps of one batch after another.

    Args:
        target, draft, verify, one_graph: as `StepRunner` takes them.
        compile: as `SpeculativeDecoder` takes it.
        schedule: chooses the number of drafts.
        measures_cost: replace the schedule by an `Optimal` one for what a draft costs, which is measured before the
            first step.

    Attributes:
        target, draft: as given.
        runner: runs a step.
        schedule: the one in use.
        compile_reason: whether steps are compiled, and why.
        cost_is_measured: whether nothing is left to measure.
    """

    def __init__(
        self,
        target: LanguageModel,
        draft: DraftSource | None,
        verify: Verifier,
        one_graph: bool,
        compile: bool | str,
        schedule: Schedule,
        measures_cost: bool,
    ) -> None:
        self.runner = StepRunner(target, draft, verify, one_graph)
        self.schedule = schedule
        self.cost_is_measured = not measures_cost
        self.target = target
        self.draft = draft
        self._compile = compile
        self._num_eager_steps = 0
        self.choose_compile(0)

    @property
    def compiled(self) -> bool:
        return self.runner.compiled

    def choose_compile(self, num_new_tokens: float) -> None:
        """Decide whether to compile; what is compiled stays so.

        Args:
            num_new_tokens: of the longest row of the batch to come.
        """
        if self.compiled:
            return
        certain = num_new_tokens / (max(self.schedule.buckets) + 1)
        steps = self._num_eager_steps + certain
        self.runner.compiled, self.compile_reason = resolve_compile(self._compile, self.target, self.draft, steps)

    def capacity(self, longest: int) -> int:
        """Slots for the longest sequence, and for the drafts of a step beyond it."""
        slots = longest + max(self.schedule.buckets) + 1
        return -(-slots // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE if self.compiled else slots

    def start_draft(self, capacity: int, inputs: Mapping[str, Tensor] | None = None) -> None:
        """Let the draft read the batch that the target has begun; what was captured for others is dropped.

        Args:
            capacity, inputs: as in `DraftSource.start`.
        """
        state = self.runner.state
        if self.draft is not None:
            self.draft.compile(self.runner.draft_shape)
            self.draft.expect(max(self.schedule.buckets))
            self.draft.start(state.tokens, state.lengths, capacity, inputs)
        self.runner.keep_valid_graphs()
        self.schedule.reset()

    def steps(self, progress: Progress) -> Iterator[Step]:
        """The steps of the batch that the runner has begun, without an end. Between two of them, rows may be refilled.

        Args:
            progress: learns from each of them.
        """
        reader = RecordReader(self.runner.state.tokens.device)
        if not self.cost_is_measured:
            self.schedule = schedules.Optimal(self._measured_cost_ratio(progress), buckets=self.schedule.buckets)
            self.cost_is_measured = True
        wanted = self.schedule.first()
        while True:
            num_draft_tokens = self._prepare(wanted, progress)
            # Excludes compiling, and the time that the caller spends on a step.
            before = time.perf_counter()
            trim = self.schedule.trim_refilled if progress.num_refills else self.schedule.trim
            record = self.runner.run(num_draft_tokens, trim)
            reader.push(record, list(progress.num_refills))
            read = reader.pop()
            if read is None:
                continue
            seconds = time.perf_counter() - before
            step, num_proposed, num_accepted = progress.add(progress.without_earlier(*read), seconds)
            self._num_eager_steps += not self.compiled
            for row, length in progress.cuts().items():
                self.runner.end_row(row, length)
            wanted = self.schedule.next(num_proposed, num_accepted)
            yield step

    def _prepare(self, num_draft_tokens: int, progress: Progress) -> int:
        """Get ready for a step with K drafts, or with fewer if no row has room for K; returns how many."""
        # The last token of a row needs no draft.
        num_draft_tokens = self.runner.fewest(num_draft_tokens, max(progress.room - 1, 0))
        progress.stats.compile_seconds += self.runner.prepare(num_draft_tokens)
        return num_draft_tokens

    def _measured_cost_ratio(self, progress: Progress) -> float:
        """The time of one more draft / the time of a step without drafts. It has two parts: the draft's own forward,
        and one more token for the target to read."""
        most = self.schedule.buckets[-1]
        seconds = []
        for num_draft_tokens in (0, most):
            progress.stats.compile_seconds += self.runner.prepare(num_draft_tokens)
            seconds.append(self.runner.seconds_of(num_draft_tokens))
        plain, drafting = seconds
        return max(drafting - plain, 0.0) / (most * plain)
