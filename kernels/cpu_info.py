"""What kind of CPU this is, where that decides which form is the faster one."""

from __future__ import annotations

import contextlib
import platform
from pathlib import Path

_CPUS = Path("/proc/cpuinfo")


def is_intel(file: Path = _CPUS) -> bool:
    """Whether the CPU is one of Intel's. ``file`` is Linux' list of CPUs; without it, Python knows the vendor."""
    with contextlib.suppress(OSError), file.open() as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() == "vendor_id":
                return value.strip() == "GenuineIntel"
    return "GenuineIntel" in platform.processor()
