"""How much memory this process can still allocate on the host, as Linux and its control groups say.

A container has less than its machine. Its limit is that of its control group, or of one around it (``memory.max`` in
version 2 of the interface, ``memory.limit_in_bytes`` in version 1). What the files of a group say it uses includes the
cache of files, of which the kernel gives back the inactive part when memory is short.
"""

from __future__ import annotations

import functools
import math
import os
import re
from pathlib import Path

_ROOT = Path("/")
_FILES = (("memory.max", "memory.current", "inactive_file"),
          ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))  # fmt: skip


def available_bytes(root: Path = _ROOT) -> float:
    """The least of what the machine and every control group of this process has left; infinite if nothing says.

    ``root`` is the folder in which ``proc`` and ``sys`` are.
    """
    machine = _number(root / "proc/meminfo", "MemAvailable:")
    available = _free_pages() if machine is None else 1024 * machine
    return max(0, min([available, *(_left(*group) for group in _groups(root))]))


def _free_pages() -> float:
    """What a system without ``/proc/meminfo`` calls available."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return math.inf


@functools.cache
def _groups(root: Path) -> list[tuple[Path, Path, str]]:
    """The control groups that this process is in, from the innermost one outwards.

    Of each these are the files with its limit and its usage, and the name in ``memory.stat`` of what can be given back.
    Inside of a container, the path of its group may be that on the host, which is not there; its own group is then
    what is mounted. They are looked for once, because every request on a CPU asks.
    """
    found: list[tuple[Path, Path, str]] = []
    for line in filter(None, _text(root / "proc/self/cgroup").splitlines()):
        _, controllers, path = line.split(":", 2)
        mounted = {"": root / "sys/fs/cgroup", "memory": root / "sys/fs/cgroup/memory"}
        top = mounted.get("memory" if "memory" in controllers.split(",") else controllers)
        if top is None:
            continue
        inner = top / path.strip("/")
        around = [folder for folder in (inner, *inner.parents) if folder == top or top in folder.parents]
        found += [(folder / limit, folder / usage, name) for folder in around for limit, usage, name in _FILES
                  if (folder / limit).is_file()]  # fmt: skip
    return found


def _left(limit: Path, usage: Path, reclaimed: str) -> float:
    """What a control group has left; infinite if it has no limit."""
    most = _text(limit).strip()
    used = _text(usage).strip() if most.isdigit() else ""
    if not used.isdigit():
        return math.inf
    return int(most) - int(used) + (_number(limit.with_name("memory.stat"), reclaimed) or 0)


def _number(path: Path, name: str) -> int | None:
    """The number behind a name, in a file with a name and a number in every line."""
    found = re.search(rf"^{name}\s+(\d+)", _text(path), re.MULTILINE)
    return int(found[1]) if found else None


def _text(path: Path) -> str:
    """What a file says; nothing if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
