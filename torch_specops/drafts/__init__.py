"""Where draft tokens come from; every source satisfies `DraftSource`."""

from .base import Draft, DraftSource, LanguageModel
from .model import ModelDraft
from .prompt_lookup import PromptLookup

__all__ = ["Draft", "DraftSource", "LanguageModel", "ModelDraft", "PromptLookup"]
