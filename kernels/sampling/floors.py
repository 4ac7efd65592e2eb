"""Top-k, top-p and min-p as one number per row: its *floor*, the smallest logit that is kept, found without a sort.

For logits ``[B, R, V]`` (float32, bfloat16 or float16) the result is float32 ``[B * R]``. Top-k and top-p solve the
same problem with different weights. A token's weight is 1 for top-k and its unnormalised probability for top-p::

    floor = min { v : W(v) < goal },   W(v) = sum of the weights of tokens above v,   goal = k or p * (sum of all
    weights)

``W`` falls as ``v`` rises, so the floor can be searched for. The search runs over sort keys, which are integers ordered
like the floats, and keeps a *bracket* of two keys between which the floor lies. A pass evaluates ``W`` at 15 pivots
inside the bracket and narrows it to a sixteenth. bfloat16 takes four passes, float16 five, and float32 eight. The floor
of min-p is ``max + log(min_p)`` and needs no search.

The vocabulary is divided into splits, one per program and row, because one program would read a row too slowly. A pass
needs the sums of all splits of the pass before, so each pass is a launch, and its programs begin by merging these sums.
Nothing waits for the host. A program does not read its logits if the bracket of its row is down to one value, or if the
option is off for the row.

Options apply to the rounded value of ``logit / temperature``. The floor that is found is therefore lowered to the
smallest number that gives the same value after the division, so that ties after the division are kept, as in
``process_logits``.

Sums over a split and sums over splits have a fixed order, and the size of a split depends on the vocabulary alone. So
the bits of a row's floor do not depend on the rest of the batch.

Source: a plain search by multisection. The options themselves are defined as in transformers.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.launch import gdc_launch_dependents, gdc_wait, launch
from specgraph.kernels.sampling.constants import TL_GREEDY_BELOW
from specgraph.kernels.sampling.gumbel import (
    INF_KEY,
    LARGEST,
    MINUS_INF_KEY,
    WARPS,
    clean,
    exponent_scale,
    processed_value,
    sort_key,
    sort_key_value,
)

TILE = 512
"""Tokens of a tile. A thread has four of them and 16 sums for each, which fit into registers."""
_ZERO_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""The number of low bits that are 0 when a value of the dtype is converted to float32."""
_WAYS = tl.constexpr(16)
_LOWEST = tl.constexpr(MINUS_INF_KEY.value - 1)
"""One less than the sort key of -inf."""


@triton.jit
def _short_value(bits, ZERO_BITS: tl.constexpr):
    """The float whose sort key begins with ``bits``, among the floats that end in ``ZERO_BITS`` zero bits."""
    rest = tl.where(bits < 0, (1 << ZERO_BITS) - 1, 0)
    return sort_key_value((bits << ZERO_BITS) | rest)


@triton.jit
def _goal(option_ptr, batch, total, MASS: tl.constexpr):
    option = tl.load(option_ptr + batch)
    return option.to(tl.float32) * total if MASS else tl.minimum(option, 1 << 24).to(tl.float32)


@triton.jit
def _applies(option_ptr, temperature_ptr, batch, vocab, MASS: tl.constexpr):
    """Whether the option can remove tokens from rows of this sequence: it is on, and the rows are not greedy."""
    option = tl.load(option_ptr + batch)
    on = option < 1 if MASS else (option > 0) & (option < vocab)
    return on & (tl.load(temperature_ptr + batch).to(tl.float32) >= TL_GREEDY_BELOW)


@triton.jit
def _bracket(
    option_ptr, brackets_ptr, sums_ptr, row, count, num_rows, splits, search_pass,
    ZERO_BITS: tl.constexpr, SPLITS: tl.constexpr, MASS: tl.constexpr,
):
    """The bracket of a row before pass ``search_pass``: ``W < goal`` is false at its first key and true at its second.

    ``sums`` ``[2, B * R, splits, 16]`` are those of the pass before: the weight of all tokens, then the weight above
    each of the 15 pivots.
    """
    low = tl.full((), _LOWEST, tl.int64) >> ZERO_BITS
    high = tl.full((), INF_KEY, tl.int64) >> ZERO_BITS
    if search_pass > 0:
        at = ((search_pass - 1) * num_rows + row) * 2
        low, high = tl.load(brackets_ptr + at), tl.load(brackets_ptr + at + 1)
        if high - low > 1:
            way, split = tl.arange(0, _WAYS), tl.arange(0, SPLITS)
            begin = ((search_pass - 1) % 2 * num_rows + row).to(tl.int64) * splits
            part = tl.load(
                sums_ptr + (begin + split[:, None]) * _WAYS + way[None, :], mask=split[:, None] < splits, other=0.0
            )
            weight = tl.sum(part, 0)
            goal = _goal(option_ptr, row // count, tl.sum(tl.where(way == 0, weight, 0.0), 0), MASS)
            step = (high - low + _WAYS - 1) // _WAYS
            met = (way > 0) & ((weight < goal) | (low + way * step >= high))
            first = tl.min(tl.where(met, way, _WAYS), 0)
            high = tl.minimum(low + first * step, high)
            low = low + (first - 1) * step
    return low, high


@triton.jit
def _row_largest(largest_ptr, row, splits, SPLITS: tl.constexpr):
    split = tl.arange(0, SPLITS)
    return tl.max(tl.load(largest_ptr + row * splits + split, mask=split < splits, other=-float("inf")), 0)


@triton.jit
def _load_logits(row_ptr, ids_ptr, entry, size, limit, MAPPED: tl.constexpr):
    """Load float32 logits at ``entry``, with -inf beyond the last and where the target does not have the token."""
    x = tl.load(row_ptr + entry, mask=entry < size, other=-float("inf")).to(tl.float32)
    if MAPPED:
        x = tl.where(tl.load(ids_ptr + entry, mask=entry < size, other=limit) < limit, x, -float("inf"))
    return x


@triton.jit(do_not_specialize=["limit"])
def _find_largest(
    logits_ptr, ids_ptr, largest_ptr, vocab, size, limit, splits,
    SPLIT: tl.constexpr, TILE: tl.constexpr, MAPPED: tl.constexpr, PDL: tl.constexpr,
):
    """Store the largest logit of every split, ``[B * R, splits]``."""
    gdc_wait(PDL)
    program = tl.program_id(0)
    row_ptr = logits_ptr + (program // splits).to(tl.int64) * vocab
    top = tl.full((TILE,), -float("inf"), tl.float32)
    for i in range(SPLIT // TILE):
        entry = program % splits * SPLIT + i * TILE + tl.arange(0, TILE)
        top = tl.maximum(top, clean(_load_logits(row_ptr, ids_ptr, entry, size, limit, MAPPED)))
    tl.store(largest_ptr + program, tl.max(top, 0))
    gdc_launch_dependents(PDL)


@triton.jit(do_not_specialize=["count", "num_rows", "limit", "search_pass"])
def _weigh_above(
    logits_ptr, ids_ptr, temperature_ptr, option_ptr, largest_ptr, floors_ptr, brackets_ptr, sums_ptr,
    count, num_rows, vocab, size, limit, splits, search_pass,
    ZERO_BITS: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, MASS: tl.constexpr,
    FLOORED: tl.constexpr, MAPPED: tl.constexpr, PDL: tl.constexpr,
):
    """Pass ``search_pass`` for one split of a row: narrow the bracket, then sum the weights above 15 pivots in it."""
    gdc_wait(PDL)
    row, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    if _applies(option_ptr, temperature_ptr, row // count, vocab, MASS):
        low, high = _bracket(
            option_ptr, brackets_ptr, sums_ptr, row, count, num_rows, splits, search_pass, ZERO_BITS, SPLITS, MASS
        )
        if split == 0:
            tl.store(brackets_ptr + (search_pass * num_rows + row) * 2, low)
            tl.store(brackets_ptr + (search_pass * num_rows + row) * 2 + 1, high)
        if high - low > 1:
            way = tl.arange(0, _WAYS)
            pivot = tl.minimum(low + way * ((high - low + _WAYS - 1) // _WAYS), high)
            bound = _short_value(pivot, ZERO_BITS)
            if MASS:
                largest = _row_largest(largest_ptr, row, splits, SPLITS)
                largest = tl.where(largest > -float("inf"), largest, 0.0)
                scale = exponent_scale(tl.load(temperature_ptr + row // count).to(tl.float32))
            floor = tl.load(floors_ptr + row) if FLOORED else -float("inf")
            # The first of the 16 sums is that of all tokens: no logit that counts is below the smallest float.
            bound = tl.where(way == 0, -float("inf"), bound)
            above = tl.zeros((_WAYS, TILE), tl.float32)
            row_ptr = logits_ptr + row.to(tl.int64) * vocab
            for i in range(SPLIT // TILE):
                entry = split * SPLIT + i * TILE + tl.arange(0, TILE)
                x = _load_logits(row_ptr, ids_ptr, entry, size, limit, MAPPED)
                if FLOORED:
                    x = tl.where(x >= floor, x, -float("inf"))
                weight = tl.full((TILE,), 1.0, tl.float32)
                if MASS:
                    weight = tl.exp2((tl.minimum(x, LARGEST) - largest) * scale)
                above = tl.where(x[None, :] > bound[:, None], above + weight[None, :], above)
            at = ((search_pass % 2 * num_rows + row).to(tl.int64) * splits + split) * _WAYS
            tl.store(sums_ptr + at + way, tl.sum(above, 1))
    gdc_launch_dependents(PDL)


@triton.jit
def _smallest_with(value, high, temperature):
    """The smallest float that gives at least ``value`` when it is divided by ``temperature``.

    The float with the sort key ``high`` does so. Arguments are blocks of one element, so that the division is the one
    of :func:`~specgraph.kernels.sampling.gumbel.processed_value`.
    """
    low = tl.full((1,), _LOWEST, tl.int64) + 1
    for _ in range(32):
        middle = (low + high) >> 1
        met = processed_value(sort_key_value(middle), temperature) >= value
        high = tl.where(met, middle, high)
        low = tl.where(met, low, middle)
    return tl.where(value > -float("inf"), sort_key_value(high), -float("inf"))


@triton.jit(do_not_specialize=["count", "num_rows", "num_passes"])
def _raise_floors(
    temperature_ptr, option_ptr, min_p_ptr, largest_ptr, floors_ptr, brackets_ptr, sums_ptr,
    count, num_rows, vocab, splits, num_passes,
    ZERO_BITS: tl.constexpr, SPLITS: tl.constexpr, SEARCHED: tl.constexpr, MASS: tl.constexpr, MIN: tl.constexpr,
    FLOORED: tl.constexpr, PDL: tl.constexpr,
):
    """For one row, raise the floor to the one that a search has found or that min-p asks for, if that is higher."""
    gdc_wait(PDL)
    row = tl.program_id(0)
    batch = row // count
    one = tl.arange(0, 1)
    temperature = tl.load(temperature_ptr + batch + one).to(tl.float32)
    floor = tl.full((1,), -float("inf"), tl.float32)
    if FLOORED:
        floor = tl.load(floors_ptr + row + one)
    largest = tl.full((1,), float("inf"), tl.float32)
    if MASS or MIN:
        largest = _row_largest(largest_ptr, row, splits, SPLITS) + tl.zeros((1,), tl.float32)
    if SEARCHED:  # noqa: SIM102  (a constexpr branch around a runtime one)
        if _applies(option_ptr, temperature_ptr, batch, vocab, MASS):
            _, high = _bracket(
                option_ptr, brackets_ptr, sums_ptr, row, count, num_rows, splits, num_passes, ZERO_BITS, SPLITS, MASS
            )
            found = tl.minimum(_short_value(high + tl.zeros((1,), tl.int64), ZERO_BITS), largest)
            value = processed_value(found, temperature)
            floor = tl.maximum(floor, _smallest_with(value, sort_key(found).to(tl.int64), temperature))
    if MIN:
        least = tl.load(min_p_ptr + batch)
        if (least > 0) & (tl.load(temperature_ptr + batch).to(tl.float32) >= TL_GREEDY_BELOW):
            # The logarithm is computed in float64 and rounded once, so that it has the reference's bits.
            value = processed_value(largest, temperature) + tl.log(least.to(tl.float64)).to(tl.float32)
            floor = tl.maximum(floor, _smallest_with(value, sort_key(largest).to(tl.int64), temperature))
    tl.store(floors_ptr + row + one, floor)
    gdc_launch_dependents(PDL)


def find_floors(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None, *,
    split: int, ids: Tensor | None = None, limit: int | None = None,
) -> Tensor | None:
    """The smallest logit that :func:`~specgraph.kernels.sampling.sample.process_logits` keeps, for every row.

    Args:
        logits: contiguous ``[B, R, V]``, float32 or half precision.
        temperature, top_k, top_p, min_p: ``[B]``. Each of the options may be None.
        split: the tokens of a split, a multiple of 512 that depends on ``V`` alone.
        ids: int64 ``[V]``: the target id of every entry. None: the entry's index.
        limit: entries whose id is not below this count as -inf. None: every entry counts.

    Returns:
        float32 ``[B * R]``, with -inf where every token is kept, as at temperature 0. None if no option is given.
    """
    if top_k is None and top_p is None and min_p is None:
        return None
    batch, count, vocab = logits.shape
    num_rows, splits = batch * count, triton.cdiv(vocab, split)
    zero_bits = _ZERO_BITS[logits.dtype]
    num_passes = triton.cdiv(32 - zero_bits, 4)
    floors = logits.new_empty(num_rows, dtype=torch.float32)
    largest = logits.new_empty((num_rows, splits), dtype=torch.float32)
    sums = logits.new_empty((2, num_rows, splits, _WAYS.value), dtype=torch.float32)
    brackets = torch.empty((num_passes, num_rows, 2), dtype=torch.int64, device=logits.device)
    limit = 2**31 - 1 if limit is None else limit
    size = min(vocab, limit) if ids is None else vocab
    options: dict[str, Any] = {"num_warps": WARPS, "enable_fp_fusion": False}
    rows: dict[str, Any] = {"SPLIT": split, "TILE": min(TILE, split), "MAPPED": ids is not None, **options}
    merge: dict[str, Any] = {"ZERO_BITS": zero_bits, "SPLITS": triton.next_power_of_2(max(splits, 2))}
    ids = temperature if ids is None else ids
    if top_p is not None or min_p is not None:
        launch(_find_largest, (num_rows * splits,), logits, ids, largest, vocab, size, limit, splits, **rows)
    searches = [(option, mass) for option, mass in ((top_k, False), (top_p, True)) if option is not None]
    floored = False
    for option, mass in searches:
        for search_pass in range(num_passes):
            launch(
                _weigh_above, (num_rows * splits,),
                logits, ids, temperature, option, largest, floors, brackets, sums, count, num_rows, vocab, size, limit,
                splits, search_pass, MASS=mass, FLOORED=floored, **merge, **rows,
            )
        last = option is searches[-1][0] and min_p is not None
        launch(
            _raise_floors, (num_rows,),
            temperature, option, min_p if last else option, largest, floors, brackets, sums, count, num_rows, vocab,
            splits, num_passes, SEARCHED=True, MASS=mass, MIN=last, FLOORED=floored, **merge, **options,
        )
        floored = True
    if not searches:
        launch(
            _raise_floors, (num_rows,),
            temperature, min_p, min_p, largest, floors, brackets, sums, count, num_rows, vocab, splits, num_passes,
            SEARCHED=False, MASS=False, MIN=True, FLOORED=False, **merge, **options,
        )
    return floors
