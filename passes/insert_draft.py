"""Adds the drafter to the step graph: from the tokens that were emitted, it proposes the drafts of the next step.

The drafter writes its own nodes. They read the tokens that verification gave, which ``insert_verify`` computes; until
then these are the input ``verified_tokens`` (``[B, T]``, padded with -1). What drafters ask of them, such as the tokens
and positions of their rows, comes from one call of :func:`~specgraph.kernels.step.finalize_step`.
"""

from __future__ import annotations

from dataclasses import dataclass

from specgraph.drafters.step import DraftStep
from specgraph.errors import PassError
from specgraph.ir.program import Program
from specgraph.passes.base import Pass, PassResult, check_option_rule


@dataclass(frozen=True)
class InsertDraft(Pass, requires={"kv_cache", "target_only"}, ensures={"draft"}, invalidates={"target_only"}):
    """Options: ``rule``, the verification rule, which decides with what noise drafts are drawn."""

    rule: str = "strict"

    def __post_init__(self) -> None:
        check_option_rule(self.name, self.rule)

    def apply(self, program: Program) -> PassResult:
        """Append the drafter's nodes after the logits."""
        drafter, count = program.drafter, program.drafter.num_speculative_tokens
        if drafter.chained and count < 1:
            raise PassError(f"{self.name}: {drafter.name} needs num_speculative_tokens >= 1, got {count}.")
        calls = drafter.build(DraftStep(program, self.rule))
        drafts = program.with_role("drafts")
        for node in drafts:
            node.meta["rule"] = self.rule
        program.set_output(program.one("logits"), *drafts)
        return PassResult(calls, notes=(f"{calls} draft calls per step",))
