"""Trains small models for tests, demos and tables: a target from text, and a draft that is distilled from it."""

from .config import TrainConfig
from .data import format_question
from .run import TrainReport, run_training

__all__ = ["TrainConfig", "TrainReport", "format_question", "run_training"]
