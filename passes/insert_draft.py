"""Adds the drafter to the step: given what was emitted, propose the drafts of the next step.

Until ``insert_verify`` computes them, ``emitted`` (``[B, T]``, padded with -1) and ``num_emitted`` (``[B]``) are
inputs.

* ``history``: emitted tokens are recorded, the module is called once.
* ``autoregressive``: one call runs the window's first token and everything emitted, which brings the draft's KV cache
  to the accepted prefix and gives the first draft; each further draft is one more call. What was rejected is written
  over, so cache and proposals depend on accepted tokens only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from specgraph.errors import PassError
from specgraph.graphs import new_module, splice
from specgraph.kernels import step
from specgraph.kernels.sample import STEP_NOISE_RULES
from specgraph.passes.base import Pass, PassResult, check_option_rule
from specgraph.program import Buffer, Program

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
        count = program.drafter.num_speculative_tokens
        if count < 1 or program.draft is None:
            raise PassError(f"insert_draft: {program.drafter.name} needs num_speculative_tokens >= 1, got {count}.")
        program.modules["draft"] = self._join(program)
        caches = program.options["draft_body_caches"]
        state = {
            "block_table": program.input("block_table"),
            "max_length": program.input("max_length"),
            "caches": program.placeholder("draft_caches", caches),
        }
        sampling = [program.placeholder(name, buffer) for name, buffer in SAMPLING.items()]
        kept = self._kept_logits(program)
        start, num_emitted = program.input("start"), program.input("num_emitted")
        tokens, positions, rows = self._accepted(program, program.draft.vocab_size)
        proposals: list[fx.Node] = []
        for row in range(count):
            if row > 0:
                tokens, rows = proposals[-1], num_emitted
                positions = program.call(step.chain_positions, start, num_emitted, row, name=f"position_{row}")
            state |= {"tokens": tokens, "positions": positions, "num_rows": rows, "row": num_emitted}
            logits = program.call("draft", **state, name=f"draft_{row}", role="draft")
            proposals.append(program.call(
                step.propose_, kept, logits, start, num_emitted, *sampling, name=f"token_{row + 1}",
                row=row, rule=self.rule, target_vocab_size=program.target.vocab_size,
            ))  # fmt: skip
        for proposal in proposals:
            proposal.meta["role"] = "drafts"
        return count

    def _kept_logits(self, program: Program) -> fx.Node | None:
        """The buffer of what drafts were drawn from, for rules that compare distributions."""
        if self.rule not in STEP_NOISE_RULES:
            return None
        assert program.draft is not None
        shape = ("B", program.drafter.num_speculative_tokens, program.draft.vocab_size)
        dtype = torch.promote_types(program.draft.dtype, torch.float32)
        return program.placeholder("draft_logits", Buffer(shape, dtype))

    def _join(self, program: Program) -> fx.GraphModule:
        """Body and head as one module that selects its row in between: vocabulary logits for one row only."""
        body, head = program.modules.pop("draft_body"), program.modules.pop("draft_head")
        graph, root = fx.Graph(), torch.nn.Module()
        inputs = {n.name: n for n in body.graph.nodes if n.op == "placeholder"}
        mapping = {node: graph.placeholder(name) for name, node in inputs.items()}
        index = graph.placeholder("row")
        hidden = splice(graph, root, body, mapping)
        hidden = graph.call_function(step.take_row, (hidden, index))
        (source,) = (n for n in head.graph.nodes if n.op == "placeholder")
        graph.output(splice(graph, root, head, {source: hidden}))
        return new_module(root, graph, "draft")
