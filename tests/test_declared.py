"""Whatever is imported is declared in setup.cfg, and what is declared is pinned in constraints.txt."""

from __future__ import annotations

import ast
import configparser
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DISTRIBUTIONS = {"hydra": "hydra-core", "yaml": "PyYAML"}
"""The packages whose name on the index is not the name that is imported."""
OURS = {"benchmarks", "specgraph", "tests"}
UNDECLARED = {"speculators"}
"""What `make install` installs by itself, since its own pins do not fit ours, and the tests do without."""


def _declared(*extras: str) -> set[str]:
    """The names that setup.cfg requires, with those of some extras."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options"]["install_requires"].splitlines()
    for extra in extras:
        lines += setup["options.extras_require"][extra].splitlines()
    return {_name(line) for line in lines if re.match(r"\w", line)} - OURS


def _name(requirement: str) -> str:
    match = re.match(r"[\w.-]+", requirement)
    assert match is not None
    return match[0].lower().replace("_", "-")


def _imported(folder: str) -> Iterator[tuple[str, str]]:
    """Every package that a file of ``folder`` imports, with the file. An example may import the file beside it."""
    for path in (ROOT / folder).rglob("*.py"):
        beside = {other.stem for other in path.parent.glob("*.py")} if folder == "examples" else set()
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
                modules = [node.module]
            for package in {module.partition(".")[0] for module in modules} - sys.stdlib_module_names - OURS - beside:
                yield _name(DISTRIBUTIONS.get(package, package)), str(path.relative_to(ROOT))


@pytest.mark.parametrize(
    ("folder", "extras"),
    [
        ("passes", ()),
        ("kernels", ()),
        ("specgraph", ("train", "eval", "grammar", "ray")),
        ("examples", ("train", "serve", "ray", "rl")),
        ("tests", ("train", "eval", "grammar", "serve", "ray", "rl", "dev")),
    ],
)
def test_every_package_that_is_imported_is_declared(folder: str, extras: tuple[str, ...]) -> None:
    imported = dict(_imported(folder))
    assert imported, f"there are files in {folder}"
    known = _declared(*extras) | UNDECLARED
    assert {package: file for package, file in imported.items() if package not in known} == {}


def test_only_training_and_plots_need_the_extra_train() -> None:
    optional = _declared("train") - _declared()
    users = {file for package, file in _imported("specgraph") if package in optional}
    assert {file for file in users if not file.startswith("specgraph/training/")} == {"specgraph/plots.py"}


def test_everything_declared_is_pinned() -> None:
    pinned = {_name(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    assert _declared("train", "eval", "grammar", "serve", "ray", "rl", "site", "dev") - pinned == set()
