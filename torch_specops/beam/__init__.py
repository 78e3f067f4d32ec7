"""Beam search with a draft."""

from ..models import TreeModel
from .search import BeamOutput, beam_search

__all__ = ["BeamOutput", "TreeModel", "beam_search"]
