"""For how many rows ``numerics: fast`` leaves a product to a library.

The variants named ``library`` compute what :mod:`specgraph.kernels.linear.linear` and
:mod:`specgraph.kernels.linear.experts` define, one launch for each part: the scale of a norm in front, the product
(cuBLAS, or PyTorch's grouped product), the activation, the residual, the two parts of a norm that follows. A library
picks another kernel for another number of rows, so a row's bits may depend on how many rows there are, and every launch
rounds its result. Our kernels do all of it in one or two launches and round once. With few rows that makes them faster;
with many rows the product itself counts most.

The choice is a table lookup (:class:`Crossovers`), by the kind of GPU, the shape of the weight and the number of rows.
``python -m specgraph bench linears`` measures what a table holds: it times both forms with everything that a step joins
to a product. Nothing is timed when a model is compiled, for two reasons. Near a crossover two measurements on one
machine disagree, and the same program would then give other bits in its next run. And a table can be read, costs no
time, and needs no idle GPU. The price is that a GPU or a shape without a table runs our kernels for every number of
rows. This is what ``numerics: bitwise`` runs, so it is not slower than that.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from specgraph.kernels.launch import is_hopper

Kind = Literal["linear", "gated", "experts"]
Shape = tuple[int, ...]

MAX_SHAPE_RATIO = 1.5
"""A weight takes the entry of the nearest shape that was measured, unless one dimension differs by a larger factor."""


@dataclass(frozen=True, eq=False)
class Crossovers:
    """The numbers of rows at which the faster form changes, on one kind of GPU, for 16-bit floating point.

    ``(512,)`` says that the library is faster from 512 rows on, ``(256, 2048)`` that it is from 256 to 2,047 rows, and
    ``()`` that our kernel is faster for every number of rows that was measured.

    Attributes:
        linear: by the shape ``(O, I)`` of the weight.
        gated: the same for a weight of gate rows over up rows, ``(2 * O, I)``, with a gated activation.
        experts: by ``(E, O, I)``. The rows are those of all experts together.
    """

    linear: Mapping[Shape, tuple[int, ...]]
    gated: Mapping[Shape, tuple[int, ...]]
    experts: Mapping[Shape, tuple[int, ...]]


HOPPER = Crossovers(
    linear={
        (6144, 4096): (), (4096, 4096): (1024,), (4096, 14336): (), (128256, 4096): (256, 257),
        (3072, 2048): (), (2048, 2048): (2048,), (2048, 8192): (512,), (128256, 2048): (128, 257),
        (5120, 2048): (256, 513), (2048, 4096): (512,), (151936, 2048): (128, 257, 2048),
    },
    gated={(28672, 4096): (), (16384, 2048): ()},
    experts={(128, 1536, 2048): (4096, 4097), (128, 2048, 768): ()},
)  # fmt: skip
"""H100 and H200, from 1 to 2,048 rows of tokens. An entry stands here where the library was at least 5% faster in one
run of ``bench linears`` on an H200: for the shapes of llama-3-8b at commit 4f5e340, and for those of llama-3.2-1b and
qwen3-30b-a3b (whose tokens meet 8 of 128 experts) at commit d805809. Other shapes were not measured."""


def crossovers_of(device: torch.device) -> Crossovers | None:
    """The table for ``device``; None if nothing was measured on its kind, and our kernels run.

    A new kind of GPU takes a table that ``bench linears`` prints there, and a line here.
    """
    return HOPPER if is_hopper(device) else None


def is_faster(kind: Kind, shape: Shape, rows: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the library is known to be faster for ``rows`` rows and a weight of ``shape``, which is written as in
    :class:`Crossovers`."""
    crossovers = crossovers_of(device)
    if crossovers is None or dtype not in (torch.bfloat16, torch.float16):
        return False
    return bisect_right(_changes(crossovers, kind, shape), rows) % 2 == 1


@functools.cache
def _changes(crossovers: Crossovers, kind: Kind, shape: Shape) -> tuple[int, ...]:
    """The entry of the nearest measured shape, ``()`` if none is near."""
    table: Mapping[Shape, tuple[int, ...]] = getattr(crossovers, kind)
    factors = {other: max(max(a / b, b / a) for a, b in zip(shape, other, strict=True)) for other in table}
    nearest = min(factors, key=factors.__getitem__, default=None)
    return () if nearest is None or factors[nearest] > MAX_SHAPE_RATIO else table[nearest]


def is_faster_for(x: Tensor, weight: Tensor, gated: bool) -> bool:
    """Whether a linear of ``x`` ``[..., I]`` and ``weight`` should run its library's form."""
    rows = x.numel() // max(x.shape[-1], 1)
    kind: Kind = "gated" if gated else "linear"
    return is_faster(kind, tuple(weight.shape), rows, x.dtype, x.device)


def is_faster_for_experts(x: Tensor, weight: Tensor, transposed: bool) -> bool:
    """Whether the experts' linear of ``x`` ``[S, I]`` and ``weight`` should, and can, run its library's form."""
    experts, outer, inner = weight.mT.shape if transposed else weight.shape
    faster = is_faster("experts", (experts, outer, inner), x.shape[0], x.dtype, x.device)
    return faster and outer % 8 == inner % 8 == 0 and _has_aligned_rows(weight)


def _has_aligned_rows(weight: Tensor) -> bool:
    """Whether the rows of every matrix begin at multiples of 16 bytes, as the grouped product demands."""
    offsets = (weight.data_ptr(), *(stride * weight.element_size() for stride in weight.stride()[:-1]))
    return weight.stride(-1) == 1 and not any(offset % 16 for offset in offsets)
