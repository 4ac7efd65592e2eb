"""Lets Inductor compile the traced modules, which is everything between our own ops.

The pass changes no graph, so dumps show the same nodes as before. Only the way in which the modules are executed
changes.
"""

from __future__ import annotations

from dataclasses import dataclass

from specgraph.errors import ConfigError
from specgraph.ir.program import Program
from specgraph.passes.base import Pass, PassResult

BACKENDS = ("eager", "inductor")


@dataclass(frozen=True)
class CompileRemainder(Pass, requires={"verify"}, exact=False):
    """Options: ``backend``, which is ``eager`` (compile nothing) or ``inductor``."""

    backend: str = "eager"

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ConfigError(f"compile_remainder: backend is one of {', '.join(BACKENDS)}, not {self.backend!r}.")

    @property
    def skipped(self) -> str | None:
        """A reason if ``backend`` is ``eager``, since nothing is compiled then."""
        return "what remains runs eagerly" if self.backend == "eager" else None

    def apply(self, program: Program) -> PassResult:
        """Mark all modules that the step graph calls as compiled."""
        called = {node.target for node in program.graph.nodes if node.op == "call_module"}
        program.compiled = frozenset(called)
        return PassResult(len(called), expected=len(called))
