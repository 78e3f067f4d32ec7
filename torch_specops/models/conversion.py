"""What a user passes as a model becomes a `LanguageModel`."""

from __future__ import annotations

from torch import nn

from .base import LanguageModel


def refuse_class(name: str, given: object) -> None:
    if isinstance(given, type):
        raise TypeError(f"{name}: expected an object, got the class {given.__name__}")


def as_language_model(name: str, model: LanguageModel | nn.Module) -> LanguageModel:
    """The model itself, or an adapter around a transformers model."""
    refuse_class(name, model)
    if isinstance(model, LanguageModel):
        return model
    is_transformers = any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__)
    # A PEFT model has a transformers model as its base.
    if is_transformers or hasattr(model, "get_base_model"):
        # transformers takes seconds to import.
        from ..hf import language_model

        return language_model(model)
    # Unwrap a result of `torch.compile`, because the loop compiles its own steps.
    original = getattr(model, "_orig_mod", None)
    if isinstance(original, nn.Module):
        return as_language_model(name, original)
    raise TypeError(
        f"{name}: expected a transformers model or a LanguageModel, got {type(model)}"
        + ("; of a wrapper, pass the model inside" if isinstance(model, nn.Module) else "")
        + "; a class of your own must derive from torch_specops.drafts.LanguageModel"
    )
