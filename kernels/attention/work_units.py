"""How the attention kernel for few rows distributes a context over programs, and how it merges their partial results.

A partial result is the state of an online softmax over some of the keys: for each of ``BLOCK_R`` (row, head) pairs the
running maximum, the normaliser and the weighted values, all float32.

A context is cut at absolute positions into pieces of ``PIECE`` positions, and ``RUN`` pieces form a run. A *work unit*
is what a program takes at a time: a piece while there are enough programs for all pieces, and a run for a longer
context, so that few partial results have to be merged. Program ``p`` of ``n`` takes the work units ``p``, ``p + n``,
``p + 2 n`` and so on. The last program to finish merges the partial results of all work units in the order of
positions.

:mod:`specgraph.kernels.attention.paged` says why this distribution does not change the bits of a row. Source:
Flash-Decoding (Dao et al. 2023).
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from specgraph.kernels.attention.tiles import empty_state, loop_bound, merge, visible_range


@triton.jit
def divide_context(position, real, max_pieces, PIECE: tl.constexpr, RUN: tl.constexpr, WINDOW: tl.constexpr):
    """The part of the context that the ``real`` rows at ``position`` see, and its division into work units.

    A work unit is a piece if there is a program for every piece, and a run of ``RUN`` pieces otherwise.

    Returns:
        - the first position that any row sees, and the position after the last one
        - the first piece, and the piece after the last one
        - the number of pieces per work unit
        - the index of the first work unit, and the number of work units
        - the number of programs that have at least one work unit
    """
    low, end = visible_range(position, real, WINDOW)
    first = low // PIECE
    last = tl.minimum((end + PIECE - 1) // PIECE, max_pieces)
    pieces = last - first
    programs = tl.num_programs(2)
    pieces_per_unit = tl.where(pieces <= programs, 1, RUN)
    first_work_unit = first // pieces_per_unit
    work_units = tl.where(pieces > 0, (last - 1) // pieces_per_unit - first_work_unit + 1, 0)
    return low, end, first, last, pieces_per_unit, first_work_unit, work_units, tl.minimum(programs, work_units)


@triton.jit
def store_work_unit(partials, index, real, row_max, row_sum, acc, DVP: tl.constexpr, BLOCK_R: tl.constexpr):
    """Store the partial result of a work unit for the program that merges: float32 ``[BLOCK_R * (2 + DVP)]``.

    Only the ``real`` rows are stored.
    """
    lane = tl.arange(0, BLOCK_R)
    partial = partials + index * ((DVP + 2) * BLOCK_R)
    tl.store(partial + lane, row_max, mask=real)
    tl.store(partial + BLOCK_R + lane, row_sum, mask=real)
    cells = (2 * BLOCK_R + lane * DVP)[None, :] + tl.arange(0, DVP)[:, None]
    tl.store(partial + cells, acc, mask=real[None, :])


@triton.jit
def _load_work_unit(partials, index, real, DVP: tl.constexpr, BLOCK_R: tl.constexpr):
    """Read the partial result of a work unit.

    Another multiprocessor may have written it, so the read bypasses the L1 cache.
    """
    lane = tl.arange(0, BLOCK_R)
    partial = partials + index * ((DVP + 2) * BLOCK_R)
    row_max = tl.load(partial + lane, mask=real, other=float("-inf"), cache_modifier=".cg")
    row_sum = tl.load(partial + BLOCK_R + lane, mask=real, other=0.0, cache_modifier=".cg")
    cells = (2 * BLOCK_R + lane * DVP)[None, :] + tl.arange(0, DVP)[:, None]
    return row_max, row_sum, tl.load(partial + cells, mask=real[None, :], other=0.0, cache_modifier=".cg")


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
def merge_work_units(
    partials, first_index, work_units, first_work_unit, pieces_per_unit, real, scale,
    RUN: tl.constexpr, DVP: tl.constexpr, BLOCK_R: tl.constexpr,
):
    """Merge all work units of a tile in the order of a single program: pieces into runs, and runs into the whole."""
    row_max, row_sum, acc = empty_state(DVP, BLOCK_R, False)
    run_max, run_sum, run_acc = empty_state(DVP, BLOCK_R, False)
    for work_unit in tl.range(0, loop_bound(work_units), num_stages=4 if BLOCK_R <= 32 else 2):
        unit_max, unit_sum, unit_acc = _load_work_unit(partials, first_index + work_unit, real, DVP, BLOCK_R)
        if ((first_work_unit + work_unit) * pieces_per_unit) % RUN == 0:
            row_max, row_sum, acc = merge(row_max, row_sum, acc, run_max, run_sum, run_acc, scale, False)
            run_max, run_sum, run_acc = empty_state(DVP, BLOCK_R, False)
        run_max, run_sum, run_acc = merge(run_max, run_sum, run_acc, unit_max, unit_sum, unit_acc, scale, False)
    return merge(row_max, row_sum, acc, run_max, run_sum, run_acc, scale, False)
