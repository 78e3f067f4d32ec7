"""Two sources in one: a lookup for rows that repeat earlier tokens, another source for the other rows."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from operator import eq, or_
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from .. import checks
from ..models.base import LanguageModel, Part, static_tensors_of
from ..ops.tracing import is_eager_cpu
from ..sampling import SamplingTensors
from .base import Draft, DraftSource, keeps_states, proposal_of, proposes_on_host, readable_lengths, without_undrafted
from .feature import FeatureDraft
from .lookup import PromptLookup, SuffixLookup
from .model import SampledDraft, as_draft_source

# The entry in `_num_read` of a row of which `other` has read all but the two newest tokens.
ALL_READ = 2**62


class LookupElse(SampledDraft):
    """Drafts each row by a lookup if at least `min_match` tokens match, and by another source otherwise.

    The choice depends on the row's sequence alone; with `schedule="auto"`, eager steps on a CPU choose from earlier
    steps too. Both keep the target's distribution. Looked-up drafts are deterministic: beside rows whose drafts were
    sampled, `Draft.is_one_hot` marks them. With `verify="gumbel"` the output of a seed is the same as with any other
    draft; "sigmoid" is refused.

    Args:
        other: a draft model or a source.
        min_match: the shortest match whose drafts are used, >= 1.
        lookup: a `PromptLookup` or `SuffixLookup` with min_ngram >= min_match; None = `PromptLookup(min_match,
            min_match)`.
        num_other_tokens: the most drafts that a row gets from `other`, >= 1; None = its default number, or 5.

    Raises:
        TypeError: an `other` that is neither a model nor a source, another kind of `lookup`, a number that is not an
            int.
        ValueError: a number out of range; a lookup that uses shorter matches.

    Examples:
        >>> import torch, transformers, torch_specops
        >>> config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, eos_token_id=None)
        >>> target, small = (transformers.GPT2LMHeadModel(config).eval() for _ in range(2))
        >>> draft = torch_specops.drafts.LookupElse(small, min_match=2)
        >>> output = torch_specops.generate(target, torch.tensor([[5, 6, 5, 6]]), draft=draft, max_new_tokens=8, seed=0)
        >>> output.lengths
        tensor([12])
    """

    compiles_itself = True
    _most_drafts = 0
    # `bind` sets it before every `start`.
    _target: LanguageModel
    # Used on a CPU only: for each row, the number of tokens that `other` has read, and the length that the last
    # `propose` got. Lists, because one operation of torch takes longer than a loop over the rows.
    _num_read: Sequence[int]
    _last_lengths: Sequence[int]
    # What `look_up` found and `choose` kept for the next `propose`, and how many drafts `other` proposes then.
    _chosen: tuple[Tensor, int] | None = None
    # Whether `other` read tokens of earlier steps in the last `propose`.
    caught_up = False
    # Whether the last `propose` since `start` ran eagerly on a CPU.
    _is_eager = False
    _of_calls: ClassVar[Sequence[str]] = ("_chosen", "_last_lengths", "_most_drafts", "_num_read", "_target")

    def __init__(
        self,
        other: DraftSource | LanguageModel | nn.Module,
        *,
        min_match: int = 4,
        lookup: PromptLookup | SuffixLookup | None = None,
        num_other_tokens: int | None = None,
    ) -> None:
        super().__init__()
        source = as_draft_source(other, "other")
        if source is None:
            raise TypeError("other: expected a model or a DraftSource, got None; without one, pass the lookup itself")
        self.other = source
        self.min_match = checks.check_int("min_match", min_match, 1)
        self.lookup = PromptLookup(min_match, min_match) if lookup is None else lookup
        if not isinstance(self.lookup, (PromptLookup, SuffixLookup)):
            raise TypeError(f"lookup: expected a PromptLookup or a SuffixLookup, got {type(lookup)}")
        if self.lookup.min_ngram < min_match:
            raise ValueError(
                f"lookup: expected min_ngram >= min_match = {min_match}, got {self.lookup.min_ngram}; "
                "a shorter match would be used"
            )
        if num_other_tokens is not None:
            checks.check_int("num_other_tokens", num_other_tokens, 1, source.max_draft_tokens or 2**31)
        default = min(source.default_draft_tokens or 5, source.max_draft_tokens or 5)
        self.num_other_tokens = num_other_tokens or default

    @property
    def inside(self) -> Sequence[Part]:  # type: ignore[override]
        return (self.lookup, self.other)

    @property
    def deterministic(self) -> bool:  # type: ignore[override]
        return self.other.deterministic

    @property
    def looks_up(self) -> bool:  # type: ignore[override]
        return self.other.looks_up

    @property
    def vocab_size(self) -> int | None:  # type: ignore[override]
        return self.other.vocab_size

    @property
    def device(self) -> torch.device | None:  # type: ignore[override]
        return self.other.device

    @property
    def default_draft_tokens(self) -> int:  # type: ignore[override]
        return max(self.lookup.default_draft_tokens, self.num_other_tokens)

    @property
    def feature_layers(self) -> Sequence[int]:  # type: ignore[override]
        return self.other.feature_layers

    @property
    def can_restart(self) -> bool:
        return self.other.can_restart

    def bind(self, target: LanguageModel) -> None:
        self._target = target
        self.other.bind(target)

    def expect(self, num_draft_tokens: int) -> None:
        self._most_drafts = num_draft_tokens
        # `propose` lets `other` read tokens of earlier steps again. A model with states then needs the states before
        # these tokens, so it must keep more states.
        self.other.expect(2 * num_draft_tokens if self._keeps_states else num_draft_tokens)

    def compile(self, shape: Hashable | None) -> None:
        super().compile(shape)
        if self.other.compiles_itself:
            self.other.compile(shape)

    def start(self, tokens: Tensor, lengths: Tensor, capacity: int, inputs: Mapping[str, Tensor] | None = None) -> None:
        self.lookup.start(tokens, lengths, capacity, inputs)
        self.other.start(tokens, readable_lengths(self.other, tokens, lengths), capacity, inputs)
        self._num_read, self._last_lengths = [ALL_READ] * len(lengths), [0] * len(lengths)
        self._chosen, self._is_eager = None, False

    def restart(self, tokens: Tensor, lengths: Tensor, rows: Tensor) -> None:
        self.lookup.restart(tokens, lengths, rows)
        self.other.restart(tokens, readable_lengths(self.other, tokens, lengths), rows)
        # `tolist` would make the host wait for a GPU.
        new = rows.tolist() if is_eager_cpu(rows) else []
        self._num_read = [ALL_READ if row in new else count for row, count in enumerate(self._num_read)]
        self._last_lengths = [0 if row in new else length for row, length in enumerate(self._last_lengths)]

    def replace_inputs(self, row: int, inputs: Mapping[str, Tensor]) -> None:
        self.lookup.replace_inputs(row, inputs)
        self.other.replace_inputs(row, inputs)

    def on_finished(self, tokens: Tensor, lengths: Tensor) -> None:
        self.lookup.on_finished(tokens, lengths)
        self.other.on_finished(tokens, lengths)

    def static_tensors(self) -> Sequence[Tensor] | None:
        return static_tensors_of(*self.inside)

    def catch_up(self, tokens: Tensor, lengths: Tensor, num_steps: int) -> None:
        # Inside a hierarchical draft, the sequence of an unfinished row may be as long as before.
        self._last_lengths = [0] * len(lengths)
        if self.can_choose and (self._is_eager or self._chosen is not None):
            # `propose` lets `other` read these tokens when it next asks it.
            before = (max(length - 2 - num_steps, 0) for length in lengths.tolist())
            self._num_read = list(map(min, self._num_read, before))
            return
        ends = readable_lengths(self.other, tokens, lengths)
        if isinstance(self.other, FeatureDraft):
            self.other.catch_up(tokens, ends, num_steps)
            return
        # The step before these steps may have verified K looked-up drafts, which `other` has not read.
        num_unread = num_steps + self._most_drafts - 1
        if is_eager_cpu(lengths):
            num_unread = max(num_unread, _most_unread(lengths.tolist(), self._num_read))
            self._num_read = [ALL_READ] * len(lengths)
        self.other.catch_up(tokens, ends, num_unread)

    def propose(
        self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, sampling: SamplingTensors, seeds: Tensor
    ) -> Draft:
        """Up to K tokens [B, K], with the logits [B, K, V] and logsumexp [B, K] of their q, unless all drafts are
        deterministic or share the target's noise."""
        count, self.caught_up = min(num_draft_tokens, self.num_other_tokens), False
        if self._chosen is None:
            look_up = self._look_up if self.lookup.on_host else self._piece(self._look_up, num_draft_tokens)
            found = look_up(tokens, lengths, num_draft_tokens)
        else:
            (found, count), self._chosen = self._chosen, None
            found = found[:, :num_draft_tokens]
        is_host, is_found, num_unread = is_eager_cpu(lengths), [True], self._most_drafts - 1
        self._is_eager = is_eager = is_host and self._shape is None
        if is_host:
            is_found, ends = [token >= 0 for token, *_ in found.tolist()], lengths.tolist()
            # A row that has not grown has ended.
            has_ended, self._last_lengths = map(eq, ends, self._last_lengths), ends
            is_unneeded = count == 0 or all(map(or_, is_found, has_ended))
            if is_eager and not self._keeps_states and is_unneeded:
                # Skip `other`: it reads these tokens when `propose` next asks it. Looked-up drafts need no logits.
                self._num_read = [min(num_read, end - 2) for num_read, end in zip(self._num_read, ends, strict=True)]
                return Draft(found)
            num_unread = max(_most_unread(ends, self._num_read), 0)
            self._num_read = [end if each else ALL_READ for end, each in zip(ends, is_found, strict=True)]
        self.caught_up = num_unread > 0 and not isinstance(self.other, FeatureDraft)
        if self.caught_up:
            self.other.catch_up(tokens, readable_lengths(self.other, tokens, lengths), num_unread)
        compiles_other = not (self.other.compiles_itself or proposes_on_host(self.other))
        ask = self._piece(self._ask_other, count) if compiles_other else self._ask_other
        drawn = ask(tokens, lengths, count, sampling, seeds)
        if is_eager and not any(is_found):
            return drawn
        return self._piece(self._mixed, found.shape[1])(found, drawn)

    @property
    def can_choose(self) -> bool:
        """Whether `choose` may choose the source of a row's drafts, rather than the length of its match."""
        return self._shape is None and not (self.looks_up or self._keeps_states)

    def look_up(self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int) -> Draft:
        """The drafts [B, K] of the lookup, with -1 for tokens that the target does not verify as such."""
        found = self.lookup.propose(tokens, lengths, num_draft_tokens)
        # A user's lookup may propose fewer or more drafts than asked. `pad` also copies if there is nothing to pad.
        if (more := num_draft_tokens - found.tokens.shape[1]) != 0:
            found = replace(found, tokens=pad(found.tokens, (0, more), value=-1))
        return without_undrafted(found, self._target)

    def choose(self, found: Tensor, num_other_tokens: int) -> None:
        """Choose the drafts of the next `propose`: `found` [B, K], and where this is -1, `num_other_tokens` drafts of
        `other`."""
        self._chosen = found, num_other_tokens

    @property
    def _keeps_states(self) -> bool:
        return keeps_states(self.other)

    def _look_up(self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int) -> Tensor:
        """The looked-up drafts [B, K]; -1 where there are none."""
        return self.look_up(tokens, lengths, num_draft_tokens).tokens

    def _ask_other(
        self, tokens: Tensor, lengths: Tensor, count: int, sampling: SamplingTensors, seeds: Tensor
    ) -> Draft:
        return proposal_of(self.other, tokens, lengths, count, sampling, seeds, self._target.vocab_size)

    def _mixed(self, found: Tensor, drawn: Draft) -> Draft:
        """Looked-up drafts [B, K] where there are any, else those of `other` [B, n], padded to K."""
        is_found, more = found[:, 0] >= 0, found.shape[1] - drawn.tokens.shape[1]
        mixed = torch.where(is_found.unsqueeze(1), found, pad(drawn.tokens, (0, more), value=-1))
        if drawn.logits is None:
            return Draft(mixed)
        logits, lse = drawn.logits, drawn.lse
        if more > 0:
            logits = pad(logits, (0, 0, 0, more))
            if lse is not None:
                lse = pad(lse, (0, more) if lse.dim() == 2 else (0, 0, 0, more))
        is_one_hot = is_found if drawn.is_one_hot is None else is_found | drawn.is_one_hot
        return Draft(mixed, logits, lse, is_one_hot=is_one_hot)


def _most_unread(lengths: Sequence[int], num_read: Sequence[int]) -> int:
    """The largest number of tokens of a row that `other` has not read, without the last two, which it reads anyway."""
    return max(length - 2 - count for length, count in zip(lengths, num_read, strict=True))
