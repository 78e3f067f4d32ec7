"""What a target and its draft must have in common, and how long a text both can read."""

from __future__ import annotations

from ..drafts import DraftSource, LanguageModel

__all__ = ["check_pair", "check_room"]


def check_pair(target: LanguageModel, draft: DraftSource | LanguageModel | None) -> None:
    """Raises ValueError unless the draft has the target's vocabulary and device, where it says which it has."""
    if draft is None:
        return
    if draft.vocab_size is not None and draft.vocab_size != target.vocab_size:
        raise ValueError(
            f"draft: expected the vocabulary of the target ({target.vocab_size} tokens), got {draft.vocab_size} tokens"
        )
    if draft.device is not None and draft.device != target.device:
        raise ValueError(f"draft: expected a draft on {target.device}, as the target is, got {draft.device}")


def check_room(target: LanguageModel, draft: DraftSource | LanguageModel | None, longest: int) -> None:
    """Raises ValueError unless both read prompts and new tokens of `longest` tokens together."""
    for name, model in (("target", target), ("draft", draft)):
        readable = None if model is None else model.max_length
        if readable is not None and longest > readable:
            raise ValueError(
                f"max_new_tokens: expected prompt and new tokens within the {readable} that the {name} reads, "
                f"got {longest}"
            )
