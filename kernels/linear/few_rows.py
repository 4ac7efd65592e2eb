"""A linear layer on a CPU whose input has few rows, as in a decode step.

``x`` ``[B, T, I]`` and ``weight`` ``[O, I]`` give ``x @ weight.T + bias``, ``[B, T, O]``, as ``linear`` does. Libraries
take longer for that product than reading the weight does. There are two other forms:

- Where Inductor compiles the step, the product is written as what it is, a sum of products for every output. Inductor
  makes a loop of that which reads a row of the weight once for all rows of ``x``, and has nothing to prepare.
- Else the same library is asked for the transposed product, ``weight @ x.T``. It is faster for 2 to 8 rows, and nothing
  is copied but the small result.

With one thread of an AMD EPYC with AVX-512, MKL 2024.2 and PyTorch 2.13 took for all linear layers of tiny-math's
target (7.1 million parameters in float32):

| rows | linear | transposed | sum |
|---|---|---|---|
| 1 | 3.3 ms | 4.1 ms | 1.3 ms |
| 2 | 4.7 ms | 2.1 ms | 1.5 ms |
| 4 | 4.7 ms | 2.7 ms | 2.3 ms |
| 6 | 5.7 ms | 4.1 ms | 2.7 ms |
| 8 | 5.5 ms | 4.8 ms | 3.1 ms |
| 12 | 6.0 ms | 8.9 ms | 4.3 ms |
| 16 | 6.8 ms | 7.4 ms | 5.1 ms |
| 24 | 7.9 ms | 11.2 ms | 8.1 ms |

With one weight of 2,048 to 11,008 outputs and 2,048 to 4,096 inputs, the sum takes 0.65 to 1.15 times as long as
``linear`` for 1, 4 and 6 rows. With 6,144 and 8,192 inputs it takes 1.5 to 4.6 times as long, since the rows of ``x``
and of the weight do not fit into the first cache together.

A result may be rounded differently than that of ``linear``, as it also may for another number of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

FEW_ROWS = 16
"""The most rows for which the product is a sum in compiled code."""
MOST_INPUTS = 4096
"""The most inputs for which it is a sum."""
TRANSPOSED = range(2, 9)
"""The numbers of rows for which the transposed product is taken elsewhere."""


def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``linear``: ``x`` ``[B, T, I]`` times ``weight`` ``[O, I]``, plus ``bias`` ``[O]`` or None, ``[B, T, O]``."""
    rows = x.shape[0] * x.shape[1] if x.dim() == 3 else 0
    if torch.compiler.is_compiling():
        product, fits = _summed, 0 < rows <= FEW_ROWS and weight.shape[1] <= MOST_INPUTS
    else:
        product, fits = _transposed, rows in TRANSPOSED
    if not fits:
        return torch.nn.functional.linear(x, weight, bias)
    found = product(x.reshape(rows, -1), weight).view(x.shape[0], x.shape[1], -1)
    return found if bias is None else found + bias


def _summed(x: Tensor, weight: Tensor) -> Tensor:
    """``x`` ``[R, I]`` times ``weight`` ``[O, I]``, ``[R, O]``, as a loop that Inductor writes."""
    # Inductor keeps what a strided view is taken of. Else it would compute ``x`` again for every output.
    x = torch.as_strided(x.contiguous(), x.shape, (x.shape[1], 1))
    return (weight.unsqueeze(1) * x).sum(2).t().contiguous()


def _transposed(x: Tensor, weight: Tensor) -> Tensor:
    """The same by a library, which is asked for ``[O, R]``."""
    return torch.mm(weight, x.t()).t().contiguous()
