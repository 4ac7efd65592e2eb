"""``specgraph::embedding``: the rows of a table that token ids name.

It is ``torch.nn.functional.embedding`` without a check of the ids, as a kernel that takes part in programmatic
dependent launch. PyTorch's own takes 6 us for 8 rows of 4,096 values on an H200, and the layer behind it cannot load
weights before it has ended. Values are copied as they are.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.checks import check_shapes, require
from specgraph.kernels.launch import block_size, contiguous, gdc_launch_dependents, gdc_wait, launch
from specgraph.kernels.ops import declare, triton_or_reference

_BLOCK = 1024


@dataclass(slots=True)
class Embedding:
    """Rows of a table: ``[...]`` to ``[..., H]``, in the dtype of the table.

    Attributes:
        weight: ``[V, H]``.
        tokens: int64 ``[...]`` in ``[0, V)``. Other ids read memory that is not the table's.
    """

    weight: Tensor
    tokens: Tensor


def embedding_reference(given: Embedding) -> Tensor:
    """:class:`Embedding` in plain PyTorch."""
    return torch.nn.functional.embedding(given.tokens, given.weight)


@triton.jit
def _embedding_kernel(out, weight, tokens, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """``BLOCK`` values of one row. The grid is (rows, parts of a row)."""
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    values = tl.load(weight + tl.load(tokens + row) * WIDTH + column, mask=inside)
    tl.store(out + row * WIDTH + column, values, mask=inside)


def embedding_triton(given: Embedding) -> Tensor:
    """:class:`Embedding` in one kernel."""
    out = _embedding_fake(given)
    width = out.shape[-1]
    block = block_size(width, _BLOCK)
    launch(
        _embedding_kernel, (given.tokens.numel(), triton.cdiv(width, block)), out,
        *contiguous(given, "weight", "tokens"), WIDTH=width, BLOCK=block, num_warps=4,
    )
    return out


def _embedding_fake(given: Embedding) -> Tensor:
    weight, tokens = given.weight, given.tokens
    check_shapes(given, weight="V H")
    require(tokens.dtype == torch.int64, lambda: f"tokens must be int64, not {tokens.dtype}")
    return weight.new_empty((*tokens.shape, weight.shape[1]))


EMBEDDING = declare(
    "embedding", Embedding, _embedding_fake,
    triton_or_reference(embedding_triton, embedding_reference, moves_only=True),
)
