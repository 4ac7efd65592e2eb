"""What the files of kernels/ import: each other without circles, and nothing else of ours."""

from __future__ import annotations

import ast
from pathlib import Path

from specgraph.kernels import catalogue

KERNELS = Path(catalogue.__file__).parent


def imports(file: Path) -> set[str]:
    """The modules of specgraph that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("specgraph"):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("specgraph")}
    return found


def kernel_imports() -> dict[str, set[str]]:
    """Every module of ``kernels/`` with those that it imports; packages go by their own name."""
    files = {
        ".".join(["specgraph.kernels", *file.relative_to(KERNELS).with_suffix("").parts]).removesuffix(
            ".__init__"
        ): file
        for file in KERNELS.rglob("*.py")
    }
    return {name: imports(file) for name, file in files.items()}


def test_kernels_import_nothing_else_of_ours_and_the_package_nothing_at_all() -> None:
    found = kernel_imports()
    assert not found["specgraph.kernels"]
    assert all(name.startswith("specgraph.kernels") for seen in found.values() for name in seen)


def test_no_circle_among_the_kernels() -> None:
    """Imports inside of functions count, and so do those for type checkers."""
    found = kernel_imports()
    edges = {name: {i for i in seen if i in found and i != name} for name, seen in found.items()}
    while free := [name for name, seen in edges.items() if not seen]:
        edges = {name: seen - set(free) for name, seen in edges.items() if name not in free}
    assert not edges
