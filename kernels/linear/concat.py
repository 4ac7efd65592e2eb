"""``specgraph::concat``: rows side by side, ``torch.cat(parts, -1)``.

What it is for is what stands behind it: heads project several hidden states of the target side by side, and a layer
that loads weights ahead of its input cannot start behind a kernel of PyTorch's before that has ended. Values are copied
as they are.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.checks import require
from specgraph.kernels.launch import block_size, gdc_launch_dependents, gdc_wait, launch
from specgraph.kernels.ops import declare, triton_or_reference

_BLOCK = 1024


@dataclass(slots=True)
class Concat:
    """Rows side by side: ``[..., W_0]``, ``[..., W_1]``, ... to ``[..., W_0 + W_1 + ...]``, contiguous.

    Attributes:
        parts: one or more tensors of one dtype that differ in their last dimension alone.
    """

    parts: list[Tensor]


def concat_reference(given: Concat) -> Tensor:
    """:class:`Concat` in plain PyTorch."""
    return torch.cat(given.parts, dim=-1)


@triton.jit
def _concat_kernel(out, parts, WIDTHS: tl.constexpr, TOTAL: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """``BLOCK`` values of one part of one row. The grid is (rows, parts of the widest tensor, tensors)."""
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin: tl.constexpr = 0
    for i in tl.static_range(len(parts)):
        if tl.program_id(2) == i:
            inside = column < WIDTHS[i]
            values = tl.load(parts[i] + row * WIDTHS[i] + column, mask=inside)
            tl.store(out + row * TOTAL + begin + column, values, mask=inside)
        begin += WIDTHS[i]


def concat_triton(given: Concat) -> Tensor:
    """:class:`Concat` in one kernel."""
    out, widths = _concat_fake(given), tuple(part.shape[-1] for part in given.parts)
    block = block_size(max(widths), _BLOCK)
    launch(
        _concat_kernel, (out.shape[:-1].numel(), triton.cdiv(max(widths), block), len(widths)), out,
        tuple(part.contiguous() for part in given.parts), WIDTHS=widths, TOTAL=out.shape[-1], BLOCK=block, num_warps=4,
    )
    return out


def _concat_fake(given: Concat) -> Tensor:
    first, width = given.parts[0], 0
    for part in given.parts:
        alike = part.dtype == first.dtype and part.dim() > 0 and part.shape[:-1] == first.shape[:-1]
        require(alike, lambda: f"parts differ in their last dimension alone, not as {_shown(given.parts)}")
        width += part.shape[-1]
    return first.new_empty((*first.shape[:-1], width))


def _shown(parts: list[Tensor]) -> str:
    return " and ".join(f"{part.dtype} {list(part.shape)}" for part in parts)


CONCAT = declare("concat", Concat, _concat_fake, triton_or_reference(concat_triton, concat_reference, moves_only=True))
