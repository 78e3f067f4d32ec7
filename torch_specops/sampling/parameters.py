"""Sampling parameters, as a user gives them and as tensors with an entry for each row of a batch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import check_number, is_int, is_number
from ..ops import sample, sample_gumbel
from .generation_config import values_of
from .processors import AnyProcessors, Processors, round_up

Number = float | list[float] | Tensor
Words = Sequence[Sequence[int]]
# The value of `Bias.until` for a bias that always applies.
ALWAYS = 2**63 - 1


class _Field(NamedTuple):
    """A numeric field of `SamplingParams`: one number, or one per sequence."""

    dtype: torch.dtype
    # The value that has no effect.
    neutral: float
    expected: str
    is_right: Callable[[Tensor], Tensor]


# Logits stay finite if they are divided by numbers >= LEAST or multiplied by numbers <= MOST.
LEAST, MOST = 1e-30, 1e30


def _is_between(least: float, most: float) -> Callable[[Tensor], Tensor]:
    # Compare in float64, because float16 and bfloat16 round the bounds.
    return lambda values: (values.double() >= least) & (values.double() <= most)


_MOST_FINITE = torch.finfo(torch.float32).max
_is_penalty = _is_between(-MOST, MOST)
_NUMBERS = {
    "temperature": _Field(
        torch.float32,
        1.0,
        f"0 (greedy) or finite numbers >= {LEAST}",
        lambda t: _is_between(LEAST, _MOST_FINITE)(t) | (t == 0),
    ),
    "top_k": _Field(torch.int64, 0, "integers >= 0", lambda k: k >= 0),
    "top_p": _Field(torch.float32, 1.0, "numbers in (0, 1]", lambda p: (p > 0) & (p <= 1)),
    "min_p": _Field(torch.float32, 0.0, "numbers in [0, 1]", lambda p: (p >= 0) & (p <= 1)),
    "repetition_penalty": _Field(torch.float32, 1.0, f"numbers in [{LEAST}, {MOST}]", _is_between(LEAST, MOST)),
    "presence_penalty": _Field(torch.float32, 0.0, f"numbers in [-{MOST}, {MOST}]", _is_penalty),
    "frequency_penalty": _Field(torch.float32, 0.0, f"numbers in [-{MOST}, {MOST}]", _is_penalty),
    "no_repeat_ngram_size": _Field(torch.int64, 0, "integers >= 0", lambda n: n >= 0),
    "min_new_tokens": _Field(torch.int64, 0, "integers >= 0", lambda n: n >= 0),
}

# For each field, the value that has no effect.
NEUTRAL = {name: field.neutral for name, field in _NUMBERS.items()}


class Bias(NamedTuple):
    """Adds `value` to the logit of the last token if the sequence ends with the other tokens and has fewer than `until`
    new tokens."""

    tokens: tuple[int, ...]
    value: float
    until: int = ALWAYS


@dataclass(frozen=True)
class SamplingParams:
    """How a loop turns the target's logits into a distribution. Each field is one value for all sequences, or one per
    sequence.

    Processors, which depend on the sequence so far, are applied first: biases, bad words and min_new_tokens, then the
    penalties, then n-grams. At a later position of a step, the drafts before it count as part of the sequence.
    Temperature and filters come last.

    Args:
        temperature: 0 = greedy; otherwise >= 1e-30, because logits divided by less overflow and tie.
        top_k: keep the k most likely tokens, and those that tie with the k-th; 0 = all.
        top_p: in (0, 1]: of these, keep the smallest set of most likely tokens whose probability is >= top_p; 1 = all.
        min_p: in [0, 1]: keep tokens of probability >= min_p times the largest; 0 = all.
        repetition_penalty: in [1e-30, 1e30]; positive logits of tokens in the sequence are divided by the penalty, and
            negative logits are multiplied by it (transformers). 1 = none.
        presence_penalty: in [-1e30, 1e30]; subtracted once from the logit of every token that is among the new tokens
            (OpenAI, vLLM).
        frequency_penalty: in [-1e30, 1e30]; subtracted from the logit of every token that is among the new tokens,
            times the number of its occurrences there.
        no_repeat_ngram_size: n; excludes tokens that would repeat an n-gram of the sequence; 0 = none. The cost of a
            step grows with the logarithm of n.
        min_new_tokens: excludes eos tokens until there are this many new tokens.
        logit_bias: maps a token to the number that is added to its logit, finite or -inf.
        bad_words: sequences of tokens. The last token of a word is excluded if the sequence ends with the word's other
            tokens. A word that is just an eos token is ignored, as in transformers. The cost of a step grows with the
            number of tokens in biases and words.

    Raises:
        TypeError: a field that is neither a number nor a sequence of numbers; a float for an integer; a malformed bias
            or word.
        ValueError: a number that is out of range, not finite in float32, or has more than 64 bits; a token below 0.

    Examples:
        >>> import torch_specops
        >>> torch_specops.SamplingParams(temperature=[0.0, 0.7]).tensors(batch=2).temperature
        tensor([0.0000, 0.7000])
        >>> banned = torch_specops.SamplingParams(bad_words=[[17, 4], [9]])  # for all rows
        >>> banned = torch_specops.SamplingParams(bad_words=[[[17, 4], [9]], []])  # for the first of two rows
        >>> biased = torch_specops.SamplingParams(logit_bias={9: -2.0}, repetition_penalty=1.1)
    """

    temperature: Number = 1.0
    top_k: int | list[int] | Tensor = 0
    top_p: Number = 1.0
    min_p: Number = 0.0
    repetition_penalty: Number = 1.0
    presence_penalty: Number = 0.0
    frequency_penalty: Number = 0.0
    no_repeat_ngram_size: int | list[int] | Tensor = 0
    min_new_tokens: int | list[int] | Tensor = 0
    logit_bias: Mapping[int, float] | Sequence[Mapping[int, float] | None] | None = None
    bad_words: Words | Sequence[Words] = ()

    def __post_init__(self) -> None:
        for name, field in _NUMBERS.items():
            value = getattr(self, name)
            values = _as_tensor(name, value)
            if field.dtype == torch.int64 and values.is_floating_point():
                raise TypeError(f"{name}: expected an integer or one per sequence, got {value!r}")
            if not bool(field.is_right(values).all()):
                raise ValueError(f"{name}: expected {field.expected}, got {value}")
        biases: Any = self.logit_bias if _is_sequence(self.logit_bias) else [self.logit_bias]
        for bias in biases:
            _check_bias({} if bias is None else bias)
        if not _is_sequence(self.bad_words):
            raise TypeError(f"bad_words: expected sequences of tokens, or a list for each row, got {self.bad_words!r}")
        words: Any = self.bad_words
        for word in chain.from_iterable(words) if self._words_are_per_row else words:
            _check_word(word)

    @classmethod
    def from_generation_config(cls, config: Any) -> SamplingParams:
        """Make the parameters with which transformers' `generate` would sample. These fields of a `GenerationConfig`
        are read: do_sample, temperature, top_k, top_p, min_p, repetition_penalty, no_repeat_ngram_size, min_new_tokens,
        bad_words_ids, suppress_tokens, and the entries of sequence_bias that are single tokens or -inf.

        Without `do_sample`, decoding is greedy and ignores temperature and filters. A None in the config stands for
        transformers' default, such as a temperature of 1 or a top_k of 50. Lengths, stop strings and special tokens are
        arguments of the loop.

        Args:
            config: `model.generation_config`, or another config.

        Raises:
            TypeError: `config` is not a `GenerationConfig`.
            ValueError: fields that change the distribution in other ways, by name; a value out of range.

        Examples:
            >>> import transformers, torch_specops
            >>> config = transformers.GenerationConfig(do_sample=True, temperature=0.7, repetition_penalty=1.05)
            >>> params = torch_specops.SamplingParams.from_generation_config(config)
            >>> params.temperature, params.top_k, params.repetition_penalty
            (0.7, 50, 1.05)
        """
        return cls(**values_of(config))

    def tensors(
        self,
        batch: int,
        device: torch.device | str = "cpu",
        *,
        prompt_lengths: Tensor | None = None,
        eos: Tensor | None = None,
        vocab_size: int | None = None,
    ) -> SamplingTensors:
        """Convert the parameters to tensors for a batch of this size.

        Args:
            prompt_lengths: [batch] int64, which processors need.
            eos: [batch, E] int64, tokens that end a row, padded with -1; None = no tokens.
            vocab_size: tokens of biases and words must be below it; None = no check.

        Raises:
            ValueError: the values are for another number of sequences; a token is outside the vocabulary;
                prompt_lengths are needed and missing.
        """
        temperature = self._per_sequence("temperature", batch, device)
        filters: dict[str, Any] = {name: self._if_any(name, batch, device) for name in ("top_k", "top_p", "min_p")}
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size")
        values = {name: self._if_any(name, batch, device) for name in names}
        rows = self._biases(batch, [[]] * batch if eos is None else eos.tolist())
        tokens = [token for biases in rows for bias in biases for token in bias.tokens]
        if vocab_size is not None and tokens and max(tokens) >= vocab_size:
            raise ValueError(
                f"logit_bias, bad_words: expected tokens in [0, {vocab_size}), as the target has, got {max(tokens)}"
            )
        if not tokens and all(value is None for value in values.values()):
            return SamplingTensors(temperature, **filters)
        if prompt_lengths is None:
            raise ValueError("prompt_lengths: expected the prompts' lengths, which processors need, got None")
        size = values["no_repeat_ngram_size"]
        longest_ngram = 0 if size is None else round_up(int(size.max()), 4)
        biases = _bias_tensors(rows, device) if tokens else {}
        processors = Processors(prompt_lengths.to(device), **values, longest_ngram=longest_ngram, **biases)
        return SamplingTensors(temperature, **filters, processors=processors)

    def _biases(self, batch: int, eos: list[list[int]]) -> list[list[Bias]]:
        """The biases of each row; `eos` has each row's eos tokens, padded with -1."""
        biases = _of_rows("logit_bias", self.logit_bias, _is_sequence(self.logit_bias), batch)
        words = _of_rows("bad_words", self.bad_words, self._words_are_per_row, batch)
        fewest = self._per_sequence("min_new_tokens", batch, "cpu").tolist()
        return [
            [Bias((int(token),), float(value)) for token, value in (biases[row] or {}).items()]
            + [Bias(tuple(map(int, word)), -math.inf) for word in words[row] if len(word) > 1 or word[0] not in ends]
            + [Bias((token,), -math.inf, fewest[row]) for token in ends if token >= 0 and fewest[row] > 0]
            for row, ends in enumerate(eos)
        ]

    @property
    def _words_are_per_row(self) -> bool:
        """True if `bad_words` has a list of words for each row: its items are lists of lists, or empty. An empty item
        is a list of words, because a word has at least one token."""
        return len(self.bad_words) > 0 and all(
            _is_sequence(item) and (len(item) == 0 or _is_sequence(item[0])) for item in self.bad_words
        )

    def _per_sequence(self, name: str, batch: int, device: torch.device | str) -> Tensor:
        values = _as_tensor(name, getattr(self, name)).to(device=device, dtype=_NUMBERS[name].dtype)
        if values.dim() == 0:
            return values.expand(batch).contiguous()
        if values.shape != (batch,):
            raise ValueError(f"{name}: expected one number or {batch}, got shape {list(values.shape)}")
        return values

    def _if_any(self, name: str, batch: int, device: torch.device | str) -> Tensor | None:
        """One number per sequence, or None if all numbers are neutral."""
        values = self._per_sequence(name, batch, device)
        return values if bool((_as_tensor(name, getattr(self, name)) != _NUMBERS[name].neutral).any()) else None


@dataclass(frozen=True)
class SamplingTensors:
    """The sampling parameters of a batch, as tensors on its device. A field that no row uses is None.

    Args:
        temperature: [B] float32, >= 0; 0 = greedy.
        top_k: [B] int64, or None.
        top_p: [B] float32, or None.
        min_p: [B] float32, or None.
        processors: changes logits according to the sequence so far; None = no change.
        coupled: whether drafts share the noise of the target (`verify="gumbel"`): see `draw`.
    """

    temperature: Tensor
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    processors: AnyProcessors | None = None
    coupled: bool = False

    @property
    def filters(self) -> dict[str, Any]:
        """The filters (top_k, top_p, min_p) that a row uses, by name."""
        filters = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        return {name: value for name, value in filters.items() if value is not None}

    def draw(
        self, logits: Tensor, numbers: Tensor, text: Tensor | None, lengths: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Draw a draft token for each row, with the processors, temperature and filters that apply to the target.

        Args:
            logits: [B, 1, V], before processors.
            numbers: [B], uniforms; if `coupled`, the seeds of the rows.
            text: as in `process`; None if there are no processors.
            lengths: [B, 1] int64, the sequences' lengths, drafts before this token included.

        Returns:
            The token [B], then `logits` [B, V] and `lse` [B] or [B, 3] for a `Draft`; both are None if `coupled`.
        """
        if text is not None:
            logits = self.process(logits, text, lengths)
        logits = logits[:, -1]
        if self.coupled:
            return sample_gumbel(logits, numbers, lengths.squeeze(1), self.temperature, **self.filters), None, None
        # Only CUDA kernels use bounds, if there are any.
        with_bounds = logits.device.type == "cuda" and len(self.filters) > 0
        tokens, lse = sample(logits, numbers, self.temperature, **self.filters, with_bounds=with_bounds)
        return tokens, logits, lse

    def process(self, logits: Tensor, text: Tensor, lengths: Tensor) -> Tensor:
        """Apply the processors, before temperature and filters: returns logits [B, n, V] in float32, or the same logits
        if there are no processors.

        Args:
            logits: [B, n, V].
            text: [B, W] int64 in [0, V), each row from index 0 on, drafts included. It is -1 where there is no draft,
                and logits after that are not used.
            lengths: [B, n] int64 in 1..W, the number of tokens of `text` that come before each of the n positions.
        """
        return logits if self.processors is None else self.processors(logits, text, lengths)


def _as_tensor(name: str, value: Number | list[int]) -> Tensor:
    for number in value if isinstance(value, Sequence) else [value]:
        if is_int(number) and not -(2**63) <= number < 2**63:
            raise ValueError(f"{name}: expected numbers of 64 bits, got {number}")
    try:
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")
        if not isinstance(value, Tensor) and tensor.is_floating_point():
            # Use float64, because in float32, the default, a number could overflow or become 0 before it is checked.
            tensor = torch.as_tensor(value, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name}: expected a number or one per sequence, got {value!r}") from error
    if tensor.dtype == torch.bool or tensor.is_complex() or tensor.dim() > 1:
        raise TypeError(f"{name}: expected a number or one per sequence, got {value!r}")
    return tensor


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _check_bias(bias: object) -> None:
    if not isinstance(bias, Mapping):
        raise TypeError(f"logit_bias: expected a dict of tokens and numbers, or one per sequence, got {bias!r}")
    for token, value in bias.items():
        _check_token("logit_bias", token)
        if not is_number(value):
            raise TypeError(f"logit_bias: expected a number for token {token}, got {value!r}")
        value = check_number("logit_bias", value)
        if value != -math.inf and not abs(value) <= torch.finfo(torch.float32).max:
            raise ValueError(f"logit_bias: expected a finite number or -inf for token {token}, got {value}")


def _check_word(word: Any) -> None:
    if not _is_sequence(word):
        raise TypeError(f"bad_words: expected sequences of tokens, or a list of them per sequence, got {word!r} in one")
    if len(word) == 0:
        raise ValueError("bad_words: expected a token in every word, got a word without one")
    for token in word:
        _check_token("bad_words", token)


def _check_token(name: str, token: Any) -> None:
    if not is_int(token):
        raise TypeError(f"{name}: expected tokens to be integers, got {token!r}")
    if not 0 <= token < 2**31:
        raise ValueError(f"{name}: expected tokens in [0, 2**31), got {token}")


def _of_rows(name: str, value: Any, is_per_row: bool, batch: int) -> Sequence[Any]:
    rows: Sequence[Any] = value if is_per_row else [value] * batch
    if len(rows) != batch:
        raise ValueError(f"{name}: expected one for all sequences or {batch}, got {len(rows)}")
    return rows


def _bias_tensors(rows: list[list[Bias]], device: torch.device | str) -> dict[str, Tensor]:
    """Convert the biases of each row to the tensors `words`, `biases` and `pieces` of `Processors`."""
    words: list[list[int]] = []
    pieces: list[list[int]] = []
    values: list[float] = []
    for row, biases in enumerate(rows):
        # Sum the biases of equal words here, so that the order of additions on a device cannot matter.
        sums: dict[tuple[tuple[int, ...], int], float] = defaultdict(float)
        for tokens, value, until in biases:
            sums[tokens, until] += value
        for (tokens, until), value in sums.items():
            pieces += [[len(words), back, token] for back, token in enumerate(reversed(tokens[:-1]), 1)]
            words.append([row, tokens[-1], until])
            values.append(value)
    num_words, num_pieces = round_up(len(words), 8 * len(rows)), round_up(len(pieces), 32 * len(rows))
    return {
        "words": torch.tensor(words + [[0, -1, 0]] * (num_words - len(words)), device=device),
        "biases": torch.tensor(values + [0.0] * (num_words - len(values)), dtype=torch.float32, device=device),
        "pieces": torch.tensor(pieces + [[0, 0, 0]] * (num_pieces - len(pieces)), device=device),
    }
