"""What a loop asks of a language model, and how a model reads texts."""

from .base import FeatureModel, LanguageModel, TreeModel

__all__ = ["FeatureModel", "LanguageModel", "TreeModel"]
