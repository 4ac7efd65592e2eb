"""The programs of ``specgraph::pointwise``: Python expressions, one for every result, with commas between them.

    sigmoid(x0), -exp(float32(x1)) * softplus(float32(x2) + x3)

``x0`` is the first input. Numbers, the operators ``+ - * /`` and the names in :data:`FUNCTIONS` mean what they mean in
PyTorch, dtypes included: every value is rounded to the dtype that PyTorch gives it.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
"""What converts to a dtype has the dtype's name."""


def _conversion(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "neg": torch.neg,
    "exp": torch.exp, "relu": torch.relu, "sigmoid": torch.sigmoid, "silu": torch.nn.functional.silu,
    "softplus": torch.nn.functional.softplus, "clamp_min": torch.clamp_min, "clamp_max": torch.clamp_max,
    **{name: _conversion(dtype) for name, dtype in DTYPES.items()},
}
"""The functions of a program. The first five are written as operators."""
OPERATORS = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div"}


def evaluate(text: str, inputs: Sequence[Any], call: Callable[..., Any] | None = None) -> list[Any]:
    """The results of a program. ``call(name, *values)`` computes a function of it; without it, PyTorch does.

    Raises:
        ValueError: ``text`` is no program, or reads an input that is not there.
    """
    compute = call or (lambda name, *values: FUNCTIONS[name](*values))
    return [_value(expression, text, inputs, compute) for expression in _parsed(text)]


@functools.cache
def result_dtypes(text: str, inputs: tuple[tuple[torch.dtype, int], ...]) -> tuple[torch.dtype, ...]:
    """The dtypes of the results, by the dtype and the number of dimensions of every input."""
    return tuple(result.dtype for result in evaluate(text, [like(dtype, dims) for dtype, dims in inputs]))


def like(dtype: torch.dtype, dims: int) -> Tensor:
    """One element, with which PyTorch is asked what dtype a result has."""
    return torch.zeros((1,) * dims, dtype=dtype)


@functools.cache
def _parsed(text: str) -> list[ast.expr]:
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError:
        raise ValueError(f"A pointwise program is a list of expressions with commas, not {text!r}.") from None
    return tree.elts if isinstance(tree, ast.Tuple) else [tree]


def _value(node: ast.expr, text: str, inputs: Sequence[Any], call: Callable[..., Any]) -> Any:
    def value(part: ast.expr) -> Any:
        return _value(part, text, inputs, call)

    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = value(operand)
            return -inner if isinstance(inner, int | float) else call("neg", inner)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return call(OPERATORS[type(op)], value(left), value(right))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
            return call(name, *map(value, args))
        case ast.Name(id=name) if name[:1] == "x" and name[1:].isdigit() and int(name[1:]) < len(inputs):
            return inputs[int(name[1:])]
    raise ValueError(
        f"A pointwise program has the inputs x0 to x{len(inputs) - 1}, numbers, + - * / and the functions "
        f"{', '.join(sorted(FUNCTIONS))}, but no {ast.unparse(node)!r} as in {text!r}."
    )
