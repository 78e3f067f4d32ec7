"""A draft model with another vocabulary, whose tokens are mapped to the target's tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ..models.base import LanguageModel, Part
from ..models.conversion import as_language_model


def _of_model(name: str) -> Any:
    return property(attrgetter(f"model.{name}"))


class TokenMap(LanguageModel):
    """Lets a model with another vocabulary draft for the target.

    The twin of a target token is the draft's token with the same text. The draft model reads the twin of each target
    token, and the logit of the twin becomes the logit of the target token. A target token without a twin has the logit
    -inf and is never proposed. The draft therefore has its model's distribution, restricted to tokens with a twin. The
    same logits are sampled and verified, so the output has the target's distribution. Missing twins only reduce the
    acceptance rate.

    Args:
        model: the draft model, of transformers or a `LanguageModel`.
        draft_of_target: [V_target] int64, the twin of each target token in [0, V_draft), or -1 if it has none; see
            `match_vocabularies`.
        unknown: the token that the model reads for a target token without a twin, in [0, V_draft).

    Raises:
        TypeError: `draft_of_target` is not an int64 tensor.
        ValueError: `draft_of_target` is not one-dimensional, has a token outside the draft's vocabulary, or has no
            token at all, or `unknown` is out of range.

    Examples:
        >>> import torch, transformers, torch_specops
        >>> from torch_specops.drafts.token_map import TokenMap, match_vocabularies
        >>> twins = match_vocabularies({"a": 0, "b": 1, "c": 2}, {"b": 0, "a": 1})
        >>> twins
        tensor([ 1,  0, -1])
        >>> config = transformers.GPT2Config(vocab_size=2, n_embd=32, n_layer=1, n_head=4, eos_token_id=None)
        >>> TokenMap(transformers.GPT2LMHeadModel(config), twins).vocab_size
        3
    """

    # These attributes and methods do not depend on the vocabulary, so take them from the model.
    device, max_length, keeps_states, not_compiled, reads_rows = map(
        _of_model, ("device", "max_length", "keeps_states", "not_compiled", "reads_rows")
    )
    begin_texts, clear_rows, copy_rows, expect, replace_inputs, static_tensors = map(
        _of_model, ("begin_texts", "clear_rows", "copy_rows", "expect", "replace_inputs", "static_tensors")
    )

    def __init__(self, model: LanguageModel | nn.Module, draft_of_target: Tensor, unknown: int = 0) -> None:
        model = as_language_model("model", model)
        if not isinstance(draft_of_target, Tensor) or draft_of_target.dtype != torch.int64:
            kind = getattr(draft_of_target, "dtype", type(draft_of_target))
            raise TypeError(f"draft_of_target: expected an int64 tensor [V], got {kind}")
        if draft_of_target.dim() != 1:
            raise ValueError(f"draft_of_target: expected [V], got shape {list(draft_of_target.shape)}")
        if not bool((draft_of_target >= 0).any()):
            raise ValueError("draft_of_target: expected a twin for at least one token, got none")
        low, high = (int(bound) for bound in draft_of_target.aminmax())
        if low < -1:
            raise ValueError(f"draft_of_target: expected tokens in [0, {model.vocab_size}) or -1, got {low}")
        self.model = model
        # `vocab_size` is the size of the target's vocabulary, because the map returns logits of target tokens.
        self.vocab_size = len(draft_of_target)
        self._highest, self._unknown = high, unknown
        self.look()
        twins = draft_of_target.to(model.device)
        self._has_twin = twins >= 0
        self._read_as = torch.where(self._has_twin, twins, unknown)

    @property
    def inside(self) -> Sequence[Part]:  # type: ignore[override]
        return (self.model,)

    def look(self) -> None:
        """Check again that the model has all tokens of the map, because its vocabulary may have changed."""
        size = self.model.vocab_size
        if self._highest >= size:
            raise ValueError(f"draft_of_target: expected tokens in [0, {size}) or -1, got {self._highest}")
        if not 0 <= self._unknown < size:
            raise ValueError(f"unknown: expected a token in [0, {size}), got {self._unknown}")

    def start(self, batch: int, capacity: int, inputs: Mapping[str, Tensor] | None = None) -> None:
        self._has_twin, self._read_as = (each.to(self.device) for each in (self._has_twin, self._read_as))
        self.model.start(batch, capacity, inputs)

    def forward(
        self, tokens: Tensor, positions: Tensor, num_logits: int | None = None, rows: Tensor | None = None
    ) -> Tensor:
        row_argument: tuple[Any, ...] = () if rows is None else (rows,)
        logits = self.model.forward(self._read_as[tokens], positions, num_logits, *row_argument)
        return torch.where(self._has_twin, logits[..., self._read_as], -torch.inf)


def match_vocabularies(
    target_vocab: Mapping[str, int], draft_vocab: Mapping[str, int], vocab_size: int | None = None
) -> Tensor:
    """For each target token, find the draft's token with the same text.

    The texts are compared as they appear in the tokenizers' vocabularies. Two byte-level vocabularies write them in the
    same way. If the vocabularies mark leading spaces differently, few tokens have a twin.

    Args:
        target_vocab, draft_vocab: text -> token, the results of the tokenizers' `get_vocab()`.
        vocab_size: the vocabulary size of the target model, which may be larger than its tokenizer's; None = the
            largest token + 1.

    Returns:
        [vocab_size] int64, -1 for a token without a twin.

    Raises:
        ValueError: `target_vocab` has a token outside [0, vocab_size).
    """
    if vocab_size is None:
        vocab_size = max(target_vocab.values()) + 1
    twins = torch.full((vocab_size,), -1, dtype=torch.int64, device="cpu")
    for text, token in target_vocab.items():
        if not 0 <= token < vocab_size:
            raise ValueError(f"target_vocab: expected tokens in [0, {vocab_size}), got {token}")
        twins[token] = draft_vocab.get(text, -1)
    return twins
