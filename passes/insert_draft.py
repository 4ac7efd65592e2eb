"""Adds the drafter to the step: given what was emitted, propose the drafts of the next step.

Until ``insert_verify`` computes them, ``emitted`` (``[B, T]``, padded with -1) and ``num_emitted`` (``[B]``) are
inputs.

* ``history``: emitted tokens are recorded, the module is called once.
* ``autoregressive``: one call runs everything emitted, which brings the draft's KV cache to the accepted prefix and
  gives the first draft; each further draft is one more call. A plain drafter runs the window's first token, too; one
  that reads the target's hidden states is shifted: it runs each token beside the features of the one before. What was
  rejected is written over, so cache and proposals depend on accepted tokens only.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from specgraph.errors import PassError
from specgraph.ir.graphs import constant, new_module, splice
from specgraph.ir.model_info import ModelInfo
from specgraph.ir.program import Buffer, Program
from specgraph.kernels import step
from specgraph.kernels.sampling.sample import STEP_NOISE_RULES
from specgraph.passes.base import Pass, PassResult, check_option_rule

SAMPLING = {
    "temperature": Buffer(("B",), torch.float32),
    "seeds": Buffer(("B",)),
    "top_k": Buffer(("B",)),
    "top_p": Buffer(("B",), torch.float32, 1.0),
    "min_p": Buffer(("B",), torch.float32),
}


@dataclass(frozen=True)
class InsertDraft(Pass):
    """Options: ``rule``, the verification rule, which decides the noise drafts are drawn with."""

    rule: str = "strict"

    name: ClassVar[str] = "insert_draft"
    requires: ClassVar[frozenset[str]] = frozenset({"kv_cache"})
    ensures: ClassVar[frozenset[str]] = frozenset({"draft"})

    def __post_init__(self) -> None:
        check_option_rule(self.name, self.rule)

    def apply(self, program: Program) -> PassResult:
        """Append the draft nodes behind the logits."""
        program.placeholder("emitted", Buffer(("B", "T"), fill=-1)).meta["role"] = "emitted"
        program.placeholder("num_emitted", Buffer(("B",))).meta["role"] = "num_emitted"
        kinds: dict[str, Callable[[Program], int]] = {
            "none": lambda _: 0,
            "history": self._history,
            "autoregressive": self._autoregressive,
        }
        calls = kinds[program.drafter.kind](program)
        program.options["rule"] = self.rule
        logits = program.one("logits")
        drafts = program.with_role("drafts")
        program.set_output(logits, *drafts)
        return PassResult(calls, notes=(f"{calls} draft calls per step",))

    def _accepted(self, program: Program, vocab_size: int) -> tuple[fx.Node, fx.Node, fx.Node]:
        """The accepted tokens as rows: tokens, positions and how many are real."""
        window, start = program.input("window"), program.input("start")
        emitted, num_emitted = program.input("emitted"), program.input("num_emitted")
        tokens = program.call(step.draft_inputs, window, emitted, vocab_size=vocab_size, name="accepted")
        positions = program.call(step.row_positions, start, tokens, name="accepted_positions")
        rows = program.call(step.catch_up_rows, num_emitted, name="accepted_rows")
        return tokens, positions, rows

    def _history(self, program: Program) -> int:
        history = program.placeholder("history", Buffer(("B", "S")))
        start, num_emitted = program.input("start"), program.input("num_emitted")
        tokens, positions, rows = self._accepted(program, program.target.vocab_size)
        program.call(step.record_tokens_, history, tokens, positions, rows)
        length = program.call(step.history_length, start, num_emitted, name="length")
        program.call("draft", history=history, length=length, name="proposals", role="drafts")
        return 1

    def _autoregressive(self, program: Program) -> int:
        drafter, model = program.drafter, program.drafter.model
        count = drafter.num_speculative_tokens
        if count < 1 or model is None:
            raise PassError(f"insert_draft: {drafter.name} needs num_speculative_tokens >= 1, got {count}.")
        program.modules["draft"] = self._join(program)
        state = {
            "block_table": program.input("block_table"),
            "max_length": program.input("max_length"),
            "caches": program.placeholder("draft_caches", program.options["draft_body_caches"]),
        }
        draw = self._draw(program, model)
        start, num_emitted = program.input("start"), program.input("num_emitted")
        inputs = self._shifted(program, model) if drafter.shifted else self._unshifted(program, model)
        proposals: list[fx.Node] = []
        for row in range(count):
            if row > 0:
                offset = row - 1 if drafter.shifted else row
                positions = program.call(step.chain_positions, start, num_emitted, offset, name=f"position_{row}")
                inputs |= {"tokens": proposals[-1], "positions": positions, "num_rows": num_emitted}
            call = program.call("draft", **state, **inputs, name=f"draft_{row}", role="draft")
            logits = call
            if drafter.shifted:
                logits = program.call(operator.getitem, call, 0, name=f"draft_logits_{row}")
                if row < count - 1:
                    inputs["hidden"] = program.call(operator.getitem, call, 1, name=f"draft_hidden_{row}")
            proposals.append(draw(logits, row))
        return count

    def _unshifted(self, program: Program, model: ModelInfo) -> dict[str, fx.Node]:
        """Inputs of the first call: the window's first token and everything emitted."""
        tokens, positions, rows = self._accepted(program, model.input_ids)
        return {"tokens": tokens, "positions": positions, "num_rows": rows, "row": program.input("num_emitted")}

    def _shifted(self, program: Program, model: ModelInfo) -> dict[str, fx.Node]:
        """Inputs of the first call: everything emitted, beside the target's features one position before."""
        features = program.with_role("feature")
        if len(features) != len(program.drafter.features):
            raise PassError(
                f"insert_draft: {program.drafter.name} reads hs{list(program.drafter.features)} of the target, and "
                f"{len(features)} are there; put expose_features before it in pipeline.order, with layers unset."
            )
        num_emitted = program.input("num_emitted")
        tokens = program.call(step.next_tokens, program.input("emitted"), vocab_size=model.input_ids, name="accepted")
        hidden = program.call("draft_features", *features, name="features")
        last = program.call(step.last_row, num_emitted, name="last")
        return {"tokens": tokens, "positions": program.one("positions"), "hidden": hidden, "num_rows": num_emitted,
                "row": last}  # fmt: skip

    def _draw(self, program: Program, model: ModelInfo) -> Callable[[fx.Node, int], fx.Node]:
        """Adds a node that draws a draft from logits; needs the state that sampling reads."""
        sampling = [program.placeholder(name, buffer) for name, buffer in SAMPLING.items()]
        kept = self._kept_logits(program, model)
        start, num_emitted = program.input("start"), program.input("num_emitted")
        options: dict[str, Any] = {"rule": self.rule, "target_vocab_size": program.target.vocab_size}
        if program.drafter.draft_to_target is not None:
            options["draft_to_target"] = self._vocabulary(program, program.drafter.draft_to_target)

        def draw(logits: fx.Node, row: int) -> fx.Node:
            return program.call(
                step.propose_, kept, logits, start, num_emitted, *sampling, name=f"token_{row + 1}", role="drafts",
                row=row, **options,
            )  # fmt: skip

        return draw

    def _vocabulary(self, program: Program, draft_to_target: Tensor) -> fx.Node:
        """The target id of every draft id as a node in front of all others."""
        program.modules["draft_to_target"] = constant(draft_to_target, "draft_to_target")
        with program.graph.inserting_before(program.one("positions")):
            return program.call("draft_to_target")

    def _kept_logits(self, program: Program, model: ModelInfo) -> fx.Node | None:
        """The buffer of what drafts were drawn from, for rules that compare distributions."""
        if self.rule not in STEP_NOISE_RULES:
            return None
        shape = ("B", program.drafter.num_speculative_tokens, model.vocab_size)
        return program.placeholder("draft_logits", Buffer(shape, torch.promote_types(model.dtype, torch.float32)))

    def _join(self, program: Program) -> fx.GraphModule:
        """Body and head as one module that selects its row in between: vocabulary logits for one row only."""
        body, head = program.modules.pop("draft_body"), program.modules.pop("draft_head")
        graph, root = fx.Graph(), torch.nn.Module()
        inputs = {n.name: n for n in body.graph.nodes if n.op == "placeholder"}
        mapping = {node: graph.placeholder(name) for name, node in inputs.items()}
        for traced, node in mapping.items():
            node.meta.update({"val": traced.meta["val"]} if "val" in traced.meta else {})
        index = graph.placeholder("row")
        hidden = splice(graph, root, body, mapping)
        hidden = graph.call_function(step.take_rows, (hidden, index, 1))
        (source,) = (n for n in head.graph.nodes if n.op == "placeholder")
        graph.output(splice(graph, root, head, {source: hidden}))
        return new_module(root, graph, "draft")
