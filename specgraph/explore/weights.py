"""Which weights several modules share, and which almost equal one of the target's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from specgraph.explore.dump_files import Dump, Tensor

SHARING = "share_weights"
"""The pass that shares weights, and the stage that it makes."""


def sharing(dump: Dump) -> dict[str, Any]:
    """The tensors that have several names, the bytes of every module, and the near misses of the pass that shares.

    Later passes join tensors, so names are those of the stage that the pass made, or of the last one without it.
    """
    stage = next((stage for stage in dump.stages if stage.made.get("pass") == SHARING), dump.stages[-1])
    said = stage.made if stage.made.get("pass") == SHARING else {}
    return {
        "stage": stage.name,
        "shared": [asdict(tensor) for tensor in stage.tensors if len(tensor.names) > 1],
        "modules": _modules(stage.tensors),
        "near_misses": said.get("near_misses", []),
        "notes": said.get("notes", []),
        "bytes_shared": said.get("bytes_shared", 0),
        "total": sum(tensor.bytes for tensor in stage.tensors),
    }


def _modules(tensors: Sequence[Tensor]) -> list[dict[str, Any]]:
    """For every module: the number and bytes of its tensors, and how many bytes another module uses as well."""
    found: dict[str, dict[str, Any]] = {}
    for tensor in tensors:
        for module in tensor.modules:
            row = found.setdefault(module, {"module": module, "tensors": 0, "bytes": 0, "shared": 0})
            row["tensors"] += 1
            row["bytes"] += tensor.bytes
            row["shared"] += tensor.bytes if len(tensor.modules) > 1 else 0
    return list(found.values())
