"""Checkpoints of drafts: what they are, how they are read, how a trained head is written."""

from specgraph.checkpoints.save import save_head

__all__ = ["save_head"]
