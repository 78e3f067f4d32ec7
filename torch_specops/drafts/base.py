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
    """K proposed tokens for each sequence, and the distribution they were drawn from.

    Args:
        tokens: [B, K] int64 or int32; -1 is padding, and drafts after the first padding are not verified. Whether a
            sampled draft j is padding may depend on the sequence, on the drafts before it and on its distribution q_j.
            It must not depend on the token drawn from q_j, because that would change the output's distribution.
        logits: [B, K, V], the logits that the tokens were sampled from, after processors and before temperature and
            filters. None = the draft is deterministic (q is one-hot), or shares the target's noise.
        lse: [B, K] float32, or [B, K, 3] with bounds, which `sample` returned with each token; None if `logits` is
            None.
        matches: [B] int64, for drafts from a lookup: the length of each sequence's match in tokens; None = not known.
            The schedule `Auto` uses the lengths to estimate acceptance.
        is_one_hot: [B] bool, True for sequences whose drafts are deterministic although `logits` is given; their
            logits and lse are not used. None = none of them, or all if `logits` is None. It may depend on the sequence,
            but not on a drawn token.
    """

    tokens: Tensor
    logits: Tensor | None = None
    lse: Tensor | None = None
    matches: Tensor | None = None
    is_one_hot: Tensor | None = None


def stacked(drawn: Sequence[Sequence[Any]], logits: Tensor | None = None) -> Draft:
    """Stack K results of `SamplingTensors.draw` into a `Draft`. `logits` [B, K, V] has their logits already, if they
    have any; None = stack these too, which copies them if K > 1."""
    tokens, rows, lse = zip(*drawn, strict=True)
    if logits is None or rows[0] is None:
        logits = _joined(rows)
    return Draft(_joined(tokens), logits, _joined(lse))


def _joined(parts: Sequence[Any]) -> Any:
    if parts[0] is None:
        return None
    return parts[0].unsqueeze(1) if len(parts) == 1 else torch.stack(parts, 1)  # type: ignore[arg-type]


class DraftSource(Part, ABC):
    """A source of draft tokens. To write a new source, derive from this class and define `propose`.

    In every method, `tokens` [B, W] int64 holds the sequences from index 0 on, and `lengths` [B] int64, 1..W, holds
    their lengths. Ignore entries of `tokens` at or after a row's length. All methods except `propose` run eagerly.

    `propose` becomes part of a compiled step. torch.compile must be able to trace `propose`, and `propose` must not
    wait for the device. The loop passes a copy of the tokens to `propose`, and checks its result. If `propose` writes
    into the copy or proposes a token outside the vocabulary, an eager step on a CPU raises; other steps ignore it.

    `propose` and `catch_up` may run in inference mode. Do not create tensors in them that a later call writes to. The
    other methods run outside inference mode.

    Attributes:
        deterministic: True = proposals depend only on the sequence, and `Draft.logits` is None.
        looks_up: True = the source is deterministic and takes a small part of the time of a step. An eager step on a
            CPU then asks for K drafts, and the schedule chooses how many of the returned drafts are verified.
        vocab_size: the number of tokens that the source can propose; None = all tokens of the target.
        device: the device of its tensors; None = the device of the tokens.
        max_length: the longest sequence that the source can read; None = no known limit. A longer row gets no more
            drafts, and every method except `on_finished` gets 1 as its length.
        default_draft_tokens: K if the caller gives none; None = 5.
        max_draft_tokens: the largest K; None = no limit.
        compiles_itself: True = `propose` compiles parts of itself, for the shape that `compile` was called with. False
            = a compiled loop compiles `propose` as a whole.
        on_host: True = `propose` reads the sequences on the host. A compiled loop then runs it eagerly, before the
            compiled or captured verification. Such a step cannot be one graph.
        feature_layers: the indices of the target's layers whose inputs the source reads from `FeatureModel.features`.
            The number of layers, as an index, means the input of the head, after the last norm. () = no features.
        is_checked: True = the loop checks proposals. Set for every subclass: True if its `propose` is defined outside
            this package, otherwise False.

    A source may also override members of `Part`, such as `inside`, which lists the models that it uses.
    """

    deterministic: bool = True
    looks_up: bool = False
    vocab_size: int | None = None
    device: torch.device | None = None
    max_length: int | None = None
    default_draft_tokens: int | None = None
    max_draft_tokens: int | None = None
    compiles_itself: bool = False
    on_host: bool = False
    feature_layers: Sequence[int] = ()
    is_checked: bool = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.is_checked = not cls.propose.__module__.startswith("torch_specops.")

    def bind(self, target: LanguageModel) -> None:
        """Called when the source becomes the draft of a target. Also called before every `start`, because another
        decoder may have bound the source to another target in between."""

    def expect(self, num_draft_tokens: int) -> None:
        """Called before `start` with the largest number of drafts in a step of the batch."""

    def start(self, tokens: Tensor, lengths: Tensor, capacity: int, inputs: Mapping[str, Tensor] | None = None) -> None:
        """Read the prompts. Called before the first step of a batch; it may wait for the device.

        Args:
            capacity: the largest number of tokens that a sequence may have, drafts included.
            inputs: the target's inputs besides the tokens, by name.
        """

    def compile(self, shape: Hashable | None) -> None:
        """Called before `start` if `compiles_itself` is True. Batches that can use the same compiled graphs have an
        equal `shape`; None = the batch is decoded eagerly."""

    def catch_up(self, tokens: Tensor, lengths: Tensor, num_steps: int) -> None:
        """Called before `propose` if the last `num_steps` steps had no drafts. Each of these steps added one token to
        every unfinished row. Also called after a step in which a grammar replaced drafts; the last `num_steps` + 2
        tokens of a row then include all that replaced drafts. The method must not wait for the device."""

    def restart(self, tokens: Tensor, lengths: Tensor, rows: Tensor) -> None:
        """Drop the state of `rows` [A] int64 and read their new prompts. A session calls `restart` between two steps.
        `restart` may wait for the device. A session also calls it for the first prompts; `start` then gets rows with
        one dummy token.

        A source that overrides `start` must also override `restart` to work in sessions and `generate_many`.
        """

    def replace_inputs(self, row: int, inputs: Mapping[str, Tensor]) -> None:
        """Called before `restart` if the target has inputs besides the tokens. `inputs` are the new inputs of this row,
        as in `start` with a batch of one."""

    @property
    def can_restart(self) -> bool:
        """True if rows may get new prompts. This needs a source that overrides `restart`, or that does not override
        `start`."""
        kind = type(self)
        return kind.start is DraftSource.start or kind.restart is not DraftSource.restart

    def on_finished(self, tokens: Tensor, lengths: Tensor) -> None:
        """Called with finished sequences, which include the emitted tokens. It is not called if the caller stops
        early."""

    @abstractmethod
    def propose(
        self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, sampling: SamplingTensors, seeds: Tensor
    ) -> Draft:
        """Propose the next tokens of each sequence.

        Args:
            num_draft_tokens: K >= 1.
            sampling: the target's temperature, top-k, top-p and min-p. A source that samples must use all of them, as
                `sample(logits, draws, sampling.temperature, **sampling.filters)` does; otherwise drafts are verified
                with another q than they were sampled from. If the target has processors, apply them with
                `sampling.process(logits, text, lengths)`, where `text` includes the drafts so far. Without processors,
                fewer drafts are accepted.
            seeds: [B] int64. A source that samples must use `uniforms(seeds, lengths, K, "propose")` and no other
                stream. If `sampling.coupled` is True, the output does not depend on the drafts, and `Draft.logits` is
                not read. In that case, draw draft i with `sample_gumbel(logits, seeds, lengths + i, ..)` for the
                highest acceptance rate.
        """


def proposes_on_host(part: Part | None) -> bool:
    """Whether a source, or one inside it, proposes on the host."""
    return isinstance(part, DraftSource) and (part.on_host or any(map(proposes_on_host, part.inside)))


def keeps_states(part: Part) -> bool:
    """Whether a model, or one inside a source, keeps a recurrent state."""
    return (isinstance(part, LanguageModel) and part.keeps_states) or any(map(keeps_states, part.inside))


def readable_lengths(source: DraftSource, tokens: Tensor, lengths: Tensor) -> Tensor:
    """The lengths [B] that are passed to a source, with 1 for sequences that are longer than it can read."""
    limit = _limit_within(source, tokens)
    return lengths if limit is None else torch.where(lengths > limit, 1, lengths)


def _limit_within(source: DraftSource, tokens: Tensor) -> int | None:
    """The `max_length` of the source if rows of tokens [B, W] may be longer, otherwise None."""
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
    """Ask a source for drafts. Drafts beyond its `max_length` become padding. The padding does not change the output's
    distribution, because it depends only on the length of the sequence."""
    if source is None or num_draft_tokens == 0:
        return Draft(tokens[:, :0])
    arguments = tokens, readable_lengths(source, tokens, lengths), num_draft_tokens, sampling, seeds
    draft = _checked_proposal(source, vocab_size, *arguments) if source.is_checked else source.propose(*arguments)
    limit = _limit_within(source, tokens)
    if limit is None:
        return draft
    num_read = lengths.unsqueeze(1) + torch.arange(draft.tokens.shape[1], device=lengths.device)
    return replace(draft, tokens=torch.where(num_read <= limit, draft.tokens, -1))


def without_undrafted(draft: Draft, target: LanguageModel) -> Draft:
    """Replace deterministic drafts in `target.undrafted` by -1. Sampled drafts stay: if padding depended on the drawn
    tokens, the output's distribution would change."""
    for token in () if draft.logits is not None and draft.is_one_hot is None else target.undrafted:
        is_dropped = draft.tokens == token
        if draft.is_one_hot is not None:
            is_dropped &= draft.is_one_hot.unsqueeze(1)
        draft = replace(draft, tokens=draft.tokens.masked_fill(is_dropped, -1))
    return draft


def _checked_proposal(
    source: DraftSource, vocab_size: int, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, *others: Any
) -> Draft:
    """Call a user's `propose` and check the result. Without the check, a mistake would cause an error far from its
    origin, or wrong output. Eager steps on a CPU also check that `propose` did not change `tokens` and `lengths`."""
    text, ends, name = tokens.clone(), lengths.clone(), f"{type(source).__name__}.propose"
    draft = source.propose(text, ends, num_draft_tokens, *others)
    if not isinstance(draft, Draft):
        raise TypeError(f"draft: expected a Draft from {name}, got {type(draft)}")
    if not isinstance(draft.tokens, Tensor) or draft.tokens.dtype not in (torch.int64, torch.int32):
        got = getattr(draft.tokens, "dtype", type(draft.tokens))
        raise TypeError(f"draft: expected int64 or int32 tokens [B, K] from {name}, got {got}")
    shape, most = list(draft.tokens.shape), [len(tokens), num_draft_tokens]
    if len(shape) != 2 or shape[0] != most[0] or shape[1] > most[1]:
        raise ValueError(f"draft: expected tokens {most} or fewer from {name}, got shape {shape}")
    for part, value, expected in (
        ("logits", draft.logits, [*shape, vocab_size]),
        ("lse", draft.lse, [*shape, 3] if isinstance(draft.lse, Tensor) and draft.lse.dim() == 3 else shape),
        ("matches", draft.matches, shape[:1]),
        ("is_one_hot", draft.is_one_hot, shape[:1]),
    ):
        if value is not None and list(getattr(value, "shape", ())) != expected:
            got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value)
            raise ValueError(f"draft: expected {part} {expected} from {name}, got {got}")
    for part, row_values, dtype in (
        ("matches", draft.matches, torch.int64),
        ("is_one_hot", draft.is_one_hot, torch.bool),
    ):
        if row_values is not None and row_values.dtype != dtype:
            expected_dtype = str(dtype).removeprefix("torch.")
            raise TypeError(f"draft: expected {expected_dtype} {part} from {name}, got {row_values.dtype}")
    if draft.is_one_hot is not None and draft.logits is None:
        raise ValueError(f"draft: expected no is_one_hot without logits from {name}; all drafts are one-hot then")
    if is_eager_cpu(tokens, lengths):
        largest = int(draft.tokens.max()) if draft.tokens.numel() > 0 else -1
        if largest >= vocab_size:
            raise ValueError(
                f"draft: expected tokens in [0, {vocab_size}), or below 0 for padding, from {name}, got {largest}"
            )
        for part, copied, original in (("tokens", text, tokens), ("lengths", ends, lengths)):
            if not torch.equal(copied, original):
                raise ValueError(f"draft: {name} wrote into {part}; it may only read them")
    return replace(draft, tokens=draft.tokens.long())


# The types of draft that a loop accepts.
AnyDraft = DraftSource | LanguageModel | nn.Module | None
