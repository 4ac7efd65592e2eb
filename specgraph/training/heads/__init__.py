"""Draft heads that read a frozen target's hidden states: EAGLE-3, and P-EAGLE, which drafts in parallel."""

from .config import HeadTrainConfig
from .run import HeadTrainReport, train_head

__all__ = ["HeadTrainConfig", "HeadTrainReport", "train_head"]
