"""What a pass added, removed and changed in a graph, by the names of nodes and by the pass that made them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specgraph.explore.difference import by_name
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
    added: list[str] = []
    moved: list[str] = []
    removed: list[str] = []
    changed: dict[str, tuple[str, ...]] = {}
    for old, new in by_name(before, after):
        same = old is not None and new is not None and old.made_by == new.made_by
        if old is not None and not same:
            removed.append(old.name)
        if new is not None and not same:
            (added if new.made_by == made_by else moved).append(new.name)
        if old is not None and new is not None and same and (what := _difference(old, new)):
            changed[new.name] = what
    return Changes(tuple(added), tuple(moved), tuple(removed), changed)


def _difference(old: Node, new: Node) -> tuple[str, ...]:
    return tuple(said for name, said in COMPARED.items() if getattr(old, name) != getattr(new, name))
