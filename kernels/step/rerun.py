"""Rows of a drafter that every step runs again, in front of those of the window, as ops of one launch each.

A drafter of several modules computes some rows from drafts: module ``m`` of multi-token prediction takes at row ``p``
the token ``p + m + 1``, which may be a draft when the row is run first. Such rows are provisional until the token is
verified. A step runs them again, always, together with its new rows. So ``R`` rows are *kept*: what the drafter reads
of the last ``R`` verified rows, and how many of these there are.

Shapes are those of :mod:`specgraph.kernels.step.step`: ``B`` sequences, ``T`` rows of the window, ids and counts int64.
Nothing is computed but integers, and hidden states are copied.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.checks import check_shapes, require
from specgraph.kernels.launch import block_size, contiguous, dense_rows, gdc_wait, launch
from specgraph.kernels.ops import declare, triton_or_reference
from specgraph.kernels.step.writes import writes

_BLOCK = 1024


@dataclass(slots=True)
class Rerun:
    """The rows that all modules run in a step: the kept ones, and behind them those of the window.

    Attributes:
        kept_tokens: ``[B, R]``, what the first module takes at each kept row.
        kept_hidden: ``[B, R, H]``, the target's hidden states of the kept rows.
        num_kept: ``[B]``, how many of them there are; they are the last ones.
        tokens: ``[B, T]``, what the first module takes at the rows of the window.
        hidden: ``[B, T, H]``, the target's hidden states of these rows, in the dtype of ``kept_hidden``.
        start: ``[B]``, the position of the first row of the window.
        num_emitted: ``[B]``, how many of the window's rows were accepted.
    """

    kept_tokens: Tensor
    kept_hidden: Tensor
    num_kept: Tensor
    tokens: Tensor
    hidden: Tensor
    start: Tensor
    num_emitted: Tensor


class RerunRows(NamedTuple):
    """What :class:`Rerun` gives.

    Attributes:
        tokens: ``[B, R + T]``.
        hidden: ``[B, R + T, H]``.
        positions: ``[B, R + T]``; -1 for kept rows that there are not, so that they have no slot.
        num_rows: ``[B]``, the number of rows up to the last accepted one. A sequence that emitted nothing has none.
        last: ``[B]``, ``num_rows - 1``.
    """

    tokens: Tensor
    hidden: Tensor
    positions: Tensor
    num_rows: Tensor
    last: Tensor


@dataclass(slots=True)
class NextModuleTokens:
    """What the next module takes, ``[B, W]``: at each row the token that the last one took one row later.

    At the last of the ``num_rows`` ``[B]`` rows of ``tokens`` ``[B, W]`` this is the new ``draft`` ``[B, 1]``. Rows
    behind it are not real.
    """

    tokens: Tensor
    num_rows: Tensor
    draft: Tensor


@dataclass(slots=True)
class KeepRows:
    """Keep the last ``R`` accepted rows of ``tokens`` ``[B, R + T]`` and ``hidden`` ``[B, R + T, H]``, in place.

    ``kept_tokens`` ``[B, R]`` and ``kept_hidden`` ``[B, R, H]`` get the ``R`` rows from row ``num_emitted`` ``[B]`` on,
    and ``num_kept`` ``[B]`` grows by ``num_emitted`` to at most ``R``. A sequence that emitted nothing keeps its rows.
    """

    kept_tokens: Tensor
    kept_hidden: Tensor
    num_kept: Tensor
    tokens: Tensor
    hidden: Tensor
    num_emitted: Tensor


def rerun_reference(given: Rerun) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """:class:`Rerun` in plain PyTorch."""
    kept = given.kept_tokens.shape[1]
    tokens = torch.cat([given.kept_tokens, given.tokens], dim=1)
    hidden = torch.cat([given.kept_hidden, given.hidden], dim=1)
    row = torch.arange(tokens.shape[1], device=tokens.device)
    there = row >= kept - given.num_kept.unsqueeze(1)
    positions = torch.where(there, given.start.unsqueeze(1) + row - kept, -1)
    num_rows = torch.where(given.num_emitted > 0, given.num_emitted + kept, 0)
    return tokens, hidden, positions, num_rows, num_rows - 1


def next_module_tokens_reference(given: NextModuleTokens) -> Tensor:
    """:class:`NextModuleTokens` in plain PyTorch."""
    row = torch.arange(given.tokens.shape[1], device=given.tokens.device)
    return torch.where(row == given.num_rows.unsqueeze(1) - 1, given.draft, given.tokens.roll(-1, dims=1))


def keep_rows_reference(given: KeepRows) -> None:
    """:class:`KeepRows` in plain PyTorch."""
    kept = given.kept_tokens.shape[1]
    index = given.num_emitted.unsqueeze(1) + torch.arange(kept, device=given.tokens.device)
    given.kept_tokens.copy_(given.tokens.gather(1, index))
    given.kept_hidden.copy_(given.hidden.gather(1, index.unsqueeze(2).expand(-1, -1, given.hidden.shape[2])))
    given.num_kept.copy_((given.num_kept + given.num_emitted).clamp_max(kept))


@triton.jit
def _rerun_kernel(
    out_tokens, out_hidden, out_positions, out_rows, out_last, kept_tokens, kept_hidden, num_kept, tokens, hidden,
    start, num_emitted, length, width, outer, inner, KEPT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """Write a part of one row. The grid is (B * (R + T), blocks of features)."""
    gdc_wait(PDL)
    total = length + KEPT
    b, row = (tl.program_id(0) // total).to(tl.int64), tl.program_id(0) % total
    place, old = tl.program_id(0).to(tl.int64), row < KEPT
    # ---- hidden = the kept rows, then those of the window; columns are features: [BLOCK]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    before = tl.load(kept_hidden + (b * KEPT + row) * width + column, mask=inside & old, other=0.0)
    new = tl.load(hidden + b * outer + (row - KEPT) * inner + column, mask=inside & (row >= KEPT), other=0.0)
    tl.store(out_hidden + place * width + column, tl.where(old, before, new), mask=inside)
    # ---- tokens alike; positions = start - R + row, and -1 for kept rows that there are not
    if tl.program_id(1) == 0:
        kept_token = tl.load(kept_tokens + b * KEPT + row, mask=old, other=0)
        token = tl.load(tokens + b * length + row - KEPT, mask=row >= KEPT, other=0)
        tl.store(out_tokens + place, tl.where(old, kept_token, token))
        there = row >= KEPT - tl.load(num_kept + b)
        tl.store(out_positions + place, tl.where(there, tl.load(start + b) + row - KEPT, -1))
        emitted = tl.load(num_emitted + b)
        rows = tl.where(emitted > 0, emitted + KEPT, 0)
        tl.store(out_rows + b, rows, mask=row == 0)
        tl.store(out_last + b, rows - 1, mask=row == 0)


@triton.jit
def _next_module_tokens_kernel(out, tokens, num_rows, draft, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """The tokens of up to ``BLOCK`` rows of one sequence. The grid is (B, blocks of rows)."""
    gdc_wait(PDL)
    b = tl.program_id(0)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    following = tl.where(row + 1 < width, row + 1, 0)
    token = tl.load(tokens + b * width + following, mask=row < width, other=0)
    token = tl.where(row == tl.load(num_rows + b) - 1, tl.load(draft + b), token)
    tl.store(out + b * width + row, token, mask=row < width)


@triton.jit
def _keep_rows_kernel(
    kept_tokens, kept_hidden, num_kept, tokens, hidden, num_emitted, total, width, KEPT: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """Keep a part of one row. The grid is (B * R, blocks of features)."""
    gdc_wait(PDL)
    b, row = (tl.program_id(0) // KEPT).to(tl.int64), tl.program_id(0) % KEPT
    emitted, place = tl.load(num_emitted + b), tl.program_id(0).to(tl.int64)
    # ---- kept[row] = the call's row num_emitted + row; columns are features: [BLOCK]
    source = b * total + emitted + row
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(hidden + source * width + column, mask=column < width)
    tl.store(kept_hidden + place * width + column, value, mask=column < width)
    if tl.program_id(1) == 0:
        tl.store(kept_tokens + place, tl.load(tokens + source))
        tl.store(num_kept + b, tl.minimum(tl.load(num_kept + b) + emitted, KEPT), mask=row == 0)


def rerun_triton(given: Rerun) -> RerunRows:
    """:class:`Rerun` in one kernel."""
    out = _rerun_fake(given)
    _, kept, width = given.kept_hidden.shape
    hidden, block = dense_rows(given.hidden), block_size(width, _BLOCK)
    launch(
        _rerun_kernel, (out.tokens.numel(), triton.cdiv(width, block)), *out,
        *contiguous(given, "kept_tokens", "kept_hidden", "num_kept", "tokens"), hidden,
        *contiguous(given, "start", "num_emitted"), given.tokens.shape[1], width, hidden.stride(0), hidden.stride(1),
        KEPT=kept, BLOCK=block, num_warps=4,
    )
    return out


def next_module_tokens_triton(given: NextModuleTokens) -> Tensor:
    """:class:`NextModuleTokens` in one kernel."""
    out = _next_module_tokens_fake(given)
    batch, width = out.shape
    block = block_size(width, 256)
    launch(
        _next_module_tokens_kernel, (batch, triton.cdiv(width, block)), out,
        *contiguous(given, "tokens", "num_rows", "draft"), width, BLOCK=block, num_warps=1,
    )
    return out


def keep_rows_triton(given: KeepRows) -> None:
    """:class:`KeepRows` in one kernel."""
    batch, kept, width = given.kept_hidden.shape
    state = (given.kept_tokens, given.kept_hidden, given.num_kept)
    require(all(tensor.is_contiguous() for tensor in state), lambda: "what is kept must be contiguous")
    block = block_size(width, _BLOCK)
    launch(
        _keep_rows_kernel, (batch * kept, triton.cdiv(width, block)), *state,
        *contiguous(given, "tokens", "hidden", "num_emitted"), given.tokens.shape[1], width, KEPT=kept, BLOCK=block,
        num_warps=4,
    )


def _rerun_fake(given: Rerun) -> RerunRows:
    hidden, kept = given.hidden, given.kept_hidden
    check_shapes(
        given, kept_tokens="B R", kept_hidden="B R H", num_kept="B", tokens="B T", hidden="B T H", start="B",
        num_emitted="B",
    )
    require(hidden.dtype == kept.dtype, lambda: f"hidden is {hidden.dtype}, and what is kept is {kept.dtype}")
    batch, length = given.tokens.shape[0], given.tokens.shape[1] + given.kept_tokens.shape[1]
    ids, counts = given.tokens.new_empty, given.num_emitted.new_empty
    rows = hidden.new_empty(batch, length, hidden.shape[2])
    return RerunRows(ids(batch, length), rows, ids(batch, length), counts(batch), counts(batch))


def _next_module_tokens_fake(given: NextModuleTokens) -> Tensor:
    check_shapes(given, tokens="B W", num_rows="B", draft="B 1")
    return given.tokens.new_empty(given.tokens.shape)


def _keep_rows_fake(given: KeepRows) -> None:
    check_shapes(given, kept_tokens="B R", kept_hidden="B R H", tokens="B W", hidden="B W H")


rerun = declare(
    "rerun", Rerun, _rerun_fake, triton_or_reference(rerun_triton, rerun_reference, moves_only=True),
).function
next_module_tokens = declare(
    "next_module_tokens", NextModuleTokens, _next_module_tokens_fake,
    triton_or_reference(next_module_tokens_triton, next_module_tokens_reference, moves_only=True),
).function
KEEP_ROWS = declare(
    "keep_rows", KeepRows, _keep_rows_fake, triton_or_reference(keep_rows_triton, keep_rows_reference, moves_only=True),
    mutates=("kept_tokens", "kept_hidden", "num_kept"),
)
keep_rows_ = writes(*KEEP_ROWS.mutates)(KEEP_ROWS.function)
