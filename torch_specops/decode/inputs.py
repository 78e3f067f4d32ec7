"""Checks and converts what a caller passes to the loop: models, prompts and the settings of each row."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import checks
from ..drafts import AnyDraft, DraftSource, LanguageModel, ModelDraft
from ..drafts.adapter import as_language_model, refuse_class
from ..drafts.base import feature_model
from ..drafts.checked import CheckedDraft
from ..sampling import SamplingParams
from ..uniforms import row_seeds
from .output import KeptLogits
from .stopping import Stopping

__all__ = [
    "BatchRequest",
    "EosTokenIds",
    "Prompts",
    "Seed",
    "as_draft_source",
    "check_logprobs",
    "check_pair",
    "check_room",
    "checked_sampling",
    "keep_features",
    "read_prompts",
    "read_seeds",
    "read_stopping",
]

EosTokenIds = int | Sequence[int] | Sequence[Sequence[int]] | None
# NumPy integers and arrays too; the type does not name them because NumPy need not be installed.
Seed = int | Sequence[int] | Tensor | None


def as_draft_source(draft: AnyDraft) -> DraftSource | None:
    """The source itself, in a `CheckedDraft` if it is a user's, or a `ModelDraft` around a model."""
    if draft is None:
        return None
    refuse_class("draft", draft)
    if not hasattr(draft, "propose"):
        if isinstance(draft, nn.Module) or hasattr(draft, "forward"):
            return ModelDraft(as_language_model("draft", draft))
        raise TypeError(f"draft: expected a model, a DraftSource (an object with propose) or None, got {type(draft)}")
    is_own = isinstance(draft, DraftSource) and type(draft).propose.__module__.startswith("torch_specops.")
    return cast(DraftSource, draft) if is_own else CheckedDraft(draft)


def check_pair(target: LanguageModel, draft: DraftSource | LanguageModel | None) -> None:
    """Raise ValueError if the draft's vocabulary or device is known and differs from the target's."""
    if draft is None:
        return
    if draft.vocab_size is not None and draft.vocab_size != target.vocab_size:
        raise ValueError(
            f"draft: expected the vocabulary of the target ({target.vocab_size} tokens), got {draft.vocab_size} tokens "
            "(torch_specops.drafts.TokenMap reads a draft with other tokens, or with padded logits)"
        )
    if draft.device is not None and draft.device != target.device:
        raise ValueError(f"draft: expected a draft on {target.device}, as the target is, got {draft.device}")


def keep_features(target: LanguageModel, draft: DraftSource | None) -> bool:
    """Tell the target which hidden states to keep: those that the draft reads. Returns whether it keeps any."""
    if draft is not None and draft.feature_layers:
        feature_model(target).keep_features(draft.feature_layers)
        # Another decoder may have bound it in between.
        draft.bind(target)
        return True
    if hasattr(target, "keep_features"):
        target.keep_features(())
    return False


def check_room(
    target: LanguageModel, draft: DraftSource | LanguageModel | None, longest: int, max_length: int | None = None
) -> None:
    """Raise ValueError if a sequence of `longest` tokens is longer than `max_length`, or than the target or the draft
    can read."""
    if max_length is not None and longest > max_length:
        raise ValueError(
            f"max_new_tokens: expected prompt and new tokens within max_length = {max_length}, got {longest}"
        )
    for name, model in (("target", target), ("draft", draft)):
        readable = None if model is None else model.max_length
        if readable is not None and longest > readable:
            raise ValueError(
                f"max_new_tokens: expected prompt and new tokens within the {readable} that the {name} reads, "
                f"got {longest}"
            )


@dataclass(frozen=True)
class BatchRequest:
    """The arguments of one call of `SpeculativeDecoder.generate` or `stream`, which documents them."""

    input_ids: Tensor
    _: KW_ONLY
    attention_mask: Tensor | None = None
    max_new_tokens: int | Sequence[int] = 128
    sampling: SamplingParams | None = None
    seed: Seed = None
    eos_token_id: EosTokenIds = None
    pad_token_id: int | None = None
    inputs: Mapping[str, Tensor] | None = None
    logprobs: str | None = None
    num_return_sequences: int = 1
    stop_strings: str | Sequence[str] | None = None
    tokenizer: Any = None
    # Set by `hf.custom_generate`: its stopping criteria, which replace stop strings, and where to keep the logits.
    stopping: Stopping | None = None
    logits: KeptLogits | None = None


@dataclass(frozen=True)
class Prompts:
    """A batch of prompts, checked; tensors on the CPU.

    Args:
        tokens: [B, P] int64, each prompt from index 0 on, then zeros.
        lengths: [B] int64 >= 1, tokens of each prompt.
        limits: [B] int64, the length at which each sequence ends.
        eos: [B, E] int64, tokens that end a sequence; -1 is none.
        pad_token_id: what fills a sequence after its end.
        inputs: what the target's encoder reads for each sequence, by name; None = nothing.
    """

    tokens: Tensor
    lengths: Tensor
    limits: Tensor
    eos: Tensor
    pad_token_id: int
    inputs: Mapping[str, Tensor] | None = None


def read_prompts(target: LanguageModel, request: BatchRequest, min_new_tokens: int = 0) -> Prompts:
    """Check prompts and limits; None for eos or pad tokens means those of the target. With `num_return_sequences`, the
    copies of a prompt stand together.

    Raises:
        TypeError, ValueError: a wrong dtype or shape, an empty prompt, a mask with holes, a token out of range, fewer
            than `min_new_tokens` new tokens.
    """
    tokens, lengths = _align(request.input_ids, request.attention_mask, target.vocab_size)
    copies = request.num_return_sequences
    checks.check_int("num_return_sequences", copies, 1)
    batch = tokens.shape[0] * copies
    max_new_tokens = _per_row("max_new_tokens", request.max_new_tokens, batch, min_new_tokens)
    if request.eos_token_id is None:
        eos = _eos_tensor(getattr(target, "eos_token_ids", ()), batch)
    else:
        eos = _eos_tensor(request.eos_token_id, batch)
        if int(eos.max()) >= target.vocab_size:
            raise ValueError(f"eos_token_id: expected tokens in [0, {target.vocab_size}), got {int(eos.max())}")
    pad_token_id = request.pad_token_id
    if pad_token_id is not None:
        checks.check_int("pad_token_id", pad_token_id, 0)
    else:
        pad_token_id = getattr(target, "pad_token_id", None)
    if request.attention_mask is None and pad_token_id is not None:
        _warn_of_padding(tokens, pad_token_id)
    if pad_token_id is None:
        pad_token_id = max(int(eos[0, 0]), 0)
    inputs = request.inputs
    if copies > 1:
        tokens, lengths = tokens.repeat_interleave(copies, 0), lengths.repeat_interleave(copies)
        inputs = inputs and {name: values.repeat_interleave(copies, 0) for name, values in inputs.items()}
    return Prompts(tokens, lengths, lengths + max_new_tokens, eos, pad_token_id, inputs)


def read_stopping(request: BatchRequest, prompts: Prompts) -> Stopping | None:
    """What ends the rows of a batch besides eos and limit; None = nothing.

    Raises:
        TypeError: a stop string that is empty or not a string; no tokenizer.
    """
    strings = request.stop_strings
    if strings is None or request.stopping is not None:
        return request.stopping
    strings = [strings] if isinstance(strings, str) else list(strings)
    if not all(isinstance(string, str) and string for string in strings):
        raise TypeError(f"stop_strings: expected strings that are not empty, got {request.stop_strings!r}")
    if not strings:
        return None
    if not hasattr(request.tokenizer, "get_vocab"):
        raise TypeError(
            f"tokenizer: expected a tokenizer of transformers, to find stop_strings, got {type(request.tokenizer)}"
        )
    from ..hf import stop_string_rule

    texts = [row[:length] for row, length in zip(prompts.tokens.tolist(), prompts.lengths.tolist(), strict=True)]
    return Stopping(texts, [stop_string_rule(request.tokenizer, strings)])


def read_seeds(seed: Seed, batch: int) -> Tensor:
    """[B] int64: the seeds given, or those that `uniforms.row_seeds` makes of an int. None draws an int from torch's
    default generator."""
    expected = f"seed: expected an int, or int64 [{batch}] as a tensor, list or array"
    if isinstance(seed, Tensor) and seed.dtype != torch.int64:
        raise TypeError(f"{expected}, got {seed.dtype}")
    values = int(torch.randint(0, 2**62, (1,))) if seed is None else _as_python(seed)
    numbers = values if isinstance(values, list) else [values]
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{expected}, got {type(number)}")
        if not -(2**63) <= number < 2**63:
            raise ValueError(f"seed: expected a 64-bit number, got {number}")
    if numbers is not values:
        return row_seeds(numbers[0], batch)
    if len(numbers) != batch:
        raise ValueError(f"{expected}, got {len(numbers)} numbers")
    return torch.tensor(numbers, dtype=torch.int64)


def checked_sampling(sampling: SamplingParams | None) -> SamplingParams | None:
    if sampling is not None and not isinstance(sampling, SamplingParams):
        raise TypeError(f"sampling: expected SamplingParams, got {type(sampling)}")
    return sampling


def check_logprobs(logprobs: str | None) -> None:
    if logprobs not in (None, "raw", "processed"):
        raise ValueError(f"logprobs: expected None, 'raw' or 'processed', got {logprobs!r}")


def _of_numpy(value: Any) -> Any:
    """A NumPy array as a tensor with its own memory; anything else unchanged."""
    return torch.tensor(value) if type(value).__module__ == "numpy" else value


def _as_python(value: Any) -> Any:
    """Tensors, arrays, sequences and NumPy scalars as Python lists and numbers."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_as_python(each) for each in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _warn_of_padding(tokens: Tensor, pad_token_id: int) -> None:
    """Warn if some rows look padded. If every row begins (or ends) with one pad token, the token is taken for text."""
    is_pad = tokens == pad_token_id
    for verb, pads in (("begins", is_pad), ("ends", is_pad.flip(1))):
        is_padded = pads[:, :2].sum(1) == 2 if bool(pads[:, 0].all()) else pads[:, 0]
        if bool(is_padded.any()):
            warnings.warn(
                f"attention_mask: none was given, and row {int(is_padded.long().argmax())} {verb} with the pad token "
                f"{pad_token_id}, which is read as text; pass the tokenizer's attention_mask",
                UserWarning,
                stacklevel=2,
            )


def _align(input_ids: Tensor, attention_mask: Tensor | None, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Prompts padded on either side -> tokens [B, P] that begin at index 0, and lengths [B]."""
    input_ids, attention_mask = _of_numpy(input_ids), _of_numpy(attention_mask)
    if not isinstance(input_ids, Tensor) or input_ids.dtype not in (torch.int64, torch.int32):
        found = getattr(input_ids, "dtype", type(input_ids))
        raise TypeError(f"input_ids: expected an int64 tensor [B, P], got {found}")
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
    # The text of a row has one beginning: at the start, or after padding.
    begins = is_token & ~torch.nn.functional.pad(is_token, (1, 0))[:, :-1]
    if bool((begins.sum(1) > 1).any()):
        row = int((begins.sum(1) > 1).long().argmax())
        raise ValueError(f"attention_mask: expected padding at the ends of a row only, got a hole in row {row}")
    tokens = input_ids.long().gather(1, (~is_token).long().argsort(dim=1, stable=True))
    inside = torch.arange(tokens.shape[1]) < lengths.unsqueeze(1)
    wrong = inside & ((tokens < 0) | (tokens >= vocab_size))
    if bool(wrong.any()):
        raise ValueError(f"input_ids: expected tokens in [0, {vocab_size}), got {int(tokens[wrong][0])}")
    return torch.where(inside, tokens, 0)[:, : int(lengths.max())], lengths


def _per_row(name: str, value: int | Sequence[int] | Tensor, batch: int, least: int) -> Tensor:
    """One int or one per row -> [B] int64."""
    given = _as_python(value)
    values = given if isinstance(given, list) else [given] * batch
    if len(values) != batch:
        raise ValueError(f"{name}: expected one number or {batch}, got {len(values)}")
    for number in values:
        checks.check_int(name, number, least)
    return torch.tensor(values, dtype=torch.int64)


def _eos_tensor(eos_token_id: Any, batch: int) -> Tensor:
    """A token, several, or several for each row -> [B, E] int64, padded with -1."""
    given = _as_python(eos_token_id)
    if not isinstance(given, list):
        rows: list[list[Any]] = [[given]] * batch
    elif not any(isinstance(item, list) for item in given):
        rows = [given] * batch
    else:
        rows = [item if isinstance(item, list) else [item] for item in given]
        if len(rows) != batch:
            raise ValueError(f"eos_token_id: expected tokens for each of {batch} rows, got {len(rows)} lists")
    for token in (token for row in rows for token in row):
        checks.check_int("eos_token_id", token, 0)
    width = max(max(len(row) for row in rows), 1)
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.int64)
