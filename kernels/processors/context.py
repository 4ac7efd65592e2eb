"""What the ops that change logits know of each row: the tokens of the sequence before the token that the row gives.

These are the tokens of the history before the window, and the window's own up to the row. Rows of logits may be fewer
than the rows of the window: the ``R`` rows begin at row ``min(num_forced, T - R)``, as
:mod:`specgraph.kernels.verify.verify` says.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.checks import check_shapes, require
from specgraph.kernels.ops import Op, declare, not_float64, triton_or_reference

CONTEXT = ("rows", "window", "start", "num_forced")
"""The arguments that say what comes before a row, in the order in which kernels take them behind the history."""


@dataclass(slots=True)
class Context:
    """The arguments that such ops share.

    Args:
        logits: ``[B, R, V]`` of any float dtype, the rows from ``min(num_forced, T - R)`` of the window on.
        history: int64 ``[N, S]``, the tokens of each sequence; those before ``start`` are read.
        rows: int64 ``[B]``, the row of ``history`` of each sequence, -1 for no sequence.
        window: int64 ``[B, T]``, the tokens at positions ``start``, ``start + 1``, ...
        start: int64 ``[B]``, the position of the window's first token.
        num_forced: int64 ``[B]``, how many of the tokens that the window's rows give are known.
    """

    SHAPES: ClassVar = {
        "logits": "B R V", "history": "N S", "window": "B T", "rows": "B", "start": "B", "num_forced": "B",
    }
    logits: Tensor
    history: Tensor
    rows: Tensor
    window: Tensor
    start: Tensor
    num_forced: Tensor

    def first_rows(self) -> Tensor:
        """The row of the window ``[B]`` that the first row of logits belongs to."""
        return self.num_forced.clamp(max=self.window.shape[1] - self.logits.shape[1])

    def starts(self) -> Tensor:
        """The position ``[B, 1]`` of the window's first token; 0 for no sequence."""
        return torch.where(self.rows >= 0, self.start, 0).unsqueeze(1)

    def lengths(self) -> Tensor:
        """How many tokens of its sequence come before the token that each row gives, int64 ``[B, R]``."""
        rows = torch.arange(self.logits.shape[1], device=self.logits.device)
        return self.starts() + self.first_rows().unsqueeze(1) + rows + 1

    def known_tokens(self, last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens of the history and of the window side by side, their positions, and which of them are known by row
        ``last`` ``[B]`` of the window; all ``[B, S + T]``."""
        history, window, start = self.history[self.rows.clamp_min(0)], self.window, self.starts()
        place = torch.arange(history.shape[1], device=window.device).expand(len(window), -1)
        column = torch.arange(window.shape[1], device=window.device).expand(len(window), -1)
        known = torch.cat([place < start, column <= last.unsqueeze(1)], dim=1)
        return torch.cat([history, window], dim=1), torch.cat([place, start + column], dim=1), known

    def by_position(self) -> Tensor:
        """The tokens of the history, and behind them those of the window, int64 ``[B, S + T]``: element ``i`` is the
        token at position ``i``. What lies behind the window is not known."""
        width = self.window.shape[1]
        history = torch.nn.functional.pad(self.history[self.rows.clamp_min(0)], (0, width))
        place = self.starts() + torch.arange(width, device=history.device)
        return history.scatter(1, place.clamp(max=history.shape[1] - 1), self.window)


def check(given: Any) -> None:
    """Refuse arguments that do not have their class's ``SHAPES``, or more rows of logits than a window has.

    Raises:
        ValueError: names the argument, and what it must be.
    """
    check_shapes(given, **given.SHAPES)
    count, width = given.logits.shape[1], given.window.shape[1]
    require(count <= width, lambda: f"there are {count} rows of logits for a window of {width} rows")


@triton.jit
def load_context(history_ptr, window_ptr, position, start, end, mask):
    """The tokens at each ``position`` of a sequence whose window begins at ``start``; -1 outside of 0 to ``end``."""
    inside = mask & (position >= 0) & (position < end)
    old = tl.load(history_ptr + position, mask=inside & (position < start), other=-1)
    new = tl.load(window_ptr + position - start, mask=inside & (position >= start), other=-1)
    return tl.where(position < start, old, new)


@triton.jit
def row_context(rows_ptr, start_ptr, num_forced_ptr, b, r, longest, count, width):
    """Of row ``r`` of sequence ``b``: its row of the history, where its window begins, and how many tokens come before
    the token that it gives."""
    row = tl.load(rows_ptr + b)
    start = tl.where(row >= 0, tl.minimum(tl.load(start_ptr + b), longest), 0).to(tl.int32)
    first = tl.minimum(tl.load(num_forced_ptr + b).to(tl.int32), width - count)
    return tl.maximum(row, 0), start, start + first + r + 1


def empty(logits: Tensor) -> Tensor:
    """Room ``[B, R, V]`` for changed logits: float32, or float64 for float64 logits."""
    return logits.new_empty(logits.shape, dtype=torch.promote_types(logits.dtype, torch.float32))


def copied(logits: Tensor) -> Tensor:
    """A copy of logits that changed ones are written to."""
    return empty(logits).copy_(logits)


def declare_processor(
    name: str, arguments: type[Any], triton: Callable[..., Tensor], reference: Callable[..., Tensor], *,
    moves_only: bool = False,
) -> Op[..., Tensor]:  # fmt: skip
    """Declare an op that changes logits, with a form in Triton, and one in PyTorch for a CPU and for float64.

    The class of the arguments has the shapes that :func:`check` asks for.
    """

    def fake(given: Any) -> Tensor:
        check(given)
        return empty(given.logits)

    forms = triton_or_reference(triton, reference, covers=not_float64("logits"), moves_only=moves_only)
    return declare(name, arguments, fake, forms)
