"""Marks the program so that its whole step (target, verification, drafting, state) runs as one CUDA graph.

The pass changes no FX graph. The decoder captures a CUDA graph when a request first needs it: one for each kind of
request, each bucket of batch sizes and, for prompts, each bucket of widths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specgraph.errors import PassError
from specgraph.ir.program import Program
from specgraph.passes.base import Pass, PassResult


@dataclass(frozen=True)
class CaptureCudaGraph(Pass, requires={"verify"}):
    """Options: ``enabled``."""

    enabled: bool | None = False

    @property
    def skipped(self) -> str | None:
        """A reason if ``enabled`` is off, which lowering sets."""
        return None if self.enabled else "no CUDA graph is asked for"

    def apply(self, program: Program) -> PassResult:
        """Mark the program. A model that is not on a GPU, or is in float64, is refused."""
        if program.target.device.type != "cuda":
            raise PassError(
                f"capture_cuda_graph: the target is on {program.target.device}, and only a GPU replays graphs; move "
                "the model there, or set lowering.cuda_graph=false."
            )
        if program.target.dtype == torch.float64:
            raise PassError(
                "capture_cuda_graph: float64 runs through the reference ops, which wait for the host; set "
                "lowering.cuda_graph=false."
            )
        program.captured = True
        return PassResult(1, expected=1)
