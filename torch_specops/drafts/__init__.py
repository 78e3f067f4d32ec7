"""Where draft tokens come from; every source satisfies `DraftSource`."""

from .base import Draft, DraftSource, LanguageModel
from .early_exit import EarlyExit
from .model import ModelDraft
from .ngram import NGram
from .prompt_lookup import PromptLookup
from .token_map import TokenMap

__all__ = ["Draft", "DraftSource", "EarlyExit", "LanguageModel", "ModelDraft", "NGram", "PromptLookup", "TokenMap"]
