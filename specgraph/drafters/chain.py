"""Drafters that make drafts one after the other, each call reading the draft before: draft models and EAGLE heads.

The first call of a step runs all tokens that were accepted. This brings the draft's KV cache to the accepted prefix and
gives the first draft. Each further draft takes one more call. An unshifted drafter, such as a draft model, also runs
the first token of the window. A drafter that reads the target's hidden states is *shifted*: its row ``t`` takes token
``t + 1`` and what ``draft_features`` computes from the target's hidden states at ``t``, and predicts token ``t + 2``.
In further calls, the hidden state is the one that the drafter's own head returned beside the logits. Cache rows of
rejected drafts are overwritten, so the cache and the proposals depend on accepted tokens only.

The next step begins to write rows at the position ``start + num_emitted``, whether the drafter is shifted or not. So
the rows in front of it are settled (:mod:`specgraph.kernels.recurrent.span`), and recurrent layers fold no others into
their state.

With ``least_survival``, a chain ends early: behind a draft that the drafter doubts, or one that stands behind others so
that all together are doubtful, there are no drafts (-1). Whether a draft is one is known before it is drawn, so this
biases no rule. A step on a CPU leaves the other calls out (:mod:`specgraph.specialise.end_chains`).
"""

from __future__ import annotations

import operator

from torch import fx, nn

from specgraph.drafters.base import Drafter
from specgraph.drafters.parts import copy_inputs, output_for
from specgraph.drafters.step import DraftStep
from specgraph.ir.graphs import new_module, splice
from specgraph.kernels import step as functions

BODY, HEAD, FEATURES = "draft_body", "draft_head", "draft_features"
"""The modules of such a drafter. The body turns rows into hidden states and has a KV cache, and the head turns hidden
states into logits. ``draft_features`` turns the target's hidden states into those that the first call reads."""
SETTLED_BY = "num_forced"
"""The input of a body with recurrent layers that says which rows are settled."""


class ChainDrafter(Drafter):
    """A drafter with the modules :data:`BODY` and :data:`HEAD` and, if it is shifted, :data:`FEATURES`."""

    chained = True

    def build(self, step: DraftStep) -> int:
        """Append K calls of ``draft``, a module made of body and head that computes logits for one row only."""
        count = self.num_speculative_tokens
        modules = step.program.modules
        modules["draft"] = _join(modules.pop(BODY), modules.pop(HEAD))
        bound = step.program.bind("draft", "draft")
        inputs = self._shifted(step) if self.shifted else self._unshifted(step)
        recurrent = SETTLED_BY in bound
        if recurrent:
            inputs[SETTLED_BY] = step.last
        state = {name: node for name, node in bound.items() if name not in inputs}
        token: fx.Node | None = None
        survival: fx.Node | None = None
        wanted = step.drafts_wanted() if self.least_survival else None
        for row in range(count):
            if token is not None:
                position = step.position(self._offset(row), f"position_{row}")
                inputs |= {"tokens": token, "positions": position, "num_rows": step.num_emitted}
                if recurrent:
                    inputs[SETTLED_BY] = self._settled_before(step, row)
            call = step.draft(**state, **inputs, name=f"draft_{row}")
            if row:
                step.mark_scratch(call)
            logits = call
            if self.shifted:
                logits = step.call(operator.getitem, call, 0, name=f"draft_logits_{row}")
                if row < count - 1:
                    inputs["hidden"] = step.call(operator.getitem, call, 1, name=f"draft_hidden_{row}")
            token = step.draw(logits, row, self.model.vocab_size, self.model.dtype)
            if survival is not None:
                step.end_chain(token, survival)
            if wanted is not None and row < count - 1:
                survival = step.survival(logits, wanted, survival, row)
        return count

    def _settled_before(self, step: DraftStep, row: int) -> fx.Node:
        """The node that marks the row of draft number ``row``, and the rows of the chain before it, as not settled.

        Its value ``[B]`` is minus the number of rows from the first unsettled one up to this call's.
        """
        return step.call(functions.unsettled_rows, step.num_emitted, self._offset(row) + 1, name=f"settled_{row}")

    def _offset(self, row: int) -> int:
        """How far behind ``start + num_emitted`` the row lies that gives draft number ``row``."""
        return row - 1 if self.shifted else row

    def _unshifted(self, step: DraftStep) -> dict[str, fx.Node]:
        """Inputs of the first call: the first token of the window, and all emitted tokens."""
        tokens, positions, rows = step.caught_up(self.model.input_ids)
        return {"tokens": tokens, "positions": positions, "num_rows": rows, "row": step.num_emitted}

    def _shifted(self, step: DraftStep) -> dict[str, fx.Node]:
        """Inputs of the first call: each emitted token, with the target's features of the position before it."""
        hidden = step.call(FEATURES, *step.features(), name="features")
        return {"tokens": step.next_tokens(self.model.input_ids), "positions": step.positions, "hidden": hidden,
                "num_rows": step.num_emitted, "row": step.last}  # fmt: skip


def _join(body: fx.GraphModule, head: fx.GraphModule) -> fx.GraphModule:
    """One module of body and head, which selects a row between the two."""
    graph, root = fx.Graph(), nn.Module()
    mapping = copy_inputs(graph, body)
    index = graph.placeholder("row")
    row = graph.call_function(functions.take_rows, (splice(graph, root, body, mapping), index, 1))
    graph.output(output_for(graph, root, head, row))
    return new_module(root, graph, "draft")
