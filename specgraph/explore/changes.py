"""Lists the nodes that a pass added, removed and changed, by their names and by the pass that made each."""

from __future__ import annotations

from typing import Any

from specgraph.explore.difference import Difference, difference
from specgraph.explore.dump_files import Stage


def changes_of(stage: Stage, before: Stage | None) -> dict[str, dict[str, Any]]:
    """The changes from the stage before to ``stage``, by graph, as names of nodes. Graphs that are equal are left out.

    ``added`` are nodes that the pass made, of which one may have the name of a node that it removed. ``moved`` are
    nodes that an earlier pass made and that were in another graph before. ``removed`` are nodes that are gone, or whose
    name now belongs to a node that the pass made. ``changed`` are nodes of an earlier pass that differ, each with what
    differs.
    """
    if before is None:
        return {}
    made_by = stage.made.get("pass")
    found = {d.graph: _changes(d, made_by) for d in difference(before, stage, same_dump=True)}
    return {graph: changes for graph, changes in found.items() if any(changes.values())}


def _changes(found: Difference, made_by: str | None) -> dict[str, Any]:
    changes: dict[str, Any] = {"added": [], "moved": [], "removed": [], "changed": {}}
    for old, new in found.entries:
        if old is not None and new is not None and old.made_by == new.made_by:
            if what := found.what(old, new):
                changes["changed"][new.name] = what
            continue
        if old is not None:
            changes["removed"].append(old.name)
        if new is not None:
            changes["added" if new.made_by == made_by else "moved"].append(new.name)
    return changes
