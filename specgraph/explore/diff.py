"""The command ``diff``: two stages or two dumps, as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from specgraph.errors import ConfigError
from specgraph.explore.difference import Difference, Entry, difference
from specgraph.explore.dump_files import Dump, Node, Stage, read_dump
from specgraph.explore.values import Deviation, compare_values

SHOWN = 20
"""How many nodes of a graph are shown, unless a single graph is asked for."""


@dataclass(frozen=True)
class _Given:
    """A dump, and the stage of it that was named; None if the dump itself was."""

    folder: Path
    dump: Dump
    stage: str | None

    def stages(self) -> dict[str, Stage]:
        return {stage.name: stage for stage in self.dump.stages if self.stage in (None, stage.name)}


def diff(old: str, new: str, *, graph: str | None = None, numerics: bool = False) -> str:
    """The differences between two stages or two dumps, as text.

    Of two dumps, stages of the same name are compared, and the nodes of the first that differ are shown.

    Args:
        old, new: each the folder of a dump, or of one of its stages.
        graph: ``step`` or a module, to compare this one alone.
        numerics: run both on the same random tokens, too, and name the first node whose value differs.

    Raises:
        ConfigError: a folder holds no dump or stage, one is a dump and the other a stage, there is no such graph, or
            values were asked for and a dump has no weights.
    """
    first, second = _given(old), _given(new)
    pairs = list(_pairs(first, second))
    known = dict.fromkeys(name for a, b in pairs for stage in (a, b) for name in stage.graphs)
    if graph is not None and graph not in known:
        raise ConfigError(f"graph={graph}: the stages have no such graph; they have {', '.join(known)}.")
    same_dump = first.folder == second.folder
    lines = _only(first, second)
    shown = False
    values: list[str] = []
    before: tuple[Stage, Stage] | None = None
    for a, b in pairs:
        found = [d for d in difference(a, b, same_dump=same_dump) if graph in (None, d.graph)]
        lines.append(_heading(a.name, b.name, found))
        if not shown and any(d.changed for d in found):
            shown = True
            lines += [line for d in found for line in _graph_lines(d, None if graph else SHOWN)]
        if numerics:
            again = before is not None and (a.graphs, b.graphs) == (before[0].graphs, before[1].graphs)
            said, before = values, (a, b)
            values = said if again else _values(first.dump.folders[a.name], second.dump.folders[b.name], found)
            lines += ["  values: as above"] if values == said else values
    return "\n".join(lines)


def _given(path: str) -> _Given:
    folder = Path(path).expanduser().resolve()
    if not (folder / "inputs.json").is_file():
        return _Given(folder, read_dump(folder), None)
    dump = read_dump(folder.parent)
    names = {place.name: stage for stage, place in dump.folders.items()}
    if folder.name not in names:
        raise ConfigError(f"{path} is no stage of the dump in {folder.parent}; it has {', '.join(names)}.")
    return _Given(folder.parent, dump, names[folder.name])


def _pairs(first: _Given, second: _Given) -> Iterator[tuple[Stage, Stage]]:
    """The stages to compare, in order."""
    old, new = first.stages(), second.stages()
    if (first.stage is None) != (second.stage is None):
        whole = first if first.stage is None else second
        inside = whole.dump.folders[whole.dump.stages[-1].name].name
        raise ConfigError(
            f"One is a dump and the other a stage; give a stage of {whole.folder}, too, such as {inside}."
        )
    if first.stage is not None:
        yield next(iter(old.values())), next(iter(new.values()))
        return
    yield from ((old[name], new[name]) for name in old if name in new)


def _only(first: _Given, second: _Given) -> list[str]:
    """Stages of two dumps that only one of them has."""
    if first.stage is not None:
        return []
    old, new = first.stages(), second.stages()
    lines = [f"- {name}: only in the first" for name in old if name not in new]
    return lines + [f"+ {name}: only in the second" for name in new if name not in old]


def _heading(old: str, new: str, found: Sequence[Difference]) -> str:
    name = old if old == new else f"{old} -> {new}"
    counts = [f"{d.graph} {_counts(d)}" for d in found if d.changed]
    renamed = sum(a != b for d in found for a, b in d.renamed.items())
    said = "; ".join(counts) or "equal"
    return f"{name}: {said}{f'; {renamed} equal nodes have other names' if renamed else ''}"


def _counts(found: Difference) -> str:
    removed = sum(new is None for _, new in found.changed)
    added = sum(old is None for old, _ in found.changed)
    return f"-{removed} +{added} ~{len(found.changed) - removed - added}"


def _graph_lines(found: Difference, most: int | None) -> Iterator[str]:
    """The first nodes of a graph that differ: ``-`` is gone, ``+`` is new, ``~`` is both, with what differs."""
    if not found.changed:
        return
    yield f"  {found.graph}"
    for entry in found.changed[:most]:
        yield from (f"  {line}" for line in _entry_lines(entry, found))
    if most is not None and len(found.changed) > most:
        yield f"  ... and {len(found.changed) - most} more; graph={found.graph} shows all"


def _entry_lines(entry: Entry, found: Difference) -> list[str]:
    old, new = entry
    if old is None or new is None:
        node = old or new
        return [f"{'-' if new is None else '+'} {_text(node)}"] if node is not None else []
    return [f"~ {_text(old)}", f"  {_text(new)}", f"    differs in: {', '.join(found.what(old, new))}"]


def _text(node: Node) -> str:
    device = None if node.device is None else f"device {node.device}"
    comment = ", ".join(part for part in (node.shape, node.made_by, device) if part)
    return f"{node.name} = {node.code}{f'  # {comment}' if comment else ''}"


def _values(old: Path, new: Path, found: Sequence[Difference]) -> list[str]:
    compared = compare_values(old, new, found)
    if compared.first is None:
        return [f"  values: all that both compute ({compared.compared}) are equal in every bit"]
    lines = [f"  first value that differs: {_deviation(compared.first, found)}"]
    if compared.beyond is None:
        return [*lines, "  no value differs by more than rounding"]
    if compared.beyond != compared.first:
        lines.append(f"  first that rounding does not explain: {_deviation(compared.beyond, found)}")
    return lines


def _deviation(found: Deviation, differences: Sequence[Difference]) -> str:
    place = found.place
    nodes = {(d.graph, old.name): old for d in differences for old, _ in d.entries if old is not None}
    node = nodes.get((place.graph, place.variable))
    made = f", made by {node.made_by}" if node is not None and node.made_by else ""
    other = "" if found.other == place.variable else f" ({found.other} in the second)"
    return (
        f"{place.graph}/{place.variable}{other}{made}, in call {place.call + 1} of step {place.step + 1}: "
        f"{found.elements} of {found.of} elements, by at most {found.largest:.3g}; relative {found.relative:.1e}, "
        f"rounding allows {found.allowed:.1e}"
    )
