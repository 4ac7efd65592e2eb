"""The small functions between the model calls become two: ``positions_and_next`` and ``settle``.

Step graphs are written as many small functions because that is readable. On a GPU each of them costs at least one
launch (1.5 to 2 us), and on a CPU several operations. Nothing is computed twice for the next position, the number of
accepted tokens or the places of chained drafts: all of it follows from the verified tokens, in one op. A function of
somebody's own in the place of one of these stays as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from specgraph.ir.graphs import arguments, calls, set_argument
from specgraph.ir.program import Program
from specgraph.kernels import step
from specgraph.kernels.step.after_verify import Settled
from specgraph.passes.base import LoweringPass, NearMiss, PassResult
from specgraph.passes.common.patterns import Mismatch, erase_unused

EMITTED, NUM_EMITTED, ACCEPTED_ROWS, ROWS, POSITIONS, NUM_ROWS, LAST, LENGTH, CHAIN = map(
    Settled._fields.index,
    ("emitted", "num_emitted", "accepted_rows", "rows", "positions", "num_rows", "last", "length", "chain"),
)
"""Places among what ``settle`` returns."""


@dataclass(frozen=True)
class FuseStep(LoweringPass):
    """Options: ``enabled``."""

    name: ClassVar[str] = "fuse_step"
    requires: ClassVar[frozenset[str]] = frozenset({"verify"})
    exact: ClassVar[bool] = True

    def apply(self, program: Program) -> PassResult:
        """Rewrite the step graph; the modules stay as they are."""
        found = 0
        for node in list(calls(program.graph, step.row_positions)):
            found += _fuse_positions(program, node)
        found += _drop_paths(program)
        try:
            found += _fuse_settling(program)
        except Mismatch as reason:
            return PassResult(found, near_misses=(NearMiss("step", str(reason)),))
        return PassResult(found, notes=(f"{found} functions of the step are joined",) if found else ())


def _drop_paths(program: Program) -> int:
    """The rows along a chain's path are the first rows, in their order: what lies behind the path's end is not used."""
    found = list(calls(program.graph, step.along_path))
    for node in found:
        path: Any = node.args[1]
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        program.graph.erase_node(node)
        erase_unused(program.graph, path)
    return len(found)


def _fuse_positions(program: Program, node: fx.Node) -> int:
    """``row_positions(...)`` and that plus one."""
    following = [user for user in node.users if user.target is operator.add and user.args == (node, 1)]
    if len(following) != 1:
        return 0
    with program.graph.inserting_before(node):
        both = program.graph.call_function(step.positions_and_next, node.args)
        parts = [program.graph.call_function(operator.getitem, (both, index)) for index in range(2)]
    _replace(program, {node: parts[0], following[0]: parts[1]})
    return 2


def _fuse_settling(program: Program) -> int:
    """Everything that is computed from the verified tokens, and where drafts are drawn."""
    graph, start = program.graph, program.input("start")
    cuts = list(calls(graph, step.cut_at_eos))
    counts = [user for cut in cuts for user in cut.users if user.target is step.count_emitted]
    if len(cuts) != 1 or len(counts) != 1:
        raise Mismatch(f"{len(cuts)} calls of cut_at_eos and {len(counts)} of count_emitted, not one of each")
    (cut,), (count,) = cuts, counts
    rows = [user for user in cut.users if user.target in (step.next_tokens, step.draft_inputs)]
    window = program.input("window")
    if len(rows) > 1 or any(user.target is step.draft_inputs and user.args[0] is not window for user in rows):
        raise Mismatch(f"the drafter takes {', '.join(user.name for user in rows)}")
    shifted = not rows or rows[0].target is step.next_tokens
    kept = [user for user in cut.users if user.target is step.cut_rows]
    parts = {cut: EMITTED, count: NUM_EMITTED, **dict.fromkeys(kept, ACCEPTED_ROWS), **dict.fromkeys(rows, ROWS)}
    parts |= dict(_followers(start, count, rows[0] if rows else None, shifted))
    following = [user for user in count.users if _calls(user, step.chain_positions, start, count)]
    chained = {user: arguments(user)["offset"] for user in following}
    drawn = [user for user in count.users if user.target is step.propose_ and _draws_from(user, start, count)]
    tokens, num_forced, eos_ids = cut.args
    options: dict[str, Any] = {"shifted": shifted, "chain": max(chained.values(), default=-1) + 1}
    options |= {"vocab_size": rows[0].kwargs["vocab_size"]} if rows else {}
    with graph.inserting_before(cut):
        read = (tokens, window, start, num_forced, eos_ids, *_accepted_rows(kept, cut))
        settled = graph.create_node("call_function", step.settle, read, options, name="settled")
        wanted = sorted({*parts.values(), *([CHAIN] if chained else []), *([LENGTH] if drawn else [])})
        items = {index: graph.call_function(operator.getitem, (settled, index)) for index in wanted}
        for index, name in ((LENGTH, "length"), (CHAIN, "chain")):
            if index in items:
                items[index].name = name
        places = {node: graph.call_function(operator.getitem, (items[CHAIN], i)) for node, i in chained.items()}
    for node in drawn:
        node.target = step.propose_at_
        set_argument(node, "length", items[LENGTH])
    _replace(program, {**{node: items[index] for node, index in parts.items()}, **places})
    return len(parts) + len(places) + len(drawn)


def _accepted_rows(kept: list[fx.Node], cut: fx.Node) -> list[fx.Node]:
    """The rows that gave the tokens, if they are asked for; they must be known where the tokens are cut."""
    given: list[Any] = list(dict.fromkeys(node.args[0] for node in kept))
    if len(given) > 1 or any(not node < cut for node in given):
        raise Mismatch(f"{', '.join(node.name for node in kept)} cut rows that {cut.name} does not know")
    return given


def _followers(start: fx.Node, count: fx.Node, rows: fx.Node | None, shifted: bool) -> Iterator[tuple[fx.Node, int]]:
    """What else ``settle`` gives, and which of its results it is."""
    for user in count.users:
        if user.target is step.last_row:
            yield user, LAST
        elif user.target is step.catch_up_rows and not shifted:
            yield user, NUM_ROWS
        elif _calls(user, step.history_length, start, count):
            yield user, LENGTH
    for user in rows.users if rows is not None else ():
        if _calls(user, step.row_positions, start, rows):
            yield user, POSITIONS


def _calls(node: fx.Node, function: object, *first: object) -> bool:
    """Whether ``node`` calls ``function`` with these first arguments."""
    return node.target is function and node.args[: len(first)] == first and not node.kwargs


def _draws_from(draw: fx.Node, start: fx.Node, count: fx.Node) -> bool:
    """Whether drafts are drawn for the positions behind the ``count`` emitted tokens from ``start`` on."""
    given = arguments(draw)
    return given["start"] is start and given["num_emitted"] is count


def _replace(program: Program, new: dict[fx.Node, fx.Node]) -> None:
    """Let new nodes stand where old ones stood, with their names and roles; the old ones go."""
    for old, node in new.items():
        old.replace_all_uses_with(node)
        node.meta.update({"role": old.meta["role"]} if "role" in old.meta else {})
    order = {node: index for index, node in enumerate(program.graph.nodes)}
    for old in sorted(new, key=lambda node: order[node], reverse=True):
        name = old.name
        program.graph.erase_node(old)
        new[old].name = name
