"""What a pass added, removed and changed in a graph, by the names of nodes and by the pass that made them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specgraph.explore.reading import Node, Stage

COMPARED = {"op": "kind", "calls": "what it calls", "code": "code", "inputs": "inputs", "shape": "shape",
            "bytes": "bytes"}  # fmt: skip
"""The attributes of a node that a pass may change, by what a reader calls them."""


@dataclass(frozen=True)
class Changes:
    """The difference of two graphs, as names of nodes.

    Attributes:
        added: nodes that the pass made. One may have the name of a node that it removed.
        moved: nodes that an earlier pass made and that were in another graph before.
        removed: nodes that are gone, or whose name now belongs to a node that the pass made.
        changed: nodes of an earlier pass that differ, with what differs (values of :data:`COMPARED`).
    """

    added: tuple[str, ...]
    moved: tuple[str, ...]
    removed: tuple[str, ...]
    changed: dict[str, tuple[str, ...]]

    def to_record(self) -> dict[str, Any]:
        """Plain values, which JSON can hold."""
        changed = {name: [*what] for name, what in self.changed.items()}
        return {"added": self.added, "moved": self.moved, "removed": self.removed, "changed": changed}

    def __bool__(self) -> bool:
        return bool(self.added or self.moved or self.removed or self.changed)


def changes_of(stage: Stage, before: Stage | None) -> dict[str, Changes]:
    """What made ``stage`` out of the stage before it, by graph. Graphs that are equal are left out."""
    if before is None:
        return {}
    made_by = stage.made.get("pass")
    names = [*stage.graphs, *(name for name in before.graphs if name not in stage.graphs)]
    found = {name: compare(before.graphs.get(name, ()), stage.graphs.get(name, ()), made_by) for name in names}
    return {name: changes for name, changes in found.items() if changes}


def compare(before: Sequence[Node], after: Sequence[Node], made_by: str | None) -> Changes:
    """The difference of two versions of a graph, of which the pass ``made_by`` made the second."""
    old, new = _by_name(before), _by_name(after)
    replaced = {name for name in old.keys() & new.keys() if old[name].made_by != new[name].made_by}
    fresh = [name for name in new if name not in old or name in replaced]
    differences = {name: _difference(old[name], new[name]) for name in new if name in old and name not in replaced}
    return Changes(
        added=tuple(name for name in fresh if new[name].made_by == made_by),
        moved=tuple(name for name in fresh if new[name].made_by != made_by),
        removed=tuple(name for name in old if name not in new or name in replaced),
        changed={name: what for name, what in differences.items() if what},
    )


def _by_name(nodes: Sequence[Node]) -> Mapping[str, Node]:
    return {node.name: node for node in nodes}


def _difference(old: Node, new: Node) -> tuple[str, ...]:
    return tuple(said for name, said in COMPARED.items() if getattr(old, name) != getattr(new, name))
