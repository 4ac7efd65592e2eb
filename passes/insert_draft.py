"""Adds the drafter to the step graph: from the tokens that were emitted, it proposes the drafts of the next step.

The drafter writes its own nodes. They read the results of verification, which ``insert_verify`` adds later; until then
these results are inputs of the graph: ``emitted`` (``[B, T]``, padded with -1), ``num_emitted`` (``[B]``) and, for
drafters that read it, ``path`` (``[B, T]``, the rows of the window that were accepted, padded with -1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from specgraph.drafters.step import DraftStep
from specgraph.ir.program import Program
from specgraph.kernels.state import Buffer, per_call
from specgraph.passes.base import Pass, PassResult, check_option_rule

VERIFIED: dict[str, Buffer] = {
    "emitted": per_call("B", "T", fill=-1),
    "num_emitted": per_call("B"),
}
"""The results of verification, by the role of their node. A drafter that reads the accepted rows adds ``path``."""


@dataclass(frozen=True)
class InsertDraft(Pass):
    """Options: ``rule``, the verification rule, which decides with what noise drafts are drawn."""

    rule: str = "strict"

    name: ClassVar[str] = "insert_draft"
    requires: ClassVar[frozenset[str]] = frozenset({"kv_cache", "target_only"})
    ensures: ClassVar[frozenset[str]] = frozenset({"draft"})
    invalidates: ClassVar[frozenset[str]] = frozenset({"target_only"})

    def __post_init__(self) -> None:
        check_option_rule(self.name, self.rule)

    def apply(self, program: Program) -> PassResult:
        """Append the drafter's nodes after the logits."""
        for name, buffer in VERIFIED.items():
            program.placeholder(name, buffer).meta["role"] = name
        calls = program.drafter.build(DraftStep(program, self.rule))
        drafts = program.with_role("drafts")
        for node in drafts:
            node.meta["rule"] = self.rule
        program.set_output(program.one("logits"), *drafts)
        return PassResult(calls, notes=(f"{calls} draft calls per step",))
