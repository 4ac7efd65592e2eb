"""A call of the step runs any of the sequences whose state is kept: the row index decides which.

Small buffers of a sequence are gathered at the head of the step, in one launch, and those that the step writes are
scattered at its end. Functions in between see the sequences of the call alone, as if there were no others. Large
buffers (:attr:`~specgraph.kernels.state.Buffer.indexed`) stay as they are, since their functions take the row index.

The pass runs behind all others, so that they can speak of a buffer as the input of the step that it is.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import replace

from torch import fx

from specgraph.errors import PassError
from specgraph.ir.graphs import calls, written_by
from specgraph.ir.program import Program
from specgraph.kernels import step
from specgraph.kernels.state import ROW_INDEX, ROWS, Buffer, Input, buffers_of, map_input
from specgraph.kernels.step import WRITES
from specgraph.passes.base import Pass, PassResult
from specgraph.passes.common.patterns import insert, items


class IndexRows(Pass, requires={"verify", "ungathered"}, ensures={"row_index"}, invalidates={"ungathered"}):
    """No options."""

    def apply(self, program: Program) -> PassResult:
        """Rewrite the step graph; the modules stay as they are.

        Raises:
            PassError: a function reads an indexed buffer without the row index, or a small one with it; or a small
                buffer of a sequence is part of a tuple.
        """
        rows = program.placeholder(ROWS, ROW_INDEX)
        inputs = program.inputs.items()
        indexed = {program.input(name) for name, spec in inputs if any(buffer.indexed for buffer in buffers_of(spec))}
        small = {program.input(name): buffer for name, buffer in _small(program.inputs)}
        _check_readers(rows, indexed, small)
        written = [node for node in small if any(node in written_by(user, WRITES) for user in node.users)]
        own = _gather(program, rows, {node: buffer for node, buffer in small.items() if node.users})
        if written:
            scattered = rows, written, [own[node] for node in written]
            insert(program.graph.output_node(), step.scatter_state_, scattered, name="scatter_state_")
        program.inputs.update({name: _of_call(spec) for name, spec in program.inputs.items()})
        note = f"the rows of {len(own)} small buffers are read by index, those of {len(written)} are written back"
        return PassResult(len(own), notes=(note,))


def gathered(program: Program, name: str) -> fx.Node:
    """What a call reads of the state ``name``: the rows of its sequences, or the input itself."""
    node = program.input(name)
    for gather in calls(program.graph, step.gather_state):
        buffers: list[fx.Node] = list(gather.args[1])  # type: ignore[arg-type]
        if node in buffers:
            index = buffers.index(node)
            return next((user for user in gather.users if user.args == (gather, index)), node)
    return node


def drop_unread(program: Program) -> None:
    """Leave out of the gathering what nothing reads any more."""
    for gather in list(calls(program.graph, step.gather_state)):
        for item in [user for user in gather.users if not user.users]:
            program.graph.erase_node(item)
        rows, buffers, fills = gather.args
        read = sorted(gather.users, key=lambda item: int(item.args[1]))  # type: ignore[arg-type]
        kept = [int(item.args[1]) for item in read]  # type: ignore[arg-type]
        gather.args = (rows, [buffers[i] for i in kept], [fills[i] for i in kept])  # type: ignore[index]
        for index, item in enumerate(read):
            item.args = (gather, index)


def _small(inputs: Mapping[str, Input]) -> Iterator[tuple[str, Buffer]]:
    """The buffers with a row per sequence that are gathered, by the names of their inputs."""
    for name, spec in inputs.items():
        found = [b for b in buffers_of(spec) if b.owner == "sequence" and not b.indexed]
        if found and not isinstance(spec, Buffer):
            raise PassError(
                f"index_rows: the input {name!r} is a tuple, and {found[0]} in it belongs to a sequence; give it an "
                "input of its own, or declare it indexed=True and read it by the row index."
            )
        yield from ((name, buffer) for buffer in found)


def _check_readers(rows: fx.Node, indexed: set[fx.Node], small: Container[fx.Node]) -> None:
    """Whatever reads an indexed buffer must know which rows are meant, and nothing else may take the row index.

    Small buffers hold the rows of the call alone.
    """
    for node in sorted(indexed):
        for user in node.users:
            if rows not in user.all_input_nodes:
                raise PassError(
                    f"index_rows: {user.name} reads {node.name!r}, which is indexed, without the row index; pass it "
                    f"DraftStep.rows (the input {ROWS!r})."
                )
    for user in rows.users:
        own = [node.name for node in user.all_input_nodes if node in small]
        if own and indexed.isdisjoint(user.all_input_nodes):
            raise PassError(
                f"index_rows: {user.name} takes the row index and reads {own[0]!r}, which is gathered before; leave "
                "the row index out, or declare the buffer indexed=True if it is large."
            )


def _gather(program: Program, rows: fx.Node, buffers: dict[fx.Node, Buffer]) -> dict[fx.Node, fx.Node]:
    """Put the rows of a call in the place of every buffer."""
    place = [*program.placeholders()][-1].next
    fills = [buffer.fill for buffer in buffers.values()]
    gather = insert(place, step.gather_state, (rows, list(buffers), fills), name="gathered")
    own = dict(zip(buffers, items(place, gather, [f"gathered_{node.name}" for node in buffers]), strict=True))
    for node, gathered_node in own.items():
        node.replace_all_uses_with(gathered_node, lambda user: user is not gather)
    return own


def _of_call(spec: Input) -> Input:
    """An input whose first dimension is that of a call, where a call brings it."""

    def own(buffer: Buffer) -> Buffer:
        shape = tuple("b" if size == "B" and buffer.owner == "call" else size for size in buffer.shape)
        return replace(buffer, shape=shape)

    return map_input(own, spec)
