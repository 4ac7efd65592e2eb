"""The whole step, target, verification, draft and state, is to run as one CUDA graph.

The graphs of nodes stay as they are; the decoder captures when it first needs a mode and a bucket of batch sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from specgraph.errors import PassError
from specgraph.ir.program import Program
from specgraph.passes.base import Pass, PassResult


@dataclass(frozen=True)
class CaptureCudaGraph(Pass):
    """Options: ``enabled``."""

    enabled: bool | None = False

    name: ClassVar[str] = "capture_cuda_graph"
    requires: ClassVar[frozenset[str]] = frozenset({"verify", "draft", "kv_cache"})
    ensures: ClassVar[frozenset[str]] = frozenset({"captured"})

    @property
    def skipped(self) -> str | None:
        """Whether lowering asks for it."""
        return None if self.enabled else "no CUDA graph is asked for"

    def apply(self, program: Program) -> PassResult:
        """Mark the program; a model that is not on a GPU is refused."""
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
