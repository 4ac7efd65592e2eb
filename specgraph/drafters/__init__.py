"""Drafters: one file each."""

from specgraph.drafters.base import Drafter, Mask
from specgraph.drafters.draft_model import draft_model
from specgraph.drafters.eagle3 import DraftHead, Eagle3, Eagle3Config, eagle3
from specgraph.drafters.ngram import ngram
from specgraph.drafters.none import none

__all__ = ["DraftHead", "Drafter", "Eagle3", "Eagle3Config", "Mask", "draft_model", "eagle3", "ngram", "none"]
