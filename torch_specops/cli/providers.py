"""The ways to decode that are compared: transformers without and with the draft, and this package without and with it.

All decode the same number of tokens and do not stop at an eos.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..decode import GenerationStats, SpeculativeDecoder
from ..drafts import DraftSource
from ..sampling import SamplingParams
from .loading import log_messages_off
from .models import Models

GENERATE = "transformers generate"
ASSISTED = "transformers assisted"
PLAIN = "specops, no draft"
SPECULATIVE = "specops"


@dataclass(frozen=True)
class Answer:
    """The new tokens of each row, and the statistics of this package."""

    tokens: list[list[int]]
    stats: GenerationStats | None = None


@dataclass(frozen=True)
class Provider:
    """One way to decode."""

    name: str
    # Takes input_ids [B, P] and attention_mask [B, P], padded on the left, how to sample, and a seed.
    decode: Callable[[Tensor, Tensor, SamplingParams, int], Answer]
    # The models that it calls, the target first.
    modules: tuple[nn.Module, ...]
    compiled: bool = False
    # It takes one prompt at a time.
    single: bool = False
    # Forwards of the target also draft, so that their number is not that of the steps.
    drafts_with_target: bool = False


def make_providers(
    models: Models,
    max_new_tokens: int,
    num_draft_tokens: int,
    schedule: str = "constant",
    verify: str = "exact",
    compile: bool | str = "auto",
) -> list[Provider]:
    """`schedule`, `verify` and `compile` are for this package. Without `models.assistance`, assisted generation is left
    out."""
    target = models.target.model
    providers = [_transformers(GENERATE, target, max_new_tokens)]
    if models.assistance is not None:
        fields = models.assistance(num_draft_tokens)
        same_number = {
            "num_assistant_tokens": num_draft_tokens,
            "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": 0.0,
        }
        name = f"{ASSISTED}, K = {num_draft_tokens}"
        providers.append(_transformers(name, target, max_new_tokens, fields, same_number))
        if "prompt_lookup_num_tokens" not in fields:
            providers.append(_transformers(f"{ASSISTED}, own K", target, max_new_tokens, fields))
    options = {"num_draft_tokens": num_draft_tokens, "schedule": schedule, "compile": compile}
    providers.append(_own(PLAIN, target, None, max_new_tokens, options))
    providers.append(_own(SPECULATIVE, target, models.draft, max_new_tokens, options | {"verify": verify}))
    return providers


def _own(
    name: str, target: nn.Module, draft: DraftSource | nn.Module | None, max_new_tokens: int, options: dict[str, Any]
) -> Provider:
    # Made from the model, not from its adapter, so that each decoder has its own cache.
    decoder = SpeculativeDecoder(target, draft, **options)

    def decode(input_ids: Tensor, attention_mask: Tensor, sampling: SamplingParams, seed: int) -> Answer:
        output = decoder.generate(
            input_ids,
            attention_mask=attention_mask,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            seed=seed,
            eos_token_id=(),
        )
        if output.errors:
            raise RuntimeError("; ".join(f"row {row}: {error}" for row, error in output.errors.items()))
        return Answer([output.new_tokens(row) for row in range(input_ids.shape[0])], output.stats)

    drafting = getattr(getattr(decoder.draft, "model", None), "model", None)
    # Early exit may draft with the target itself.
    modules = (target, drafting) if isinstance(drafting, nn.Module) and drafting is not target else (target,)
    return Provider(name + ", compiled" * decoder.compiled, decode, modules, decoder.compiled)


def _transformers(
    name: str,
    target: Any,
    max_new_tokens: int,
    fields: dict[str, Any] | None = None,
    assistant_config: dict[str, Any] | None = None,
) -> Provider:
    """`target.generate`, without anything of the models' own generation configs, which may have an eos, a top-k or
    penalties: each call replaces them.

    Args:
        fields: arguments that make it assisted; None = no draft.
        assistant_config: the generation config of the model that drafts; None = transformers' defaults.
    """
    fields = fields or {}
    # Without an assistant the target drafts for itself. The config of the last module is therefore the assistant's.
    modules = tuple(filter(None, (target, fields.get("assistant_model"))))
    configs = [{}, assistant_config or {}][-len(modules) :]

    def decode(input_ids: Tensor, attention_mask: Tensor, sampling: SamplingParams, seed: int) -> Answer:
        torch.manual_seed(seed)
        asked = fields | {"max_new_tokens": max_new_tokens, "do_sample": sampling.temperature != 0}
        if asked["do_sample"]:
            asked |= {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
            asked["min_p"] = sampling.min_p or None
        # `generate` takes from them what its arguments leave out.
        for model, config in zip(modules, configs, strict=True):
            old = model.generation_config
            model.generation_config = type(old)(pad_token_id=old.pad_token_id or 0, **config)
        # transformers' call of the assistant makes transformers warn of deprecated arguments.
        with log_messages_off():
            output = target.generate(input_ids=input_ids, attention_mask=attention_mask, **asked)
        return Answer(output[:, input_ids.shape[1] :].tolist())

    early_exit = "assistant_early_exit" in fields
    return Provider(name, decode, modules, single=bool(fields), drafts_with_target=early_exit)
