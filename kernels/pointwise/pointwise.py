"""``specgraph::pointwise``: functions of single elements of broadcast inputs, in one kernel.

A step consists of several hundred launches, and one that computes little takes 1 to 2 us all the same. Recurrent layers
have a dozen of them for their gates alone. The kernel is written from the op's own text
(:mod:`specgraph.kernels.pointwise.program`), which is what a dump shows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specgraph.kernels.checks import require
from specgraph.kernels.ops import declare, triton_or_reference
from specgraph.kernels.pointwise.pointwise_triton import COMPUTED, pointwise_kernel
from specgraph.kernels.pointwise.program import evaluate, result_dtypes


@dataclass(slots=True)
class Pointwise:
    """Functions of single elements.

    Every result is contiguous and has the shape to which all inputs broadcast. Its dtype is the one that PyTorch gives
    to the expression.

    Attributes:
        inputs: one or more floating-point tensors, of any strides, whose shapes broadcast.
        program: an expression per result, such as ``"x0 * sigmoid(x1)"``.
    """

    inputs: list[Tensor]
    program: str


def pointwise_reference(given: Pointwise) -> list[Tensor]:
    """:class:`Pointwise` in plain PyTorch."""
    shape = _shape(given)
    results = evaluate(given.program, given.inputs)
    return [result.expand(shape).clone(memory_format=torch.contiguous_format) for result in results]


def pointwise_triton(given: Pointwise) -> list[Tensor]:
    """:class:`Pointwise` in one kernel. Values of a lower precision are computed in float32 and rounded."""
    outs = _pointwise_fake(given)
    if outs[0].numel():
        pointwise_kernel(outs, given.inputs, given.program)
    return outs


def _covers(given: Pointwise) -> bool:
    return all(x.dtype in COMPUTED for x in given.inputs) and "float64" not in given.program


def _pointwise_fake(given: Pointwise) -> list[Tensor]:
    require(len(given.inputs) > 0, lambda: "a pointwise program has at least one input")
    wrong = [x.dtype for x in given.inputs if not x.is_floating_point()]
    require(not wrong, lambda: f"inputs are floating-point tensors, not {wrong[0]}")
    dtypes = result_dtypes(given.program, tuple((x.dtype, x.dim()) for x in given.inputs))
    return [given.inputs[0].new_empty(_shape(given), dtype=dtype) for dtype in dtypes]


def _shape(given: Pointwise) -> torch.Size:
    """The shape to which all inputs broadcast."""
    return torch.broadcast_shapes(*(x.shape for x in given.inputs))  # type: ignore[no-untyped-call]


POINTWISE = declare(
    "pointwise", Pointwise, _pointwise_fake, triton_or_reference(pointwise_triton, pointwise_reference, covers=_covers),
)
