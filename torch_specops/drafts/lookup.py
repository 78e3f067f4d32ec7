"""Lookups: drafts that are copied from the sequence so far, from the encoder's input or from earlier outputs, without a
model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import checks
from ..models.base import LanguageModel, placed, settings_of
from ..ops.tracing import is_eager_cpu, is_traced, normal_tensors
from .base import Draft, DraftSource
from .eager_lookup import Texts, prompt_lookup, suffix_lookup
from .history import LARGEST_LEVEL, MOST_TOKENS, NUM_PLACES, NUM_TOKENS, History, Ints, joined

# A step that is compiled or captured as a whole scans a memory of at most this many tokens.
MOST_SCANNED = 8192
# `PromptLookup` measures the length of its match only up to this many tokens.
LONGEST_MATCH = 20


class _Lookup(DraftSource):
    """A source that copies tokens from the sequence. If the target's encoder reads tokens (`input_ids`, as in T5),
    these are put before the sequence, and the source copies from them too. (Leviathan et al. 2023, section 3.6, copy
    from the context; shallow aggressive decoding, Sun et al. 2021, copies from the input.) Each text before the row's
    sequence ends with a -1, so that no draft continues from one text into the next."""

    looks_up = True
    default_draft_tokens = 10

    # [B, S] int64, the encoder's tokens, with -1 for padding and at the end; None = there is no encoder that reads
    # tokens.
    _input: Tensor | None = None
    _of_calls: ClassVar[Sequence[str]] = ("_input",)

    def __getstate__(self) -> dict[str, Any]:
        return settings_of(self)

    def start(self, tokens: Tensor, lengths: Tensor, capacity: int, inputs: Mapping[str, Tensor] | None = None) -> None:
        self._keep(_tokens_of(inputs, tokens.device))

    def restart(self, tokens: Tensor, lengths: Tensor, rows: Tensor) -> None:
        """Does nothing, because `propose` reads the new prompts."""

    def replace_inputs(self, row: int, inputs: Mapping[str, Tensor]) -> None:
        old = self._input
        new = None if old is None else _tokens_of(inputs, old.device)
        if old is None or new is None:
            return
        rows = pad(old, (0, max(new.shape[1] - old.shape[1], 0)), value=-1)
        rows[row] = pad(new[0], (0, rows.shape[1] - new.shape[1]), value=-1)
        self._keep(rows)

    def static_tensors(self) -> Sequence[Tensor]:
        return () if self._input is None else (self._input,)

    def _check_rows(self, num_rows: int) -> None:
        if self._input is not None and len(self._input) != num_rows:
            raise RuntimeError(
                f"draft: another decoder has used this {type(self).__name__} since, for {len(self._input)} rows; "
                "expected a lookup for each decoder with an encoder"
            )

    def _keep(self, new: Tensor | None) -> None:
        # Write to the instance's dict, because `PromptLookup` is a frozen dataclass, and an assignment would raise.
        vars(self)["_input"] = None if new is None else placed(self._input, new)

    def _eager_texts(self, tokens: Tensor, lengths: Tensor) -> Texts:
        self._check_rows(len(tokens))
        before = None if self._input is None else self._input.numpy(force=True)
        return Texts(tokens.numpy(force=True), lengths.numpy(force=True), before)

    def _texts(self, tokens: Tensor, lengths: Tensor, *before: Tensor) -> tuple[Tensor, Tensor, int]:
        """Returns the tokens [B, N] to search, the index [B, 1] of the last token of each row's sequence, and the index
        of its first token. The tokens are `before`, then the encoder's tokens, then the row's sequence."""
        self._check_rows(len(tokens))
        before = before if self._input is None else (*before, self._input)
        text = torch.cat([*before, tokens], 1) if before else tokens
        begin = text.shape[1] - tokens.shape[1]
        return text, (begin + lengths - 1).unsqueeze(1), begin


@dataclass(frozen=True)
class PromptLookup(_Lookup):
    """Finds an earlier occurrence of a sequence's last tokens, and proposes the tokens that followed it.

    The lookup uses the longest match of min_ngram to max_ngram tokens, and among equals the earliest. Drafts are
    deterministic: `Draft.logits` is None. If the target's encoder reads tokens (T5), these are searched too, which
    helps in tasks that copy from the input. `PromptLookup(2, 1, repeat=False)` proposes the same drafts as
    transformers' prompt lookup with its defaults, except that transformers does not search the encoder's tokens.

    Args:
        max_ngram: the length of the longest match that is searched, >= min_ngram.
        min_ngram: the length of the shortest match that is used, >= 1. A match of a single token is frequent, but
            rarely predicts the next tokens.
        repeat: True = if fewer than K tokens follow the match, repeat these tokens to get K drafts.

    Examples:
        >>> import torch
        >>> from torch_specops.drafts import PromptLookup
        >>> tokens = torch.tensor([[5, 6, 7, 8, 5, 6]])
        >>> PromptLookup().propose(tokens, torch.tensor([6]), 3).tokens
        tensor([[7, 8, 5]])
    """

    max_ngram: int = 3
    min_ngram: int = 2
    repeat: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "min_ngram", checks.check_int("min_ngram", self.min_ngram, 1))
        object.__setattr__(self, "max_ngram", checks.check_int("max_ngram", self.max_ngram, self.min_ngram))

    def propose(
        self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, sampling: object = None, seeds: object = None
    ) -> Draft:
        """Propose the tokens [B, K] that followed the match; -1 where there is no match or no further token."""
        if is_eager_cpu(tokens, lengths):
            texts, limits = self._eager_texts(tokens, lengths), (self.max_ngram, self.min_ngram)
            found = prompt_lookup(texts, num_draft_tokens, *limits, repeat=self.repeat, longest_match=LONGEST_MATCH)
            drafts, matches = map(torch.from_numpy, found)
            return Draft(drafts, matches=matches)
        text, last, begin = self._texts(tokens, lengths)
        width = text.shape[1]
        length = _match_lengths(text, last, begin, self.max_ngram)
        position = torch.arange(width, device=text.device)
        rank = torch.where(length >= self.min_ngram, length * width + width - 1 - position, -1)
        best = rank.amax(1, keepdim=True)
        end = width - 1 - best % width
        ahead = torch.arange(num_draft_tokens, device=text.device)
        is_proposed = (best >= 0) & (self.repeat | (ahead < last - end))
        drafts = torch.where(is_proposed, _following(text, last, end, num_draft_tokens).squeeze(1), -1)
        return Draft(drafts)


class SuffixLookup(_Lookup):
    """Finds the longest suffix of a sequence that occurs earlier in it or in finished sequences, and proposes the
    tokens that followed.

    Unlike `PromptLookup`, `SuffixLookup` stores finished sequences, searches longer matches, and proposes tokens only
    as long as they are likely enough (suffix decoding, Oliaro et al. 2024). Each place with the longest match votes for
    the token that followed there. After a match of m tokens, the probability of a token is estimated as m / (m + 1)
    times its share of the votes. Only places that agree with the drafts so far have a vote. Drafts are deterministic:
    `Draft.logits` is None. Like `PromptLookup`, `SuffixLookup` also searches the tokens that the target's encoder
    reads.

    Eager steps on a CPU find places by an index on the host. Steps that are compiled or captured scan a memory of at
    most 8192 tokens on the device. With a larger memory, they look up on the host before they verify, and cannot be one
    graph.

    With `verify="exact"`, the output for a seed depends on the stored sequences, because the drafts determine how
    random numbers are used. With "gumbel", the default, the output does not depend on them. `memory=0` stores nothing,
    and `forget` empties the memory.

    Args:
        max_ngram: the length of the longest match that is searched, >= min_ngram.
        min_ngram: the length of the shortest match that is used, >= 1.
        min_probability: in [0, 1]. Drafts end before the product of their estimated probabilities falls below this
            number.
        memory: the number of tokens of finished sequences that are stored, 0 to 10**8. The end of a sequence takes the
            place of a token. The oldest are removed first. The memory grows as sequences come, to about 20 bytes a
            token.

    Raises:
        TypeError, ValueError: a wrong argument, by name.

    Examples:
        >>> import torch
        >>> from torch_specops.drafts import SuffixLookup
        >>> tokens = torch.tensor([[5, 6, 7, 8, 4, 5, 6, 7, 9, 3, 4, 5, 6, 7]])
        >>> SuffixLookup().propose(tokens, torch.tensor([14]), 3).tokens
        tensor([[9, 3, 4]])
    """

    _of_calls: ClassVar[Sequence[str]] = ("_history", "_memory")

    def __init__(
        self, max_ngram: int = 32, min_ngram: int = 2, min_probability: float = 0.1, memory: int = 8192
    ) -> None:
        self.min_ngram = checks.check_int("min_ngram", min_ngram, 1)
        self.max_ngram = checks.check_int("max_ngram", max_ngram, min_ngram)
        self.min_probability = checks.check_number("min_probability", min_probability)
        if not 0 <= min_probability <= 1:
            raise ValueError(f"min_probability: expected a number in [0, 1], got {min_probability}")
        self.memory = checks.check_int("memory", memory, 0, 10**8)
        self._set_history(np.zeros(0, np.int32))

    def _set_history(self, tokens: Ints) -> None:
        self._history = History(self.memory)
        # The newest tokens of the history, where a compiled step reads them; the newest come last, after -1.
        self._memory: Tensor | None = None
        if not self.on_host:
            with normal_tensors():
                self._memory = torch.full((self.memory,), -1, device="cpu")
        self._append(tokens)

    def _append(self, tokens: Ints) -> None:
        with self._history.lock:
            self._history.append(tokens)
            if self._memory is not None:
                newest = torch.from_numpy(self._history.newest())
                self._memory.copy_(pad(newest, (self.memory - len(newest), 0), value=-1))

    def __getstate__(self) -> dict[str, Any]:
        # Pickle an array, because torch would share the memory of a tensor with the other process, and both would write
        # to it.
        with self._history.lock:
            tokens = self._history.newest()
        return super().__getstate__() | {"_tokens": tokens}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._set_history(vars(self).pop("_tokens"))

    @property
    def on_host(self) -> bool:  # type: ignore[override]
        return self.memory > MOST_SCANNED

    @property
    def num_remembered(self) -> int:
        """The number of tokens in the memory."""
        with self._history.lock:
            return self._history.count()

    def remember(self, sequences: Iterable[Tensor | Sequence[int]]) -> None:
        """Store finished sequences, such as the answers of an earlier epoch with their prompts, the newest last.

        Args:
            sequences: 1-D tensors of integers or lists of int; tokens in [0, 2,000,000).

        Raises:
            TypeError, ValueError: a sequence of another kind, by its index. The sequences before it may be stored.

        Examples:
            >>> import torch
            >>> from torch_specops.drafts import SuffixLookup
            >>> draft = SuffixLookup(memory=10**6)
            >>> draft.remember([[5, 6, 7, 8], torch.tensor([1, 5, 6, 9])])
            >>> draft.num_remembered
            8
        """
        if isinstance(sequences, (Tensor, str)) or not isinstance(sequences, Iterable):
            raise TypeError(f"sequences: expected a list of 1-D tensors or lists of int, got {type(sequences)}")
        texts: list[Ints] = []
        num_tokens = 0
        for index, sequence in enumerate(sequences):
            texts.append(_text_of(f"sequences[{index}]", sequence))
            num_tokens += len(texts[-1])
            # A large part is indexed at once, which is faster than text by text.
            if num_tokens >= LARGEST_LEVEL:
                self._append(joined(texts))
                texts, num_tokens = [], 0
        if texts:
            self._append(joined(texts))

    def bind(self, target: LanguageModel) -> None:
        if self.memory > 0 and target.vocab_size > MOST_TOKENS:
            raise ValueError(f"memory: expected 0 for a target of more than {MOST_TOKENS} tokens, got {self.memory}")

    def forget(self) -> None:
        """Empty the memory."""
        with self._history.lock:
            self._history.forget()
            if self._memory is not None:
                self._memory.fill_(-1)

    def start(self, tokens: Tensor, lengths: Tensor, capacity: int, inputs: Mapping[str, Tensor] | None = None) -> None:
        super().start(tokens, lengths, capacity, inputs)
        if self._memory is not None:
            self._memory = self._memory.to(tokens.device)

    def on_finished(self, tokens: Tensor, lengths: Tensor) -> None:
        if self.memory > 0 and len(tokens) > 0:
            rows = zip(tokens.numpy(force=True), lengths.tolist(), strict=True)
            self._append(joined([row[:length] for row, length in rows]))

    def static_tensors(self) -> Sequence[Tensor]:
        memory = () if self._memory is None else (self._memory,)
        return (*memory, *super().static_tensors())

    def propose(
        self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, sampling: object = None, seeds: object = None
    ) -> Draft:
        """Propose the tokens [B, K] that followed the longest match; -1 where nothing matches or no token is likely
        enough."""
        if self._memory is None and is_traced():
            raise NotImplementedError(f"memory: expected at most {MOST_SCANNED} in a traced lookup, got {self.memory}")
        if self._memory is None or is_eager_cpu(tokens, lengths):
            return self._propose_on_host(tokens, lengths, num_draft_tokens)
        text, last, begin = self._texts(tokens, lengths, self._memory.expand(len(tokens), -1))
        end, length = self._matches(text, last, begin)  # [B, C]; among equally good places, the newest comes first
        longest = length.amax(1, keepdim=True)
        agrees = (length == longest) & (longest >= self.min_ngram)
        probability = torch.ones_like(longest, dtype=torch.float32)
        drafts = [tokens[:, :0]]
        for ahead, token in enumerate(_following(text, last, end, num_draft_tokens).unbind(2)):
            has_vote = agrees & (token >= 0)
            votes = ((token.unsqueeze(1) == token.unsqueeze(2)) & has_vote.unsqueeze(1)).sum(2) * has_vote
            most, best = votes.max(1, keepdim=True)
            # If no place agrees, the share is NaN, and the comparison with `min_probability` is False.
            share = most.float() / agrees.sum(1, keepdim=True)
            probability = probability * share * (longest + ahead) / (longest + ahead + 1)
            is_likely = (probability >= self.min_probability) & (most > 0)
            draft = torch.where(is_likely, token.gather(1, best), -1)
            agrees = agrees & is_likely & (token == draft)
            drafts.append(draft)
        return Draft(torch.cat(drafts, 1), matches=longest.squeeze(1))

    def _propose_on_host(self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int) -> Draft:
        texts, limits = self._eager_texts(tokens, lengths), (self.max_ngram, self.min_ngram)
        found = suffix_lookup(texts, self._history, num_draft_tokens, *limits, self.min_probability)
        drafts, longest = (torch.from_numpy(each).to(tokens.device) for each in found)
        return Draft(drafts, matches=longest)

    def _matches(self, text: Tensor, last: Tensor, begin: int) -> tuple[Tensor, Tensor]:
        """Candidate places [B, C], and the length [B, C] of the match at each place."""
        # Choose the places that match most of the row's last few tokens, and prefer newer places among equals.
        num_equal = _match_lengths(text, last, begin, min(NUM_TOKENS, self.max_ngram))
        position = torch.arange(text.shape[1], device=text.device)
        rank = torch.where(num_equal > 0, num_equal * text.shape[1] + position, -1)
        rank, end = rank.topk(min(NUM_PLACES, text.shape[1]))
        return end, _shared(text, last, end, begin, self.max_ngram) * (rank >= 0)


def _text_of(name: str, sequence: Tensor | Sequence[int]) -> Ints:
    """A sequence as an array [N], checked. `name` is for the error messages."""
    try:
        text = sequence.numpy(force=True) if isinstance(sequence, Tensor) else np.asarray(sequence)
        text = text if text.size > 0 else text.astype(np.int64)
        is_text = text.ndim == 1 and text.dtype.kind in "iu"
    except (TypeError, ValueError, RuntimeError):
        # A dtype that numpy does not have, a list of lists, or a tensor without data.
        is_text = False
    if not is_text:
        got = repr(sequence)
        if isinstance(sequence, Tensor):
            got = f"{sequence.dtype} of shape {list(sequence.shape)} on {sequence.device}"
        raise TypeError(f"{name}: expected a 1-D tensor of integers or a list of int, got {got[:80]}")
    if text.size > 0 and not 0 <= text.min() <= text.max() < MOST_TOKENS:
        raise ValueError(f"{name}: expected tokens in [0, {MOST_TOKENS}), got {text.min()} to {text.max()}")
    return text


def _tokens_of(inputs: Mapping[str, Tensor] | None, device: torch.device) -> Tensor | None:
    """The encoder's tokens [B, S] int64 in the form of `_Lookup._input`, or None."""
    inputs = inputs or {}
    tokens, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if tokens is None:
        return None
    tokens = tokens if mask is None else torch.where(mask != 0, tokens, -1)
    return pad(tokens.to(device), (0, 1), value=-1)


def _match_lengths(text: Tensor, last: Tensor, begin: int, most: int) -> Tensor:
    """[B, N], the length of the match at each place before the end of the row, at most `most`. The length of a match is
    the number of tokens up to the place that equal the last tokens of the row. `text`, `last` and `begin` are the
    results of `_Lookup._texts`."""
    position = torch.arange(text.shape[1], device=text.device)
    alive, lengths = position < last, torch.zeros_like(text)
    for back in range(most):
        token = text.gather(1, (last - back).clamp(min=begin))
        alive = alive & (position >= back) & (last - back >= begin) & (text.roll(back, 1) == token)
        lengths += alive
    return lengths


def _shared(text: Tensor, last: Tensor, end: Tensor, begin: int, most: int) -> Tensor:
    """[B, C], the lengths of the matches at places `end` [B, C], at most `most`. The length of a match is the number of
    tokens up to the place that equal the last tokens of the row."""
    back = torch.arange(most, device=text.device)
    is_inside = (end.unsqueeze(2) >= back) & (last.unsqueeze(2) - back >= begin)
    before = text.gather(1, (end.unsqueeze(2) - back).clamp(min=0).flatten(1)).view_as(is_inside)
    suffix = text.gather(1, (last - back).clamp(min=0)).unsqueeze(1)
    return (is_inside & (before == suffix)).cumprod(2).sum(2)


def _following(text: Tensor, last: Tensor, end: Tensor, count: int) -> Tensor:
    """[B, C, count], the tokens after places `end` [B, C]. If the row ends before `count` tokens, they start again
    after the place."""
    ahead = torch.arange(count, device=text.device) % (last - end).clamp(min=1).unsqueeze(2)
    source = (end.unsqueeze(2) + 1 + ahead).clamp(max=text.shape[1] - 1)
    return text.gather(1, source.flatten(1)).view_as(source)
