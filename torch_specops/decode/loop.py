"""Runs step after step: decides whether to compile, how many drafts a step has, and when the host reads its record."""

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
        measures_cost: measure the cost of a draft before the first step, and replace the schedule by the `Optimal` one
            for that cost.

    Attributes:
        target, draft: as given.
        runner: runs a step.
        schedule: the one in use.
        compile_reason: whether steps are compiled, and why.
        cost_is_measured: False until a cost that is to be measured has been.
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
        """Decide whether to compile. Once steps are compiled, they stay compiled.

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
        """Let the draft read the batch that the target has begun, and drop CUDA graphs that do not fit it.

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
        """An endless iterator over the steps of the runner's batch. Rows may be refilled between two steps.

        Args:
            progress: is updated by each step.
        """
        reader = RecordReader(self.runner.state.tokens.device)
        if not self.cost_is_measured:
            self.schedule = schedules.Optimal(self._measured_cost_ratio(progress), buckets=self.schedule.buckets)
            self.cost_is_measured = True
        wanted = self.schedule.first()
        while True:
            # The last token of a row needs no draft, so the rows may have room for fewer than are wanted.
            num_draft_tokens = self.runner.smallest_sufficient(wanted, max(progress.room - 1, 0))
            progress.stats.compile_seconds += self.runner.prepare(num_draft_tokens)
            # The time of a step excludes compiling, and what the caller does between two steps.
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
