"""K chained draft calls become one call whose last K - 1 rows are mask tokens.

The rewrite depends on the step graph alone, not on the drafter's architecture. The first draft call has rows that bring
the draft's cache to the accepted prefix. After them the pass adds one mask row for every draft but the first, at the
positions that follow, and it draws all drafts from the logits of the last K rows. As everywhere, rows past
``max_length`` get ``PADDING_SLOT`` and are not written. What mask rows write to the cache is at positions after the
accepted prefix, and it is overwritten before anything reads it.

Source: PARD (An et al. 2025, arXiv 2504.18583) for draft models, P-EAGLE for EAGLE heads.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch import fx

from specgraph.errors import PassError, UnsupportedModelError
from specgraph.ir.drafter import Mask
from specgraph.ir.graphs import calls, constant, set_argument
from specgraph.ir.program import Program
from specgraph.kernels import step
from specgraph.kernels.state import MAX_DRAFTS, Buffer
from specgraph.passes.base import Pass, PassResult
from specgraph.passes.common.patterns import items
from specgraph.passes.insert_recurrent_state import has_recurrent_state


@dataclass(frozen=True)
class ParallelDraft(Pass, requires={"draft"}, redrafts=True):
    """Options: ``enabled``; None means on if the drafter was trained for parallel drafting."""

    enabled: bool | None = None

    def apply(self, program: Program) -> PassResult:
        """Rewrite the chain of draft calls. Exactly one chain is expected."""
        drafter = program.drafter
        if not (drafter.parallel if self.enabled is None else self.enabled):
            said = (
                "one draft is made after the other" if drafter.chained else "there is no chain of calls of one drafter"
            )
            return PassResult(0, notes=(said,))
        if not drafter.chained:
            raise PassError(f"parallel_draft: {drafter.name} makes no chain of draft calls; set draft.parallel=false.")
        if has_recurrent_state(program.modules.unchanged["draft"].graph):
            raise UnsupportedModelError(
                f"parallel_draft: this {drafter.name} has recurrent layers, which draft as a chain so far; set "
                "draft.parallel=false."
            )
        if drafter.mask is None:
            missing = "mask_hidden and a mask token" if drafter.features else "mask token (draft.mask_token_id)"
            raise PassError(
                f"parallel_draft: this {drafter.name} has no {missing}, so it was not trained to draft in parallel; "
                "set draft.parallel=false or use a checkpoint that was."
            )
        if drafter.least_survival:
            raise PassError(
                f"parallel_draft: the chain of this {drafter.name} ends early, which drafts of one call do not; set "
                "draft.parallel=true, or draft.adaptive=false beside passes.parallel_draft.enabled=true."
            )
        count = drafter.num_speculative_tokens
        first, *chained = program.with_role("draft")
        proposals = program.with_role("drafts")
        if not (1 + len(chained) == len(proposals) == count):
            raise PassError(f"parallel_draft expects {count} chained draft calls, found {1 + len(chained)}.")
        self._expand(program, first, drafter.mask, count - 1)
        self._widen(program, count)
        self._draw(program, first, proposals)
        return PassResult(1, expected=1, notes=(f"{count} draft calls became 1 with {count - 1} mask rows",))

    def _expand(self, program: Program, first: fx.Node, mask: Mask, count: int) -> None:
        """Add ``count`` mask rows to the inputs of the first call."""
        inputs: dict[str, Any] = dict(first.kwargs)
        graph, mask_hidden = program.graph, None
        limit = program.placeholder(MAX_DRAFTS, Buffer(("B",), fill=count + 1))
        with graph.inserting_before(first):
            if mask.hidden is not None:
                program.modules["mask_hidden"] = constant(mask.hidden, "mask_hidden")
                mask_hidden = program.call("mask_hidden")
            rows = program.call(
                step.expand_draft_inputs, inputs["tokens"], inputs["num_rows"], inputs.get("hidden"), mask_hidden,
                limit, mask_token_id=mask.token_id, count=count, name="expanded",
            )  # fmt: skip
            names = ("tokens", "num_rows", "hidden") if "hidden" in inputs else ("tokens", "num_rows")
            inputs |= zip(names, items(first, rows, [f"expanded_{name}" for name in names]), strict=True)
            before = inputs["positions"]
            inputs["positions"] = program.call(
                step.row_positions, program.input("start"), inputs["tokens"], name="expanded_positions"
            )
        first.kwargs = inputs
        if not before.users:
            graph.erase_node(before)

    def _widen(self, program: Program, count: int) -> None:
        """Let the draft return the logits of ``count`` rows, and no longer the hidden state that a chain feeds on."""
        draft = program.modules["draft"]
        (rows,) = calls(draft.graph, step.take_rows)
        set_argument(rows, "count", count)
        output = draft.graph.output_node()
        if program.drafter.features:
            both: Any = output.args[0]
            output.args = (both[0],)
        draft.graph.eliminate_dead_code()
        draft.recompile()

    def _draw(self, program: Program, first: fx.Node, proposals: list[fx.Node]) -> None:
        """Draw all drafts from the one call and drop the chain."""
        draw = proposals[0]
        set_argument(draw, "logits", first)
        draw.name = "proposals"
        program.set_output(program.one("logits"), draw)
        (update,) = calls(program.graph, step.finalize_step)
        for node in reversed(program.graph.nodes):
            chained = node.meta.get("role") in ("draft", "drafts") or node.target is operator.getitem
            if chained and not node.users and node is not draw:
                program.graph.erase_node(node)
        update.kwargs = {name: value for name, value in update.kwargs.items() if name != "chain"}
