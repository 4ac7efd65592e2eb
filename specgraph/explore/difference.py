"""The difference of two stages, or of two dumps, node by node.

Within one dump, passes copy graphs, so a node that a pass leaves alone keeps its name. Two compilations may name equal
nodes differently, since a node more shifts the numbers in the names of those behind it. So nodes of two dumps are put
beside each other by what they call, in order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from specgraph.explore.dump_files import Node, Stage

_NAME = re.compile(r'(?<![\w."])[A-Za-z_]\w*(?!\w|=[^=])')
"""A variable in the code of a node: no attribute, no name of an argument, and no word of a text."""
COMPARED = {"op": "kind", "calls": "what it calls", "code": "code", "shape": "shape", "made_by": "pass",
            "device": "device"}  # fmt: skip
"""The attributes of a node in which two may differ, by what a reader calls them."""
Entry = tuple[Node | None, Node | None]
"""A node in the first version and in the second; None where it is not there."""


@dataclass(frozen=True)
class Difference:
    """The difference between two versions of a graph.

    Attributes:
        graph: its name, ``step`` or a module.
        entries: the nodes of both versions, in the order of the graphs.
        renamed: the names of the second version, by those of the first, for nodes that are in both.
    """

    graph: str
    entries: tuple[Entry, ...]
    renamed: dict[str, str]

    @property
    def changed(self) -> list[Entry]:
        """The entries that are not the same node, apart from names."""
        return [(old, new) for old, new in self.entries if old is None or new is None or self.what(old, new)]

    def what(self, old: Node, new: Node) -> list[str]:
        """The words of :data:`COMPARED` for everything but their names in which two nodes differ."""
        told = {**vars(old), "code": translate(old.code, self.renamed)}
        return [said for name, said in COMPARED.items() if told[name] != getattr(new, name)]


def translate(code: str, renamed: Mapping[str, str]) -> str:
    """The code with other names for the nodes in it."""
    return _NAME.sub(lambda match: renamed.get(match[0], match[0]), code)


def difference(old: Stage, new: Stage, *, same_dump: bool) -> list[Difference]:
    """The differences between two stages, one for each graph, equal graphs included."""
    names = [*old.graphs, *(name for name in new.graphs if name not in old.graphs)]
    return [_of_graph(n, old.graphs.get(n, []), new.graphs.get(n, []), same_dump=same_dump) for n in names]


def _of_graph(name: str, old: Sequence[Node], new: Sequence[Node], *, same_dump: bool) -> Difference:
    entries = tuple((by_name if same_dump else by_place)(old, new))
    return Difference(name, entries, {a.name: b.name for a, b in entries if a is not None and b is not None})


def by_name(old: Sequence[Node], new: Sequence[Node]) -> Iterator[Entry]:
    """Pairs of nodes of the same name, in the order of the second graph.

    A node that was removed follows its last predecessor that was not.
    """
    before, after = {node.name: node for node in old}, {node.name for node in new}
    gone: dict[str | None, list[Entry]] = {}
    kept: str | None = None
    for node in old:
        if node.name in after:
            kept = node.name
        else:
            gone.setdefault(kept, []).append((node, None))
    yield from gone.get(None, ())
    for node in new:
        yield before.get(node.name), node
        yield from gone.get(node.name, ())


def by_place(old: Sequence[Node], new: Sequence[Node]) -> Iterator[Entry]:
    """Pairs of nodes that call the same, in order. Between two such pairs, nodes are replaced."""
    matcher = SequenceMatcher(None, _signatures(old), _signatures(new), autojunk=False)
    for kind, a, b, c, d in matcher.get_opcodes():
        if kind == "equal":
            yield from zip(old[a:b], new[c:d], strict=True)
        else:
            yield from ((node, None) for node in old[a:b])
            yield from ((None, node) for node in new[c:d])


def _signatures(nodes: Sequence[Node]) -> list[tuple[str, str]]:
    return [(node.op, node.calls) for node in nodes]
