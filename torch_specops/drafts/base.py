"""The interface of all drafts: `DraftSource`, which proposes tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..models.base import LanguageModel, Part
from ..ops.tracing import is_eager_cpu
from ..sampling import SamplingTensors


@dataclass(frozen=True)
class Draft:
    """K proposed tokens per sequence, and the distribution they were drawn from.

    Args:
        tokens: [B, K] int64 or int32; -1 is padding, and drafts after the first padding are not verified. Whether a
            sampled draft j is padding may depend on the sequence, on the drafts before it and on its distribution q_j,
            but never on the token drawn from q_j: that would change the output's distribution.
        logits: [B, K, V], the logits that the tokens were sampled from, after processors, before temperature and
            filters; None = the draft is deterministic (q is one-hot), or shares the target's noise.
        lse: [B, K] float32, the logsumexp that `sample` returned with each token; None where `logits` is None.
        matches: [B] int64, for looked-up drafts: the length of each sequence's match, in tokens; None = not known.
            `Auto` learns from it.
    """

    tokens: Tensor
    logits: Tensor | None = None
    lse: Tensor | None = None
    matches: Tensor | None = None


def stacked(drawn: Sequence[Sequence[Tensor | None]]) -> Draft:
    """Stack K results of `SamplingTensors.draw` into a `Draft`."""
    parts = zip(*drawn, strict=True)
    return Draft(*(None if part[0] is None else torch.stack(part, 1) for part in parts))  # type: ignore[arg-type]


class DraftSource(Part, ABC):
    """A source of draft tokens. To write your own, derive from this class and define `propose`.

    In every method, `tokens` [B, W] int64 holds the sequences from index 0 on, and `lengths` [B] int64, 1..W, says
    where they end; ignore entries at or after a row's length. All methods but `propose` run eagerly.

    `propose` becomes part of a compiled step: it must be traceable by torch.compile and must not wait for the device.
    The loop checks what your `propose` returns, and passes it a copy of the tokens. Writing into this copy, or
    proposing a token outside the vocabulary, raises in an eager step on a CPU and has no effect elsewhere. `propose`
    and `catch_up` may run in inference mode: do not create tensors there that a later call writes. The other methods
    run outside inference mode.

    Attributes:
        deterministic: True = proposals depend on the sequence alone, and `Draft.logits` is None.
        looks_up: True = the source is deterministic and takes a small part of a step's time. An eager step on a CPU
            then asks for K drafts, and the schedule chooses how many of the drafts found are verified.
        vocab_size: the number of tokens that the source can propose; None = any of the target's.
        device: where its tensors live; None = wherever the tokens are.
        max_length: the longest sequence it can read; None = no known limit. A longer row gets no more drafts: every
            method but `on_finished` then gets 1 as its length.
        default_draft_tokens: K if the caller gives none; None = 5.
        max_draft_tokens: the largest K; None = no limit.
        compiles_itself: True = `propose` compiles its own pieces, for the shapes that `compile` names; False = a
            compiled loop compiles `propose` as a whole.
        feature_layers: the target's layers, counted from 0, whose inputs the source reads from `FeatureModel.features`;
            the number of layers stands for the input of the head, after the last norm. () = none.
        is_checked: True = the loop checks proposals. Set per class: True if `propose` is defined outside this package.

    A source may also define members of `Part`, such as `inside` for the models that it uses.
    """

    deterministic: bool = True
    looks_up: bool = False
    vocab_size: int | None = None
    device: torch.device | None = None
    max_length: int | None = None
    default_draft_tokens: int | None = None
    max_draft_tokens: int | None = None
    compiles_itself: bool = False
    feature_layers: Sequence[int] = ()
    is_checked: bool = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.is_checked = not cls.propose.__module__.startswith("torch_specops.")

    def bind(self, target: LanguageModel) -> None:
        """Called when the source becomes the draft of a target, and before every `start`, because another decoder may
        have bound it in between."""

    def expect(self, num_draft_tokens: int) -> None:
        """Called before `start` with the most drafts that a step of the batch may have."""

    def start(self, tokens: Tensor, lengths: Tensor, capacity: int, inputs: Mapping[str, Tensor] | None = None) -> None:
        """Read the prompts, before the first step of a batch. May wait for the device.

        Args:
            capacity: the most tokens that a sequence may ever have, drafts included.
            inputs: the target's inputs besides the tokens, by name.
        """

    def compile(self, shape: Hashable | None) -> None:
        """Called before `start` if `compiles_itself` is True. `shape` is equal for batches that can use the same
        compiled graphs; None = the batch is decoded eagerly."""

    def catch_up(self, tokens: Tensor, lengths: Tensor, num_steps: int) -> None:
        """Called before `propose` if the last `num_steps` steps had no drafts: each of them gave every unfinished row
        one token. Must not wait for the device."""

    def restart(self, tokens: Tensor, lengths: Tensor, rows: Tensor) -> None:
        """Forget `rows` [A] int64 and read their new prompts. Called between two steps of a session, also for the first
        prompts: `start` then gets rows of one dummy token. May wait for the device.

        A source that overrides `start` must also override `restart` to work in sessions and `generate_many`.
        """

    def replace_inputs(self, row: int, inputs: Mapping[str, Tensor]) -> None:
        """Called before `restart` if the target has inputs besides the tokens. `inputs` are the new ones of this row,
        as in `start` with a batch of one."""

    @property
    def can_restart(self) -> bool:
        """True = rows may get new prompts: the source overrides `restart`, or does not override `start`."""
        kind = type(self)
        return kind.start is DraftSource.start or kind.restart is not DraftSource.restart

    def on_finished(self, tokens: Tensor, lengths: Tensor) -> None:
        """Called with finished sequences, emitted tokens included; not called if the caller stops early."""

    @abstractmethod
    def propose(
        self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, sampling: SamplingTensors, seeds: Tensor
    ) -> Draft:
        """Propose tokens to follow each sequence.

        Args:
            num_draft_tokens: K >= 1.
            sampling: the target's temperature, top-k, top-p and min-p. A source that samples must use all of them, as
                `sample(logits, draws, sampling.temperature, **sampling.filters)` does; otherwise the verified q is not
                the q that was sampled. If the target has processors, `sampling.process(logits, text, lengths)` applies
                them, where `text` includes the drafts so far; without them, fewer drafts are accepted.
            seeds: [B] int64; a source that samples takes `uniforms(seeds, lengths, K, "propose")` and no other stream.
                If `sampling.coupled`, the output does not depend on the drafts, and `Draft.logits` are not read.
                Acceptance is then highest for a source that draws draft i with
                `sample_gumbel(logits, seeds, lengths + i, ..)`.
        """


def readable_lengths(source: DraftSource, tokens: Tensor, lengths: Tensor) -> Tensor:
    """The lengths [B] that a source gets: 1 for sequences that are longer than it can read."""
    limit = _limit_within(source, tokens)
    return lengths if limit is None else torch.where(lengths > limit, 1, lengths)


def _limit_within(source: DraftSource, tokens: Tensor) -> int | None:
    """The source's `max_length` if tokens [B, W] have room for more, otherwise None."""
    limit = source.max_length
    return None if limit is None or tokens.shape[1] <= limit else limit


def proposal_of(
    source: DraftSource | None,
    tokens: Tensor,
    lengths: Tensor,
    num_draft_tokens: int,
    sampling: SamplingTensors,
    seeds: Tensor,
    vocab_size: int,
) -> Draft:
    """Ask a source for drafts. Drafts beyond its `max_length` become padding, which depends on the sequence's length
    alone."""
    if source is None or num_draft_tokens == 0:
        return Draft(tokens[:, :0])
    arguments = tokens, readable_lengths(source, tokens, lengths), num_draft_tokens, sampling, seeds
    draft = _checked_proposal(source, vocab_size, *arguments) if source.is_checked else source.propose(*arguments)
    limit = _limit_within(source, tokens)
    if limit is None:
        return draft
    num_read = lengths.unsqueeze(1) + torch.arange(draft.tokens.shape[1], device=lengths.device)
    return replace(draft, tokens=torch.where(num_read <= limit, draft.tokens, -1))


def _checked_proposal(
    source: DraftSource, vocab_size: int, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, *others: Any
) -> Draft:
    """Call a user's `propose` and check the result, because an error would otherwise surface far from its cause, or as
    wrong output. Eager steps on a CPU also check that `tokens` and `lengths` did not change."""
    text, ends, name = tokens.clone(), lengths.clone(), f"{type(source).__name__}.propose"
    draft = source.propose(text, ends, num_draft_tokens, *others)
    if not isinstance(draft, Draft):
        raise TypeError(f"draft: expected a Draft from {name}, got {type(draft)}")
    if not isinstance(draft.tokens, Tensor) or draft.tokens.dtype not in (torch.int64, torch.int32):
        found = getattr(draft.tokens, "dtype", type(draft.tokens))
        raise TypeError(f"draft: expected int64 or int32 tokens [B, K] from {name}, got {found}")
    shape, most = list(draft.tokens.shape), [len(tokens), num_draft_tokens]
    if len(shape) != 2 or shape[0] != most[0] or shape[1] > most[1]:
        raise ValueError(f"draft: expected tokens {most} or fewer from {name}, got shape {shape}")
    for part, value, expected in (
        ("logits", draft.logits, [*shape, vocab_size]),
        ("lse", draft.lse, shape),
        ("matches", draft.matches, shape[:1]),
    ):
        if value is not None and list(getattr(value, "shape", ())) != expected:
            found = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value)
            raise ValueError(f"draft: expected {part} {expected} from {name}, got {found}")
    if draft.matches is not None and draft.matches.dtype != torch.int64:
        raise TypeError(f"draft: expected int64 matches from {name}, got {draft.matches.dtype}")
    if is_eager_cpu(tokens, lengths):
        largest = int(draft.tokens.max()) if draft.tokens.numel() > 0 else -1
        if largest >= vocab_size:
            raise ValueError(
                f"draft: expected tokens in [0, {vocab_size}), or below 0 for padding, from {name}, got {largest}"
            )
        for part, copied, given in (("tokens", text, tokens), ("lengths", ends, lengths)):
            if not torch.equal(copied, given):
                raise ValueError(f"draft: {name} wrote into {part}; it may only read them")
    return replace(draft, tokens=draft.tokens.long())


# The kinds of draft that a loop accepts.
AnyDraft = DraftSource | LanguageModel | nn.Module | None
