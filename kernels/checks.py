"""Checks of arguments that the ops of several rooms share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def require(condition: bool, message: Callable[[], str]) -> None:
    """Raise ``ValueError`` with ``message()`` unless ``condition`` holds. The condition may be of symbolic shapes."""
    torch._check_value(condition, message)  # type: ignore[no-untyped-call]


def check_batch(name: str, values: Tensor, batch: int) -> None:
    """Raise ``ValueError`` unless ``values`` has one row per sequence."""
    require(values.shape[0] == batch, lambda: f"{name} must have one row per sequence, {batch}, not {values.shape[0]}")
