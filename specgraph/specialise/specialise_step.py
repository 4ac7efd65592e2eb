"""The step for one kind of request: with the log-probabilities it asks for, and without the inputs it makes no use of.

A request whose sequences all leave ``top_k`` off gives the same tokens without that input, sooner; a greedy one draws
no noise and needs no seeds. The decoder applies this pass once for every kind of request that it meets.

It also makes the step of fewer drafts, for when many sequences decode together (``draft.num_speculative_tokens`` by
load). The state keeps its shape; the window of a call has K + 1 columns for the smaller K, and all rows behind it
follow from its width. The next window takes the first K drafts. What only made the others goes: draft calls whose cache
rows nobody reads later (``scratch``), modules that write nothing, and draws. What brings the drafter's cache to the
accepted prefix stays, so the drafts after a time with a smaller K are those that a larger one would have made. Of a
module whose results nobody reads any more, only what it writes is computed: without drafts, those are keys and values.
Where all sequences of the step are too long for the drafter (``draft.max_context``), its modules go, and its cache
stays behind. A lookup in front of it then drafts alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from specgraph.errors import ConfigError
from specgraph.ir.drafter import SCRATCH
from specgraph.ir.graphs import arguments, calls, remove_dead_code, set_argument, written_by
from specgraph.ir.program import TARGET_MODULES, Program
from specgraph.kernels import step
from specgraph.kernels.step import WRITES
from specgraph.kernels.verify.arguments import LOGPROBS
from specgraph.passes.base import Pass, PassResult
from specgraph.passes.common.patterns import insert
from specgraph.passes.insert_processors import removable
from specgraph.passes.insert_verify import VERIFY
from specgraph.specialise.index_rows import drop_unread, gathered

ABOUT_DRAFTS = (step.keep_confidence_, step.keep_point_mass_)
"""Functions that keep something about the next drafts, for which a step without drafts has no use."""


@dataclass(frozen=True)
class SpecialiseStep(Pass, requires={"verify", "grid"}, invalidates={"processors"}):
    """Options: ``logprobs``, ``none``, ``raw`` or ``processed``; ``unused``, names of inputs to do without; ``drafts``,
    how many of the K drafts are made and verified, None for all; ``plain``, whether the drafter is left out."""

    logprobs: str = "none"
    unused: tuple[str, ...] = ()
    drafts: int | None = None
    plain: bool = False

    def __post_init__(self) -> None:
        if self.logprobs not in LOGPROBS:
            raise ConfigError(f"specialise_step: logprobs is one of {', '.join(LOGPROBS)}, not {self.logprobs!r}.")
        if self.drafts is not None and self.drafts < 0:
            raise ConfigError(f"specialise_step: drafts is a number from 0 up, or null for all, not {self.drafts}.")

    def apply(self, program: Program) -> PassResult:
        """Rewrite the step graph; the modules and the state stay as they are."""
        left_out = {gathered(program, name) for name in self.unused if name in program.inputs}
        for node in program.graph.nodes:
            node.args = fx.map_arg(node.args, lambda arg: None if arg in left_out else arg)
        # Before fewer drafts are made, since what a drafter reads of the tokens shows that it keeps them for itself.
        _drop_processors(program)
        if self.plain:
            _leave_drafter_out(program)
        notes = () if self.drafts is None else (_make_fewer(program, self.drafts),)
        drop_unread(program)
        given = [node for node in program.graph.nodes if "logprobs" in node.kwargs]
        for node in given:
            node.kwargs = {**node.kwargs, "logprobs": self.logprobs}
        without = ", ".join(sorted(node.name for node in left_out)) or "nothing left out"
        notes = (f"log-probabilities: {self.logprobs}; {without}", *notes)
        return PassResult(len(left_out) + len(given) + (self.drafts is not None), notes=notes)


def _drop_processors(program: Program) -> None:
    """Take out processors that no request asks for, and what only keeps up with what they alone read."""
    for node in [node for node in program.graph.nodes if removable(node)]:
        logits: fx.Node = node.args[0]
        read = [given for given in node.all_input_nodes if given.op == "placeholder"]
        node.replace_all_uses_with(logits)
        program.graph.erase_node(node)
        for state in read:
            _drop_writers(program, state)
    for node in calls(program.graph, VERIFY):
        if node.kwargs.get("raw_logits") is node.args[0]:
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "raw_logits"}


def _drop_writers(program: Program, state: fx.Node) -> None:
    """Erase the nodes that write ``state`` if nothing else reads it."""
    writers = [user for user in state.users if state in written_by(user, WRITES) and not user.users]
    if len(writers) == len(state.users):
        for writer in writers:
            program.graph.erase_node(writer)


def _make_fewer(program: Program, count: int) -> str:
    """Let the step make and verify ``count`` drafts. Returns a note."""
    most = program.drafter.num_speculative_tokens
    if count >= most:
        return f"all {most} drafts"
    for node in calls(program.graph, step.needed_rows):
        set_argument(node, "count", count + 1)
    _drop_masks(program, count)
    (advance,) = calls(program.graph, step.advance_)
    set_argument(advance, "drafts", _first(program, advance, arguments(advance)["drafts"], count))
    _forget(program, count)
    gone = _sweep(program, count, () if count else ABOUT_DRAFTS)
    trimmed = "".join(f"; of {name} what it writes" for name in _drop_results(program))
    return f"{count} of {most} drafts; {gone.count('draft')} draft calls left out{trimmed}"


def _drop_masks(program: Program, count: int) -> None:
    """Let a call that makes all drafts have mask rows for the first ``count`` alone, on which others have no influence.

    What Inductor has compiled stays as it is, since it would be compiled once more for every number.
    """
    rows = max(count, 1)  # the last of the real rows gives the first draft
    for expanded in calls(program.graph, step.expand_draft_inputs):
        readers = (user for item in expanded.users for user in item.users)
        names = {str(user.target) for user in readers if user.op == "call_module"}
        if program.compiled.isdisjoint(names):
            set_argument(expanded, "count", rows - 1)
            for name in names:
                (taken,) = calls(program.modules[name].graph, step.take_rows)
                set_argument(taken, "count", rows)
                program.modules[name].recompile()


def _leave_drafter_out(program: Program) -> None:
    """Mark all that the drafter keeps as read by nobody, and let a lookup in front of it draft alone."""
    for node in program.graph.find_nodes(op="call_module"):
        if node.target not in TARGET_MODULES:
            node.meta[SCRATCH] = True
    for choice in calls(program.graph, step.prefer_found):
        choice.replace_all_uses_with(choice.all_input_nodes[0])
        _sweep(program, 0, (step.keep_confidence_,))


def _first(program: Program, before: fx.Node, drafts: Sequence[fx.Node], count: int) -> list[fx.Node]:
    """The first ``count`` of drafts ``[B, k]`` that have K columns in all, made in front of a node."""
    if not count:
        return []
    if len(drafts) == program.drafter.num_speculative_tokens:
        return list(drafts[:count])
    every = drafts[0] if len(drafts) == 1 else insert(before, torch.cat, (list(drafts), 1))
    if every.target is step.prefer_found:
        found, *own = every.args
        every.args = (*_first(program, every, [found], count), *_first(program, every, own, count))  # type: ignore[list-item, arg-type]
        return [every]
    return [insert(before, operator.getitem, (every, (slice(None), slice(0, count))), name=f"{every.name}_first")]


def _forget(program: Program, count: int) -> None:
    """Let no function that takes one draft after the other, joined, ask for those that are not made.

    Such are estimates of how probable each draft is. The first token stands in: nobody reads what is said of it there.
    """
    gone = {node for node in program.graph.nodes if _number(node) >= count}
    for node in calls(program.graph, torch.cat):
        joined: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
        node.update_arg(0, [joined[0] if token in gone else token for token in joined])


def _sweep(program: Program, count: int, useless: Collection[Callable[..., Any]]) -> list[str]:
    """Erase what the first ``count`` drafts and the state do without, and calls of ``useless`` functions.

    Returns the roles of what was erased.
    """
    erased = []
    for node in reversed(program.graph.nodes):
        if not node.users and (node.target in useless or _removable(program, node, count)):
            erased.append(str(node.meta.get("role")))
            program.graph.erase_node(node)
    return erased


def _drop_results(program: Program) -> list[str]:
    """Let modules whose results nobody reads compute what they write, and nothing else. Returns the names of those that
    computed more."""
    called = [node for node in program.graph.nodes if node.op == "call_module"]
    names = sorted({str(node.target) for node in called} - {str(node.target) for node in called if node.users})
    for name in names:
        (output,) = program.modules[name].graph.find_nodes(op="output")
        output.args = ((),)
    return [name for name in names if remove_dead_code(program.modules[name])]


def _removable(program: Program, node: fx.Node, count: int) -> bool:
    """Whether a step of ``count`` drafts needs nothing that a node does besides its result."""
    if node.op in ("placeholder", "output"):
        return False
    if node.op == "call_module":
        return node.meta.get(SCRATCH, False) or not _writes(program.modules.unchanged[str(node.target)])
    return _number(node) >= count or not node.is_impure()


def _number(node: fx.Node) -> int:
    """The number of the first draft that a node draws, or for which it keeps something; -1 for other nodes."""
    return int(node.kwargs["row"]) if node.target in (step.propose_, step.keep_hidden_) else -1  # type: ignore[arg-type]


def _writes(module: fx.GraphModule) -> bool:
    """Whether a module writes any of its inputs in place."""
    return any(written_by(node, WRITES) for node in module.graph.nodes if node.op == "call_function")
