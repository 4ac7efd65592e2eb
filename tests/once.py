"""A cache that knows defaults, for what tests make once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

Made = TypeVar("Made")


def once(make: Callable[..., Made]) -> Callable[..., Made]:
    """``make``, whose results are kept.

    ``functools.cache`` would make another one where a default is given and not left out.
    """
    signature, cached = inspect.signature(make), functools.cache(make)

    @functools.wraps(make)
    def call(*args: Any, **options: Any) -> Made:
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        return cached(*bound.args, **bound.kwargs)

    return call
