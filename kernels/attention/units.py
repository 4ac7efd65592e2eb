"""How the attention kernel for few rows distributes a context over programs, and how it merges their partial results.

A partial result is the state of an online softmax over some of the keys: for each of ``BLOCK_R`` (row, head) pairs the
running maximum, the normaliser and the weighted values, all float32.

A context is cut at absolute positions into pieces of ``PIECE`` positions, and ``RUN`` pieces form a run. A *work unit*
(``unit``) is what a program takes at a time: a piece while there are enough programs for all pieces, and a run for a
longer context, so that few partial results have to be merged. Program ``p`` of ``n`` takes the units ``p``, ``p + n``,
``p + 2 n`` and so on. The last program to finish merges the partial results of all units in the order of positions.

:mod:`specgraph.kernels.attention.paged` says why this distribution does not change the bits of a row. Source:
Flash-Decoding (Dao et al. 2023).
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from specgraph.kernels.attention.tiles import bound, merge, nothing, seen_range


@triton.jit
def share_out(place, real, max_pieces, PIECE: tl.constexpr, RUN: tl.constexpr, WINDOW: tl.constexpr):
    """The part of the context that the ``real`` rows at positions ``place`` see, and its division into work units.

    A unit is a piece if there is a program for every piece, and a run of ``RUN`` pieces otherwise.

    Returns:
        - the first position that any row sees, and the position after the last one
        - the first piece, and the piece after the last one
        - the number of pieces per unit
        - the index of the first unit, and the number of units
        - the number of programs that have at least one unit
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
    """Store the partial result of a unit for the program that merges: float32 ``[BLOCK_R * (2 + DVP)]``.

    Only the ``real`` rows are stored.
    """
    lane = tl.arange(0, BLOCK_R)
    partial = partials + index * ((DVP + 2) * BLOCK_R)
    tl.store(partial + lane, top, mask=real)
    tl.store(partial + BLOCK_R + lane, total, mask=real)
    cells = (2 * BLOCK_R + lane * DVP)[None, :] + tl.arange(0, DVP)[:, None]
    tl.store(partial + cells, summed, mask=real[None, :])


@triton.jit
def _load_unit(partials, index, real, DVP: tl.constexpr, BLOCK_R: tl.constexpr):
    """Read the partial result of a unit.

    Another multiprocessor may have written it, so the read bypasses the L1 cache.
    """
    lane = tl.arange(0, BLOCK_R)
    partial = partials + index * ((DVP + 2) * BLOCK_R)
    top = tl.load(partial + lane, mask=real, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(partial + BLOCK_R + lane, mask=real, other=0.0, cache_modifier=".cg")
    cells = (2 * BLOCK_R + lane * DVP)[None, :] + tl.arange(0, DVP)[:, None]
    return top, total, tl.load(partial + cells, mask=real[None, :], other=0.0, cache_modifier=".cg")


@triton.jit
def is_last(counter, programs):
    """Whether this program is the last of ``programs`` to arrive. If so, it can read what the others have stored."""
    # The barrier and the release make every thread's stores visible before the count. The acquire lets the program that
    # counts last see the stores of all others.
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
    """Merge all units of a tile in the order of a single program: pieces into runs, and runs into the whole."""
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
