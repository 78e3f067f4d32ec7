"""Adapts a user's model to `LanguageModel`."""

from __future__ import annotations

from typing import cast

from torch import nn

from .base import LanguageModel

__all__ = ["as_language_model", "refuse_class"]


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
