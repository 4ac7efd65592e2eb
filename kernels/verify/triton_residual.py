"""The rules ``probabilistic`` and ``block`` of ``specgraph::verify`` in Triton.

With ``p`` the target's and ``q`` the draft's probabilities, drafts are accepted with chances that are made of ``p`` and
``q``, and the next token is drawn from the residual ``max(w * p - q, 0)``. :mod:`specgraph.kernels.verify.verify`
defines this and gives shapes and dtypes. A probability is never stored. Wherever one is needed, it is computed from its
logit and the sum of its row.

There are up to six launches. Those that read whole rows have a program per row and split of the vocabulary, and those
that merge and decide have a program per sequence::

    _sum_drafts        per split      the largest value and the sum of exponentials of the draft's rows
    _weigh_rows        per sequence   merges both sums; p and q of every draft token; the chain of weights of `block`
    _sum_excess        per split      (for `block`) the sum of max(w * p - q, 0) of every row
    _choose            per sequence   how many drafts are accepted, and which row gives the next token
    sample_residual    per split      the winner of the exponential race in the split of that row
    finish_residual    per sequence   the winner of all splits; writes tokens and log-probabilities

Sums over a split have a fixed order, and sums over splits are taken in fixed point, in which every order gives the same
sum. So a sequence's results do not depend on other sequences.

Sources: Leviathan et al. 2023, arXiv 2211.17192, and Chen et al. 2023, arXiv 2302.01318, for ``probabilistic``; Sun et
al. 2024, arXiv 2403.10444, Algorithm 2, for ``block``.
"""

# Triton functions carry no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.launch import gdc_launch_dependents, gdc_wait, launch
from specgraph.kernels.sampling.constants import TL_GREEDY_BELOW
from specgraph.kernels.sampling.gumbel import LOG2E, NO_TOKEN, exponent_scale, load_floors, split_size
from specgraph.kernels.sampling.scan import row_tokens
from specgraph.kernels.step.tokens import what_is_bad
from specgraph.kernels.verify.arguments import Verified, Verify
from specgraph.kernels.verify.row_tables import (
    CHANCE,
    DRAFT,
    DRAFT_MAX,
    DRAFT_SUM,
    LIVE,
    NUM_INTEGERS,
    NUM_REALS,
    ONE_HOT,
    TARGET_MAX,
    TARGET_SUM,
    WEIGHT,
    Tables,
    column,
)
from specgraph.kernels.verify.rows import (
    Rows,
    acceptance_uniforms,
    count_accepted,
    fixed_sum,
    floored_logits,
    locate_drafts,
    merge_sums,
    place_rows,
    split_largest,
    split_sums,
)
from specgraph.kernels.verify.sample_residual import (
    draft_prob,
    draft_row,
    finish_residual,
    residual_tile,
    sample_residual,
    target_prob,
)

_TINY = tl.constexpr(1.1754943508222875e-38)


class Drawn(NamedTuple):
    """What the drafts were drawn from, which kernels take as one argument, ``source``. All tensors are contiguous.

    Attributes:
        logits: ``[N, Kd, Vd]``; None if all drafts are point masses.
        own_ids: int32 ``[V]``, the draft id of every target id; None: ids mean the same.
        rows: int64 ``[B]``, the row of ``logits`` of each sequence, -1 for point masses; None: sequence b has row b.
        vocab: Vd.
    """

    logits: Tensor | None
    own_ids: Tensor | None
    rows: Tensor | None
    vocab: int


def drawn_from(given: Verify) -> Drawn:
    """The ``Drawn`` of what ``specgraph::verify`` is given."""
    logits, rows, point_mass = given.draft_logits, given.draft_rows, given.point_mass
    if logits is None or logits.shape[1] == 0:
        return Drawn(None, None, None, 1 if logits is None else logits.shape[2])
    if point_mass is not None:
        rows = torch.arange(len(point_mass), device=point_mass.device) if rows is None else rows
        rows = rows.masked_fill(point_mass, -1)
    own_ids = given.target_to_draft
    return Drawn(
        logits.contiguous(), None if own_ids is None else own_ids.contiguous(),
        None if rows is None else rows.contiguous(), logits.shape[2],
    )


@triton.jit(do_not_specialize=["drawn"])
def _sum_drafts(
    given, source, stats_ptr, drawn, splits, SPLIT: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr
):
    """For one split of one row of the draft, store the largest value and the sum of exponentials."""
    gdc_wait(PDL)
    program = tl.program_id(0)
    line, split = program // splits, program % splits
    batch, row = line // drawn, line % drawn
    wanted = (row < tl.load(given.num_rows + batch) - 1) & (row >= tl.load(given.num_forced + batch))
    draft_batch, has_logits = draft_row(source, batch, drawn)
    if wanted & (row < has_logits):
        row_ptr = source.logits + (draft_batch * drawn + row) * source.vocab
        largest = split_largest(row_ptr, split * SPLIT, source.vocab, SPLIT, TILE)
        tl.store(stats_ptr + program, largest)
        largest = tl.where(largest > -float("inf"), largest, 0.0)
        total, _ = split_sums(row_ptr, split * SPLIT, source.vocab, largest, 0.0, LOG2E, SPLIT, TILE, False)
        tl.store(stats_ptr + tl.num_programs(0) + program, total)
    gdc_launch_dependents(PDL)


@triton.jit(do_not_specialize=["lines", "count", "width", "drafts_stride", "drawn"])
def _weigh_rows(
    given, source, tables, draft_stats_ptr, bad_ptr, draft_tokens_ptr, count, width, drafts_stride, lines, drawn,
    own_splits,
    ROWS: tl.constexpr, SPLITS: tl.constexpr, OWN_SPLITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """For one sequence, write the tables of its rows.

    For ``probabilistic`` the weight after a row is the chance that its draft is accepted.
    """
    gdc_wait(PDL)
    batch = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    row, needed, num_rows, first, forced, _ = place_rows(given, batch, count, width, ROWS)
    draft, valid_draft, live = locate_drafts(
        draft_tokens_ptr, batch, row, num_rows, first, forced, count, width, drafts_stride, given.vocab, ROWS
    )
    temperature = tl.load(given.temperature + batch).to(tl.float32)
    cold = temperature + tl.zeros((ROWS,), tl.float32) < TL_GREEDY_BELOW
    scale = exponent_scale(temperature)

    # ---- p of every draft: merge the splits of the target's rows ----
    ks, splits = tl.arange(0, SPLITS), given.splits
    line = (batch * count + rows).to(tl.int64)
    at = line[:, None] * splits + ks[None, :]  # [ROWS, SPLITS]
    known = needed[:, None] & (ks[None, :] < splits)
    largest, total, _ = merge_sums(given.stats, at, known, lines * splits, 2, scale)
    token, bad = row_tokens(given.reports, line, needed, splits, lines * splits, SPLITS)
    tl.store(bad_ptr + batch, what_is_bad(bad, row, needed & (token == NO_TOKEN)))
    # This is the token of a row that is a point mass (a greedy row, or one with nothing but -inf), and -1 otherwise.
    one_hot = tl.where(largest == -float("inf"), 0, tl.where(cold, token, -1))
    largest = tl.where(largest > -float("inf"), largest, 0.0)
    floor = load_floors(given.floors, line, needed, given.floors is not None)
    x = floored_logits(given, line, draft, floor, needed & valid_draft)
    p = target_prob(x, draft, floor, largest, total, scale, one_hot)

    # ---- q of every draft: merge the splits of the draft's rows ----
    draft_batch, num_logits = draft_row(source, batch, drawn)
    has_logits = row < num_logits
    draft_largest, draft_total = tl.zeros((ROWS,), tl.float32), tl.full((ROWS,), 1.0, tl.float32)
    if source.logits is not None:
        own_ks = tl.arange(0, OWN_SPLITS)
        has = live & valid_draft & has_logits
        own_at = (batch * drawn + row)[:, None] * own_splits + own_ks[None, :]  # [ROWS, OWN_SPLITS]
        own_known = has[:, None] & (own_ks[None, :] < own_splits)
        area = tl.num_programs(0) * drawn * own_splits
        draft_largest, draft_total, _ = merge_sums(draft_stats_ptr, own_at, own_known, area, 1, LOG2E)
        draft_largest = tl.where(draft_largest > -float("inf"), draft_largest, 0.0)
        draft_total = tl.where(draft_total > 0, draft_total, 1.0)
    q = draft_prob(
        source, draft_batch * drawn + row, draft, live & valid_draft, has_logits, draft, draft_largest, draft_total
    )

    # ---- `block` (Sun et al., Algorithm 2): w_0 = 1, w_i = min(1, w_(i-1) * p_i / q_i) ----
    # ---- `probabilistic` (Leviathan et al.): accept with chance min(1, p / q), residual weight 1 ----
    before = tl.full((ROWS,), 1.0, tl.float32)  # [ROWS]
    after = tl.full((ROWS,), 1.0, tl.float32)
    if BLOCK:
        weight = tl.full((), 1.0, tl.float32)
        for r in range(ROWS):
            here = rows == r
            here_p, here_q = tl.sum(tl.where(here, p, 0.0), 0), tl.sum(tl.where(here, q, 0.0), 0)
            before = tl.where(here, weight, before)
            scaled = weight * here_p
            step = tl.minimum(scaled / tl.maximum(here_q, _TINY), 1.0)
            step = tl.where((scaled >= here_q) & (here_p > 0), 1.0, step)
            weight = tl.where(tl.sum(tl.where(here & live, 1, 0), 0) > 0, step, weight)
            after = tl.where(here, weight, after)
    else:
        after = tl.where((p >= q) & (p > 0), 1.0, tl.minimum(p / tl.maximum(q, _TINY), 1.0))
    inside = rows < count
    tl.store(column(tables.reals, TARGET_MAX, lines) + line, largest, mask=inside)
    tl.store(column(tables.reals, TARGET_SUM, lines) + line, total, mask=inside)
    tl.store(column(tables.reals, DRAFT_MAX, lines) + line, draft_largest, mask=inside)
    tl.store(column(tables.reals, DRAFT_SUM, lines) + line, draft_total, mask=inside)
    tl.store(column(tables.reals, WEIGHT, lines) + line, before, mask=inside)
    tl.store(column(tables.reals, CHANCE, lines) + line, after, mask=inside)
    tl.store(column(tables.integers, ONE_HOT, lines) + line, one_hot, mask=inside)
    tl.store(column(tables.integers, LIVE, lines) + line, live.to(tl.int32), mask=inside)
    tl.store(column(tables.integers, DRAFT, lines) + line, draft, mask=inside)
    gdc_launch_dependents(PDL)


@triton.jit(do_not_specialize=["lines", "count", "width", "drawn"])
def _sum_excess(
    given, source, tables, excess_ptr, count, width, lines, drawn,
    SPLIT: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):
    """For one split of one row, store the sum of ``max(w * p - q, 0)``."""
    gdc_wait(PDL)
    program = tl.program_id(0)
    line, split = program // given.splits, program % given.splits
    batch = line // count
    row = tl.minimum(tl.load(given.num_forced + batch).to(tl.int32), width - count) + line % count
    if tl.load(column(tables.integers, LIVE, lines) + line) > 0:
        total = tl.zeros((TILE // 4, 4), tl.float32)
        for i in range(SPLIT // TILE):
            left, _ = residual_tile(
                given, source, tables, batch, line, row, split * SPLIT + i * TILE, lines, drawn, 0, TILE
            )
            total += left
        tl.store(excess_ptr + program, tl.sum(tl.sum(total, 1), 0))
    gdc_launch_dependents(PDL)


@triton.jit
def _block_chances(tables, excess_ptr, line, rows, after, count, splits, lines, SPLITS: tl.constexpr):
    """``h_i = sum(max(w_i * p - q, 0)) / (sum(max(w_i * p - q, 0)) + 1 - w_i)`` of Algorithm 2, for every prefix.

    ``p`` and ``q`` are those of the row behind the prefix. The last prefix has the chance ``w_i``.
    """
    ks = tl.arange(0, SPLITS)
    follows = rows + 1 < count
    next_live = tl.load(column(tables.integers, LIVE, lines) + line + 1, mask=follows, other=0) > 0
    at = (line[:, None] + 1) * splits + ks[None, :]  # [ROWS, SPLITS]
    excess = fixed_sum(tl.load(excess_ptr + at, mask=next_live[:, None] & (ks[None, :] < splits), other=0.0))
    total = excess + (1.0 - after)
    share = tl.where(total > 0, excess / tl.maximum(total, _TINY), 1.0)
    return tl.where(next_live, share, after)


@triton.jit(do_not_specialize=["lines", "count", "width"])
def _choose(
    given, tables, excess_ptr, accepted_ptr, count, width, lines,
    ROWS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """For one sequence, store the number of accepted tokens."""
    gdc_wait(PDL)
    batch = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    row, _, _, first, forced, _ = place_rows(given, batch, count, width, ROWS)
    line = (batch * count + rows).to(tl.int64)
    live = tl.load(column(tables.integers, LIVE, lines) + line, mask=rows < count, other=0) > 0
    chance = tl.load(column(tables.reals, CHANCE, lines) + line, mask=rows < count, other=0.0)
    u = acceptance_uniforms(given, batch, row, forced, width)
    # ---- `block`: the longest prefix with u_i < h_i. `probabilistic`: all drafts before the first u_i >= chance ----
    if BLOCK:
        chance = _block_chances(tables, excess_ptr, line, rows, chance, count, given.splits, lines, SPLITS)
        accepted = forced + tl.max(tl.where((u < chance) & live, row - forced + 1, 0), 0)
    else:
        accepted, _ = count_accepted(u < chance, live, row, first, forced, count, ROWS)
    tl.store(accepted_ptr + batch, accepted)
    gdc_launch_dependents(PDL)


def verify_residual(
    given: Rows, source: Drawn, draft_tokens: Tensor, out: Verified, by_block: bool, common: dict[str, Any]
) -> None:
    """Write ``out``, the results of ``verify_triton``, for ``probabilistic`` or, if ``by_block``, for ``block``.

    ``common`` holds launch options and sizes, of which a kernel is given those that it has as parameters.
    """
    batch, count, _ = given.logits.shape
    width, lines, splits, device = out.emitted.shape[1], batch * count, given.splits, given.logits.device
    drawn = 0 if source.logits is None else source.logits.shape[1]
    own_split = split_size(source.vocab)
    own_splits = triton.cdiv(source.vocab, own_split)
    draft_stats = torch.empty(2 * max(batch * drawn * own_splits, 1), dtype=torch.float32, device=device)
    tables = Tables(
        torch.empty((NUM_REALS, lines), dtype=torch.float32, device=device),
        torch.empty((NUM_INTEGERS, lines), dtype=torch.int32, device=device),
    )
    excess = torch.empty(lines * splits if by_block else 1, dtype=torch.float32, device=device)
    accepted = torch.empty(batch, dtype=torch.int32, device=device)
    race_values = torch.empty(batch * splits, dtype=torch.float32, device=device)
    race = accepted, race_values, torch.empty_like(race_values, dtype=torch.int32)
    drafts_stride = draft_tokens.stride(0)
    options = {**common, "BLOCK": by_block, "OWN_SPLITS": triton.next_power_of_2(max(own_splits, 2))}

    def run(kernel: Any, programs: int, *arguments: object, **changes: int) -> None:
        known = {name: value for name, value in options.items() if not name.isupper() or name in kernel.arg_names}
        launch(kernel, (programs,), given, *arguments, **{**known, **changes})

    if drawn:
        run(
            _sum_drafts, batch * drawn * own_splits, source, draft_stats, drawn, own_splits, SPLIT=own_split,
            TILE=min(own_split, common["TILE"]),
        )
    run(
        _weigh_rows, batch, source, tables, draft_stats, out.bad, draft_tokens, count, width, drafts_stride, lines,
        drawn, own_splits,
    )
    if by_block:
        run(_sum_excess, lines * splits, source, tables, excess, count, width, lines, drawn)
    run(_choose, batch, tables, excess, accepted, count, width, lines)
    run(sample_residual, batch * splits, source, tables, *race, count, width, lines, drawn)
    run(
        finish_residual, batch, source, tables, *race, out, draft_tokens, count, width, drafts_stride, lines, drawn,
    )
