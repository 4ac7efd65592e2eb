"""Counts lines of code by folder:  python -m benchmarks.count_lines [FOLDER ...]

A line of code is a physical line that holds at least one token of Python. Blank lines, comments and docstrings are not
counted. A docstring is a string that is a statement of its own, so the text below a constant or a field is one, too.
Any other string, such as the source of another program, is counted with all its lines.

Without arguments, the folders of the package are counted and summed, and tests and benchmarks stand apart.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ("specgraph", "passes", "kernels")
APART = ("tests", "benchmarks", "examples")
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def docstring_lines(source: str) -> set[int]:
    """The numbers of the lines on which strings stand that are statements of their own."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def code_lines(source: str) -> int:
    """How many lines of a Python file hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(source))


def count(root: Path, folder: str) -> Counter[str]:
    """The lines of code of each folder directly below a folder; files of the folder itself stand under its own name."""
    counted: Counter[str] = Counter()
    for path in sorted((root / folder).rglob("*.py")):
        inner = path.relative_to(root / folder).parts[:-1]
        counted["/".join((folder, *inner[:1]))] += code_lines(path.read_text())
    return counted


def table(root: Path, package: tuple[str, ...], apart: tuple[str, ...] = ()) -> list[tuple[str, int]]:
    """The rows to print: each folder of the package, their sums, and one row for each folder that stands apart."""
    rows: list[tuple[str, int]] = []
    total = 0
    for folder in package:
        counted = count(root, folder)
        rows += sorted(counted.items())
        if len(counted) > 1:
            rows.append((f"{folder}, sum", counted.total()))
        total += counted.total()
    if len(package) > 1:
        rows.append((" + ".join(package), total))
    return rows + [(folder, count(root, folder).total()) for folder in apart]


if __name__ == "__main__":
    asked = tuple(sys.argv[1:])
    shown = table(ROOT, asked) if asked else table(ROOT, PACKAGE, APART)
    print(tabulate(shown, headers=["folder", "lines of code"], intfmt=","))
