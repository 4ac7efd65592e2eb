"""Which functions of step graphs write arguments in place, so that passes keep their calls and the order of these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import fx

F = TypeVar("F", bound=Callable[..., Any])
WRITES: dict[Callable[..., Any], tuple[str, ...]] = {}
"""The parameters that a function writes in place."""
FINAL_WRITES: dict[Callable[..., Any], tuple[str, ...]] = {}
"""Those of them that hold the next step's values after the call."""


def writes(*names: str, final: bool = True) -> Callable[[F], F]:
    """Mark a function that writes the parameters ``names`` in place, so that dead-code elimination does not remove it.

    ``final``: they hold the next step's values after the call, so that nothing may read them later in the same step.
    """

    def mark(function: F) -> F:
        WRITES[function], FINAL_WRITES[function] = names, names if final else ()
        fx.node.has_side_effect(function)
        return function

    return mark
