"""Trains draft heads that read the hidden states of a frozen target, for all drafters that support training."""

from specgraph.training.config import HeadTrainConfig
from specgraph.training.data import format_question
from specgraph.training.run import HeadTrainReport, train_head

__all__ = ["HeadTrainConfig", "HeadTrainReport", "format_question", "train_head"]
