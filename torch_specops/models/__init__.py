"""The interface of language models, and functions that prefill them."""

from .base import FeatureModel, LanguageModel, TreeModel

__all__ = ["FeatureModel", "LanguageModel", "TreeModel"]
