"""``specgraph::int4_linear``: a linear layer with a weight of four bits, and a scale for each group of inputs.

It computes ``y = x @ weight.T + bias`` for ``x`` ``[..., I]`` and ``weight`` ``[O, I]``. An entry of the weight is the
product of a number from -8 to 7 and the scale of its group: ``weight[o, i] = value[o, i] * scale[o, i // G]``. The
numbers are ``packed``, int32 ``[O, I / 8]``, in the layout that the package compressed-tensors calls
``pack-quantized``: to each number 8 is added, and eight numbers of neighbouring inputs stand in one int32, the first of
them in its lowest four bits. ``scale`` is ``[O, I / G]``, which also says how large a group is. The quantisation is
symmetric, so there are no zero points.

Activations are not quantised. Products and sums are float32, or float64 for ``x`` in float64, and the result is rounded
once to the dtype of ``x``. In particular the weight is not rounded to that dtype before it is multiplied.

There is no kernel of its own yet. Every call makes the whole weight in float32, which takes eight times the memory of
the packed one while it lasts, and multiplies it. On a GPU the kernel of ``specgraph::linear`` does that, whose bits of
a row do not depend on the other rows; elsewhere PyTorch does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specgraph.kernels.checks import check_shapes, require
from specgraph.kernels.linear.linear import Linear, linear_reference, linear_triton
from specgraph.kernels.ops import declare, not_float64, triton_or_reference

PER_WORD = 8
"""How many numbers of four bits an int32 holds."""
OFFSET = 8
"""What is added to a number from -8 to 7 before it is stored."""
SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""The dtypes that scales may have. The last one is that of a model which was cast to check it."""


@dataclass(slots=True)
class Int4Linear:
    """``y = x @ weight.T + bias``, ``[..., O]`` in the dtype of ``x``, for ``weight`` in four bits.

    Attributes:
        x: ``[..., I]``, of floating point.
        packed: int32 ``[O, I / 8]``, as :func:`pack` makes it.
        scale: ``[O, I / G]`` in one of :data:`SCALE_DTYPES`: one for each group of ``G`` inputs of an output.
        bias: ``[O]`` or None.
    """

    x: Tensor
    packed: Tensor
    scale: Tensor
    bias: Tensor | None = None


def pack(values: Tensor) -> Tensor:
    """Pack numbers from -8 to 7, of any integer dtype and of shape ``[O, I]``, into int32 ``[O, I / 8]``.

    Raises:
        ValueError: ``I`` is no multiple of 8, or a number needs more than four bits.
    """
    rows, inner = values.shape
    if inner % PER_WORD:
        raise ValueError(f"values are {[rows, inner]}; the last dimension must be a multiple of {PER_WORD}.")
    if values.numel() and not -OFFSET <= int(values.min()) <= int(values.max()) < OFFSET:
        raise ValueError(f"values go from {int(values.min())} to {int(values.max())}; four bits hold -8 to 7.")
    words = (values.to(torch.int32) + OFFSET).view(rows, inner // PER_WORD, PER_WORD) << _shifts(values.device)
    return words.sum(-1, dtype=torch.int32)  # no two of them have a bit in common, so that the sum joins them


def unpack(packed: Tensor) -> Tensor:
    """The numbers from -8 to 7 that :func:`pack` packed, as int32 ``[O, I]``."""
    return ((packed[..., None] >> _shifts(packed.device)) & 15).flatten(-2) - OFFSET


def dequantise(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight ``[O, I]`` of :class:`Int4Linear`, with products in ``dtype``.

    In the dtype of the scales it is, bit for bit, the weight that compressed-tensors makes of these tensors.
    """
    values = unpack(packed).to(dtype)
    groups = values.view(*scale.shape, -1)
    return (groups * scale.to(dtype)[..., None]).flatten(-2)


def int4_linear_reference(given: Int4Linear) -> Tensor:
    """:class:`Int4Linear` in plain PyTorch."""
    exact = torch.promote_types(given.x.dtype, torch.float32)
    return linear_reference(Linear(given.x, dequantise(given.packed, given.scale, exact), given.bias))


def int4_linear_triton(given: Int4Linear) -> Tensor:
    """:class:`Int4Linear` by the kernel of ``specgraph::linear`` in float32."""
    weight = dequantise(given.packed, given.scale, torch.float32)
    bias = None if given.bias is None else given.bias.float()
    return linear_triton(Linear(given.x.float(), weight, bias)).to(given.x.dtype)


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(0, 4 * PER_WORD, 4, dtype=torch.int32, device=device)


def _int4_linear_fake(given: Int4Linear) -> Tensor:
    x, packed, scale = given.x, given.packed, given.scale
    require(x.dtype.is_floating_point, lambda: f"x is {x.dtype}; it must be of floating point")
    require(packed.dtype == torch.int32, lambda: f"packed is {packed.dtype}; it must be torch.int32")
    require(
        scale.dtype in SCALE_DTYPES,
        lambda: f"scale is {scale.dtype}; it must be one of {', '.join(map(str, SCALE_DTYPES))}",
    )
    check_shapes(given, packed="O *", scale="O *", x="... I", bias="O")
    inner, groups = packed.shape[1] * PER_WORD, scale.shape[1]
    require(
        x.shape[-1] == inner,
        lambda: f"x has {x.shape[-1]} inputs, and packed, which is {list(packed.shape)}, has {inner}: they must agree",
    )
    require(
        groups > 0 and inner % groups == 0,
        lambda: f"scale has {groups} groups for {inner} inputs; the number of groups must divide that of the inputs",
    )
    return x.new_empty((*x.shape[:-1], packed.shape[0]))


INT4_LINEAR = declare(
    "int4_linear", Int4Linear, _int4_linear_fake,
    triton_or_reference(int4_linear_triton, int4_linear_reference, covers=not_float64("x")),
)
int4_linear = INT4_LINEAR.function
