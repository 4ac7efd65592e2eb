"""Private names of torch and transformers come from ``specgraph/compat.py`` alone, and all of them are there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from specgraph import compat

ROOT = Path(__file__).parents[1]
PRIVATE = re.compile(
    r"\b(torch(?!\.ops\.)|transformers)(\.[a-z]\w*)*\._[a-zA-Z]\w*"  # torch._C, torch.utils._pytree, but no op
    r"|from (torch|transformers)[\w.]* import .*\b_[a-z]\w*"
    r"|\b(torch\.fx\.experimental|transformers\.utils\.output_capturing)\b"
)
KERNELS = {"torch._ops", "torch._check_value"}
"""What kernels name themselves, since they import nothing of ours."""


def found_in(folder: str) -> dict[str, set[str]]:
    """The private names in the code of each file. Docstrings may name them between backquotes."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        code = re.sub(r"`[^`]*`", "", path.read_text())
        names = {match[0] for match in PRIVATE.finditer(code)}
        if names and path.name != "compat.py":
            found[str(path.relative_to(ROOT))] = names
    return found


@pytest.mark.parametrize("folder", ["specgraph", "passes"])
def test_nobody_else_names_them(folder: str) -> None:
    assert found_in(folder) == {}


def test_kernels_name_those_that_are_listed() -> None:
    assert set().union(*found_in("kernels").values()) == KERNELS


@pytest.mark.parametrize("name", [*(name for name in vars(compat) if not name.startswith("_")), *compat._LATE])
def test_every_name_is_there(name: str) -> None:
    assert getattr(compat, name) is not None


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = compat.nothing  # type: ignore[attr-defined]


def test_what_takes_long_is_imported_late() -> None:
    slow = ["torch._dynamo", "torch._inductor", "sympy", "transformers"]
    code = "import sys, torch; before = {*sys.modules}; import specgraph.compat; "
    code += f"print([name for name in {slow} if name in sys.modules and name not in before])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"
