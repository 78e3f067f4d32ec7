"""The models of a decoder: what their owners have changed, whether they fit each other, and how they are computed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from ..drafts import DraftSource
from ..models.base import LanguageModel, Part


def models_of(*parts: Part | None) -> list[Part]:
    """Models and drafts, and the models and drafts inside of them, which come first."""
    found: list[Part] = []
    for part in parts:
        if part is not None:
            found += [*models_of(*part.inside), part]
    return found


def versions_of(*parts: Part | None) -> list[Hashable]:
    """The `version` of every model, by which a look tells that it has found a change."""
    return [model.version for model in models_of(*parts)]


def look_at(target: LanguageModel, draft: DraftSource | LanguageModel | None) -> RuntimeError | None:
    """Let the models take over what has changed in them (`LanguageModel.look`), and check that they fit each other.

    Returns:
        Why what was read of texts does not fit a model any more; None = it does. `start` forgets these texts.

    Raises:
        ValueError: a model that cannot be read any more; as `check_pair`.
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
    """Raise ValueError if a model would be read in two places, with one cache."""
    models = [part for part in models_of(target, draft) if isinstance(part, LanguageModel)]
    for index, model in enumerate(models):
        if any(model is other for other in models[:index]):
            raise ValueError(
                "draft: expected other models than the target and other drafts in it have, because each has one cache; "
                f"got the same {type(model).__name__} twice (torch_specops.hf.language_model makes an adapter for each)"
            )


def check_pair(target: LanguageModel, draft: DraftSource | LanguageModel | None) -> None:
    """Raise ValueError if the vocabulary or device of the draft, or of a source inside, is known and differs from the
    target's, or if a model would be read in two places, with one cache."""
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
    """How to compute with these models and drafts without gradients: `torch.inference_mode`, in which a step of small
    models takes up to a fifth less time; or `torch.no_grad`, if a user's code may keep what a forward computes
    (`LanguageModel.is_observed`), because nobody can train with what was made in inference mode.

    The mode may change between two steps. So what is written in more than one step is made outside inference mode
    (`ops.tracing.normal_tensors`): outside of it, its tensors cannot be written.
    """
    is_observed = any(model.is_observed for model in models_of(*parts))
    return torch.no_grad if is_observed else torch.inference_mode


@contextmanager
def evaluating(*parts: Part | None) -> Iterator[None]:
    """Puts models and drafts that are modules into evaluation mode, and restores the mode of each submodule afterwards;
    after an error also whether gradients are computed. A transformers model is no module here: its adapter reads a
    copy."""
    modules = [model for model in models_of(*parts) if isinstance(model, nn.Module)]
    training = [module for own in modules for module in own.modules() if module.training]
    has_gradients = torch.is_grad_enabled()
    try:
        try:
            _set_training(training, False)
            yield
        except BaseException:
            # An interrupt may have come before `torch.no_grad` had ended.
            torch.set_grad_enabled(has_gradients)
            raise
        finally:
            _set_training(training, True)
    finally:
        # Once more, because an interrupt may have come in between.
        _set_training(training, True)


def _set_training(modules: Sequence[nn.Module], training: bool) -> None:
    for module in modules:
        module.training = training
