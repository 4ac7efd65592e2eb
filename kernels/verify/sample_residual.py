"""The draw of ``probabilistic`` and ``block`` from the residual of one row, ``max(w * p - q, 0)``.

The draw is an exponential race: the first argmax of ``residual / e``, ``e`` exponential, which is that of
``log(residual) + gumbel``. :mod:`specgraph.kernels.verify.triton_residual` names the sources, and
:mod:`specgraph.kernels.verify.row_tables` the columns of the tables that these functions read.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from specgraph.kernels.launch import gdc_launch_dependents, gdc_wait
from specgraph.kernels.sampling.constants import TL_STREAM_RESIDUAL
from specgraph.kernels.sampling.gumbel import (
    LOG2E,
    NO_TOKEN,
    clean,
    exponent_scale,
    first_best,
    load_floor,
    load_floors,
    load_tile,
    token_exponentials,
)
from specgraph.kernels.verify.row_tables import (
    DRAFT,
    DRAFT_MAX,
    DRAFT_SUM,
    LIVE,
    ONE_HOT,
    TARGET_MAX,
    TARGET_SUM,
    WEIGHT,
    column,
)
from specgraph.kernels.verify.rows import last_row, lay_out, load_drafts, place_rows, step_noise_key, write_logprobs


@triton.jit
def target_prob(x, token_ids, floor, largest, total, scale, one_hot):
    """The target's probabilities of the tokens at ``token_ids``. ``one_hot`` is the token of a point mass, or -1."""
    x = clean(tl.where(x < floor, -float("inf"), x))
    return tl.where(one_hot >= 0, tl.where(token_ids == one_hot, 1.0, 0.0), tl.exp2((x - largest) * scale) / total)


@triton.jit
def draft_row(source, batch, drawn):
    """The row of the draft logits that belongs to a sequence, and how many of its drafts have logits.

    These are ``drawn``, or none if the row is -1.
    """
    own = batch.to(tl.int64)
    if source.rows is not None:
        own = tl.load(source.rows + batch)
        drawn = tl.where(own < 0, 0, drawn)
        own = tl.maximum(own, 0)
    return own, drawn


@triton.jit
def draft_prob(source, line, token_ids, inside, drawn, draft, largest, total):
    """The draft's probabilities of the target's tokens at ``token_ids``.

    A draft that was not drawn from a known distribution is a point mass at ``draft``.
    """
    prob = tl.where(token_ids == draft, 1.0, 0.0)
    if source.logits is not None:
        own = token_ids
        if source.own_ids is not None:
            own = tl.load(source.own_ids + token_ids, mask=inside, other=-1)
        has = inside & drawn & (own >= 0) & (own < source.vocab)
        row_ptr = source.logits + line.to(tl.int64) * source.vocab
        x = tl.load(row_ptr + own, mask=has, other=-float("inf")).to(tl.float32)
        prob = tl.where(drawn, tl.exp2((x - largest) * LOG2E) / total, prob)
    return prob


@triton.jit
def residual_tile(given, source, tables, batch, line, row, begin, lines, drawn, own, TILE: tl.constexpr):
    """``max(w * p - q, 0)`` of one tile of a row, or ``p`` if ``own``, and the token ids, both ``[TILE // 4, 4]``."""
    token_ids = begin + tl.arange(0, TILE // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]  # [TILE // 4, 4]
    temperature = tl.load(given.temperature + batch).to(tl.float32)
    scale = exponent_scale(temperature)
    floor = load_floor(given.floors, line, given.floors is not None)
    largest = tl.load(column(tables.reals, TARGET_MAX, lines) + line)
    total = tl.load(column(tables.reals, TARGET_SUM, lines) + line)
    draft_largest = tl.load(column(tables.reals, DRAFT_MAX, lines) + line)
    draft_total = tl.load(column(tables.reals, DRAFT_SUM, lines) + line)
    weight = tl.load(column(tables.reals, WEIGHT, lines) + line)
    one_hot = tl.load(column(tables.integers, ONE_HOT, lines) + line)
    draft = tl.load(column(tables.integers, DRAFT, lines) + line)
    # ---- p = softmax(logits / temperature), q = softmax(draft logits), residual = max(w * p - q, 0) ----
    x = load_tile(given.logits + line.to(tl.int64) * given.vocab, begin, given.vocab, TILE)
    p = target_prob(x, token_ids, floor, largest, total, scale, one_hot)
    draft_batch, has_logits = draft_row(source, batch, drawn)
    q = draft_prob(
        source, draft_batch * drawn + row, token_ids, (token_ids < given.vocab) & (own == 0), row < has_logits, draft,
        draft_largest, draft_total,
    )
    return tl.where(own > 0, p, tl.maximum(weight * p - q, 0.0)), token_ids


@triton.jit
def _split_winner(
    given, source, tables, batch, last, first, forced, accepted, begin, count, width, lines, drawn, own,
    SPLIT: tl.constexpr, TILE: tl.constexpr,
):
    """The first token of a split to arrive: its race value, which is 0 if no token has any weight, and its id."""
    line = batch * count + last
    local = tl.arange(0, TILE // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    top = tl.zeros((TILE // 4, 4), tl.float32)  # the largest race value of every lane
    tile_index = tl.zeros((TILE // 4, 4), tl.int32)  # the first tile that has it
    for i in range(SPLIT // TILE):
        value, _ = residual_tile(
            given, source, tables, batch, line, first + last, begin + i * TILE, lines, drawn, own, TILE
        )
        if given.seeds is not None:
            next_row = tl.minimum(accepted, width - 1)
            k0, k1, c1, c2, c3 = step_noise_key(given, batch, next_row, forced, width, TL_STREAM_RESIDUAL)
            # The race value residual / e. A Philox block serves the four tokens of a row of the tile.
            block = (begin + i * TILE) // 4 + tl.arange(0, TILE // 4)[:, None]
            value = value / token_exponentials(block, tl.arange(0, 4)[None, :], k0, k1, c1, c2, c3)
        better = value > top
        top = tl.where(better, value, top)
        tile_index = tl.where(better, i, tile_index)
    return first_best(top, begin + tile_index * TILE + local)


@triton.jit(do_not_specialize=["lines", "count", "width", "drawn"])
def sample_residual(
    given, source, tables, accepted_ptr, best_ptr, token_ids_ptr, count, width, lines, drawn,
    SPLIT: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):
    """Store the first token of one split to arrive, in the row that gives the next token. The grid is (B * splits)."""
    gdc_wait(PDL)
    program = tl.program_id(0)
    batch, split = program // given.splits, program % given.splits
    num_forced = tl.load(given.num_forced + batch).to(tl.int32)
    if num_forced < tl.load(given.num_rows + batch):
        first, forced = tl.minimum(num_forced, width - count), tl.minimum(num_forced, width - 1)
        accepted = tl.load(accepted_ptr + batch)
        last = last_row(accepted, first, count)
        own = 1 - tl.load(column(tables.integers, LIVE, lines) + batch * count + last)
        best, token_ids = _split_winner(
            given, source, tables, batch, last, first, forced, accepted, split * SPLIT, count, width, lines, drawn, own,
            SPLIT, TILE,
        )
        tl.store(best_ptr + program, best)
        tl.store(token_ids_ptr + program, token_ids)
    gdc_launch_dependents(PDL)


@triton.jit(do_not_specialize=["lines", "count", "width", "drafts_stride", "drawn"])
def finish_residual(
    given, source, tables, accepted_ptr, best_ptr, token_ids_ptr, out, draft_tokens_ptr, count, width, drafts_stride,
    lines, drawn,
    SPLIT: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr,
    RAW: tl.constexpr, PROCESSED: tl.constexpr, PDL: tl.constexpr,
):
    """For one sequence, find the first token of all splits to arrive, and write the results."""
    gdc_wait(PDL)
    batch, splits = tl.program_id(0), given.splits
    rows, ks = tl.arange(0, ROWS), tl.arange(0, SPLITS)
    row, needed, _, first, forced, more = place_rows(given, batch, count, width, ROWS)
    accepted = tl.load(accepted_ptr + batch)
    last = last_row(accepted, first, count)
    # ---- The winner of all splits, the lowest id on ties ----
    inside = (ks < splits) & more  # [SPLITS]
    race_value = tl.load(best_ptr + batch * splits + ks, mask=inside, other=0.0)
    token_ids = tl.load(token_ids_ptr + batch * splits + ks, mask=inside, other=NO_TOKEN)
    best = tl.max(race_value, 0)
    token = tl.min(tl.where(inside & (race_value == best), token_ids, NO_TOKEN), 0)
    split = tl.where((best > 0) | (more == 0), splits, 0)
    while split < splits:
        # Rounding has left nothing of the difference, so the token is drawn from the target's own distribution.
        found, found_token = _split_winner(
            given, source, tables, batch, last, first, forced, accepted, split * SPLIT, count, width, lines, drawn, 1,
            SPLIT, TILE,
        )
        token = tl.where(found > best, found_token, token)
        best = tl.maximum(best, found)
        split += 1
    token = tl.where(token < given.vocab, token, 0)

    # ---- The accepted drafts, then the winner, and their log-probabilities ----
    lay_out(
        out, load_drafts(draft_tokens_ptr, batch, 0, width, drafts_stride, COLUMNS), draft_tokens_ptr, batch, accepted,
        token, more, first, count, width, drafts_stride, COLUMNS, RAW or PROCESSED,
    )
    line = (batch * count + rows).to(tl.int64)
    at = line[:, None] * splits + ks[None, :]  # [ROWS, SPLITS]
    known = needed[:, None] & (ks[None, :] < splits)
    if RAW or PROCESSED:
        temperature = tl.load(given.temperature + batch).to(tl.float32)
        one_hot = tl.load(column(tables.integers, ONE_HOT, lines) + line, mask=rows < count, other=-1)
        draft = tl.load(column(tables.integers, DRAFT, lines) + line, mask=rows < count, other=0)
        floor = load_floors(given.floors, line, needed, given.floors is not None)
        write_logprobs(
            given, out.logprobs, floor, batch, line, at, known, lines * splits, row, needed, first, count, width, draft,
            token, accepted, one_hot, temperature, RAW,
        )
    gdc_launch_dependents(PDL)
