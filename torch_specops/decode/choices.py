"""What a caller may choose by name or by object, made into what the loop uses."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from .. import ops, schedules
from ..drafts import DraftSource, LanguageModel, ModelDraft
from ..sampling import SamplingParams, SamplingTensors
from ..schedules import Schedule
from .state import Verify

__all__ = ["as_draft_source", "as_language_model", "as_sampling", "as_schedule", "as_verify", "resolve_compile"]


def as_language_model(name: str, model: LanguageModel | nn.Module) -> LanguageModel:
    if isinstance(model, nn.Module):
        # The one import against the layers: a transformers model needs its adapter, and nothing else does.
        from ..hf import language_model

        return language_model(model)
    if isinstance(model, LanguageModel):
        return model
    raise TypeError(f"{name}: expected a transformers model or a LanguageModel, got {type(model)}")


def as_draft_source(draft: DraftSource | LanguageModel | nn.Module | None) -> DraftSource | None:
    if draft is None or isinstance(draft, DraftSource):
        return draft
    if isinstance(draft, (nn.Module, LanguageModel)):
        return ModelDraft(as_language_model("draft", draft))
    raise TypeError(f"draft: expected a model, a DraftSource or None, got {type(draft)}")


def as_sampling(sampling: SamplingParams | None, otherwise: SamplingParams) -> SamplingParams:
    if sampling is not None and not isinstance(sampling, SamplingParams):
        raise TypeError(f"sampling: expected SamplingParams, got {type(sampling)}")
    return otherwise if sampling is None else sampling


def as_schedule(schedule: str | Schedule, num_draft_tokens: int) -> Schedule:
    if isinstance(schedule, Schedule):
        return schedule
    if schedule == "constant":
        return schedules.Constant(num_draft_tokens)
    if schedule == "heuristic":
        return schedules.Heuristic(num_draft_tokens, maximum=max(20, num_draft_tokens))
    if schedule == "optimal":
        # The cost ratio stands until it is measured.
        return schedules.Optimal(0.1, buckets=optimal_buckets(num_draft_tokens))
    raise ValueError(f"schedule: expected 'constant', 'heuristic', 'optimal' or a Schedule, got {schedule!r}")


def optimal_buckets(num_draft_tokens: int) -> tuple[int, ...]:
    return (0, *(bucket for bucket in schedules.BUCKETS if bucket < num_draft_tokens), num_draft_tokens)


def as_verify(verify: str, draft: DraftSource | None, lenience: float, argmax_lenience: float) -> Verify:
    for name, value in (("lenience", lenience), ("argmax_lenience", argmax_lenience)):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name}: expected a number, got {type(value)}")
        if not 0.0 < value <= 1.0:
            raise ValueError(f"{name}: expected a number in (0, 1], got {value}")
        if value < 1.0 and verify != "exact":
            raise ValueError(f"{name}: only verify='exact' can be lenient; expected 1, got {value} with {verify!r}")
    if verify == "exact":
        lossy: dict[str, Any] = {"lenience": lenience, "argmax_lenience": argmax_lenience}
        return partial(_verify_exact, **{name: value for name, value in lossy.items() if value < 1.0})
    if verify == "block":
        return _verify_block
    if verify != "sigmoid":
        raise ValueError(f"verify: expected 'exact', 'block' or 'sigmoid', got {verify!r}")
    if draft is None or draft.deterministic:
        raise ValueError("verify: 'sigmoid' compares two models' logits; expected a draft with probabilities")
    return _verify_sigmoid


# Steps whose gain pays for compiling on a CPU: 3,500 (greedy) to 7,100 (sampled) by benchmarks/results, cpu-compile and
# cpu-loop-austen-bytes.
STEPS_THAT_PAY = 8000


def resolve_compile(
    compile: bool | str, target: LanguageModel, draft: DraftSource | None, num_steps: float
) -> tuple[bool, str]:
    """Whether to compile, and why.

    Args:
        num_steps: eager steps done, and those that what is asked for cannot do without.
    """
    models = (target, getattr(draft, "model", None))
    obstacle = next((why for model in models if (why := getattr(model, "not_compiled", None))), None)
    if isinstance(compile, bool):
        if compile and obstacle is not None:
            raise ValueError(f"compile: expected False or 'auto', got True: {obstacle}")
        return compile, f"compile={compile} was asked for"
    if compile != "auto":
        raise ValueError(f"compile: expected True, False or 'auto', got {compile!r}")
    if obstacle is not None:
        return False, f"eager: {obstacle}"
    device = target.device
    if device.type == "cuda":
        return True, "compiled: on CUDA the host would be the slowest part of a step"
    if draft is not None and draft.deterministic:
        # Text without a match has no drafts, and a forward's time is the tokens it reads.
        return False, f"eager: on {device.type} it reads the proposed tokens alone, a compiled step always K"
    pays = f"on {device.type} compiling pays after about {STEPS_THAT_PAY:,} steps"
    if num_steps >= STEPS_THAT_PAY:
        return True, f"compiled: {pays}"
    return False, f"eager: {pays}, and {num_steps:,.0f} are done or certain"


def _verify_exact(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    accept_uniforms: Tensor,
    sample_uniforms: Tensor,
    sampling: SamplingTensors,
    draft_lse: Tensor | None,
    **lenience: Any,
) -> tuple[Tensor, Tensor]:
    return ops.verify_exact(
        target_logits,
        draft_tokens,
        draft_logits,
        accept_uniforms,
        sample_uniforms,
        sampling.temperature,
        draft_lse,
        **sampling.filters,
        **lenience,
    )


def _verify_block(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    accept_uniforms: Tensor,
    sample_uniforms: Tensor,
    sampling: SamplingTensors,
    draft_lse: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return ops.verify_block(
        target_logits,
        draft_tokens,
        draft_logits,
        accept_uniforms,
        sample_uniforms,
        sampling.temperature,
        draft_lse,
        **sampling.filters,
    )


def _verify_sigmoid(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    accept_uniforms: Tensor,
    sample_uniforms: Tensor,
    sampling: SamplingTensors,
    draft_lse: Tensor | None,
) -> tuple[Tensor, Tensor]:
    target_logits = _filtered(target_logits, sampling)
    uniforms = accept_uniforms, sample_uniforms
    if draft_logits is None:
        # No drafts in this step: one token from the target.
        return ops.verify_exact(target_logits, draft_tokens, None, *uniforms, sampling.temperature)
    draft_logits = _filtered(draft_logits, sampling)
    return ops.verify_sigmoid(target_logits, draft_tokens, draft_logits, *uniforms, temperature=sampling.temperature)


def _filtered(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """[B, n, V] without what top-k, top-p and min-p remove: `verify_sigmoid` takes no filters of its own."""
    if not sampling.filters:
        return logits
    rows = logits.shape[1]
    each = {name: value.repeat_interleave(rows) for name, value in sampling.filters.items()}
    temperature = sampling.temperature.repeat_interleave(rows)
    return ops.filter_logits(logits.flatten(0, 1), temperature, **each).unflatten(0, logits.shape[:2])
