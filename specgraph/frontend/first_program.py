"""Makes the first program from a traced target and a drafter. Its step takes tokens and returns logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from torch import fx

from specgraph.frontend.tracing import TracedModel
from specgraph.ir.drafter import BoundDrafter
from specgraph.ir.modules import Modules
from specgraph.ir.program import FIRST_FACTS, Program
from specgraph.kernels.state import Buffer, per_call
from specgraph.kernels.step import row_positions


def first_program(target: TracedModel, drafter: BoundDrafter) -> Program:
    """The program of the stage ``trace``: its step runs the target over a window, without a cache and without drafts.

    The inputs are ``window``, int64 ``[B, T]``, and ``start`` ``[B]``, the position of the window's first token. The
    step returns the logits ``[B, T, V]``.
    """
    modules = Modules({"target": target.body, "lm_head": target.head, **drafter.modules})
    program = Program(fx.Graph(), modules, {}, target.info, replace(cast(Any, drafter), modules={}))
    window = program.placeholder("window", per_call("B", "T"))
    start = program.placeholder("start", Buffer(("B",)))
    positions = program.call(row_positions, start, window, name="positions", role="positions")
    hidden = program.call("target", tokens=window, positions=positions, name="hidden", role="target")
    logits = program.call("lm_head", hidden, name="logits", role="logits")
    program.set_output(logits)
    program.facts = FIRST_FACTS
    first = program.copy()
    first.mark_provenance("trace")
    first.modules.share()
    return first
