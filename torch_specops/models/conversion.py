"""What a user passes as a model becomes a `LanguageModel`."""

from __future__ import annotations

from typing import Any

from torch import nn

from .base import LanguageModel


def refuse_class(name: str, given: object) -> None:
    if isinstance(given, type):
        raise TypeError(f"{name}: expected an object, got the class {given.__name__}")


def as_language_model(name: str, model: LanguageModel | nn.Module, *, invariant: bool = False) -> LanguageModel:
    """The model itself, or an adapter around a transformers model."""
    refuse_class(name, model)
    if isinstance(model, LanguageModel):
        if invariant and not model.invariant:
            raise ValueError(
                f"invariant: expected {name} to be a transformers model, or torch_specops.hf.language_model(model, "
                f"invariant=True), got a {type(model).__name__} that is not invariant"
            )
        return model
    if _is_transformers(model):
        # transformers takes seconds to import.
        from ..hf import language_model

        return language_model(model, invariant=invariant)
    # Unwrap a result of `torch.compile`, because the loop compiles its own steps.
    original = getattr(model, "_orig_mod", None)
    if isinstance(original, nn.Module):
        return as_language_model(name, original, invariant=invariant)
    raise TypeError(
        f"{name}: expected a transformers model or a LanguageModel, got {type(model)}"
        + ("; of a wrapper, pass the model inside" if isinstance(model, nn.Module) else "")
        + "; a class of your own must derive from torch_specops.drafts.LanguageModel"
    )


def _is_transformers(model: object) -> bool:
    # A PEFT model has a transformers model as its base.
    kinds = type(model).__mro__
    return any(kind.__module__.startswith("transformers.") for kind in kinds) or hasattr(model, "get_base_model")


def new_shadow(target: LanguageModel | nn.Module) -> tuple[Any, Any] | None:
    """The transformers model of a target, and a `ShadowModel` that has not looked at it; None = the target is not of
    transformers."""
    target = getattr(target, "_orig_mod", target)
    if isinstance(target, (LanguageModel, type)) or not _is_transformers(target):
        return None
    from ..hf.architecture import unwrapped
    from ..hf.shadow_model import ShadowModel

    return unwrapped(target), ShadowModel()


def invariant_forward(model: nn.Module) -> Any:
    """A trainer's forward whose logits are, bit for bit, those of a decoder with `invariant=True`.

    Args:
        model: a transformers model that `SpeculativeDecoder(model, invariant=True)` takes, in any mode.

    Returns:
        A callable with the signature of the model's forward, which takes whole texts: `input_ids` [B, P] and
        `attention_mask` [B, P], with padding on either side. It runs the modules of a copy in evaluation mode over the
        model's own parameters, which get gradients. Logits of padding are not defined.

    Raises:
        TypeError, ValueError: the model is refused (`SpeculativeDecoder`). From a call: a cache, positions, `labels`,
            or a model that has changed and is refused now.
        RuntimeError: from the first call, if tokens that are read in pieces have other bits; names the module.

    Examples:
        >>> import torch, transformers, torch_specops
        >>> config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, eos_token_id=None)
        >>> policy = transformers.GPT2LMHeadModel(config)
        >>> output = torch_specops.generate(policy, [[5, 6, 7]], max_new_tokens=8, logprobs="raw", invariant=True)
        >>> logits = torch_specops.invariant_forward(policy)(output.sequences).logits
        >>> logprobs = torch_specops.raw_logprobs(logits[:, :-1], output.sequences[:, 1:])
        >>> torch.equal(logprobs[:, 2:], output.logprobs[:, 3:])
        True
    """
    # transformers takes seconds to import.
    from ..hf.invariant_forward import InvariantForward

    return InvariantForward(model)
