"""Rows of a drafter that every step runs again, in front of those of the window.

A drafter of several modules computes some rows from drafts: module ``m`` of multi-token prediction takes at row ``p``
the token ``p + m + 1``, which may be a draft when the row is run first. Such rows are provisional until the token is
verified. A step runs them again, always, together with its new rows. So ``R`` rows are *kept*: what the drafter reads
of the last ``R`` verified rows, and how many of these there are. Functions that end in an underscore write arguments in
place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.kernels.step.step import writes


def behind_kept(kept: Tensor, rows: Tensor) -> Tensor:
    """The kept rows ``[B, R, ...]`` and behind them those of the window ``[B, T, ...]``: ``[B, R + T, ...]``."""
    return torch.cat([kept, rows.to(kept.dtype)], dim=1)


def rerun_positions(start: Tensor, num_kept: Tensor, rows: Tensor, *, kept: int) -> Tensor:
    """The positions ``[B, R + T]`` of ``rows`` ``[B, R + T]``. The first ``kept`` (``R``) of them lie before ``start``.

    Only the last ``num_kept`` ``[B]`` of these exist. The others get -1, so that they have no slot.
    """
    row = torch.arange(rows.shape[1], device=start.device)
    positions = start.unsqueeze(1) + row - kept
    return torch.where(row >= kept - num_kept.unsqueeze(1), positions, -1)


def rerun_rows(num_emitted: Tensor, *, kept: int) -> Tensor:
    """How many rows ``[B]`` there are up to the last accepted one, with the kept ones.

    A sequence that emitted nothing has none.
    """
    return torch.where(num_emitted > 0, num_emitted + kept, 0)


def next_module_tokens(tokens: Tensor, num_rows: Tensor, draft: Tensor) -> Tensor:
    """What the next module takes, ``[B, W]``: at each row the token that the last module took one row later.

    At the last of the ``num_rows`` ``[B]`` rows of ``tokens`` ``[B, W]`` this is the new ``draft`` ``[B, 1]``.
    """
    row = torch.arange(tokens.shape[1], device=tokens.device)
    return torch.where(row == num_rows.unsqueeze(1) - 1, draft, tokens.roll(-1, dims=1))


@writes("kept")
def keep_rows_(kept: Tensor, rows: Tensor, num_emitted: Tensor) -> None:
    """Keep the last ``R`` accepted rows of ``rows`` ``[B, R + T, ...]`` in ``kept`` ``[B, R, ...]``.

    A sequence that emitted nothing keeps what it had.
    """
    index = num_emitted.unsqueeze(1) + torch.arange(kept.shape[1], device=kept.device)
    kept.copy_(rows.gather(1, index.view(*index.shape, *[1] * (rows.dim() - 2)).expand(-1, -1, *rows.shape[2:])))


@writes("num_kept")
def count_kept_(num_kept: Tensor, num_emitted: Tensor, *, kept: int) -> None:
    """Add ``num_emitted`` ``[B]`` to the number of kept rows ``num_kept`` ``[B]``, which is at most ``kept``."""
    num_kept.copy_((num_kept + num_emitted).clamp_max(kept))
