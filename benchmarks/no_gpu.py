"""A Hopper GPU that need not be there, for which Triton compiles."""

from __future__ import annotations

from triton.backends.compiler import GPUTarget


class Hopper:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0
