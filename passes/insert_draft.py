"""Adds the drafter to the step: given what was emitted, propose the drafts of the next step.

The drafter writes its own nodes. Until ``insert_verify`` computes them, what verification gives is an input:
``emitted`` (``[B, T]``, padded with -1), ``num_emitted`` (``[B]``) and, for drafters that ask for it, ``path``
(``[B, T]``, the rows of the window that were accepted, padded with -1).
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
"""What verification gives, by the role of its node. A drafter that asks for the accepted rows adds ``path``."""


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
        for name, buffer in VERIFIED.items():
            program.placeholder(name, buffer).meta["role"] = name
        calls = program.drafter.build(DraftStep(program, self.rule))
        drafts = program.with_role("drafts")
        for node in drafts:
            node.meta["rule"] = self.rule
        program.set_output(program.one("logits"), *drafts)
        return PassResult(calls, notes=(f"{calls} draft calls per step",))
