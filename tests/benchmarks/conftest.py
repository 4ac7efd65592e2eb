"""What the tests of the scripts share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks import kernels


@pytest.fixture(scope="module", autouse=True)
def known_bandwidth() -> Iterator[None]:
    """Bandwidth is not measured, which would take seconds; it is 1 GB/s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "measure_bandwidth", lambda device: 1e9)
        yield
