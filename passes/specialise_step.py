"""The step for one kind of request: with the log-probabilities it asks for, and without the inputs it makes no use of.

A request whose sequences all leave ``top_k`` off gives the same tokens without that input, sooner; a greedy one draws
no noise and needs no seeds. The decoder applies this pass once for every kind of request that it meets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from specgraph.errors import ConfigError
from specgraph.ir.program import Program
from specgraph.kernels.verify.arguments import LOGPROBS
from specgraph.passes.base import Pass, PassResult
from specgraph.passes.index_rows import drop_unread, gathered


@dataclass(frozen=True)
class SpecialiseStep(Pass):
    """Options: ``logprobs``, ``none``, ``raw`` or ``processed``; ``unused``, names of inputs to do without."""

    logprobs: str = "none"
    unused: tuple[str, ...] = ()

    name: ClassVar[str] = "specialise_step"
    requires: ClassVar[frozenset[str]] = frozenset({"verify"})
    ensures: ClassVar[frozenset[str]] = frozenset({"specialised"})

    def __post_init__(self) -> None:
        if self.logprobs not in LOGPROBS:
            raise ConfigError(f"specialise_step: logprobs is one of {', '.join(LOGPROBS)}, not {self.logprobs!r}.")

    def apply(self, program: Program) -> PassResult:
        """Rewrite the step graph; the modules and the state stay as they are."""
        left_out = {gathered(program, name) for name in self.unused if name in program.inputs}
        for node in program.graph.nodes:
            node.args = fx.map_arg(node.args, lambda arg: None if arg in left_out else arg)
        drop_unread(program)
        given = [node for node in program.graph.nodes if "logprobs" in node.kwargs]
        for node in given:
            node.kwargs = {**node.kwargs, "logprobs": self.logprobs}
        without = ", ".join(sorted(node.name for node in left_out)) or "nothing left out"
        return PassResult(len(left_out) + len(given), notes=(f"log-probabilities: {self.logprobs}; {without}",))
