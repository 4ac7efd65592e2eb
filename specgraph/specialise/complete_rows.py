"""Begins verification at the exit layer for the rows of the window that drafting has run through the first layers.

A drafter that runs the target's first layers (:attr:`~specgraph.ir.drafter.BoundDrafter.exit_layer`) keeps the hidden
states of the rows that it runs: of the newest token, and of all drafts but the last. In the next step, which verifies
these drafts, the first layers run the last real row alone, and what is behind them takes the states that were kept. So
every token goes through every layer once. Rows that are cut off from the end of a window do no harm: the last one that
is left runs again, with the same result.

The decoder applies this pass to steps whose sequences all decode. A prompt's rows were run by nobody.
"""

from __future__ import annotations

from specgraph.ir.graphs import arguments, calls
from specgraph.ir.program import FIRST_LAYERS, Program
from specgraph.kernels import step
from specgraph.kernels.state import FIRST_HIDDEN, ROWS
from specgraph.passes.base import NearMiss, Pass, PassResult
from specgraph.passes.common.patterns import insert, items
from specgraph.specialise.index_rows import gathered


class CompleteRows(Pass, requires={"verify", "row_index", "grid"}):
    """No options."""

    def apply(self, program: Program) -> PassResult:
        """Rewrite the step graph; the modules stay as they are."""
        call, (advance,) = program.one(FIRST_LAYERS), calls(program.graph, step.advance_)
        others = [node.name for node in arguments(advance)["drafts"] if node.target is not step.propose_]
        if others:
            why = f"the drafts {', '.join(others)} may be others than those whose rows were run"
            return PassResult(0, near_misses=(NearMiss(call.name, why),))
        window, num_rows = program.input("window"), gathered(program, "num_rows")
        newest = insert(call, step.newest_row, (window, call.kwargs["positions"], num_rows), name="newest_row")
        names = ("newest_token", "newest_position", "newest_rows")
        for name, own in zip(("tokens", "positions", "num_rows"), items(call, newest, names), strict=True):
            call.update_kwarg(name, own)
        given = program.input(FIRST_HIDDEN), call, program.input(ROWS), num_rows, window
        whole = insert(call.next, step.complete_rows, given, name="window_hidden")
        call.replace_all_uses_with(whole, lambda user: user is not whole)
        return PassResult(1, expected=1)
