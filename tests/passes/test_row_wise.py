"""Every ATen op of which ``lower_kernels`` believes that a row of its result does not depend on the other rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specgraph.passes.lower_kernels import ROW_WISE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, WIDTH = 7, 1003


def places(x: Tensor, count: int = WIDTH) -> Tensor:
    """Some columns of each row, int64 ``[rows, count]``, of which none occurs twice."""
    return torch.arange(count - 1, -1, -1, device=x.device).expand(len(x), count)


Arguments = Callable[[Tensor], tuple[Any, ...]]
MOVES: dict[str, tuple[str, Arguments]] = {
    "cat": ("default", lambda x: ([x, x], -1)),
    "clone": ("default", lambda x: (x,)),
    "constant_pad_nd": ("default", lambda x: (x, [0, 3], 2.0)),
    "copy": ("default", lambda x: (torch.zeros_like(x), x)),
    "embedding": ("default", lambda x: (torch.arange(4.0 * WIDTH, device=x.device).view(WIDTH, 4), places(x))),
    "flip": ("default", lambda x: (x, [1])),
    "gather": ("default", lambda x: (x, 1, places(x))),
    "index": ("Tensor", lambda x: (x, [None, places(x)[0]])),
    "index_select": ("default", lambda x: (x, 1, places(x)[0])),
    "pad": ("default", lambda x: (x, [1, 2])),
    "repeat": ("default", lambda x: (x, [1, 2])),
    "repeat_interleave": ("self_int", lambda x: (x, 2, 1)),
    "roll": ("default", lambda x: (x, [1], [1])),
    "scatter": ("src", lambda x: (torch.zeros_like(x), 1, places(x), x)),
    "select_scatter": ("default", lambda x: (x, x[:, 1], 1, 0)),
    "slice_scatter": ("default", lambda x: (x, x[:, :5], 1, 2, 7)),
    "stack": ("default", lambda x: ([x, x], 1)),
    "to": ("dtype", lambda x: (x, torch.bfloat16)),
    "_to_copy": ("default", lambda x: (x,)),
    "type_as": ("default", lambda x: (x, x.bfloat16())),
    "_unsafe_view": ("default", lambda x: (x, [len(x), 17, 59])),
}
CONSTANTS: dict[str, tuple[str, Arguments]] = {
    "arange": ("default", lambda x: (x.shape[1],)),
    "empty": ("memory_format", lambda x: ([*x.shape],)),
    "empty_like": ("default", lambda x: (x,)),
    "full": ("default", lambda x: ([*x.shape], 3.0)),
    "full_like": ("default", lambda x: (x, 3.0)),
    "new_empty": ("default", lambda x: (x, [*x.shape])),
    "new_full": ("default", lambda x: (x, [*x.shape], 3.0)),
    "new_ones": ("default", lambda x: (x, [*x.shape])),
    "new_zeros": ("default", lambda x: (x, [*x.shape])),
    "one_hot": ("default", lambda x: (places(x, 5), 5)),
    "ones": ("default", lambda x: ([*x.shape],)),
    "ones_like": ("default", lambda x: (x,)),
    "scalar_tensor": ("default", lambda x: (3.0,)),
    "zeros": ("default", lambda x: ([*x.shape],)),
    "zeros_like": ("default", lambda x: (x,)),
}
REDUCTIONS: dict[str, tuple[str, Arguments]] = {
    "amax": ("default", lambda x: (x, [-1])),
    "amin": ("default", lambda x: (x, [-1])),
    "argmax": ("default", lambda x: (x, -1)),
    "argsort": ("default", lambda x: (x, -1)),
    "log_softmax": ("int", lambda x: (x, -1)),
    "_log_softmax": ("default", lambda x: (x, -1, False)),
    "max": ("dim", lambda x: (x.round(), -1)),
    "softmax": ("int", lambda x: (x, -1)),
    "_softmax": ("default", lambda x: (x, -1, False)),
    "sort": ("default", lambda x: (x, -1)),
    "topk": ("default", lambda x: (x, 9)),
}
EXAMPLES = {**MOVES, **CONSTANTS, **REDUCTIONS}
UNWRITTEN = ("empty", "empty_like", "new_empty")


def results(name: str, x: Tensor) -> list[Tensor]:
    """What an op of :data:`EXAMPLES` gives for the rows ``x`` ``[rows, WIDTH]``."""
    overload, arguments = EXAMPLES[name]
    found = getattr(getattr(torch.ops.aten, name), overload)(*arguments(x))
    return [found] if isinstance(found, Tensor) else list(found)


def test_there_is_an_example_of_every_op() -> None:
    assert set(EXAMPLES) == ROW_WISE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_row_has_the_same_bits_alone_and_beside_others(name: str, dtype: torch.dtype) -> None:
    """The rows are not a multiple of any vector long, so that they begin at different alignments."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).mul(4).to(DEVICE, dtype)
    together = results(name, x)
    for row in range(ROWS):
        for every, alone in zip(together, results(name, x[row : row + 1].clone()), strict=True):
            own = every[row : row + 1] if every.shape[:1] == (ROWS,) else every
            assert own.shape == alone.shape and own.dtype == alone.dtype
            assert name in UNWRITTEN or torch.equal(own, alone)
