"""The decoding loop over the tiny models: drafts of every kind, and what greedy decoding has to return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tiny_dflash import trained_drafter
from tiny_eagle3 import trained_head
from tiny_models import PROMPTS, VOCAB, encoder_inputs, greedy_rows, padded, perturbed, shared_tiny
from torch import Tensor, nn

from torch_specops import SamplingParams, SpeculativeDecoder
from torch_specops.decode import GenerationOutput, Step
from torch_specops.decode.output import RecordReader
from torch_specops.drafts import (
    DFlash,
    Draft,
    DraftSource,
    Eagle3,
    EarlyExit,
    LanguageModel,
    LookupElse,
    NGram,
    PromptLookup,
)
from torch_specops.drafts.hierarchical import HierarchicalDraft
from torch_specops.drafts.token_map import TokenMap
from torch_specops.sampling import SamplingTensors
from torch_specops.schedules import Auto, Constant, NextStep, PastStep, Schedule

GREEDY = SamplingParams(temperature=0.0)
LENGTH = 20

AnyDraft = DraftSource | LanguageModel | nn.Module | None


def expected_rows(length: int = LENGTH, family: str = "llama") -> list[list[int]]:
    return [list(row) for row in greedy_rows(family, length)]


def expected_texts(family: str) -> list[Tensor]:
    rows = expected_rows(family=family)
    return [torch.tensor([*prompt, *row]) for prompt, row in zip(PROMPTS, rows, strict=True)]


def bigrams(family: str, probabilities: bool) -> NGram:
    """Of the expected text, so that the table guesses right often, but not always."""
    return NGram.from_tokens(expected_texts(family), vocab_size=VOCAB, order=2, probabilities=probabilities)


def without_some_tokens(family: str) -> TokenMap:
    """The target as its own draft, which does not know every third token."""
    twins = torch.arange(VOCAB)
    twins[::3] = -1
    return TokenMap(shared_tiny(family), twins, unknown=5)


# Functions of the family.
DRAFTS: dict[str, Callable[[str], AnyDraft]] = {
    "nothing": lambda family: None,
    "prompt lookup": lambda family: PromptLookup(min_ngram=1),
    "n-gram": lambda family: bigrams(family, probabilities=False),
    "n-gram with counts": lambda family: bigrams(family, probabilities=True),
    "itself": shared_tiny,
    "perturbed": lambda family: perturbed(shared_tiny(family)),
    "stranger": lambda family: shared_tiny(family, seed=3),
    "early exit": lambda family: EarlyExit(1),
    "hierarchical": lambda family: HierarchicalDraft(perturbed(shared_tiny(family))),
    "over a model": lambda family: HierarchicalDraft(perturbed(shared_tiny(family)), shared_tiny(family, seed=3)),
    "lookup else": lambda family: LookupElse(perturbed(shared_tiny(family)), min_match=1, num_other_tokens=2),
    "token map": without_some_tokens,
    "eagle 3": lambda family: Eagle3(trained_head(family)),
    "dflash": lambda family: DFlash(trained_drafter(family)),
}


def decode(
    draft: str | AnyDraft,
    num_draft_tokens: int,
    *,
    family: str = "llama",
    target: nn.Module | None = None,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    side: str = "left",
    sampling: SamplingParams = GREEDY,
    schedule: str | Schedule | None = "constant",
    compile: bool | str = "auto",
    **arguments: Any,
) -> GenerationOutput:
    """The output of the loop; without another `target`, that of the family's model."""
    decoder = SpeculativeDecoder(
        shared_tiny(family) if target is None else target,
        DRAFTS[draft](family) if isinstance(draft, str) else draft,
        num_draft_tokens=max(num_draft_tokens, 1),
        schedule=Constant(0) if num_draft_tokens == 0 else schedule,
        sampling=sampling,
        compile=compile,
    )
    input_ids, attention_mask = padded(prompts, side)
    defaults = {"max_new_tokens": LENGTH, "inputs": encoder_inputs(family)}
    return decoder.generate(input_ids, attention_mask=attention_mask, **(defaults | arguments))


def steps_of(draft: str | AnyDraft, num_draft_tokens: int, **arguments: Any) -> tuple[list[Step], GenerationOutput]:
    steps: list[Step] = []
    output = decode(draft, num_draft_tokens, streamer=steps.append, **arguments)
    return steps, output


def new_tokens(output: GenerationOutput) -> list[list[int]]:
    return [output.new_tokens(row) for row in range(len(output.lengths))]


def streamed(steps: Sequence[Step], num_rows: int = 3) -> list[list[int]]:
    return [[token for step in steps for token in step.tokens[row]] for row in range(num_rows)]


def limited(rows: Sequence[Sequence[int]], limits: Sequence[int]) -> list[list[int]]:
    return [list(row[:limit]) for row, limit in zip(rows, limits, strict=True)]


def cut(rows: Sequence[Sequence[int]], eos: Sequence[Sequence[int]]) -> list[list[int]]:
    """Each row up to the first of its eos tokens."""
    ends = [[row.index(token) for token in own if token in row] for row, own in zip(rows, eos, strict=True)]
    return [list(row[: min(end) + 1] if end else row) for row, end in zip(rows, ends, strict=True)]


class Holes(DraftSource):
    """Proposes the right tokens; but where `is_hole(calls before, B, K)` [B, K] is true, numbers below 0."""

    def __init__(self, family: str, is_hole: Callable[[int, int, int], Tensor]) -> None:
        self.texts, _ = padded([text.tolist() for text in expected_texts(family)], "right")
        self.is_hole = is_hole
        self.num_calls = 0

    def propose(
        self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, sampling: SamplingTensors, seeds: Tensor
    ) -> Draft:
        at = lengths.unsqueeze(1) + torch.arange(num_draft_tokens)
        drafts = self.texts.gather(1, at.clamp(max=self.texts.shape[1] - 1))
        holes = self.is_hole(self.num_calls, len(lengths), num_draft_tokens)
        self.num_calls += 1
        return Draft(torch.where(holes, torch.tensor([[-1], [-2], [-1000]]), drafts))


class TokenStreamer:
    """Like transformers' streamers: gets the prompt, then int64 tokens, then the end."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def put(self, value: Tensor) -> None:
        assert value.dtype == torch.int64
        self.heard.append(value.flatten().tolist())

    def end(self) -> None:
        self.heard.append("end")


class Late(RecordReader):
    """Gives records one step late, as on CUDA, where the next step is queued already."""

    def pop(self, early: bool = False) -> tuple[Tensor, Any] | None:
        return None if len(self._queue) < (1 if early else 2) else super().pop()


class Recording:
    """Before a draft source among the bases of a class: keeps the texts and drafts of every step."""

    def propose(self, tokens: Tensor, lengths: Tensor, *rest: Any) -> Draft:
        draft: Draft = super().propose(tokens, lengths, *rest)  # type: ignore[misc]
        self.seen.append((tokens.clone(), lengths.clone(), draft))
        return draft

    def start(self, *arguments: Any) -> None:
        super().start(*arguments)  # type: ignore[misc]
        self.seen: list[tuple[Tensor, Tensor, Draft]] = []


class Given(Schedule):
    """These numbers of drafts, again and again."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.buckets = tuple(sorted(set(counts)))
        self._counts = counts

    def plan(self, step: NextStep) -> list[int]:
        return step.at_most(self._counts[self._place])

    def learn(self, step: PastStep) -> None:
        self._place = (self._place + 1) % len(self._counts)

    def reset(self) -> None:
        self._place = 0


class EachItsOwn(Given):
    """These numbers of drafts, again and again, and each row begins with another of them."""

    def plan(self, step: NextStep) -> list[int]:
        limits = step.at_most(max(self._counts))
        return [min(self._counts[(self._place + n) % len(self._counts)], most) for n, most in enumerate(limits)]


class Pauses(Given):
    """Three drafts in every third step, and none in the others."""

    def __init__(self) -> None:
        super().__init__([0, 0, 3])


class ByTurns(Auto):
    """Chooses the source of each row's drafts, in turns of seven steps."""

    num_steps = 0

    def __init__(self, num_draft_tokens: int) -> None:
        super().__init__(num_draft_tokens)
        self.reports: list[PastStep] = []

    def learn(self, step: PastStep) -> None:
        self.reports.append(step)

    def plan_sources(self, step: NextStep) -> tuple[list[int], list[bool]]:
        if step.offered is None or step.num_others is None:
            # Nothing is looked up before the last token.
            return [0] * len(step.texts), [False] * len(step.texts)
        self.num_steps += 1
        turn, num_rows = self.num_steps % 7, len(step.texts)
        # Lookups alone, no drafts, the other source alone, and rows with either.
        is_looked_up = [turn < 3 or (turn > 5 and row % 2 == 0) for row in range(num_rows)]
        counts = [
            0 if turn in (2, 3) else min(room, self.buckets[-1], offered if first else step.num_others)
            for room, offered, first in zip(step.rooms, step.offered, is_looked_up, strict=True)
        ]
        return counts, is_looked_up
