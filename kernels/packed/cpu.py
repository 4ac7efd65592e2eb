"""Products with weights in few bits on a CPU, by a function in C++ that reads numbers as they are stored.

``cpu.cpp`` computes ``x @ weight.T`` for rows in float32, with sums in float32. Numbers are made in registers, from
words of 32 bits for as many words at once as a vector register holds, so that no format needs another layout. All
numbers of a word have one scale, with which the sum over the word is multiplied. Up to four or eight rows, depending on
the number of registers, meet a number when it is made. The sums of a row are the same in the same order whatever stands
beside it, so that its bits do not depend on the other rows.

CPU milliseconds of one thread on an AMD EPYC with AVX2 (Zen 3), for a weight ``[8192, 2048]`` (*dense*: ``linear`` with
the weight in bfloat16; *whole*: with the weight made in float32 from mxfp4 before):

| rows | dense | int4 | mxfp4 | fp8 blocks | int8, a scale for each output | mxfp4, whole |
|---|---|---|---|---|---|---|
| 1 | 5.2 | 2.5 | 3.3 | 3.7 | 2.5 | 381 |
| 4 | 16.4 | 4.2 | 4.9 | 5.6 | 4.4 | |
| 32 | 113 | 30 | 31 | 37 | 31 | 453 |

A compiler for C++ is needed, as for Inductor. Loops that Inductor makes of the same sums, which were tried before, took
6.5 ms in mxfp4 and 10 in fp8 for one row, since it moves numbers through memory where bits are taken as another type.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from specgraph.kernels.packed.format import Format

_FLAGS = ("-march=native", "-ffp-contract=fast")
"""For vectors as long as the CPU has, and for sums of products that are rounded once."""


class Compiler:
    """What makes a library of a source in C++ for this CPU, given flags. Kernels import no package that can.

    Attributes:
        load: set by :mod:`specgraph.ir.packed`; returns None where nothing can or may be compiled.
    """

    load: ClassVar[Callable[[str, tuple[str, ...]], ctypes.CDLL | None]] = staticmethod(lambda source, flags: None)


def library() -> ctypes.CDLL | None:
    """The functions of ``cpu.cpp``; None where they cannot be compiled."""
    return Compiler.load(_source(), _FLAGS)


@functools.cache
def _source() -> str:
    return Path(__file__).with_name("cpu.cpp").read_text()


def covers(form: Format, x: Tensor, weight: Sequence[Tensor]) -> bool:
    """Whether :func:`product` computes the product of ``x`` ``[..., I]`` with the tensors of a weight ``[O, I]``."""
    if form.cpu_product is None or x.dtype == torch.float64 or x.numel() == 0:
        return False
    inputs, of_word = x.shape[-1], _numbers_of_word(form)
    group = min(form.block(inputs, weight[1])[1], inputs)
    if inputs % of_word or group % of_word or not weight[0].is_contiguous():
        return False
    return library() is not None


def product(form: Format, x: Tensor, weight: Sequence[Tensor]) -> Tensor:
    """``x @ weight.T`` in float32, ``[..., O]``, for what :func:`covers` takes."""
    functions = library()
    assert functions is not None and form.cpu_product is not None, "covers has said so"
    inputs, outputs, of_word = x.shape[-1], weight[0].shape[0], _numbers_of_word(form)
    rows = form.quantise_rows(x, weight).float().reshape(-1, inputs)
    lanes = functions.lanes()
    rows = functional.pad(rows, (0, -inputs % (lanes * of_word)))
    # The first numbers of as many words as there are lanes, then their second ones, and so on.
    rows = rows.view(len(rows), -1, lanes, of_word).mT.contiguous()
    scale, zeros = form.factors(weight)
    scale, zeros = scale.contiguous(), None if zeros is None else zeros.contiguous()
    out = rows.new_empty(len(rows), outputs)
    getattr(functions, form.cpu_product)(
        *(ctypes.c_void_p(None if part is None else part.data_ptr()) for part in (rows, weight[0], scale, zeros, out)),
        *map(ctypes.c_long, (len(rows), outputs, inputs, *form.block(inputs, weight[1]))),
        int(scale.dtype == torch.uint8), torch.get_num_threads(),
    )  # fmt: skip
    return out.view(*x.shape[:-1], outputs)


def _numbers_of_word(form: Format) -> int:
    return 4 * form.per_element // form.stored.itemsize
