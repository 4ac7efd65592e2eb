"""Checkpoints of drafts: what they are, how they are read, how a trained head is written."""

from specgraph.checkpoints.checkpoint import Checkpoint, open_checkpoint
from specgraph.checkpoints.eagle3 import load_head, shared_notes
from specgraph.checkpoints.options import Choice, HeadOptions, read_options
from specgraph.checkpoints.save import save_head

__all__ = ["Checkpoint", "Choice", "HeadOptions", "load_head", "open_checkpoint", "read_options", "save_head",
           "shared_notes"]  # fmt: skip
