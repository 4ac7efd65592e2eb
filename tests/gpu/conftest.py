"""Everything here needs a GPU; on a machine without one it is collected, and skipped by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

REASON = "needs a GPU: torch.cuda finds none"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder; the hook is given those of all folders."""
    if torch.cuda.is_available():
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=REASON))
