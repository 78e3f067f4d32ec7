"""Read transformers' settings for assisted generation, which say how many tokens to draft."""

from __future__ import annotations

from typing import Any

from transformers.generation import GenerationConfig

from ...checks import check_int
from ...drafts import AnyDraft
from ...schedules import Schedule

# transformers writes these defaults into the config of every call. A value equal to its default is therefore treated as
# not given.
DEFAULTS = {
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.4,
}
SCHEDULES = {"constant": "constant", "heuristic": "heuristic", "heuristic_transient": "heuristic"}


def read_assistant_settings(
    config: GenerationConfig,
    draft: AnyDraft,
    num_draft_tokens: int | None,
    schedule: str | Schedule | None,
    **given: Any,
) -> tuple[int | None, str | Schedule | None]:
    """Return K and the schedule of a call; None = use the draft's default.

    Args:
        config: the generation config that `generate` prepared.
        draft: the draft of the call. If it is a model, its generation config is read too, as in transformers.
        num_draft_tokens, schedule: our arguments; None = not given.
        given: transformers' arguments, named as in `DEFAULTS`; None = not given.

    Raises:
        NotImplementedError: the confidence threshold is above 0.
        TypeError, ValueError: a setting is given under two names, a number is below 1, or transformers does not have
            the schedule.
    """
    lookup, count = config.prompt_lookup_num_tokens, given["num_assistant_tokens"]
    for name, value, other, other_value in (
        ("num_draft_tokens", num_draft_tokens, "prompt_lookup_num_tokens", lookup),
        ("num_assistant_tokens", count, "prompt_lookup_num_tokens", lookup),
        ("num_assistant_tokens", count, "num_draft_tokens", num_draft_tokens),
        ("num_assistant_tokens_schedule", given["num_assistant_tokens_schedule"], "schedule", schedule),
    ):
        if value is not None and other_value is not None:
            raise ValueError(f"{name}: expected None beside {other}, which is the same, got {value!r}")
    # Like transformers, ignore these settings if there is no draft or if `prompt_lookup_num_tokens` is given.
    has_model = draft is not None and lookup is None
    count, plan, threshold = (_wish(name, given[name], config, draft) if has_model else None for name in DEFAULTS)
    plan = given["num_assistant_tokens_schedule"] if plan is None else plan
    if threshold:
        raise NotImplementedError(
            f"assistant_confidence_threshold: expected None or 0, got {threshold!r}: this loop drafts as many tokens "
            "as schedule= says, whatever their probability ('auto' follows the acceptance rate)"
        )
    if plan not in (None, *SCHEDULES):
        raise ValueError(f"num_assistant_tokens_schedule: expected one of {', '.join(SCHEDULES)}, got {plan!r}")
    if count is not None:
        count = check_int("num_assistant_tokens", count, 1)
    chosen = next((each for each in (num_draft_tokens, lookup, count) if each is not None), None)
    return chosen, SCHEDULES[plan] if schedule is None and plan is not None else schedule


def _wish(name: str, argument: Any, config: GenerationConfig, draft: AnyDraft) -> Any:
    """The value of a setting: the caller's argument, else the value in `config` if it is not the default, else the
    value in the draft model's generation config."""
    if argument is not None:
        return argument
    value = getattr(config, name, None)
    if value is not None and value != DEFAULTS[name]:
        return value
    return getattr(getattr(draft, "generation_config", None), name, None)
