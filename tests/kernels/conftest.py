"""Files of tests that launch no Triton kernel, which compiling all kernels leaves out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from triton.runtime import interpreter

LAUNCHES_NOTHING = (
    "attention/test_attention.py",
    "linear/test_linear_hopper.py",
    "packed/test_cpu.py",
    "packed/test_formats.py",
    "sampling/test_draft_rows.py",
    "sampling/test_draw.py",
    "sampling/test_kept.py",
    "verify/test_row_by_row.py",
    "verify/test_verify.py",
    "verify/test_verify_distribution.py",
)
"""The slow ones of them: they run references, forms for a CPU or processes of their own."""


def _refuse(*given: Any, **options: Any) -> None:
    raise AssertionError("this file is in LAUNCHES_NOTHING, so tests/kernels/test_compile.py does not see this launch")


@pytest.fixture(scope="module", autouse=True)
def launches_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """A file of the list launches no kernel, else a variant might not be compiled anywhere."""
    with pytest.MonkeyPatch.context() as patch:
        if str(request.path.relative_to(Path(__file__).parent)) in LAUNCHES_NOTHING:
            patch.setattr(interpreter.GridExecutor, "__call__", _refuse)
        yield
