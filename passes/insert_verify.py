"""Inserts verification as one op, and closes the loop: the step computes what it emits and moves its state.

:mod:`specgraph.kernels.verify.verify` says what the op computes, and spells it as a composition of plain functions.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from specgraph.drafters.step import POINT_MASS, SAMPLING, VERIFIED, DraftStep
from specgraph.errors import ConfigError, PassError
from specgraph.ir.graphs import calls, constant
from specgraph.ir.program import Program
from specgraph.kernels import step, verify
from specgraph.kernels.state import MAX_DRAFTS, ROW_INDEX, ROWS, Buffer
from specgraph.passes.base import Pass, PassResult, check_option_rule
from specgraph.passes.common.patterns import insert, items

VERIFY = torch.ops.specgraph.verify.default


@dataclass(frozen=True)
class InsertVerify(Pass, requires={"kv_cache", "draft"}, ensures={"verify"}, invalidates={"draft"}):
    """Options: ``rule`` and the options of the rules, as :class:`~specgraph.kernels.verify.Verify` describes them;
    ``max_context``, the tokens that a sequence has at most where its drafter drafts, None for any number."""

    rule: str = "strict"
    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3
    acceptance_rate: float = 0.7
    odd_acceptance_rate: float | None = None
    max_context: int | None = None

    def __post_init__(self) -> None:
        check_option_rule(self.name, self.rule)
        for name in ("acceptance_rate", "odd_acceptance_rate"):
            if not 0 <= (getattr(self, name) or 0.0) <= 1:
                raise ConfigError(f"insert_verify: {name} must be in [0, 1], got {getattr(self, name)}.")
        if self.posterior_threshold < 0 or self.posterior_alpha < 0:
            raise ConfigError("insert_verify: posterior_threshold and posterior_alpha must be 0 or more.")

    def apply(self, program: Program) -> PassResult:
        """Replace the input ``verified_tokens`` by nodes that compute it."""
        self._check_rule(program)
        logits = program.one("logits")
        self._select_rows(program, logits)
        drafts = program.with_role("drafts")
        made = DraftStep(program, self.rule)
        emitted, num_emitted = made.emitted, made.num_emitted  # a drafter has asked for them, unless it makes no drafts
        self._verify(program, logits)
        self._advance(program, emitted, num_emitted, drafts)
        return PassResult(1, expected=1)

    def _check_rule(self, program: Program) -> None:
        """Drafts must have been drawn for the rule that verifies them."""
        rules = {str(node.meta.get("rule", self.rule)) for node in program.with_role("drafts")}
        for drawn_for in sorted(rules - {self.rule}):
            raise PassError(
                f"insert_verify verifies by {self.rule!r}, but insert_draft drew its drafts for {drawn_for!r}; set "
                "verify.rule, which gives both the same."
            )

    def _select_rows(self, program: Program, logits: fx.Node) -> None:
        """Run the vocabulary projection for the rows whose next token is unknown, at most K + 1."""
        (hidden,) = logits.args
        num_forced = program.placeholder("num_forced", Buffer(("B",)))
        count = program.drafter.num_speculative_tokens + 1
        logits.args = (insert(logits, step.needed_rows, (hidden, num_forced, count), name="needed"),)

    def _verify(self, program: Program, logits: fx.Node) -> None:
        """Verification behind the logits, which computes the input ``verified_tokens``."""
        temperature, seeds, *cuts = (program.placeholder(name, buffer) for name, buffer in SAMPLING.items())
        rows = [program.placeholder(name, Buffer(("B",))) for name in ("num_rows", "num_forced")]
        positions, place = self._next_positions(program), logits.next
        drafts = insert(place, step.draft_tokens, (program.input("window"),), name="drafts")
        draft_logits, own, options = self._drawn_from(program)
        given = (logits, drafts, draft_logits, temperature, seeds, positions, *cuts, *rows, own)
        verification = insert(place, VERIFY, given, {**options, "logprobs": "none"}, "verification")
        places = map(verify.Verified._fields.index, ("emitted", "logprobs", "bad"))
        tokens, logprobs, bad = (insert(place, operator.getitem, (verification, index)) for index in places)
        logprobs.name = logprobs.meta["role"] = "logprobs"
        bad.name = bad.meta["role"] = "bad"
        program.input(VERIFIED).replace_all_uses_with(tokens)
        program.drop_input(VERIFIED)
        tokens.name = VERIFIED

    def _next_positions(self, program: Program) -> fx.Node:
        """The positions after those of the window's rows, from the launch that gives these."""
        own = program.one("positions")
        positions, following = items(own, insert(own, step.positions_and_next, own.args), 2)
        positions.meta["role"] = own.meta.pop("role")
        own.replace_all_uses_with(positions)
        program.graph.erase_node(own)
        positions.name, following.name = "positions", "next_positions"
        return following

    def _drawn_from(self, program: Program) -> tuple[fx.Node | None, fx.Node | None, dict[str, Any]]:
        """The logits that drafts were drawn from, if there are any, the drafts' vocabulary, and the op's options."""
        options: dict[str, Any] = {
            "rule": self.rule,
            "posterior_threshold": self.posterior_threshold,
            "posterior_alpha": self.posterior_alpha,
            "acceptance_rate": self.acceptance_rate,
        }
        if self.odd_acceptance_rate is not None:
            options["odd_acceptance_rate"] = self.odd_acceptance_rate
        if "draft_logits" not in program.inputs:
            return None, None, options
        if POINT_MASS in program.inputs:
            options = {"point_mass": program.input(POINT_MASS), **options}
        options["draft_rows"] = program.placeholder(ROWS, ROW_INDEX)
        return program.input("draft_logits"), self._vocabulary(program), options

    def _vocabulary(self, program: Program) -> fx.Node | None:
        """The draft id of every target id, where they differ: a constant, as a node in front of all others."""
        known = program.drafter.draft_to_target
        if known is None:
            return None
        own = verify.invert_vocabulary(known, program.target.vocab_size)
        program.modules["target_to_draft"] = constant(own, "target_to_draft")
        with program.graph.inserting_before(program.one("positions")):
            return program.call("target_to_draft")

    def _advance(self, program: Program, emitted: fx.Node, num_emitted: fx.Node, drafts: list[fx.Node]) -> None:
        """Write the state back and return what the host reads."""
        window = Buffer(("B", program.drafter.num_speculative_tokens + 1))
        program.set_output(emitted, num_emitted, program.one("logprobs"), program.one("bad"))
        start, *rows, limit, ends = map(program.input, ("start", "num_rows", "num_forced", "max_length", "eos_ids"))
        given = program.placeholder("next_window", window), start, *rows, emitted, num_emitted, drafts, limit, ends
        if MAX_DRAFTS in program.inputs:
            given = *given, program.input(MAX_DRAFTS)
        insert(program.graph.output_node(), step.advance_, given, name="advance")
        if self.max_context is not None:
            self._limit_context(program, start, num_emitted)

    def _limit_context(self, program: Program, start: fx.Node, num_emitted: fx.Node) -> None:
        """Let long sequences have no drafts, or those alone that a lookup in front of the drafter finds."""
        choices = [*calls(program.graph, step.prefer_found)]
        for choice in choices:
            last = insert(choice, step.last_position, (start, num_emitted), name="last")
            choice.update_kwarg("last", last)
        for node in (*calls(program.graph, step.drafts_wanted), *(choices or calls(program.graph, step.advance_))):
            node.update_kwarg("max_context", self.max_context)
