"""Checks of arguments that the ops of several rooms share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def require(condition: bool, message: Callable[[], str]) -> None:
    """Raise ``ValueError`` with ``message()`` unless ``condition`` holds. The condition may be of symbolic shapes."""
    torch._check_value(condition, message)  # type: ignore[no-untyped-call]


def check_batch(given: object, batch: int, *names: str) -> None:
    """Raise ``ValueError`` unless the arguments of these names, each a tensor, several or None, have ``batch`` rows."""
    for name in names:
        values = getattr(given, name)
        for part in values if isinstance(values, list) else [values]:
            _check_batch(name, part, batch)


def _check_batch(name: str, values: Tensor | None, batch: int) -> None:
    rows = batch if values is None else values.shape[0]
    require(rows == batch, lambda: f"{name} must have one row per sequence, {batch}, not {rows}")
