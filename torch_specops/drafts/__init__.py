"""Where draft tokens come from; every source satisfies `DraftSource`."""

from .base import CachedModel, Draft, DraftSource
from .model import ModelDraft
from .prompt_lookup import PromptLookup

__all__ = ["CachedModel", "Draft", "DraftSource", "ModelDraft", "PromptLookup"]
