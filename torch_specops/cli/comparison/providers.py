"""The ways to decode that are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...decode import GenerationStats, SpeculativeDecoder
from ...drafts import DraftSource
from ...sampling import SamplingParams
from ..loading import log_messages_off
from .work import Models, Workload

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


def make_providers(models: Models, work: Workload, compile: bool | str) -> list[Provider]:
    """transformers without and with the draft, if it has such a draft, and this package without and with it."""
    return [
        *_transformers(models, work),
        _own(PLAIN, models, None, work, compile),
        _own(SPECULATIVE, models, models.make_draft(), work, compile),
    ]


def _own(
    name: str, models: Models, draft: DraftSource | nn.Module | None, work: Workload, compile: bool | str
) -> Provider:
    # Made from the model, not from its adapter, so that each decoder has its own cache.
    decoder = SpeculativeDecoder(
        models.target.model,
        draft,
        num_draft_tokens=work.num_draft_tokens,
        schedule=work.schedule,
        verify="exact" if draft is None else work.verify,
        compile=compile,
    )

    def decode(input_ids: Tensor, attention_mask: Tensor, sampling: SamplingParams, seed: int) -> Answer:
        output = decoder.generate(
            input_ids,
            attention_mask=attention_mask,
            max_new_tokens=work.max_new_tokens,
            sampling=sampling,
            seed=seed,
            eos_token_id=(),
        )
        if output.errors:
            raise RuntimeError("; ".join(f"row {row}: {error}" for row, error in output.errors.items()))
        return Answer([output.new_tokens(row) for row in range(input_ids.shape[0])], output.stats)

    drafting = getattr(getattr(decoder.draft, "model", None), "model", None)
    # Early exit may draft with the target itself.
    modules = tuple(dict.fromkeys([models.target.model, *([drafting] if isinstance(drafting, nn.Module) else [])]))
    return Provider(name + ", compiled" * decoder.compiled, decode, modules, decoder.compiled)


def _transformers(models: Models, work: Workload) -> list[Provider]:
    target = models.target.model
    providers = [Provider(GENERATE, _generate(target, work, {}, None, {}), (target,))]
    if models.assistance is None:
        return providers
    fields = models.assistance(work.num_draft_tokens)
    same_number = {
        "num_assistant_tokens": work.num_draft_tokens,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
    settings = {f"K = {work.num_draft_tokens}": same_number}
    if "prompt_lookup_num_tokens" not in fields:
        settings["own K"] = {}
    modules = (target,) if models.assistant is None else (target, models.assistant)
    return providers + [
        Provider(
            f"{ASSISTED}, {name}",
            _generate(target, work, fields, models.assistant, assistant_fields),
            modules,
            single=True,
            drafts_with_target="assistant_early_exit" in fields,
        )
        for name, assistant_fields in settings.items()
    ]


def _generate(
    target: Any, work: Workload, fields: dict[str, Any], assistant: Any, assistant_fields: dict[str, Any]
) -> Callable[[Tensor, Tensor, SamplingParams, int], Answer]:
    """`target.generate` with these fields and nothing from the model's own generation config, which may have an eos, a
    top-k or penalties."""

    def decode(input_ids: Tensor, attention_mask: Tensor, sampling: SamplingParams, seed: int) -> Answer:
        torch.manual_seed(seed)
        asked = fields | {"max_new_tokens": work.max_new_tokens, "do_sample": sampling.temperature != 0}
        if asked["do_sample"]:
            asked |= {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
            asked["min_p"] = sampling.min_p or None
        helper = {} if assistant is None else {"assistant_model": assistant}
        # Without an assistant the target drafts for itself, so the assistant's fields are the target's.
        drafting = target if assistant is None else assistant
        # transformers' call of the assistant makes transformers warn of deprecated arguments.
        with _generation_config(target, {}), _generation_config(drafting, assistant_fields), log_messages_off():
            output = target.generate(input_ids=input_ids, attention_mask=attention_mask, **helper, **asked)
        return Answer(output[:, input_ids.shape[1] :].tolist())

    return decode


@contextmanager
def _generation_config(model: Any, fields: dict[str, Any]) -> Iterator[None]:
    """Gives the model a new generation config with these fields, from which `generate` takes what its arguments leave
    out; restores the old one afterwards."""
    kept = model.generation_config
    pad = 0 if kept.pad_token_id is None else kept.pad_token_id
    model.generation_config = type(kept)(pad_token_id=pad, **fields)
    try:
        yield
    finally:
        model.generation_config = kept
