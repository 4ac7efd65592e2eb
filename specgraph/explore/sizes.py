"""Numbers for the byte formulas of a dump: ``1024*B*T`` for given sizes."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
}  # fmt: skip
BLOCK_SIZE = 16


def evaluate(formula: str | None, sizes: Mapping[str, int]) -> int | None:
    """The value of a sum of products of numbers and letters; None if it is not known, as with a size ``?``."""
    try:
        return None if formula is None else _value(ast.parse(formula, mode="eval").body, sizes)
    except (SyntaxError, KeyError, ValueError, RecursionError):
        return None


def _value(node: ast.expr, sizes: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return sizes[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, sizes), _value(node.right, sizes))
    raise ValueError(f"{ast.dump(node)} is no sum or product")


def decode_sizes(num_speculative_tokens: int, batch: int, length: int) -> dict[str, int]:
    """The letters of a decode step over ``batch`` sequences of so many tokens each."""
    rows, pages = num_speculative_tokens + 1, -(-length // BLOCK_SIZE)
    return {
        "B": batch, "b": batch, "T": rows, "R": batch * rows, "S": length, "M": pages, "N": batch * pages,
        "E": 1, "W": 1,
    }  # fmt: skip
