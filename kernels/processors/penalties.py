"""``specgraph::penalise``: the logits of tokens that occur in a sequence already are made smaller, or larger.

For a row of logits ``x`` ``[V]``, let ``n`` be how often token ``t`` was generated before the token that the row gives,
and let ``t`` occur if it is anywhere in the prompt or among these generated tokens. Then::

    x[t] = x[t] * repetition if x[t] < 0 else x[t] / repetition      if t occurs
    x[t] = x[t] - frequency * n
    x[t] = x[t] - presence                                           if n > 0

The rows of one window have different contexts. Row ``i`` of the window sees the tokens of the sequence up to the
window's first token, and the drafts in columns 1 to ``i``, so that it gets the penalties that plain decoding would give
it if these drafts are accepted. Results are float32, or float64 for float64 logits.

Programs. One launch counts the tokens that all rows of a sequence have in common into a table ``[B, V]`` of integers
that was filled with zeros. An entry holds the number of times that the token was generated, and a bit says whether the
prompt has it. Both are written by integer atomics, which give the same table in any order. A second launch has a
program per row and tile of the vocabulary. It adds the few drafts before its row and computes the new logits. A row of
128,000 logits is 0.25 MB to read and 0.5 MB to write, and a table is 0.5 MB for each sequence.

Each logit is computed alone, so the bits of a row do not depend on other rows, nor on the number of drafts.

Sources: Keskar et al. 2019, arXiv 1909.05858, section 4.1, for the repetition penalty, where
``RepetitionPenaltyLogitsProcessor`` of transformers is the form that treats negative logits; OpenAI's API reference
(``frequency_penalty``, ``presence_penalty``) for the other two.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels import gpus
from specgraph.kernels.attention.tiles import loop_bound
from specgraph.kernels.launch import contiguous, dense_rows
from specgraph.kernels.processors.context import CONTEXT, Context, check, copied, declare_processor, empty

TILE = 2048
"""Logits, or tokens of the sequence, that a program reads at a time."""
IN_PROMPT = 1 << 30
"""The bit of a table entry that says that the prompt has the token."""
_IN_PROMPT = tl.constexpr(IN_PROMPT)
PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


@dataclass(slots=True)
class Penalise(Context):
    """Change the logits of tokens that occur in the context of each row.

    Args:
        prompt_length: int64 ``[B]``; tokens at positions from here on were generated.
        repetition_penalty: float ``[B]``, more than 0; 1 changes nothing. None is 1 for all sequences.
        frequency_penalty, presence_penalty: float ``[B]``; 0 changes nothing. None is 0 for all sequences.

    Returns:
        ``[B, R, V]``, float32, or float64 for float64 logits.
    """

    SHAPES: ClassVar = {**Context.SHAPES, "prompt_length": "B", **dict.fromkeys(PENALTIES, "B")}
    prompt_length: Tensor
    repetition_penalty: Tensor | None
    frequency_penalty: Tensor | None
    presence_penalty: Tensor | None


def penalise_reference(given: Penalise) -> Tensor:
    """:class:`Penalise` in plain PyTorch, for the tokens that occur. The logits of others are only copied."""
    check(given)
    out, vocab = copied(given.logits), given.logits.shape[2]
    known = replace(given, history=given.history[:, : max([1, *given.start.tolist()])])
    options = [getattr(given, name) for name in PENALTIES]
    counts = given.frequency_penalty is not None or given.presence_penalty is not None
    for row in range(out.shape[1]):
        tokens, place, seen = known.known_tokens(given.first_rows() + row)
        sequence, column = (seen & (tokens >= 0) & (tokens < vocab)).nonzero(as_tuple=True)
        token = tokens[sequence, column]
        number = torch.zeros_like(token)
        if counts:
            generated = place[sequence, column] >= given.prompt_length[sequence]
            table, at = token.new_zeros(len(tokens) * vocab), sequence * vocab + token
            number = table.scatter_add_(0, at, generated.long())[at]
        penalties = [None if part is None else part.to(out.dtype)[sequence] for part in options]
        # A token that occurs twice gets the same value twice.
        out[sequence, row, token] = _penalised(penalties, out[sequence, row, token], number)
    return out


def _penalised(penalties: Sequence[Tensor | None], x: Tensor, number: Tensor) -> Tensor:
    """The formula, for the three penalties and for the logits of tokens that occur, and how often each of these was
    generated; all of one shape."""
    repetition, frequency, presence = penalties
    if repetition is not None:
        x = torch.where(x < 0, x * repetition, x / repetition)
    if frequency is not None:
        x = torch.where(number > 0, x - frequency * number.to(x.dtype), x)
    if presence is not None:
        x = torch.where(number > 0, x - presence, x)
    return x


@triton.jit(do_not_specialize=["count", "width"])
def _count_kernel(
    table_ptr, history_ptr, rows_ptr, window_ptr, start_ptr, num_forced_ptr, prompt_length_ptr,
    stride, longest, count, width, vocab, TILE: tl.constexpr,
):
    """Count the tokens that all rows of one sequence have in common. The grid is (parts, B)."""
    part, b = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows_ptr + b)
    start = tl.where(row >= 0, tl.minimum(tl.load(start_ptr + b), longest), 0).to(tl.int32)
    prompt_length = tl.load(prompt_length_ptr + b).to(tl.int32)
    end = start + tl.minimum(tl.load(num_forced_ptr + b).to(tl.int32), width - count) + 1
    own, table = history_ptr + tl.maximum(row, 0) * stride, table_ptr + b.to(tl.int64) * vocab
    # ---- table[token] += 1 if it was generated, and |= IN_PROMPT if not: for the tokens of history and window, by TILE
    for tile in range(loop_bound(part), loop_bound((end + TILE - 1) // TILE), loop_bound(tl.num_programs(0))):
        place = tile * TILE + tl.arange(0, TILE)
        token = tl.load(own + place, mask=place < start, other=-1)
        in_window = (place >= start) & (place < end)
        token = tl.where(in_window, tl.load(window_ptr + b * width + place - start, mask=in_window, other=-1), token)
        known = (token >= 0) & (token < vocab)
        tl.atomic_add(table + token, 1, mask=known & (place >= prompt_length), sem="relaxed")
        tl.atomic_or(table + token, _IN_PROMPT, mask=known & (place < prompt_length), sem="relaxed")


@triton.jit(do_not_specialize=["count", "width"])
def _penalise_kernel(
    out_ptr, logits_ptr, table_ptr, rows_ptr, window_ptr, start_ptr, num_forced_ptr, prompt_length_ptr,
    repetition_ptr, frequency_ptr, presence_ptr, count, width, vocab, TILE: tl.constexpr,
):
    """One tile of one row. The grid is (tiles, R, B)."""
    r, b = tl.program_id(1), tl.program_id(2)
    ids = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = ids < vocab
    at = (b * count + r).to(tl.int64) * vocab + ids
    entry = tl.load(table_ptr + b.to(tl.int64) * vocab + ids, mask=inside, other=0)
    x = tl.load(logits_ptr + at, mask=inside, other=0.0).to(tl.float32)
    first = tl.minimum(tl.load(num_forced_ptr + b).to(tl.int32), width - count)
    start = tl.where(tl.load(rows_ptr + b) >= 0, tl.load(start_ptr + b), 0)
    prompt_length = tl.load(prompt_length_ptr + b)
    # ---- the table's entries with the drafts in front of the row: [TILE]
    for column in range(loop_bound(first + 1), loop_bound(first + r + 1)):
        drafted = ids == tl.load(window_ptr + b * width + column)
        more = tl.where(start + column >= prompt_length, entry + 1, entry | _IN_PROMPT)
        entry = tl.where(drafted, more, entry)
    # ---- the three formulas of the module, one after the other: [TILE]
    number = entry & (_IN_PROMPT - 1)
    if repetition_ptr is not None:
        penalty = tl.load(repetition_ptr + b).to(tl.float32)
        x = tl.where(entry != 0, tl.where(x < 0, x * penalty, tl.div_rn(x, penalty + tl.zeros_like(x))), x)
    if frequency_ptr is not None:
        x = tl.where(number > 0, x - tl.load(frequency_ptr + b).to(tl.float32) * number.to(tl.float32), x)
    if presence_ptr is not None:
        x = tl.where(number > 0, x - tl.load(presence_ptr + b).to(tl.float32), x)
    tl.store(out_ptr + at, x, mask=inside)


def penalise_triton(given: Penalise) -> Tensor:
    """:class:`Penalise` in a launch that fills a table with zeros, one that counts, and one that computes."""
    check(given)
    logits, out = given.logits.contiguous(), empty(given.logits)
    batch, count, vocab = logits.shape
    width = given.window.shape[1]
    if out.numel() == 0:
        return out
    table = torch.zeros(batch, vocab, dtype=torch.int32, device=logits.device)
    history, shared = dense_rows(given.history), contiguous(given, *CONTEXT, "prompt_length")
    parts = min(triton.cdiv(history.shape[1] + width, TILE), max(1, gpus.HOPPER.count_programs // batch))
    _count_kernel[(parts, batch)](
        table, history, *shared, history.stride(0), history.shape[1], count, width, vocab,
        TILE=TILE, num_warps=4,
    )
    # Without contraction, a logit has the bits of the definition in PyTorch.
    _penalise_kernel[(triton.cdiv(vocab, TILE), count, batch)](
        out, logits, table, *shared, *contiguous(given, *PENALTIES), count, width, vocab, TILE=TILE, num_warps=4,
        enable_fp_fusion=False,
    )
    return out


PENALISE = declare_processor("penalise", Penalise, penalise_triton, penalise_reference)
