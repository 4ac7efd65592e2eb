"""``specgraph::ban_ngrams``: a token that would repeat an n-gram of its sequence is forbidden.

For a row whose context is ``c`` ``[L]`` and an ``n`` of its sequence::

    x[c[p]] = -inf      for every p with n - 1 <= p < L and c[p - k] == c[L - k] for all 0 < k < n

``n = 1`` forbids every token that occurs, and ``n = 0`` nothing. The context of a row is made of the tokens before the
window and those of the window up to the row. Results are float32, or float64 for float64 logits.

Programs. One launch copies the logits. The second has programs for each row, which share the positions of its context.
Each position looks at the tokens in front of it, as a lookup does (:mod:`specgraph.kernels.step.ngram`). All write the
same value, so no order matters, and the bits of a row depend on its own context alone.

Source: Paulus et al. 2017, arXiv 1705.04304, section 2.5; ``NoRepeatNGramLogitsProcessor`` of transformers.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels import gpus
from specgraph.kernels.attention.tiles import loop_bound
from specgraph.kernels.launch import contiguous, dense_rows
from specgraph.kernels.processors.context import (
    CONTEXT,
    Context,
    check,
    copied,
    declare_processor,
    load_context,
    row_context,
)

TILE = 512
"""Positions of a program at a time."""


@dataclass(slots=True)
class BanNgrams(Context):
    """Forbid tokens that would complete an n-gram that occurs already.

    Args:
        no_repeat_ngram_size: int64 ``[B]``, the ``n`` of each sequence; 0 forbids nothing.

    Returns:
        ``[B, R, V]``, float32, or float64 for float64 logits.
    """

    SHAPES: ClassVar = {**Context.SHAPES, "no_repeat_ngram_size": "B"}
    no_repeat_ngram_size: Tensor


def ban_ngrams_reference(given: BanNgrams) -> Tensor:
    """:class:`BanNgrams` in plain PyTorch, on the known tokens alone. Other logits are only copied."""
    known, longest = max([1, *given.start.tolist()]), max([1, *given.no_repeat_ngram_size.tolist()])
    token, inside = _found(replace(given, history=given.history[:, :known]), longest)
    out, (b, r, place) = copied(given.logits), inside.nonzero(as_tuple=True)
    out[b, r, token[b, r, place]] = -float("inf")
    return out


def _found(given: BanNgrams, longest: int) -> tuple[Tensor, Tensor]:
    """The token at every place of each row's context, and whether it would complete an n-gram; both ``[B, R, S + T]``.

    ``longest``: no ``n`` is larger.
    """
    check(given)
    vocab = given.logits.shape[2]
    context, length = given.by_position(), given.lengths().unsqueeze(2)
    place = torch.arange(context.shape[1], device=context.device)
    n = given.no_repeat_ngram_size[:, None, None]
    holds = (n > 0) & (place >= n - 1) & (place < length)
    for back in range(1, longest):
        wanted = context.gather(1, (length.squeeze(2) - back).clamp(0, context.shape[1] - 1)).unsqueeze(2)
        equal = context.roll(back, 1).unsqueeze(1) == wanted
        holds &= equal | (n <= back)
    token = context.unsqueeze(1).expand_as(holds)
    return token, holds & (token >= 0) & (token < vocab)


@triton.jit(do_not_specialize=["count", "width"])
def _ban_kernel(
    out_ptr, history_ptr, rows_ptr, window_ptr, start_ptr, num_forced_ptr, sizes_ptr, stride, longest, count, width,
    vocab, TILE: tl.constexpr,
):
    """Every so many tiles of the context of one row. The grid is (parts, R, B)."""
    part, r, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, start, length = row_context(rows_ptr, start_ptr, num_forced_ptr, b, r, longest, count, width)
    history, window = history_ptr + row * stride, window_ptr + b * width
    n = tl.load(sizes_ptr + b).to(tl.int32)
    tiles = tl.where(n > 0, (length + TILE - 1) // TILE, 0)
    for tile in range(loop_bound(part), loop_bound(tiles), loop_bound(tl.num_programs(0))):
        place = tile * TILE + tl.arange(0, TILE)
        # ---- holds_p = c[p - k] == c[L - k] for all 0 < k < n: [TILE]
        holds = (place >= n - 1) & (place < length)
        for back in range(1, loop_bound(tl.minimum(n, length + 1))):
            last = tl.full((TILE,), 0, tl.int32) + length - back
            wanted = load_context(history, window, last, start, length, holds)
            holds = holds & (load_context(history, window, place - back, start, length, holds) == wanted)
        # ---- x[c[p]] = -inf
        token = load_context(history, window, place, start, length, holds)
        inside = holds & (token >= 0) & (token < vocab)
        tl.store(out_ptr + (b * count + r).to(tl.int64) * vocab + token, -float("inf"), mask=inside)


def ban_ngrams_triton(given: BanNgrams) -> Tensor:
    """:class:`BanNgrams` in two launches."""
    out, width = copied(given.logits), given.window.shape[1]
    batch, count, vocab = out.shape
    if out.numel() == 0:
        return out
    history, context = dense_rows(given.history), contiguous(given, *CONTEXT, "no_repeat_ngram_size")
    parts = min(triton.cdiv(history.shape[1] + width, TILE), max(1, gpus.HOPPER.search_programs // (batch * count)))
    _ban_kernel[(parts, count, batch)](
        out, history, *context, history.stride(0), history.shape[1], count, width, vocab, TILE=TILE, num_warps=4
    )
    return out


BAN_NGRAMS = declare_processor("ban_ngrams", BanNgrams, ban_ngrams_triton, ban_ngrams_reference)
