"""Functions for the models of a decoder. The functions find changes by the user, check that target and draft fit each
other, and set the mode in which the models run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from ..drafts import DraftSource
from ..models.base import LanguageModel, Part


def models_of(*parts: Part | None) -> list[Part]:
    """These models and drafts, and the models and drafts inside them. Each part comes after the parts inside it."""
    models: list[Part] = []
    for part in parts:
        if part is not None:
            models += [*models_of(*part.inside), part]
    return models


def versions_of(*parts: Part | None) -> list[Hashable]:
    """The `version` of every model and draft. A version changes when `look` finds a change."""
    return [model.version for model in models_of(*parts)]


def look_at(target: LanguageModel, draft: DraftSource | LanguageModel | None) -> RuntimeError | None:
    """Let the models adapt to changes that the user has made (`LanguageModel.look`), and check that target and draft
    fit each other.

    Returns:
        The error of a model that no longer fits its cache, so that `start` must be called next. None = all caches fit.

    Raises:
        ValueError: a model can no longer be used; or an error of `check_pair`.
    """
    misfit = None
    for name, part in (("target", target), ("draft", draft)):
        for model in models_of(part):
            try:
                model.look()
            except ValueError as error:
                raise ValueError(_named(name, error)) from error
            except RuntimeError as error:
                misfit = RuntimeError(_named(name, error))
    check_pair(target, draft)
    return misfit


def _named(name: str, error: Exception) -> str:
    return f"{name}: {str(error).removeprefix('model: ')}"


def check_read_once(target: LanguageModel, draft: Part | None) -> None:
    """Raise ValueError if a model with one cache would be used in two places."""
    models = [part for part in models_of(target, draft) if isinstance(part, LanguageModel)]
    for index, model in enumerate(models):
        if any(model is other for other in models[:index]):
            raise ValueError(
                "draft: expected other models than the target and other drafts in it have, because each has one cache; "
                f"got the same {type(model).__name__} twice (torch_specops.hf.language_model makes an adapter for each)"
            )


def check_pair(target: LanguageModel, draft: DraftSource | LanguageModel | None) -> None:
    """Raise ValueError if the draft, or a source inside it, has another vocabulary or device than the target. Also
    raise if a model with one cache would be used in two places."""
    if draft is None:
        return
    check_read_once(target, draft)
    if draft.vocab_size is not None and draft.vocab_size != target.vocab_size:
        raise ValueError(
            f"draft: expected the vocabulary of the target ({target.vocab_size} tokens), got {draft.vocab_size} tokens "
            "(torch_specops.drafts.TokenMap reads a draft with other tokens, or with padded logits)"
        )
    if draft.device is not None and draft.device != target.device:
        raise ValueError(f"draft: expected a draft on {target.device}, as the target is, got {draft.device}")
    for inner in draft.inside:
        if isinstance(inner, DraftSource):
            check_pair(target, inner)


def mode_of(*parts: Part | None) -> Callable[[], AbstractContextManager[None]]:
    """The mode without gradients for these models and drafts. Usually the mode is `torch.inference_mode`, in which a
    step of small models takes up to a tenth less time. The mode is `torch.no_grad` if user code may keep tensors of a
    forward (`LanguageModel.is_observed`), because training cannot use tensors from inference mode.

    The mode may change between two steps, and inference tensors cannot be written outside inference mode. Therefore
    `ops.tracing.normal_tensors` makes the tensors that several steps write.
    """
    is_observed = any(model.is_observed for model in models_of(*parts))
    return torch.no_grad if is_observed else torch.inference_mode


@contextmanager
def evaluating(*parts: Part | None) -> Iterator[None]:
    """Put models and drafts that are modules into evaluation mode, and restore the mode of each submodule afterwards.
    After an error, also restore whether gradients are enabled. Transformers models are not affected: their adapters run
    a copy."""
    modules = [model for model in models_of(*parts) if isinstance(model, nn.Module)]
    training = [module for model in modules for module in model.modules() if module.training]
    has_gradients = torch.is_grad_enabled()
    try:
        try:
            _set_training(training, False)
            yield
        except BaseException:
            # An interrupt may have prevented `torch.no_grad` from enabling gradients again.
            torch.set_grad_enabled(has_gradients)
            raise
        finally:
            _set_training(training, True)
    finally:
        # Restore again, because an interrupt may have stopped the first call.
        _set_training(training, True)


def _set_training(modules: Sequence[nn.Module], training: bool) -> None:
    for module in modules:
        module.training = training
