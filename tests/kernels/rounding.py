"""How far a kernel that computes in float32 may be from the exact result, for operands of 16 bits."""

from __future__ import annotations

import torch
from torch import Tensor


def unit(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding to the nearest number: half of the distance from 1 to the next."""
    return torch.finfo(dtype).eps / 2


def assert_within(found: Tensor, expected: Tensor, error: Tensor) -> None:
    """Each value is within ``error`` of the expected one before it is rounded to its dtype, and so after it.

    Args:
        found: what the kernel gave.
        expected: the exact result, in float64.
        error: for each value, the most that the roundings before the last one can make of it.
    """
    bound = error + unit(found.dtype) * (expected.abs() + error)
    excess = (found.double() - expected).abs() - bound
    at = int(excess.argmax())
    assert bool((excess <= 0).all()), (
        f"value {at} is {float(found.flatten()[at])}, not {float(expected.flatten()[at])}: "
        f"no further than {float(bound.flatten()[at]):.2e} from it is rounding"
    )


def attention_error(spread: Tensor, dtype: torch.dtype) -> Tensor:
    """The error of attention before its result is rounded.

    A weight is rounded to ``dtype`` before it multiplies a value. ``spread`` is the same attention over the magnitudes
    of the values, and at most one rounding of it is lost. Scores, exponentials and sums are float32, for which these
    tests allow 1e-5 everywhere.
    """
    return (unit(dtype) + 1e-5) * spread
