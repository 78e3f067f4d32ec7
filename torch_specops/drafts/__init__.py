"""Draft sources, one per file. To write your own, derive from `DraftSource` and define `propose`.

Examples:
    >>> import torch
    >>> from torch_specops.drafts import Draft, DraftSource
    >>> class Repeat(DraftSource):
    ...     def propose(self, tokens, lengths, num_draft_tokens, sampling, seeds):
    ...         newest = tokens.gather(1, (lengths - 1).unsqueeze(1))
    ...         return Draft(newest.expand(-1, num_draft_tokens))
    >>> Repeat().propose(torch.tensor([[5, 6, 0]]), torch.tensor([2]), 3, None, None).tokens
    tensor([[6, 6, 6]])

A source that samples sets `deterministic = False`, uses the `sampling` and `seeds` it is given, and returns the logits
that it sampled from, as `ModelDraft` in model.py does.
"""

from ..models import FeatureModel, LanguageModel
from .base import AnyDraft, Draft, DraftSource
from .dflash import DFlash
from .eagle3 import Eagle3
from .early_exit import EarlyExit
from .gemma4 import Gemma4Assistant
from .hierarchical import HierarchicalDraft
from .lookup import PromptLookup, SuffixLookup
from .lookup_else import LookupElse
from .model import ModelDraft
from .mtp import MTP
from .ngram import NGram
from .peagle import PEagle
from .quantised import quantised_copy
from .token_map import TokenMap

__all__ = [
    "MTP",
    "AnyDraft",
    "DFlash",
    "Draft",
    "DraftSource",
    "Eagle3",
    "EarlyExit",
    "FeatureModel",
    "Gemma4Assistant",
    "HierarchicalDraft",
    "LanguageModel",
    "LookupElse",
    "ModelDraft",
    "NGram",
    "PEagle",
    "PromptLookup",
    "SuffixLookup",
    "TokenMap",
    "quantised_copy",
]
