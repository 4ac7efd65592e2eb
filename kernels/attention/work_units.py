"""How the attention kernel for few queries distributes a context over programs, and how it merges partial results.

A partial result is the state ``m_i``, ``l_i``, ``acc`` of an online softmax over some of the keys, for each of
``BLOCK_M`` (query, head) pairs, in float32 (:mod:`specgraph.kernels.attention.tiles`).

A context is cut at absolute positions into *KV splits* of ``KV_SPLIT`` positions, and ``SPLIT_GROUP`` KV splits form a
*split group*. A *work unit* is what a program takes at a time: a KV split while there are enough programs for all of
them, and a split group for a longer context, so that few partial results have to be merged. Program ``p`` of ``n``
takes the work units ``p``, ``p + n``, ``p + 2 n`` and so on. The last program to finish merges the partial results of
all work units in the order of positions.

:mod:`specgraph.kernels.attention.paged` says why this distribution does not change the bits of a query. Source:
Flash-Decoding (Dao et al. 2023).
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from specgraph.kernels.attention.tiles import empty_state, loop_bound, merge, visible_range


@triton.jit
def divide_context(position, real, max_splits, KV_SPLIT: tl.constexpr, SPLIT_GROUP: tl.constexpr, WINDOW: tl.constexpr):
    """The part of the context that the ``real`` queries at ``position`` see, and its division into work units.

    A work unit is a KV split if there is a program for every KV split, and a split group otherwise.

    Returns:
        - the first position that any query sees, and the position after the last one
        - the first KV split, and the KV split after the last one
        - the number of KV splits per work unit
        - the index of the first work unit, and the number of work units
        - the number of programs that have at least one work unit
    """
    low, end = visible_range(position, real, WINDOW)
    first = low // KV_SPLIT
    last = tl.minimum((end + KV_SPLIT - 1) // KV_SPLIT, max_splits)
    splits = last - first
    programs = tl.num_programs(2)
    splits_per_unit = tl.where(splits <= programs, 1, SPLIT_GROUP)
    first_work_unit = first // splits_per_unit
    work_units = tl.where(splits > 0, (last - 1) // splits_per_unit - first_work_unit + 1, 0)
    return low, end, first, last, splits_per_unit, first_work_unit, work_units, tl.minimum(programs, work_units)


@triton.jit
def store_work_unit(partials, index, real, m_i, l_i, acc, DVP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Store the partial result of a work unit for the program that merges: float32 ``[BLOCK_M * (2 + DVP)]``.

    ``m_i`` and ``l_i`` ``[BLOCK_M]`` come first, and ``acc`` ``[DVP, BLOCK_M]`` after them. Only the ``real`` pairs are
    stored.
    """
    lane = tl.arange(0, BLOCK_M)
    partial = partials + index * ((DVP + 2) * BLOCK_M)
    tl.store(partial + lane, m_i, mask=real)
    tl.store(partial + BLOCK_M + lane, l_i, mask=real)
    cells = (2 * BLOCK_M + lane * DVP)[None, :] + tl.arange(0, DVP)[:, None]
    tl.store(partial + cells, acc, mask=real[None, :])


@triton.jit
def _load_work_unit(partials, index, real, DVP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Read the partial result of a work unit.

    Another multiprocessor may have written it, so the read bypasses the L1 cache.
    """
    lane = tl.arange(0, BLOCK_M)
    partial = partials + index * ((DVP + 2) * BLOCK_M)
    m_i = tl.load(partial + lane, mask=real, other=float("-inf"), cache_modifier=".cg")
    l_i = tl.load(partial + BLOCK_M + lane, mask=real, other=0.0, cache_modifier=".cg")
    cells = (2 * BLOCK_M + lane * DVP)[None, :] + tl.arange(0, DVP)[:, None]
    return m_i, l_i, tl.load(partial + cells, mask=real[None, :], other=0.0, cache_modifier=".cg")


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
    partials, first_index, work_units, first_work_unit, splits_per_unit, real, scale,
    SPLIT_GROUP: tl.constexpr, DVP: tl.constexpr, BLOCK_M: tl.constexpr,
):
    """Merge all work units of a tile as a single program would: KV splits into groups, and groups into the whole."""
    m_i, l_i, acc = empty_state(DVP, BLOCK_M, False)
    m_group, l_group, acc_group = empty_state(DVP, BLOCK_M, False)
    for work_unit in tl.range(0, loop_bound(work_units), num_stages=4 if BLOCK_M <= 32 else 2):
        m_unit, l_unit, acc_unit = _load_work_unit(partials, first_index + work_unit, real, DVP, BLOCK_M)
        # ---- a split group ends: merge it into the whole
        if ((first_work_unit + work_unit) * splits_per_unit) % SPLIT_GROUP == 0:
            m_i, l_i, acc = merge(m_i, l_i, acc, m_group, l_group, acc_group, scale, False)
            m_group, l_group, acc_group = empty_state(DVP, BLOCK_M, False)
        m_group, l_group, acc_group = merge(m_group, l_group, acc_group, m_unit, l_unit, acc_unit, scale, False)
    return merge(m_i, l_i, acc, m_group, l_group, acc_group, scale, False)
