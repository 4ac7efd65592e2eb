"""How many bytes of tensors are alive while something runs, by what the allocator of PyTorch reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch.profiler import ProfilerActivity, profile

T = TypeVar("T")


@dataclass(frozen=True)
class Measured(Generic[T]):
    """What a function returned, and the bytes that were allocated beyond those before: at most, and at its end."""

    result: T
    peak: int
    kept: int


def measured(run: Callable[[], T]) -> Measured[T]:
    """Every allocation on the CPU counts, those inside of an operation, too. Mapped files count where they are opened.

    Memory that becomes free counts if it was allocated in a call of this function, too, be it another one.

    ``tracemalloc`` does not see memory of PyTorch, and the resident size of a process has what malloc keeps.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    found = profiler.profiler
    assert found is not None
    events = sorted((e for e in found.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns())
    peak = now = 0
    for event in events:
        now += event.nbytes()
        peak = max(peak, now)
    return Measured(result, peak, now)
