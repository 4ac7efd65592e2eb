"""``specgraph::block_rows``: the rows that a block drafter runs, and their positions.

A block of ``K + 1`` rows begins with the *anchor*, the newest verified token, whose position is ``P``. Behind it are
``K`` mask tokens. The tokens are int64 ``[B, K + 1]``, and the positions ``P``, ``P + 1``, ..., ``P + K`` are too.

A program makes the rows of one sequence. Nothing is computed but integers, so no row depends on others.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.checks import check_shapes
from specgraph.kernels.launch import contiguous, gdc_launch_dependents, gdc_wait, launch
from specgraph.kernels.ops import declare, triton_or_reference


@dataclass(slots=True)
class BlockRows:
    """The tokens ``[B, count + 1]`` of a block and their positions.

    Attributes:
        emitted: int64 ``[B, T]``, of which the first ``num_emitted`` ``[B]`` were emitted. The last of these is the
            anchor. A sequence that emitted nothing gets some token, and its block is not used.
        start: int64 ``[B]``, the position of the last token that was known before; the anchor's is ``num_emitted``
            more.
        num_emitted: int64 ``[B]``.
        mask_token_id: the token of the rows behind the anchor.
        count: the number of these rows.
        vocab_size: the number of ids that the drafter embeds, into which the anchor is clamped.
    """

    emitted: Tensor
    start: Tensor
    num_emitted: Tensor
    _: KW_ONLY
    mask_token_id: int
    count: int
    vocab_size: int


def block_rows_reference(given: BlockRows) -> tuple[Tensor, Tensor]:
    """:class:`BlockRows` in plain PyTorch."""
    last = (given.num_emitted - 1).clamp_min(0).unsqueeze(1)
    anchor = given.emitted.gather(1, last).clamp(0, given.vocab_size - 1)
    row = torch.arange(given.count + 1, device=anchor.device)
    tokens = torch.where(row == 0, anchor, given.mask_token_id)
    return tokens, (given.start + given.num_emitted).unsqueeze(1) + row


@triton.jit
def _block_rows_kernel(
    tokens, positions, emitted, start, num_emitted, width, count,
    MASK: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """The rows of one sequence. The grid is (B,)."""
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    b = tl.program_id(0)
    row = tl.arange(0, BLOCK)
    # ---- tokens = anchor, mask, mask, ...; positions = P, P + 1, P + 2, ...
    emitted_rows = tl.load(num_emitted + b)
    anchor = tl.load(emitted + b * width + tl.maximum(emitted_rows - 1, 0))
    anchor = tl.minimum(tl.maximum(anchor, 0), VOCAB - 1)
    first = tl.load(start + b) + emitted_rows
    tl.store(tokens + b * (count + 1) + row, tl.where(row == 0, anchor, MASK), mask=row <= count)
    tl.store(positions + b * (count + 1) + row, first + row, mask=row <= count)


def block_rows_triton(given: BlockRows) -> tuple[Tensor, Tensor]:
    """:class:`BlockRows` in one launch."""
    tokens, positions = _block_rows_fake(given)
    launch(
        _block_rows_kernel, (len(tokens),), tokens, positions, *contiguous(given, "emitted", "start", "num_emitted"),
        given.emitted.shape[1], given.count, MASK=given.mask_token_id, VOCAB=given.vocab_size,
        BLOCK=triton.next_power_of_2(given.count + 1), num_warps=1,
    )
    return tokens, positions


def _block_rows_fake(given: BlockRows) -> tuple[Tensor, Tensor]:
    emitted = given.emitted
    check_shapes(given, emitted="B T", start="B", num_emitted="B")
    shape = (emitted.shape[0], given.count + 1)
    return emitted.new_empty(shape), emitted.new_empty(shape)


block_rows = declare(
    "block_rows", BlockRows, _block_rows_fake,
    triton_or_reference(block_rows_triton, block_rows_reference, moves_only=True),
).function
