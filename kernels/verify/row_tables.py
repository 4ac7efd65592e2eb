"""The columns of the two tables of rows that ``probabilistic`` and ``block`` keep between their launches.

A table is ``[columns, B * R]``, with an entry for each row of logits, so that the lanes of a program read neighbours.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

TARGET_MAX, TARGET_SUM, DRAFT_MAX, DRAFT_SUM, WEIGHT, CHANCE = (tl.constexpr(i) for i in range(6))
"""The columns of the float32 table ``reals``.

They are the largest logit and the sum of exponentials of the target, those of the draft, the weight ``w`` of the
residual, and the weight behind the row, which for ``probabilistic`` is the chance of its draft.
"""
NUM_REALS = 6
ONE_HOT, LIVE, DRAFT = (tl.constexpr(i) for i in range(3))
"""The columns of the int32 table ``integers``: the token of a row whose target is one-hot, or -1; whether the row is
live; and the draft that it verifies."""
NUM_INTEGERS = 3


class Tables(NamedTuple):
    """The two tables, which kernels take as one argument."""

    reals: Tensor
    integers: Tensor


@triton.jit
def column(table_ptr, name: tl.constexpr, lines):
    """The first entry of a column, of a table of ``lines`` rows of logits."""
    return table_ptr + name * lines
