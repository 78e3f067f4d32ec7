"""The providers are the ways to decode that the benchmark compares: transformers and this package, both without and
with the draft.

All providers decode the same number of tokens, and do not stop at an eos token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..decode import GenerationStats, SpeculativeDecoder
from ..drafts import DraftSource, Gemma4Assistant
from ..sampling import SamplingParams
from .loading import log_messages_off
from .models import Models

GENERATE = "transformers generate"
ASSISTED = "transformers assisted"
PLAIN = "specops, no draft"
SPECULATIVE = "specops"


@dataclass(frozen=True)
class Answer:
    """The new tokens of each row, and the statistics of this package (None for transformers)."""

    tokens: list[list[int]]
    stats: GenerationStats | None = None


@dataclass(frozen=True)
class Provider:
    """One way to decode."""

    name: str
    # The arguments are input_ids [B, P] and attention_mask [B, P], padded on the left; max_new_tokens; sampling
    # parameters; and a seed.
    decode: Callable[[Tensor, Tensor, int, SamplingParams, int], Answer]
    # The models that the provider calls, the target first.
    modules: tuple[nn.Module, ...]
    # Whether steps are compiled or captured.
    compiled: bool = False
    # Whether the provider takes only one prompt at a time.
    single: bool = False
    # Whether some forwards of the target only draft. If so, the number of forwards is not the number of steps.
    drafts_with_target: bool = False


def make_providers(
    models: Models,
    num_draft_tokens: int,
    schedule: str | None = None,
    verify: str | None = None,
    compile: bool | str = "auto",
    assisted_tokens: int | None = None,
    invariant: bool = False,
) -> list[Provider]:
    """`schedule`, `verify`, `compile` and `invariant` are for this package. `assisted_tokens` is K of transformers'
    assisted generation; None = the same K. Without `models.assistance`, assisted generation is left out."""
    target = models.target.model
    providers = [_transformers(GENERATE, target, {}, {})]
    count = assisted_tokens or num_draft_tokens
    fields = models.assistance(count)
    if fields is not None:
        same_number = {
            "num_assistant_tokens": count,
            "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": 0.0,
        }
        name = f"{ASSISTED}, K = {count}"
        providers.append(_transformers(name, target, fields, same_number))
        # transformers has no K of its own for an assistant of Gemma 4. `other` is the draft in a `LookupElse`.
        is_assistant = isinstance(getattr(models.draft, "other", models.draft), Gemma4Assistant)
        if not (is_assistant or fields.keys() & {"prompt_lookup_num_tokens", "use_mtp"}):
            providers.append(_transformers(f"{ASSISTED}, own K", target, fields, {}))
    options = {"num_draft_tokens": num_draft_tokens, "schedule": schedule, "compile": compile, "invariant": invariant}
    providers.append(_own(PLAIN, target, None, options))
    providers.append(_own(SPECULATIVE, target, models.draft, options | {"verify": verify}))
    return providers


def refusal(provider: Provider) -> str | None:
    """The reason why transformers refuses every prompt of this provider, or None. For example, assisted generation
    takes no model that keeps a recurrent state."""
    device = next(provider.modules[0].parameters()).device
    token = torch.ones(1, 1, dtype=torch.int64, device=device)
    try:
        provider.decode(token, token, 1, SamplingParams(temperature=0.0), 0)
    except ValueError as error:
        return str(error)
    return None


def _own(name: str, target: nn.Module, draft: DraftSource | nn.Module | None, options: dict[str, Any]) -> Provider:
    # Pass the model instead of its adapter, so that each decoder has a separate cache.
    decoder = SpeculativeDecoder(target, draft, **options)

    def decode(ids: Tensor, mask: Tensor, max_new_tokens: int, sampling: SamplingParams, seed: int) -> Answer:
        how: dict[str, Any] = {"sampling": sampling, "seed": seed, "eos_token_id": ()}
        output = decoder.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, **how)
        if output.errors:
            raise RuntimeError("; ".join(f"row {row}: {error}" for row, error in output.errors.items()))
        return Answer([output.new_tokens(row) for row in range(ids.shape[0])], output.stats)

    drafting = getattr(getattr(decoder.draft, "model", None), "model", None)
    # With early exit, the drafting model may be the target itself, which must be listed only once.
    modules = (target, drafting) if isinstance(drafting, nn.Module) and drafting is not target else (target,)
    way = ", compiled" if options["compile"] is True else ", captured"
    return Provider(name + way * decoder.compiled, decode, modules, decoder.compiled)


def _transformers(name: str, target: Any, fields: dict[str, Any], assistant_config: dict[str, Any]) -> Provider:
    """`target.generate` with the models' generation configs replaced in each call, because they may have an eos, a
    top-k or penalties.

    Args:
        fields: the arguments for assisted generation; empty without a draft.
        assistant_config: fields of the drafting model's generation config; the other fields have transformers'
            defaults.
    """
    assistant = fields.get("assistant_model")
    modules = (target,) if assistant is None else (target, assistant)
    # The last module drafts, so it gets `assistant_config`. It is the assistant, or the target if there is no
    # assistant.
    configs = [{}, assistant_config][-len(modules) :]

    def decode(ids: Tensor, mask: Tensor, max_new_tokens: int, sampling: SamplingParams, seed: int) -> Answer:
        torch.manual_seed(seed)
        asked = fields | {"max_new_tokens": max_new_tokens, "do_sample": sampling.temperature != 0}
        if asked["do_sample"]:
            asked |= {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
            asked["min_p"] = sampling.min_p or None
        # Replace the generation configs, because `generate` takes from them every setting that is not among its
        # arguments.
        for model, config in zip(modules, configs, strict=True):
            old = model.generation_config
            model.generation_config = type(old)(pad_token_id=old.pad_token_id or 0, **config)
        # Hide warnings: transformers calls the assistant with deprecated arguments, and then warns of them.
        with log_messages_off():
            output = target.generate(input_ids=ids, attention_mask=mask, **asked)
        return Answer(output[:, ids.shape[1] :].tolist())

    early_exit = "assistant_early_exit" in fields
    return Provider(name, decode, modules, single=bool(fields), drafts_with_target=early_exit)
