"""Training of draft heads that read a frozen target's hidden states: whatever a drafter says that it trains."""

from .config import HeadTrainConfig
from .run import HeadTrainReport, train_head

__all__ = ["HeadTrainConfig", "HeadTrainReport", "train_head"]
