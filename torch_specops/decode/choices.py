"""What a caller may choose by name or by object, made into what the loop uses."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import schedules
from ..drafts import DraftSource, LanguageModel, ModelDraft
from ..schedules import Schedule
from ..verification import verify_exact, verify_sigmoid
from .state import Verify

__all__ = ["as_draft_source", "as_language_model", "as_schedule", "as_verify", "resolve_compile"]


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


def as_verify(verify: str, draft: DraftSource | None) -> Verify:
    if verify == "exact":
        return verify_exact
    if verify != "sigmoid":
        raise ValueError(f"verify: expected 'exact' or 'sigmoid', got {verify!r}")
    if draft is None or draft.deterministic:
        raise ValueError("verify: 'sigmoid' compares two models' logits; expected a draft with probabilities")
    return _verify_sigmoid


def resolve_compile(compile: bool | str, device: torch.device) -> tuple[bool, str]:
    if isinstance(compile, bool):
        return compile, f"compile={compile} was asked for"
    if compile != "auto":
        raise ValueError(f"compile: expected True, False or 'auto', got {compile!r}")
    if device.type == "cuda":
        return True, "compiled: on CUDA the host would be the slowest part of a step"
    return False, f"eager: on {device.type} compiling takes longer than most outputs take to decode"


def _verify_sigmoid(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    accept_uniforms: Tensor,
    sample_uniforms: Tensor,
    temperature: Tensor,
    draft_lse: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if draft_logits is None:
        # No drafts in this step: one token from the target.
        return verify_exact(target_logits, draft_tokens, None, accept_uniforms, sample_uniforms, temperature)
    return verify_sigmoid(
        target_logits, draft_tokens, draft_logits, accept_uniforms, sample_uniforms, temperature=temperature
    )
