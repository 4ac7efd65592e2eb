"""How the kernel of paged attention for few rows shares a context out to programs and puts together what they find.

:mod:`specgraph.kernels.attention.paged` says why the cut changes no bit.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from specgraph.kernels.attention.tiles import bound, merge, nothing, seen_range


@triton.jit
def share_out(place, real, max_pieces, PIECE: tl.constexpr, RUN: tl.constexpr, WINDOW: tl.constexpr):
    """What the rows at ``place`` see and the units it is cut into, of which a program takes every ``programs``-th one.

    A unit is a piece if there are programs for all of them, and a run of ``RUN`` pieces otherwise.

    Returns:
        The first position that a row sees, the one after the last; the first piece, the one after the last; pieces per
        unit; the number of the first unit, the number of units, and that of programs that have any.
    """
    low, end = seen_range(place, real, WINDOW)
    first = low // PIECE
    last = tl.minimum((end + PIECE - 1) // PIECE, max_pieces)
    pieces = last - first
    programs = tl.num_programs(2)
    per = tl.where(pieces <= programs, 1, RUN)
    first_unit = first // per
    units = tl.where(pieces > 0, (last - 1) // per - first_unit + 1, 0)
    return low, end, first, last, per, first_unit, units, tl.minimum(programs, units)


@triton.jit
def store_unit(partials, index, real, top, total, summed, DVP: tl.constexpr, BLOCK_R: tl.constexpr):
    """Leave the ``real`` rows of a unit for the program that merges: ``[BLOCK_R * (2 + DVP)]`` float32."""
    lane = tl.arange(0, BLOCK_R)
    partial = partials + index * ((DVP + 2) * BLOCK_R)
    tl.store(partial + lane, top, mask=real)
    tl.store(partial + BLOCK_R + lane, total, mask=real)
    cells = (2 * BLOCK_R + lane * DVP)[None, :] + tl.arange(0, DVP)[:, None]
    tl.store(partial + cells, summed, mask=real[None, :])


@triton.jit
def _load_unit(partials, index, real, DVP: tl.constexpr, BLOCK_R: tl.constexpr):
    """A unit that another program may have left, past this multiprocessor's own cache."""
    lane = tl.arange(0, BLOCK_R)
    partial = partials + index * ((DVP + 2) * BLOCK_R)
    top = tl.load(partial + lane, mask=real, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(partial + BLOCK_R + lane, mask=real, other=0.0, cache_modifier=".cg")
    cells = (2 * BLOCK_R + lane * DVP)[None, :] + tl.arange(0, DVP)[:, None]
    return top, total, tl.load(partial + cells, mask=real[None, :], other=0.0, cache_modifier=".cg")


@triton.jit
def is_last(counter, programs):
    """Whether this program is the last of ``programs`` to come here; what the others have stored can be read then."""
    # Every thread's partial sums, then the count: release. The last to count sees all others': acquire.
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def merge_units(
    partials, first_index, units, first_unit, per, real, scale,
    RUN: tl.constexpr, DVP: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """All units of a tile, in the order in which one program has them: pieces to runs, runs to the whole."""
    top, total, summed = nothing(DVP, BLOCK_R, False)
    run_top, run_total, run_summed = nothing(DVP, BLOCK_R, False)
    for unit in tl.range(0, bound(units), num_stages=4 if BLOCK_R <= 32 else 2):
        unit_top, unit_total, unit_summed = _load_unit(partials, first_index + unit, real, DVP, BLOCK_R)
        if ((first_unit + unit) * per) % RUN == 0:
            top, total, summed = merge(top, total, summed, run_top, run_total, run_summed, scale, False)
            run_top, run_total, run_summed = nothing(DVP, BLOCK_R, False)
        run_top, run_total, run_summed = merge(
            run_top, run_total, run_summed, unit_top, unit_total, unit_summed, scale, False
        )
    return merge(top, total, summed, run_top, run_total, run_summed, scale, False)
