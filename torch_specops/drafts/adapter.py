"""Adapts what a user passes as target and draft."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

from torch import nn

from .base import AnyDraft, DraftSource, LanguageModel, feature_model
from .checked import CheckedDraft
from .model import ModelDraft
from .token_map import TokenMap

__all__ = [
    "as_draft_source",
    "as_language_model",
    "check_pair",
    "evaluating",
    "keep_features",
    "modules_of",
    "refuse_class",
]


def as_language_model(name: str, model: LanguageModel | nn.Module) -> LanguageModel:
    """The model itself, or an adapter around a transformers model."""
    refuse_class(name, model)
    members = ("vocab_size", "device", "max_length", "start", "forward")
    missing = [name for name in members if not hasattr(model, name)]
    if not missing:
        return cast(LanguageModel, model)
    is_transformers = any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__)
    # Of PEFT's models the base is one.
    if is_transformers or hasattr(model, "get_base_model"):
        # Imported only for a transformers model, because `hf` imports this package.
        from ..hf import language_model

        return language_model(model)
    # What `torch.compile` made of it; the loop compiles its own steps.
    original = getattr(model, "_orig_mod", None)
    if isinstance(original, nn.Module):
        return as_language_model(name, original)
    raise TypeError(
        f"{name}: expected a transformers model or a LanguageModel, got {type(model)} without {', '.join(missing)}"
        + ("; of a wrapper, pass the model inside" if isinstance(model, nn.Module) else "")
    )


def refuse_class(name: str, given: object) -> None:
    if isinstance(given, type):
        raise TypeError(f"{name}: expected an object, got the class {given.__name__}")


def as_draft_source(draft: AnyDraft, name: str = "draft") -> DraftSource | None:
    """The source itself, in a `CheckedDraft` if it is a user's, or a `ModelDraft` around a model."""
    if draft is None:
        return None
    refuse_class(name, draft)
    if not hasattr(draft, "propose"):
        if isinstance(draft, nn.Module) or hasattr(draft, "forward"):
            return ModelDraft(as_language_model(name, draft))
        raise TypeError(f"{name}: expected a model, a DraftSource (an object with propose) or None, got {type(draft)}")
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


@contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Puts modules into evaluation mode, and restores the mode of each submodule afterwards."""
    training = [module for own in modules for module in own.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def modules_of(*parts: object) -> list[nn.Module]:
    """The models and drafts that are modules. A transformers model is none of them: its adapter reads a copy."""
    found: list[nn.Module] = []
    for part in parts:
        if isinstance(part, nn.Module):
            found.append(part)
        if isinstance(part, CheckedDraft):
            found += modules_of(part.source)
        elif isinstance(part, (DraftSource, TokenMap)):
            found += modules_of(*(getattr(part, name, None) for name in ("model", "inner")))
    return found
