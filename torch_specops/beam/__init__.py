"""Beam search with a draft."""

from .search import BeamOutput, beam_search
from .tree import TreeModel

__all__ = ["BeamOutput", "TreeModel", "beam_search"]
