"""Modules run the real rows of all sequences one behind the other, instead of a grid that is partly padding.

A step has a window ``[b, T]``. In a step over prompts, and in one where prompts run beside sequences that decode, most
of this grid is padding. The functions between the modules compute a few integers for every place of it; a module runs a
whole network. So this pass puts in front of every module call what packs its rows
(:mod:`specgraph.kernels.attention.packing`), and behind it what unpacks them again, or what takes the rows that are
needed. Where what one module returns is unpacked and packed again for the next one, both are left out.

Of heads, which turn hidden states into logits, the rows are packed whose logits somebody reads: behind prompts, those
whose next token is unknown, and of a drafter that makes all drafts in one call, as many as the sequence is to have
(:data:`~specgraph.kernels.state.MAX_DRAFTS`). Their logits are unpacked again.

Rows influence each other only through ops that read the cache, and these know the packed layout (``cu_seqlens``).
A module in which another op reads pages, or that calls a function of somebody's own, runs the grid as before. So does
one whose rows are not known to be a few more than those of the window at most. The report says which, and why.

The decoder applies this pass to steps that run prompts. ``capacity`` is a further input of such a step: its length is
the number of rows that all sequences may have together.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NamedTuple

from torch import fx

from specgraph.errors import VerificationError
from specgraph.ir.graphs import arguments, calls, copy_module
from specgraph.ir.linear import describe
from specgraph.ir.program import Program
from specgraph.ir.shapes import LAYOUT, columns_beyond, propagate
from specgraph.kernels import step
from specgraph.kernels.ops import find
from specgraph.kernels.state import MAX_DRAFTS, per_call
from specgraph.passes.base import NearMiss, Pass, PassResult
from specgraph.passes.common.patterns import Mismatch, insert, items
from specgraph.specialise.index_rows import gathered

SUFFIX = "_packed"
"""What the name of a module that runs packed rows has more than that of the one that runs a grid."""
CAPACITY = "capacity"
"""The input ``[R]`` that says how many packed rows there is room for."""
DRAFT_SOURCE = "draft_source"
"""The input of a module that computes logits of several drafts: where its rows of drafts lie that are wanted."""
COUNTING = (step.finalize_step, step.expand_draft_inputs, step.rerun)
"""Functions that say how many rows of a grid are real: those that a step has accepted, which are no more than the real
rows of the window, and as many further ones as the grid has further columns."""
SEQUENCE_INPUTS = ("num_rows", "max_length")
"""The inputs of a module from which only the slots of its rows are computed."""


class PackRows(Pass, requires={"verify", "row_index"}, invalidates={"grid"}):
    """No options."""

    def apply(self, program: Program) -> PassResult:
        """Rewrite the step graph; modules that run packed rows are added beside those that run a grid."""
        program.placeholder(CAPACITY, per_call("R"))
        try:
            propagate(program, inside=False)
        except VerificationError as error:
            return PassResult(0, near_misses=(NearMiss("step", f"its shapes are not known: {error}"),))
        before, refused = program.copy(), dict[str, str]()
        while True:
            result = _pack_calls(program, refused)
            try:
                propagate(program, inside=False)
            except VerificationError as error:
                if not result.changed:
                    raise
                # A module may look at several rows in a way that only their shapes show, in it or behind it.
                name = error.graph.removesuffix(SUFFIX)
                first_time = name in before.modules and name not in refused
                refused |= dict.fromkeys([name] if first_time else before.modules, str(error))
                own = before.copy()
                program.graph, program.modules, program.compiled = own.graph, own.modules, own.compiled
            else:
                return result


def _pack_calls(program: Program, refused: Mapping[str, str]) -> PassResult:
    """Pack the rows of all calls but those of modules that are ``refused``, each with its reason."""
    packer, found, misses = _Packer(program, program.input(CAPACITY)), 0, []
    for call in list(program.graph.find_nodes(op="call_module")):
        try:
            if call.target in refused:
                raise Mismatch(refused[str(call.target)])
            found += packer.pack(call)
        except Mismatch as reason:
            misses.append(NearMiss(call.name, str(reason)))
    _take_from_packed(program)
    misses += _pack_heads(program, packer.capacity, refused)
    _drop_uncalled(program)
    grids = [node.name for node in calls(program.graph, step.unpack_rows)]
    notes = (f"{found} calls run packed rows", *([f"unpacked again: {', '.join(grids)}"] if grids else []))
    return PassResult(found, near_misses=tuple(misses), notes=notes)


def extra_columns(node: Any) -> int | None:
    """How many more columns than the window a grid of rows ``[b, T + n, ...]`` has; None if a node is no such grid."""
    return columns_beyond(node, "b", "T") if isinstance(node, fx.Node) else None


class _Packing(NamedTuple):
    """A grid whose rows are packed: a node of that width, and the nodes of what says where its rows lie."""

    grid: fx.Node
    cu_seqlens: fx.Node
    source: fx.Node


@dataclass
class _Packer:
    """Packs the calls of one step graph.

    Attributes:
        packings: by the extra columns of the grid and the node with the numbers of real rows.
        packed: the packed rows of what was packed, or never need be unpacked, by node and packing.
        homes: the packing of every node that unpacks rows.
    """

    program: Program
    capacity: fx.Node
    packings: dict[tuple[int, fx.Node], _Packing] = field(default_factory=dict)
    packed: dict[tuple[fx.Node, _Packing], fx.Node] = field(default_factory=dict)
    homes: dict[fx.Node, _Packing] = field(default_factory=dict)

    def pack(self, call: fx.Node) -> bool:
        """Let a call run packed rows; False if it runs no grid.

        Raises:
            Mismatch: it has to run a grid.
        """
        given = self._arguments(call)
        grids = [name for name, node in given.items() if extra_columns(node) is not None]
        if not grids:
            return False
        packing = self._packing(call, given, grids)
        module = f"{call.target}{SUFFIX}"
        if module not in self.program.modules:
            self.program.modules[module] = packed_module(self.program.modules.unchanged[str(call.target)], grids)
            self._pack_drafts(module)
            if call.target in self.program.compiled and self.program.target.device.type != "cpu":
                self.program.compiled |= {module}  # on a CPU, prompts run through modules as they are
        names = self.program.inputs_of(module)
        with self.program.graph.inserting_before(call):
            own = {name: self._pack(given[name], packing) if name in grids else given.get(name) for name in names}
            if "slots" in names:
                own["slots"] = self._slots(call, given, packing)
            if "cu_seqlens" in names:
                own["cu_seqlens"] = packing.cu_seqlens
            if DRAFT_SOURCE in names:
                cu_drafts, own[DRAFT_SOURCE], count = self._draft_places(call, module)
            new = self.program.graph.create_node("call_module", module, (), own)
        self._replace(call, new, packing)
        if DRAFT_SOURCE in names:
            _unpack(new, cu_drafts, count)
        return True

    def _pack_drafts(self, module: str) -> None:
        """Let a module that computes the logits of several drafts pack their rows first."""
        graph = self.program.modules[module].graph
        for rows in calls(graph, step.take_packed_rows) if MAX_DRAFTS in self.program.inputs else ():
            with graph.inserting_after([*graph.find_nodes(op="placeholder")][-1]):
                source = graph.placeholder(DRAFT_SOURCE)
            packed = insert(rows.next, step.pack_rows, (rows, source))
            rows.replace_all_uses_with(packed, lambda user, packed=packed: user is not packed)  # type: ignore[misc]
        self.program.modules[module].recompile()

    def _draft_places(self, call: fx.Node, module: str) -> tuple[fx.Node, fx.Node, int]:
        """Of the drafts that a module computes the logits of: ``cu_seqlens``, the source, and how many there can be."""
        (rows,) = calls(self.program.modules.unchanged[module].graph, step.take_packed_rows)
        count = arguments(rows)["count"]
        (expanded,) = calls(self.program.graph, step.expand_draft_inputs)
        drafts = insert(call, operator.getitem, (expanded, 3), name="num_drafts")
        return *_room(call, drafts, self.capacity, count), count

    def _arguments(self, call: fx.Node) -> dict[str, Any]:
        names = self.program.inputs_of(str(call.target))
        return {**dict(zip(names, call.args, strict=False)), **call.kwargs}

    def _packing(self, call: fx.Node, given: dict[str, Any], grids: list[str]) -> _Packing:
        """How the rows of a call are packed: as those of the call that gave them, if nothing counts them anew."""
        extras = sorted({extra_columns(given[name]) or 0 for name in grids})
        if len(extras) > 1:
            widths = ", ".join(f"T+{extra}" if extra else "T" for extra in extras)
            raise Mismatch(f"it runs grids of the widths {widths}")
        if "num_rows" not in given:
            homes = {self.homes.get(given[name]) for name in grids}
            home = homes.pop()
            if homes or home is None:
                raise Mismatch("nothing says which of its rows are real")
            return home
        (extra,) = extras
        counts, window_rows = self._counts(given["num_rows"], extra), gathered(self.program, "num_rows")
        key = (extra, counts)
        if key not in self.packings:
            grid = self.program.input("window") if counts is window_rows else given[grids[0]]
            self.packings[key] = self._places(counts, grid, extra, call)
        return self.packings[key]

    def _counts(self, num_rows: fx.Node, extra: int) -> fx.Node:
        """The node that says how many rows of a grid are packed.

        Rows of the window that were accepted are packed as all of its real rows are, so that nothing has to be moved
        between the target and a drafter.
        """
        window_rows = gathered(self.program, "num_rows")
        if num_rows is window_rows:
            return window_rows
        origin = num_rows.args[0] if num_rows.target is operator.getitem else num_rows
        if not isinstance(origin, fx.Node) or origin.target not in COUNTING:
            raise Mismatch(f"{num_rows.name} may be more rows than there is room for")
        return num_rows if extra else window_rows

    def _places(self, counts: fx.Node, grid: fx.Node, extra: int, call: fx.Node) -> _Packing:
        options: dict[str, Any] = {"extra": extra} if extra else {}
        if any(node.target is step.expand_draft_inputs for node in counts.all_input_nodes):
            options["limited"] = True
        places = insert(call, step.packed_places, (counts, self.capacity, grid), options, "places")
        return _Packing(grid, *items(call, places, ("cu_seqlens", "source")))

    def _pack(self, grid: fx.Node, packing: _Packing, fill: int = 0) -> fx.Node:
        """The packed rows of a grid."""
        key = (grid, packing)
        if key not in self.packed:
            options: dict[str, Any] = {"fill": fill} if fill else {}
            name = f"packed_{grid.name}"
            self.packed[key] = self.program.call(step.pack_rows, grid, packing.source, name=name, **options)
        return self.packed[key]

    def _slots(self, call: fx.Node, given: dict[str, Any], packing: _Packing) -> fx.Node:
        """The slots of the packed rows of a call."""
        module = self.program.modules.unchanged[str(call.target)]
        (inside,) = calls(module.graph, step.row_slots)
        inputs: Any = inside.args
        options: Any = inside.kwargs
        arguments = [given[node.name] for node in inputs]
        slots = self.program.call(step.row_slots, *arguments, name="slots", **options)
        return self._pack(slots, packing, fill=-1)

    def _replace(self, call: fx.Node, new: fx.Node, packing: _Packing) -> None:
        """Let results of the new call stand in the place of the old one's, unpacked where they are grids."""
        new.meta = {key: value for key, value in call.meta.items() if key not in (LAYOUT, "pass_name")}
        parts = list(call.users) if isinstance(call.meta[LAYOUT], tuple | list) else []
        for old in parts:
            item = insert(old, operator.getitem, (new, old.args[1]), name=f"packed_{old.name}")
            unpacked = self._unpacked(old, item, packing)
            if "role" in old.meta:
                unpacked.meta["role"] = old.meta["role"]
            self._exchange(old, unpacked)
        if not parts:
            call.replace_all_uses_with(self._unpacked(call, new, packing))
        self._exchange(call, new)

    def _exchange(self, old: fx.Node, new: fx.Node) -> None:
        """Erase a node, for which another one stands under its name."""
        name = old.name
        old.replace_all_uses_with(new)
        self.program.graph.erase_node(old)
        new.name = name

    def _unpacked(self, old: fx.Node, value: fx.Node, packing: _Packing) -> fx.Node:
        """A grid for the packed rows ``value`` if a result was a grid before, and else ``value`` as it is."""
        if extra_columns(old) is None:
            return value
        unpacked = insert(value.next, step.unpack_rows, (value, packing.cu_seqlens, packing.grid))
        unpacked.meta[LAYOUT] = old.meta[LAYOUT]
        self.packed[unpacked, packing] = value
        self.homes[unpacked] = packing
        return unpacked


def packed_module(module: fx.GraphModule, grids: list[str]) -> fx.GraphModule:
    """A copy of a module that takes the inputs ``grids`` ``[b, W, ...]`` as packed rows ``[1, R, ...]``.

    It takes their ``slots`` where it has computed these, and ``cu_seqlens`` where anything needs to know which sequence
    a row is of.

    Raises:
        Mismatch: an op of it reads pages, and takes no packed rows.
    """
    copy = copy_module(module)
    graph = copy.graph
    inputs = {node.name: node for node in graph.find_nodes(op="placeholder")}
    with graph.inserting_after([*inputs.values()][-1]):
        cu_seqlens = graph.placeholder("cu_seqlens")
        slots = graph.placeholder("slots")
    for node in list(calls(graph, step.row_slots)):
        if any(not isinstance(arg, fx.Node) or arg.op != "placeholder" for arg in node.args):
            raise Mismatch(f"{node.name} is computed from other values than the module's inputs")
        node.replace_all_uses_with(slots)
        graph.erase_node(node)
    for node in list(_across_rows(graph)):
        if node.target is step.take_rows:
            values, first, count = node.args
            node.target, node.args = step.take_packed_rows, (values, cu_seqlens, first, count)
        else:
            node.update_kwarg("cu_seqlens", cu_seqlens)
    slots.name = "slots"  # which the node in its place may have been named
    for node in (slots, cu_seqlens, *(inputs[name] for name in SEQUENCE_INPUTS if name in inputs)):
        if not node.users:
            graph.erase_node(node)
    left = [name for name in SEQUENCE_INPUTS if name in inputs and inputs[name].users]
    if left:
        raise Mismatch(f"it reads {left[0]} for something else than slots")
    graph.lint()
    copy.recompile()
    return copy


def _across_rows(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes that have to know which sequence a row is of.

    Raises:
        Mismatch: one of them does not take packed rows.
    """
    for node in graph.nodes:
        op = find(node.target)
        names = {entry.name for entry in op.fields} if op is not None else set()
        if node.target is step.take_rows or "cu_seqlens" in names:
            yield node
        elif "block_table" in names:
            raise Mismatch(f"{node.name} reads pages and takes no packed rows")
        elif isinstance(node.target, FunctionType) and describe(node) is None:
            raise Mismatch(f"{node.name} calls {node.target.__name__}, which may look at several rows")


def _room(before: fx.Node, counts: fx.Node, capacity: fx.Node, grid: fx.Node | int) -> tuple[fx.Node, fx.Node]:
    """``cu_seqlens`` and source of so many rows of each sequence, which are no more than the packed rows of a step."""
    places = insert(before, step.packed_places, (counts, capacity, grid), {"limited": True}, "places")
    cu_seqlens, source = items(before, places, ("cu_seqlens", "source"))
    return cu_seqlens, source


def _unpack(call: fx.Node, cu_seqlens: fx.Node, grid: fx.Node | int) -> fx.Node:
    """Let all that reads packed rows read the grid of them."""
    unpacked = insert(call.next, step.unpack_rows, (call, cu_seqlens, grid))
    call.replace_all_uses_with(unpacked, lambda user: user is not unpacked)
    name, call.name = call.name, f"packed_{call.name}"
    unpacked.name = name
    return unpacked


def _pack_heads(program: Program, capacity: fx.Node, refused: Mapping[str, str]) -> Iterator[NearMiss]:
    """Let heads that are not ``refused`` run the rows alone whose next token is unknown. Gives those that cannot."""
    for needed in calls(program.graph, step.needed_packed_rows):
        _, _, grid, num_forced, count = needed.args
        heads = [user for user in needed.users if user.op == "call_module" and user.target not in refused]
        for head in heads if count != 1 else ():
            try:
                for node in _across_rows(program.modules.unchanged[str(head.target)].graph):
                    raise Mismatch(f"{node.name} looks at several rows")
            except Mismatch as reason:
                yield NearMiss(head.name, str(reason))
                continue
            counts = insert(head, step.num_needed, (gathered(program, "num_rows"), num_forced, grid, needed))
            cu_seqlens, source = _room(head, counts, capacity, needed)
            head.replace_input_with(needed, insert(head, step.pack_rows, (needed, source)))
            _unpack(head, cu_seqlens, needed).meta["role"] = head.meta.pop("role", None)


def _take_from_packed(program: Program) -> None:
    """Take rows of a grid from the packed ones, and leave out what then is unpacked for nobody."""
    for unpacked in list(calls(program.graph, step.unpack_rows)):
        values, cu_seqlens, grid = unpacked.args
        for user in list(unpacked.users):
            if user.target is step.needed_rows:
                user.target, user.args = step.needed_packed_rows, (values, cu_seqlens, grid, *user.args[1:])
            elif user.target is step.take_rows:
                user.target, user.args = step.take_packed_rows, (values, cu_seqlens, *user.args[1:])
        if not unpacked.users:
            program.graph.erase_node(unpacked)


def _drop_uncalled(program: Program) -> None:
    """Leave out modules whose calls have all become calls of another."""
    called = {node.target for node in program.graph.find_nodes(op="call_module")}
    for name in program.modules.keys() - called:
        if f"{name}{SUFFIX}" in called:
            del program.modules[name]
    program.compiled &= program.modules.keys()
