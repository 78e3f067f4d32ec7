"""This package, in every mode. A batch has rows of both settings, with prompts of different lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from engines import NUM_DRAFT_TOKENS, Row, law_of, tiny_pair
from peer_transformers import gemma4_assistant
from torch import Tensor

from torch_specops import SamplingParams, SpeculativeDecoder, Verifier
from torch_specops.drafts import Gemma4Assistant, PromptLookup


class NoRepeats:
    """A grammar in which no token follows itself."""

    def __init__(self, last: int) -> None:
        self._text = [last]

    def fill_bitmask(self, bitmask: Tensor, row: int) -> None:
        bitmask[row, 0] = ~(1 << self._text[-1])

    def accept(self, token: int) -> bool:
        is_right = token != self._text[-1]
        self._text += [token] * is_right
        return is_right

    def rollback(self, count: int) -> None:
        del self._text[len(self._text) - count :]


def without_repeats(text: Tensor, logits: Tensor) -> Tensor:
    return logits.scatter(1, text[:, -1:], -torch.inf)


class Package:
    def __init__(
        self, drafts: Callable[[Any], Any], has_grammar: bool = False, pair: Any = tiny_pair, **settings: Any
    ) -> None:
        target, draft = pair()
        own = law_of(target)
        self._has_grammar = has_grammar
        self.law = (lambda text: without_repeats(text, own(text))) if has_grammar else own
        self._decoder = SpeculativeDecoder(target, drafts(draft), num_draft_tokens=NUM_DRAFT_TOKENS, **settings)
        self.steps = self.tokens = 0

    def __call__(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], seeds: Sequence[int], length: int
    ) -> list[list[int]]:
        longest = max(map(len, prompts))
        output = self._decoder.generate(
            torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts]),
            attention_mask=torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
            max_new_tokens=length,
            sampling=SamplingParams(
                temperature=[each.temperature for each in params],
                top_k=[each.top_k for each in params],
                top_p=[each.top_p for each in params],
            ),
            seed=list(seeds),
            eos_token_id=(),
            grammar=[NoRepeats(prompt[-1]) for prompt in prompts] if self._has_grammar else None,
        )
        self.steps += output.stats.num_row_steps
        self.tokens += output.stats.num_tokens
        return [output.new_tokens(row) for row in range(len(prompts))]


def itself(draft: Any) -> Any:
    return draft


def lookup(draft: Any) -> PromptLookup:
    return PromptLookup()


def nothing(draft: Any) -> None:
    return None


def gemma4_pair() -> tuple[Any, Any]:
    """The models of the row `transformers-gemma4`."""
    target, helper = gemma4_assistant()
    return target, helper["assistant_model"]


# name -> what the table says, the draft, settings
WAYS: dict[str, tuple[str, Callable[[Any], Any], dict[str, Any]]] = {
    "no-draft": ("no draft", nothing, {}),
    **{
        f"{name}-{verify}": (f"{way}, verify {verify}", drafts, {"verify": verify, "schedule": "constant"})
        for name, way, drafts in (("draft", "draft model", itself), ("lookup", "prompt lookup", lookup))
        for verify in ("exact", "block", "gumbel")
    },
    "draft-grammar": ("draft model in a grammar, verify exact", itself, {"has_grammar": True, "verify": "exact"}),
    "draft-compiled": ("draft model, verify exact, compiled", itself, {"verify": "exact", "compile": True}),
    "gemma4": ("Gemma 4 with its assistant, verify exact", Gemma4Assistant, {"pair": gemma4_pair}),
    "draft-sigmoid": ("draft model, verify sigmoid, lossy by design", itself, {"verify": "sigmoid"}),
    "draft-lenient": ("draft model, lenience 0.5, lossy by design", itself, {"verify": Verifier(lenience=0.5)}),
}
ROWS = {
    f"specops-{name}": Row("torch-specops", way, partial(Package, drafts, **settings), 10_000)
    for name, (way, drafts, settings) in WAYS.items()
}
