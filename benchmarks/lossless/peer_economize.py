"""economize's decoding loop. A batch has rows of both settings, with prompts of different lengths."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from engines import NUM_DRAFT_TOKENS, SETTINGS_TOP_P, Row, law_of, tiny_pair

from torch_specops import SamplingParams


class Economize:
    """`decode_batch` of a model with the technique that `make` gives; `options` are for its `DecodeConfig`."""

    def __init__(self, make: Callable[[Any], Any], **options: Any) -> None:
        import economize

        target, draft = tiny_pair()
        self.law = law_of(target)
        self._options = {"cycle_length": NUM_DRAFT_TOKENS + 1} | options
        self._folder = tempfile.TemporaryDirectory(prefix="economize_")
        draft.save_pretrained(self._folder.name)
        self._model = economize.apply(target, make(self._folder.name))
        self.steps = self.tokens = 0

    def __call__(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], seeds: Sequence[int], length: int
    ) -> list[list[int]]:
        from economize import DecodeConfig, GreedySelector, TopPSampler

        # Rows that share a selector are verified together, and a call has one verifier.
        is_greedy = params[0].temperature == 0
        selectors: dict[SamplingParams, Any] = {}
        for each, seed in zip(params, seeds, strict=True):
            if each not in selectors:
                sampler = partial(TopPSampler, temperature=each.temperature, top_p=each.top_p, seed=seed)
                selectors[each] = GreedySelector() if is_greedy else sampler()
        verifier = {} if is_greedy else {"verifier": "rejection"}
        results = self._model.decode_batch(
            [torch.tensor(prompt) for prompt in prompts],
            length,
            decoding=DecodeConfig(**(verifier | self._options)),
            selectors=[selectors[each] for each in params],
        )
        texts = [result.tokens.tolist() for result in results]
        # The first token comes from the pass that reads the prompt, and every cycle gives one beside its drafts.
        num_tokens = sum(map(len, texts))
        self.steps += num_tokens - sum(kept for result in results for _, kept in result.acceptance)
        self.tokens += num_tokens
        return texts


def draft_model(folder: str) -> Any:
    from economize.techniques.draft_model import DraftModelConfig

    return DraftModelConfig(model=folder)


def lookup(folder: str) -> Any:
    from economize.techniques.lookup import LookupConfig

    return LookupConfig()


def early_exit(folder: str) -> Any:
    from economize.techniques.early_exit import EarlyExitConfig

    return EarlyExitConfig(exit_layer=1, head="shared")


def medusa(folder: str) -> Any:
    """Heads as they begin, and a tree of their two likeliest tokens."""
    from economize.techniques.medusa import MedusaConfig

    return MedusaConfig(num_heads=NUM_DRAFT_TOKENS, tree=[[0], [1], [0, 0], [0, 1], [1, 0]])


TYPICAL = {"verifier": "typical", "verifier_options": {"threshold": 0.09, "alpha": 0.3}}
WAYS: dict[str, tuple[str, Callable[[str], Any], dict[str, Any]]] = {
    "draft": ("draft model, rejection", draft_model, {}),
    "lookup": ("prompt lookup, rejection", lookup, {}),
    "early-exit": ("early exit, rejection", early_exit, {}),
    "medusa": ("Medusa tree, rejection", medusa, {}),
    "typical": ("draft model, typical, lossy by design", draft_model, TYPICAL),
}
ROWS = {
    f"economize-{name}": Row("economize", way, partial(Economize, make, **options), 10_000, SETTINGS_TOP_P)
    for name, (way, make, options) in WAYS.items()
}
