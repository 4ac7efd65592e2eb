"""Writes the kernel of a pointwise program, and launches it.

The source is Triton as one would write it by hand for this program: a load for every input, a line for every function,
a store for every result. :func:`source` returns it. :func:`gate_function` writes the function that other kernels call
with values that they hold in registers.

Elements are computed in float32, without contracting a product with a sum, and rounded after every function to the
dtype that PyTorch gives its result. So an element has the same bits whatever the shape of the inputs and of the tiles.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import functools
import hashlib
import linecache
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels import gpus
from specgraph.kernels.launch import gdc_launch_dependents, gdc_wait, launch, merged_dimensions
from specgraph.kernels.pointwise.program import FUNCTIONS, evaluate, like

COMPUTED = {torch.float32: "tl.float32", torch.bfloat16: "tl.bfloat16", torch.float16: "tl.float16"}
"""The dtypes that the kernel computes, and their names in it."""
_SMALL, _LARGE = 256, 1024


@triton.jit
def _softplus(x):
    """``log(1 + exp(x))`` as PyTorch computes it, with a threshold of 20.

    ``log(1 + y)`` of a small ``y`` loses what the rounding of ``1 + y`` loses; ``y / (1 + y - 1)`` gives it back.
    """
    y = tl.exp(tl.where(x > 20.0, 20.0, x))
    rounded = 1.0 + y
    lost = rounded - 1.0
    small = lost == 0.0
    log = tl.where(small, y, tl.log(rounded) * tl.div_rn(y, tl.where(small, 1.0, lost)))
    return tl.where(x > 20.0, x, log)


_FORMS = {
    "add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "div": "tl.div_rn({}, {})", "neg": "-{}",
    "exp": "tl.exp({})", "relu": "tl.where({0} < 0.0, 0.0, {0})", "sigmoid": "1.0 / (1.0 + tl.exp(-{}))",
    "silu": "{0} / (1.0 + tl.exp(-{0}))", "softplus": "_softplus({})", "float32": "{}", "bfloat16": "{}",
    "float16": "{}", "clamp_min": "tl.where({0} < {1}, {1}, {0})", "clamp_max": "tl.where({0} > {1}, {1}, {0})",
}
"""How each function is written in float32."""


class _Value(NamedTuple):
    """A value in the source: its name, and an element of its dtype."""

    name: str
    element: Tensor


@dataclass(frozen=True)
class _Input:
    """What the source depends on of an input: its dtype and dimensions, and those left when neighbours are joined."""

    dtype: torch.dtype
    dims: int
    joined: int


def source(program: str, inputs: Sequence[_Input]) -> str:
    """The kernel of ``program`` in Triton."""
    lines, values = list[str](), list[_Value]()
    for index, given in enumerate(inputs):
        lines += _load(index, given.joined)
        values.append(_Value(f"x{index}", like(given.dtype, given.dims)))
    results = evaluate(program, values, functools.partial(_write, lines))
    lines += [f"tl.store(out{i} + at, {result.name}, mask=inside)" for i, result in enumerate(results)]
    outs = [f"out{i}" for i in range(len(results))]
    parameters = [name for i, given in enumerate(inputs) for name in (f"p{i}", *_strides(i, given.joined))]
    return "\n    ".join([
        f"def pointwise({', '.join([*outs, *parameters, 'total'])}, "
        "WIDE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):",
        f'"""{program}"""',
        "gdc_launch_dependents(PDL)",
        "gdc_wait(PDL)",
        "tile = tl.program_id(0)",
        "if WIDE:",
        "    tile = tile.to(tl.int64)",
        "at = tile * BLOCK + tl.arange(0, BLOCK)",
        "inside = at < total",
        *lines,
        "",
    ])


def _strides(index: int, dims: int) -> list[str]:
    """The parameters that say where an input's elements are: strides, and the sizes of all dimensions but the first."""
    return [f"s{index}_{d}" for d in range(dims)] + [f"n{index}_{d}" for d in range(1, dims)]


def _load(index: int, dims: int) -> list[str]:
    """The lines that load an input's elements, as float32."""
    terms, place = [], "at"
    for d in range(dims - 1, 0, -1):
        terms.append(f"{place} % n{index}_{d} * s{index}_{d}")
        place = f"({place} // n{index}_{d})"
    terms += [f"{place} * s{index}_0"] if dims else ["at * 0"]
    return [f"x{index} = tl.load(p{index} + ({' + '.join(terms)}), mask=inside).to(tl.float32)"]


def _write(lines: list[str], function: str, *values: Any) -> _Value:
    """Append the line that computes a function, and what rounds its result."""
    element = FUNCTIONS[function](*(v.element if isinstance(v, _Value) else v for v in values))
    names = [v.name if isinstance(v, _Value) else repr(float(v)) for v in values]
    text, name = _FORMS[function].format(*names), f"t{len(lines)}"
    rounded = text if element.dtype == torch.float32 else f"({text}).to({COMPUTED[element.dtype]}).to(tl.float32)"
    lines.append(f"{name} = {rounded}")
    return _Value(name, element)


@functools.cache
def _compiled(program: str, inputs: tuple[_Input, ...]) -> Any:
    """The kernel as a function of Triton's."""
    names = _defined(source(program, inputs))
    return triton.jit(names["pointwise"])


@functools.cache
def gate_function(program: str, dtype: torch.dtype) -> Any:
    """A program of two inputs and one result as a function of Triton's, for kernels that take it as a constant.

    It takes two blocks of one shape that hold values of ``dtype`` in float32, and returns such a block.
    """
    lines = list[str]()
    values = [_Value(f"x{index}", like(dtype, 2)) for index in range(2)]
    (result,) = evaluate(program, values, functools.partial(_write, lines))
    text = "\n    ".join(["def gate(x0, x1):", f'"""{program}"""', *lines, f"return {result.name}", ""])
    function = _defined(text)["gate"]
    return triton.jit(function)


def _defined(text: str) -> dict[str, Any]:
    """What a source defines, which Triton reads from Python's own cache of lines."""
    name = f"specgraph_pointwise_{hashlib.sha256(text.encode()).hexdigest()[:12]}.py"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    helpers = {"_softplus": _softplus, "gdc_wait": gdc_wait, "gdc_launch_dependents": gdc_launch_dependents}
    names: dict[str, Any] = {"__name__": __name__, "tl": tl, **helpers}
    exec(compile(text, name, "exec"), names)
    return names


def pointwise_kernel(outs: list[Tensor], inputs: list[Tensor], program: str) -> None:
    """Compute ``program`` of ``inputs`` into ``outs``, which are contiguous and not empty."""
    shape, total = outs[0].shape, outs[0].numel()
    places = [merged_dimensions(shape, x.expand(shape).stride()) for x in inputs]
    kernel = _compiled(program, tuple(_Input(x.dtype, x.dim(), len(p)) for x, p in zip(inputs, places, strict=True)))
    arguments = list[Any](outs)
    for x, place in zip(inputs, places, strict=True):
        arguments += [x, *(stride for _, stride in place), *(size for size, _ in place[1:])]
    farthest = max(sum((size - 1) * stride for size, stride in place) for place in places)
    # Too few elements to give all multiprocessors a large tile are cut into small ones.
    block, warps = (_LARGE, 8) if total >= gpus.HOPPER.pointwise_tiles * _LARGE else (_SMALL, 2)
    launch(
        kernel, (triton.cdiv(total, block),), *arguments, total, WIDE=max(total + block, farthest) >= 1 << 31,
        BLOCK=block, num_warps=warps, enable_fp_fusion=False,
    )
