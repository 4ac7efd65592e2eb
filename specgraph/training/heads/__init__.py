"""Trains draft heads that read the hidden states of a frozen target, for all drafters that support training."""

from .config import HeadTrainConfig
from .run import HeadTrainReport, train_head

__all__ = ["HeadTrainConfig", "HeadTrainReport", "train_head"]
