"""``specgraph::force_tokens``: the token behind a prompt of one token, or the last token of a sequence, is given.

In a row whose token is forced, the logit of that token becomes 0 and all others become minus infinity. The token at
position 1 may be forced, which is the one behind a prompt of a single token (a BOS), and so may the last token that a
sequence has room for. Results are float32, or float64 for float64 logits.

One launch has a program per row and tile of the vocabulary. The bits of a row depend on its own position alone.

Source: ``ForcedBOSTokenLogitsProcessor`` and ``ForcedEOSTokenLogitsProcessor`` of transformers.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.launch import contiguous
from specgraph.kernels.processors.context import check, copied, declare_processor, empty

TILE = 4096
"""Logits of a program."""
PER_SEQUENCE = ("start", "num_forced", "max_length", "forced_bos_token_id", "forced_eos_token_id")


@dataclass(slots=True)
class ForceTokens:
    """Force the token at position 1, or the last one.

    Args:
        logits: ``[B, R, V]`` of any float dtype, the rows from ``min(num_forced, T - R)`` of the window on.
        window: ``[B, T]``, of which only ``T`` is read.
        start: int64 ``[B]``, the position of the window's first token.
        num_forced: int64 ``[B]``, how many of the tokens that the window's rows give are known.
        max_length: int64 ``[B]``, the length at which each sequence ends.
        forced_bos_token_id: int64 ``[B]``, the token at position 1; -1 forces none, and None is -1 for all sequences.
        forced_eos_token_id: likewise, the token at position ``max_length - 1``, which has precedence.

    Returns:
        ``[B, R, V]``, float32, or float64 for float64 logits.
    """

    SHAPES: ClassVar = {"logits": "B R V", "window": "B T", **dict.fromkeys(PER_SEQUENCE, "B")}
    logits: Tensor
    window: Tensor
    start: Tensor
    num_forced: Tensor
    max_length: Tensor
    forced_bos_token_id: Tensor | None
    forced_eos_token_id: Tensor | None


def force_tokens_reference(given: ForceTokens) -> Tensor:
    """:class:`ForceTokens` in plain PyTorch. Rows whose token is forced are written, and others only copied."""
    token, out = _forced(given), copied(given.logits)
    for b, r in (token >= 0).nonzero().tolist():
        only = int(token[b, r])
        out[b, r] = -float("inf")
        out[b, r, only : only + 1] = 0.0  # nothing, if the vocabulary does not have it
    return out


def _forced(given: ForceTokens) -> Tensor:
    """The token of each row that is forced, int64 ``[B, R]``; -1 for none."""
    check(given)
    count, first, last = given.logits.shape[1], given.forced_bos_token_id, given.forced_eos_token_id
    rows = torch.arange(count, device=given.logits.device)
    position = (given.start + given.num_forced.clamp(max=given.window.shape[1] - count)).unsqueeze(1) + rows + 1
    token = torch.full_like(position, -1)
    if first is not None:
        token = torch.where(position == 1, first.unsqueeze(1), token)
    if last is not None:
        ends = (position == given.max_length.unsqueeze(1) - 1) & (last >= 0).unsqueeze(1)
        token = torch.where(ends, last.unsqueeze(1), token)
    return token


@triton.jit(do_not_specialize=["count", "width"])
def _force_kernel(
    out_ptr, logits_ptr, start_ptr, num_forced_ptr, max_length_ptr, first_ptr, last_ptr, count, width, vocab,
    TILE: tl.constexpr,
):
    """One tile of one row. The grid is (tiles, R, B)."""
    r, b = tl.program_id(1), tl.program_id(2)
    ids = tl.program_id(0) * TILE + tl.arange(0, TILE)
    at = (b * count + r).to(tl.int64) * vocab + ids
    position = tl.load(start_ptr + b) + tl.minimum(tl.load(num_forced_ptr + b), width - count) + r + 1
    # ---- the token that is forced at the position which the row gives, or -1
    token = position * 0 - 1
    if first_ptr is not None:
        token = tl.where(position == 1, tl.load(first_ptr + b), token)
    if last_ptr is not None:
        last = tl.load(last_ptr + b)
        token = tl.where((position == tl.load(max_length_ptr + b) - 1) & (last >= 0), last, token)
    # ---- x = 0 at a forced token and -inf elsewhere: [TILE]
    x = tl.load(logits_ptr + at, mask=ids < vocab, other=0.0).to(tl.float32)
    x = tl.where(token >= 0, tl.where(ids == token, 0.0, -float("inf")), x)
    tl.store(out_ptr + at, x, mask=ids < vocab)


def force_tokens_triton(given: ForceTokens) -> Tensor:
    """:class:`ForceTokens` in one launch."""
    check(given)
    logits, out = given.logits.contiguous(), empty(given.logits)
    batch, count, vocab = logits.shape
    if out.numel() == 0:
        return out
    _force_kernel[(triton.cdiv(vocab, TILE), count, batch)](
        out, logits, *contiguous(given, *PER_SEQUENCE), count, given.window.shape[1], vocab, TILE=TILE, num_warps=4
    )
    return out


FORCE_TOKENS = declare_processor(
    "force_tokens", ForceTokens, force_tokens_triton, force_tokens_reference, moves_only=True
)
