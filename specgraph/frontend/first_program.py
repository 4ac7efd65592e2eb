"""Makes the first program from a traced target and a drafter. Its step takes tokens and returns logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from torch import fx

from specgraph.frontend.tracing import ATTENTION, TracedModel, cut_at_layer
from specgraph.ir.drafter import BoundDrafter
from specgraph.ir.graphs import calls
from specgraph.ir.modules import Modules
from specgraph.ir.program import FIRST_FACTS, FIRST_LAYERS, Program
from specgraph.kernels.state import Buffer, per_call
from specgraph.kernels.step import row_positions


def first_program(target: TracedModel, drafter: BoundDrafter) -> Program:
    """The program of the stage ``trace``: its step runs the target over a window, without a cache and without drafts.

    The inputs are ``window``, int64 ``[B, T]``, and ``start`` ``[B]``, the position of the window's first token. The
    step returns the logits ``[B, T, V]``. A drafter may ask for the target in two modules (``exit_layer``).
    """
    modules = Modules({"target": target.body, "lm_head": target.head, **drafter.modules})
    program = Program(fx.Graph(), modules, {}, target.info, replace(cast(Any, drafter), modules={}))
    if drafter.exit_layer is not None:
        modules[FIRST_LAYERS], modules["target"] = cut_at_layer(target, drafter.exit_layer)
        caches = sum(1 for _ in calls(modules["target"].graph, ATTENTION))
        program.target = replace(target.info, num_caches=caches)
    window = program.placeholder("window", per_call("B", "T"))
    start = program.placeholder("start", Buffer(("B",)))
    positions = program.call(row_positions, start, window, name="positions", role="positions")
    given = {"tokens": window, "positions": positions}
    if FIRST_LAYERS in modules:
        given["hidden"] = program.call(FIRST_LAYERS, **given, name="first_hidden", role=FIRST_LAYERS)
    own = {name: given[name] for name in program.inputs_of("target")}
    hidden = program.call("target", **own, name="hidden", role="target")
    logits = program.call("lm_head", hidden, name="logits", role="logits")
    program.set_output(logits)
    program.facts = FIRST_FACTS
    first = program.copy()
    first.mark_provenance("trace")
    first.modules.share()
    return first
