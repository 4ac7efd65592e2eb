"""A linear layer on a CPU whose input has few rows, as in a decode step.

``x`` ``[B, T, I]`` and ``weight`` ``[O, I]`` give ``x @ weight.T + bias``, ``[B, T, O]``, as ``linear`` does. Libraries
often take longer for that product than reading the weight does. There are three other forms:

- *sum*: the product is written as what it is, a sum of products for every output. Where Inductor compiles the step, it
  makes a loop of that which reads a row of the weight once for all rows of ``x``, and has nothing to prepare.
- *transposed*: the same library is asked for ``weight @ x.T``. Nothing is copied but the small result. One row is run
  as two equal ones, since a product of a matrix and a vector is slower.
- *oneDNN*: PyTorch's other library, which has kernels for all CPUs with AVX-512, and takes the weight as it is.

MKL has kernels of its own for Intel's CPUs, and slower ones for others, so the best form is a question of the CPU, too.
Milliseconds of one thread with PyTorch 2.13 and MKL 2024.2, in float32, on an AMD EPYC with AVX-512 for all linear
layers of tiny-math's target (7.1 million parameters), and on an Intel Xeon with AVX-512 for linear layers of a hidden
size of 2,048 (61 million):

| rows | AMD: linear | transposed | sum | Intel: linear | transposed | sum |
|---|---|---|---|---|---|---|
| 1 | 3.3 | 4.1 | 1.3 | 15.6 | 15.6 | 20.3 |
| 2 | 4.7 | 2.1 | 1.5 | 15.8 | 33.8 | 25.2 |
| 4 | 4.7 | 2.7 | 2.3 | 31.5 | 33.7 | 32.4 |
| 6 | 5.7 | 4.1 | 2.7 | 33.3 | 35.1 | 41.1 |
| 8 | 5.5 | 4.8 | 3.1 | 47.0 | 33.5 | 47.7 |
| 12 | 6.0 | 8.9 | 4.3 | 61.0 | 33.9 | 64.5 |
| 16 | 6.8 | 7.4 | 5.1 | 45.6 | 32.3 | 77.2 |
| 24 | 7.9 | 11.2 | 8.1 | 47.0 | 44.8 | |

On the AMD, with one weight of 2,048 to 11,008 outputs and 2,048 to 4,096 inputs, the sum takes 0.65 to 1.15 times as
long as ``linear`` for 1, 4 and 6 rows. With 6,144 and 8,192 inputs it takes 1.5 to 4.6 times as long, since the rows of
``x`` and of the weight do not fit into the first cache together.

Here every sum on the Intel was compiled alone, where calling it costs some 15 us. In a whole compiled step, sums for up
to 6 rows are as fast there as ``linear``: 3.5 ms for 3.6 with tiny-math, 16.3 for 17.4 with a hybrid of 31 million
parameters, and 335 for 320 with the shapes of Llama-3.2-1B (one row); 668 for 676 with 6 rows of the latter. With 12
rows, a step with transposed products takes 722 ms where one with sums takes 1,057. Without a compiler, a step of the
hybrid takes 20 ms for 31 with 2 rows, since the products are not transposed, and 39 for 44 with 12, where they are.

Without a compiler, on the AMD, for one weight ``[O, I]`` each, as multiples of ``linear`` with one row (one thread, the
least of 12 runs, on a machine that others were using as well, so a figure may be off by half):

| rows | form | 2048, 640 | 65536, 640 | 4864, 896 | 8960, 1536 | 640, 2048 | 1536, 8960 |
|---|---|---|---|---|---|---|---|
| 1 | transposed | 0.4 | 0.6 | 0.6 | | 4.5 | |
| 2 | linear | 2.3 | 2.5 | 2.5 | 3.1 | 3.0 | 1.4 |
| | transposed | 0.3 | 0.5 | 0.4 | 0.8 | 2.9 | 1.4 |
| | oneDNN | 1.2 | 1.0 | 1.1 | 1.3 | 1.4 | 1.3 |
| 3 | transposed | 0.5 | 0.8 | 1.0 | 3.1 | 3.5 | 2.4 |
| | oneDNN | 1.1 | 1.2 | 1.1 | 1.2 | 1.5 | 1.3 |
| 5 | linear | 2.3 | 2.4 | 2.1 | 5.8 | 3.7 | 1.7 |
| | transposed | 1.0 | 1.2 | 1.3 | 5.5 | 7.1 | 3.0 |
| | oneDNN | 1.1 | 1.3 | 1.2 | 2.5 | 2.7 | 1.4 |
| 8 | linear | 2.3 | 2.7 | 2.5 | 6.2 | 3.7 | 1.6 |
| | oneDNN | 1.7 | 1.5 | 1.3 | 2.8 | 3.9 | 1.6 |

With a weight that oneDNN has packed beforehand, five rows take 0.5 to 1.4 times as long as one row of ``linear``. But a
packed weight is a second copy of it.

A result may be rounded differently than that of ``linear``, as it also may for another number of rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specgraph.kernels.cpu_info import is_intel

MKL_IS_FAST: bool = is_intel() and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
"""Whether the library has kernels for this CPU."""
FEW_ROWS = 16
"""The most rows for which the product is a sum in compiled code."""
MOST_INPUTS = 4096
"""The most inputs for which it is a sum."""
TRANSPOSED = range(1, 4)
"""The numbers of rows for which the transposed product is taken in code that is not compiled."""
MOST_TRANSPOSED = 960
"""The most inputs for which it is."""
BY_ONEDNN = range(2, 17)
"""The numbers of rows for which oneDNN is asked otherwise."""
HAS_ONEDNN: bool = torch.backends.mkldnn.is_available() and hasattr(  # type: ignore[no-untyped-call]
    torch.ops.mkldnn, "_linear_pointwise"
)
"""Whether PyTorch was built with oneDNN."""
TRANSPOSED_BY_MKL = range(8, 17)
"""The numbers of rows for which it is taken, compiled or not, if the library has kernels for this CPU."""


def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``linear``: ``x`` ``[B, T, I]`` times ``weight`` ``[O, I]``, plus ``bias`` ``[O]`` or None, ``[B, T, O]``."""
    rows = x.shape[0] * x.shape[1] if x.dim() == 3 else 0
    product = _product(rows, weight.shape[1])
    if product is None:
        return torch.nn.functional.linear(x, weight, bias)
    found = product(x.reshape(rows, -1), weight).view(x.shape[0], x.shape[1], -1)
    return found if bias is None else found + bias


def _product(rows: int, inputs: int) -> Callable[[Tensor, Tensor], Tensor] | None:
    """The form for so many rows; None for ``linear``."""
    if MKL_IS_FAST and _is_among(rows, TRANSPOSED_BY_MKL):
        return _transposed
    if torch.compiler.is_compiling():
        return _summed if 0 < rows <= FEW_ROWS and inputs <= MOST_INPUTS else None
    if MKL_IS_FAST:
        return None
    if _is_among(rows, TRANSPOSED) and inputs <= MOST_TRANSPOSED:
        return _transposed
    return _by_onednn if HAS_ONEDNN and _is_among(rows, BY_ONEDNN) else None


def _is_among(rows: int, numbers: range) -> bool:
    """``in``, which would compare a symbolic number with each of them."""
    return numbers[0] <= rows <= numbers[-1]


def _summed(x: Tensor, weight: Tensor) -> Tensor:
    """``x`` ``[R, I]`` times ``weight`` ``[O, I]``, ``[R, O]``, as a loop that Inductor writes."""
    # Inductor keeps what a strided view is taken of. Else it would compute ``x`` again for every output.
    x = torch.as_strided(x.contiguous(), x.shape, (x.shape[1], 1))
    return (weight.unsqueeze(1) * x).sum(2).t().contiguous()


def _transposed(x: Tensor, weight: Tensor) -> Tensor:
    """The same by a library, which is asked for ``[O, R]``."""
    several = x if x.shape[0] > 1 else x.repeat(2, 1)
    return torch.mm(weight, several.t())[:, : x.shape[0]].t().contiguous()


def _by_onednn(x: Tensor, weight: Tensor) -> Tensor:
    """The same by oneDNN, which has products in float32 and in lower precision."""
    if x.dtype == torch.float64:
        return torch.nn.functional.linear(x, weight)
    return torch.ops.mkldnn._linear_pointwise(x.contiguous(), weight, None, "none", [], "")
