"""Drafters: one file each."""

from specgraph.drafters.base import Drafter
from specgraph.drafters.draft_model import draft_model
from specgraph.drafters.ngram import ngram
from specgraph.drafters.none import none

__all__ = ["Drafter", "draft_model", "ngram", "none"]
