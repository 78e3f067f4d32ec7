"""Checks and converts the arguments of the loop: prompts, and the settings of each row."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .. import checks
from ..grammars import Grammar
from ..models import LanguageModel
from ..ops.uniforms import row_seeds
from ..sampling import SamplingParams
from .grammar import check_grammar
from .rows import Row, RowRule
from .state import DecodeState
from .stop_strings import stop_string_rule

PromptIds = Tensor | Sequence[Tensor | Sequence[int]]
AttentionMask = Tensor | Sequence[Tensor | Sequence[int]] | None
EosTokenIds = int | Sequence[int] | Sequence[Sequence[int]] | None
# NumPy integers and arrays are accepted too.
Seed = int | Sequence[int] | Tensor | None
Sampling = SamplingParams | Mapping[str, Any] | None
AnyGrammar = Grammar | Sequence[Grammar | None] | None
StopStrings = str | Sequence[str] | Sequence[Sequence[str]] | None


class GenerateArguments(TypedDict, total=False):
    """The keywords of `SpeculativeDecoder.generate` that `read_prompts` checks."""

    attention_mask: AttentionMask
    max_new_tokens: int | Sequence[int]
    sampling: Sampling
    seed: Seed
    eos_token_id: EosTokenIds
    pad_token_id: int | None
    inputs: Mapping[str, Tensor] | None
    logprobs: str | None
    top_logprobs: int
    num_return_sequences: int
    stop_strings: StopStrings
    tokenizer: Any
    grammar: AnyGrammar


@dataclass(frozen=True)
class Prompts:
    """A batch of prompts whose arguments were checked. All tensors are on the CPU.

    Args:
        state: the state before the first step, as wide as the longest prompt. A row with `max_new_tokens` = 0 is
            finished.
        rules: the rules of each row that end it, in addition to its eos tokens and its limit.
        grammars: the grammar of each row, which restricts its new tokens; None = no restriction.
        pad_token_id: fills a sequence after its end.
        inputs: the input of the target's encoder for each sequence, by name, or the images of all prompts; None =
            neither.
        num_copies: the number of sequences of each prompt, which are adjacent rows.
    """

    state: DecodeState
    rules: list[list[RowRule]]
    grammars: list[Grammar | None]
    pad_token_id: int = 0
    inputs: Mapping[str, Tensor] | None = None
    num_copies: int = 1

    def rows(self) -> list[Row]:
        """The `Row` objects, in which the host keeps the sequences."""
        state = self.state
        of_rows = (tensor.tolist() for tensor in (state.tokens, state.lengths, state.limits, state.eos, state.finished))
        return [
            Row(tokens[:length], limit, eos, rules, grammar, ended, "length" if ended else None)
            for tokens, length, limit, eos, ended, rules, grammar in zip(
                *of_rows, self.rules, self.grammars, strict=True
            )
        ]


def read_prompts(
    target: LanguageModel,
    input_ids: PromptIds,
    *,
    attention_mask: AttentionMask = None,
    max_new_tokens: int | Sequence[int] = 128,
    sampling: Sampling = None,
    default_sampling: SamplingParams | None = None,
    seed: Seed = None,
    eos_token_id: EosTokenIds = None,
    pad_token_id: int | None = None,
    inputs: Mapping[str, Tensor] | None = None,
    logprobs: str | None = None,
    top_logprobs: int = 0,
    num_return_sequences: int = 1,
    stop_strings: StopStrings = None,
    tokenizer: Any = None,
    grammar: AnyGrammar = None,
    row_rules: Sequence[RowRule] = (),
    min_new_tokens: int = 0,
) -> Prompts:
    """Check the arguments of a call, which `SpeculativeDecoder.generate` documents. If the eos or pad tokens are None,
    those of the target are used.

    Args:
        row_rules: additional rules that end rows; they apply to all rows.

    Raises:
        TypeError, ValueError: a wrong argument, by name; fewer than `min_new_tokens` new tokens.
    """
    prompts, mask = _batch_of(input_ids, attention_mask)
    tokens, lengths = _align(prompts, mask, target.vocab_size)
    if inputs is not None and not isinstance(inputs, Mapping):
        raise TypeError(f"inputs: expected tensors by name, got {type(inputs)}")
    num_return_sequences = checks.check_int("num_return_sequences", num_return_sequences, 1)
    batch = tokens.shape[0] * num_return_sequences
    num_new = _per_row("max_new_tokens", max_new_tokens, batch, min_new_tokens)
    own_eos = target.eos_token_ids
    eos = _eos_tensor(own_eos if eos_token_id is None else eos_token_id, batch)
    if eos_token_id is not None and int(eos.max()) >= target.vocab_size:
        raise ValueError(f"eos_token_id: expected tokens in [0, {target.vocab_size}), got {int(eos.max())}")
    if pad_token_id is not None:
        pad_token_id = checks.check_int("pad_token_id", pad_token_id, 0)
    else:
        pad_token_id = target.pad_token_id
    # Runs of eos tokens or of token 0 may be padding too: tokenizers often pad with these tokens, even if the model's
    # config has another pad token.
    suspects = {0, *eos.flatten().tolist(), *own_eos}
    suspects |= {each for each in (pad_token_id, getattr(tokenizer, "pad_token_id", None)) if each is not None}
    if mask is None:
        _warn_of_padding("attention_mask", tokens, suspects, pad_token_id)
    read_by_encoder = (inputs or {}).get("input_ids")
    if read_by_encoder is not None and "attention_mask" not in (inputs or {}):
        _warn_of_padding("inputs: attention_mask", read_by_encoder, suspects, pad_token_id)
    if pad_token_id is None:
        pad_token_id = max(int(eos[0, 0]), 0)
    top_logprobs = checked_logprobs(logprobs, top_logprobs, target.vocab_size)
    inputs = target.check_images(tokens, lengths, inputs, mask)
    if num_return_sequences > 1:
        tokens, lengths = (each.repeat_interleave(num_return_sequences, 0) for each in (tokens, lengths))
        # Do not repeat images, because they are read once for all sequences of a prompt.
        if inputs and not target.reads_images:
            inputs = {name: values.repeat_interleave(num_return_sequences, 0) for name, values in inputs.items()}
    params = checked_sampling(sampling) or default_sampling or SamplingParams()
    of_rows = params.tensors(batch, prompt_lengths=lengths, eos=eos, vocab_size=target.vocab_size)
    finished, top = num_new == 0, (*tokens.shape, top_logprobs)
    state = DecodeState(
        tokens=tokens,
        lengths=lengths,
        limits=lengths + num_new,
        eos=eos,
        finished=finished,
        failed=torch.zeros_like(finished),
        seeds=_read_seeds(seed, batch),
        sampling=of_rows,
        is_sampled=bool((of_rows.temperature > 0).any()),
        logprobs=None if logprobs is None else tokens.new_full(tokens.shape, math.nan, dtype=torch.float32),
        logprobs_of=logprobs or ("raw" if top_logprobs else None),
        top_tokens=tokens.new_full(top, -1) if top_logprobs else None,
        top_values=tokens.new_full(top, math.nan, dtype=torch.float32) if top_logprobs else None,
    )
    rules = [[*row, *row_rules] for row in _read_rules(stop_strings, tokenizer, batch)]
    return Prompts(state, rules, _read_grammars(grammar, batch), pad_token_id, inputs, num_return_sequences)


def check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """Raise ValueError if a token of a prompt is outside the vocabulary."""
    wrong = (tokens < 0) | (tokens >= vocab_size)
    if bool(wrong.any()):
        raise ValueError(f"input_ids: expected tokens in [0, {vocab_size}), got {int(tokens[wrong][0])}")


def check_room(target: LanguageModel, longest: int, max_length: int | None = None) -> None:
    """Raise ValueError if `longest` tokens are more than `max_length`, or more than the target can read. Warn if the
    target can read them, but was made for shorter sequences."""
    if max_length is not None and longest > max_length:
        raise ValueError(
            f"max_new_tokens: expected prompt and new tokens within max_length = {max_length}, got {longest}"
        )
    readable, reason = target.max_length, target.limited_by
    if readable is None or longest <= readable:
        return
    if not target.reads_beyond:
        raise ValueError(
            f"max_new_tokens: expected prompt and new tokens within the {readable} that the target reads, got {longest}"
            + (f"; {reason}" if reason else "")
        )
    warnings.warn(
        f"max_new_tokens: prompt and new tokens may become {longest}, and the target was made for {readable} "
        "(max_position_embeddings); its text may be poor from there on",
        UserWarning,
        stacklevel=2,
    )


def checked_logprobs(logprobs: str | None, top_logprobs: int, vocab_size: int) -> int:
    """Check both arguments. Returns `top_logprobs` as an int."""
    if logprobs not in (None, "raw", "processed"):
        raise ValueError(f"logprobs: expected None, 'raw' or 'processed', got {logprobs!r}")
    top_logprobs = checks.check_int("top_logprobs", top_logprobs, 0)
    if top_logprobs > vocab_size:
        raise ValueError(f"top_logprobs: expected at most the {vocab_size} tokens of the target, got {top_logprobs}")
    return top_logprobs


def checked_sampling(sampling: Sampling) -> SamplingParams | None:
    if isinstance(sampling, Mapping):
        try:
            return SamplingParams(**sampling)
        except TypeError as error:
            raise TypeError(f"sampling: {error}") from error
    if sampling is not None and not isinstance(sampling, SamplingParams):
        raise TypeError(f"sampling: expected SamplingParams, got {type(sampling)}")
    return sampling


def _read_rules(stop_strings: StopStrings, tokenizer: Any, batch: int) -> list[list[RowRule]]:
    """The stop-string rules of each row. Rows with the same strings share one rule."""
    given = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings or [])
    is_per_row = bool(given) and not any(isinstance(each, str) for each in given)
    rules: dict[tuple[str, ...], list[RowRule]] = {(): []}
    rules_of_rows = []
    for row in _of_rows("stop_strings", "strings for all rows, or for each of", given, is_per_row, batch):
        strings = tuple(row) if isinstance(row, Sequence) and not isinstance(row, str) else (row,)
        if not all(isinstance(string, str) and string for string in strings):
            raise TypeError(f"stop_strings: expected strings that are not empty, got {stop_strings!r}")
        if strings not in rules:
            if not hasattr(tokenizer, "get_vocab"):
                raise TypeError(
                    f"tokenizer: expected a tokenizer of transformers, to find stop_strings, got {type(tokenizer)}"
                )
            rules[strings] = [stop_string_rule(tokenizer, strings)]
        rules_of_rows.append(rules[strings])
    return rules_of_rows


def _read_grammars(grammar: AnyGrammar, batch: int) -> list[Grammar | None]:
    given: Any = grammar
    # A string is a sequence too, but it is not a list of grammars.
    rows = list(given) if isinstance(given, Sequence) and not isinstance(given, (str, bytes)) else [given] * batch
    if len(rows) != batch:
        raise ValueError(f"grammar: expected one, or None, for each of {batch} rows, got {len(rows)}")
    used = [row_grammar for row_grammar in rows if row_grammar is not None]
    for row_grammar in used:
        check_grammar(row_grammar)
    if len(set(map(id, used))) < len(used):
        raise ValueError(f"grammar: it is the state of one text; expected one for each of {batch} rows, got one twice")
    return rows


def _read_seeds(seed: Seed, batch: int) -> Tensor:
    """The seed of each row, [B] int64: the given seeds, or hashes of one int (`uniforms.row_seeds`). If `seed` is None,
    the int is drawn from torch's default generator."""
    expected = f"seed: expected an int, or int64 [{batch}] as a tensor, list or array"
    if isinstance(seed, Tensor) and seed.dtype != torch.int64:
        raise TypeError(f"{expected}, got {seed.dtype}")
    values = int(torch.randint(0, 2**62, (1,), device="cpu")) if seed is None else _as_python(seed)
    numbers = values if isinstance(values, list) else [values]
    for number in numbers:
        if not checks.is_int(number):
            raise TypeError(f"{expected}, got {type(number)}")
        if not -(2**63) <= number < 2**63:
            raise ValueError(f"seed: expected a 64-bit number, got {number}")
    if numbers is not values:
        return row_seeds(numbers[0], batch)
    if len(numbers) != batch:
        raise ValueError(f"{expected}, got {len(numbers)} numbers")
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _of_numpy(value: Any) -> Any:
    """Convert a NumPy array to a new tensor, or to a list if its dtype is object. Other values stay unchanged."""
    if type(value).__module__ != "numpy":
        return value
    return value.tolist() if value.dtype == object else torch.tensor(value, device="cpu")


def _as_python(value: Any) -> Any:
    """Convert tensors, arrays, sequences and NumPy scalars to Python lists and numbers."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_as_python(each) for each in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _warn_of_padding(name: str, tokens: Tensor, suspects: Collection[int], pad_token_id: int | None) -> None:
    """Warn if a row seems to be padded: it begins or ends with a longer run of a token in `suspects` than another row.
    The shortest run counts as text, but if it consists of pad tokens, only one of them does."""
    for verb, rows in (("begins", tokens), ("ends", tokens.flip(1))):
        for token in sorted(set(rows[:, 0].tolist()).intersection(suspects)):
            runs = (rows == token).long().cumprod(1).sum(1)
            of_text = int(runs.min())
            if token == pad_token_id:
                of_text = min(of_text, 1)
            elif token == 0 and verb == "ends":
                # Count one more token 0 at the end of a row as text: in many vocabularies token 0 is an exclamation
                # mark.
                of_text += 1
            if bool((runs > of_text).any()):
                kind = "the pad token" if token == pad_token_id else "token"
                warnings.warn(
                    f"{name}: none was given, and row {int(runs.argmax())} {verb} with {kind} {token}, which is read "
                    "as text; pass the tokenizer's attention_mask",
                    UserWarning,
                    stacklevel=2,
                )
                return


def as_prompt(name: str, values: Any) -> Tensor:
    """Convert a tensor, an array or a list of tokens to a tensor [P]."""
    try:
        tokens = torch.as_tensor(_of_numpy(values), device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name}: expected an int64 tensor [P] or a list of tokens, got {type(values)}") from error
    if tokens.dim() != 1 or len(tokens) == 0:
        raise ValueError(f"{name}: expected [P] with P >= 1, got shape {list(tokens.shape)}")
    return tokens


def _batch_of(input_ids: Any, attention_mask: Any) -> tuple[Any, Any]:
    """Convert a list of prompts, and a list of masks if there is one, to tensors that are padded on the right."""
    # Convert a column of pandas, Arrow or polars to an array with one list per row.
    columns = (each.to_numpy() if hasattr(each, "to_numpy") else each for each in (input_ids, attention_mask))
    input_ids, attention_mask = map(_of_numpy, columns)
    if not isinstance(input_ids, (list, tuple)):
        return input_ids, attention_mask
    if not input_ids:
        raise ValueError("input_ids: expected at least one prompt, got an empty list")
    if checks.is_int(input_ids[0]):
        raise ValueError("input_ids: expected a list of prompts, got a list of tokens: pass [tokens]")
    rows = [as_prompt(f"input_ids[{index}]", prompt) for index, prompt in enumerate(input_ids)]
    masks = [torch.ones_like(row) for row in rows]
    if attention_mask is not None:
        if not isinstance(attention_mask, (list, tuple)):
            raise TypeError(
                f"attention_mask: expected None or a list, as input_ids is a list, got {type(attention_mask)}"
            )
        masks = [as_prompt(f"attention_mask[{index}]", mask) for index, mask in enumerate(attention_mask)]
        if list(map(len, masks)) != list(map(len, rows)):
            raise ValueError("attention_mask: expected a number for each token of every prompt")
    dtypes = {row.dtype for row in rows}
    if len(dtypes) > 1 or not dtypes <= {torch.int64, torch.int32}:
        raise TypeError(f"input_ids: expected int64 tokens in every prompt, got {', '.join(map(str, dtypes))}")
    return pad_sequence(rows, batch_first=True), pad_sequence(masks, batch_first=True)


def _align(input_ids: Any, attention_mask: Any, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Shift prompts that are padded on either side to index 0. Returns tokens [B, P] and lengths [B]."""
    if not isinstance(input_ids, Tensor) or input_ids.dtype not in (torch.int64, torch.int32):
        kind = getattr(input_ids, "dtype", type(input_ids))
        expected = 'an int64 tensor [B, P] or a list of prompts, as tokenizer(texts)["input_ids"]'
        raise TypeError(f"input_ids: expected {expected}, got {kind}")
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise ValueError(f"input_ids: expected [B, P] with B, P >= 1, got shape {list(input_ids.shape)}")
    input_ids = input_ids.cpu()
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask: expected a tensor [B, P], got {type(attention_mask)}")
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask: expected {list(input_ids.shape)}, as input_ids has, got {list(attention_mask.shape)}"
        )
    if bool(((attention_mask != 0) & (attention_mask != 1)).any()):
        raise ValueError("attention_mask: expected zeros and ones")
    is_token = attention_mask.cpu().bool()
    lengths = is_token.sum(1)
    if bool((lengths == 0).any()):
        raise ValueError(f"attention_mask: expected a token in every row, got none in row {int(lengths.argmin())}")
    # True at the first token of each run of tokens. A valid row has one run, because it has padding only at its ends.
    begins = is_token & ~torch.nn.functional.pad(is_token, (1, 0))[:, :-1]
    if bool((begins.sum(1) > 1).any()):
        row = int((begins.sum(1) > 1).long().argmax())
        raise ValueError(f"attention_mask: expected padding at the ends of a row only, got a hole in row {row}")
    tokens = input_ids.long().gather(1, (~is_token).long().argsort(dim=1, stable=True))
    inside = torch.arange(tokens.shape[1], device="cpu") < lengths.unsqueeze(1)
    check_tokens(tokens[inside], vocab_size)
    return torch.where(inside, tokens, 0)[:, : int(lengths.max())], lengths


def _of_rows(name: str, expected: str, given: Any, is_per_row: bool, batch: int) -> list[Any]:
    """A list with the value of each row: the given values, or the one value for all rows."""
    if not is_per_row:
        return [given] * batch
    if len(given) != batch:
        raise ValueError(f"{name}: expected {expected} {batch}, got {len(given)}")
    return list(given)


def _per_row(name: str, value: int | Sequence[int] | Tensor, batch: int, least: int) -> Tensor:
    """Convert one int for all rows, or an int for each row, to [B] int64."""
    given = _as_python(value)
    values = _of_rows(name, "one number or", given, isinstance(given, list), batch)
    for number in values:
        # Limit each number to 31 bits, so that sums of these numbers fit int64.
        checks.check_int(name, number, least, 2**31 - 1)
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def _eos_tensor(eos_token_id: Any, batch: int) -> Tensor:
    """Convert one eos token, several, or a list for each row to [B, E] int64, padded with -1."""
    given = _as_python(eos_token_id)
    is_per_row = isinstance(given, list) and any(isinstance(item, list) for item in given)
    rows = []
    for row in _of_rows("eos_token_id", "tokens for all rows, or for each of", given, is_per_row, batch):
        row_eos = row if isinstance(row, list) else [row]
        for token in row_eos:
            checks.check_int("eos_token_id", token, 0)
        rows.append(list(dict.fromkeys(row_eos)))
    width = max(max(len(row) for row in rows), 1)
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.int64, device="cpu")
