"""What the launchers of several kernels share: programmatic dependent launch, and counters for the last arrival.

Programmatic dependent launch (Hopper and later) starts a kernel's programs while the kernel before it still runs. A
kernel that is launched with :func:`launch_options` keeps to three rules, and is then right after any kernel:

1. ``tl.extra.cuda.gdc_wait()`` comes before the first read of anything an earlier kernel may have written, and before
   the first write of anything at all, since an earlier kernel may still be reading it. Any number of kernels may be
   unfinished before the wait. It ends when the kernel before has finished and its writes are visible; that one has
   waited in its turn, so all earlier ones are done too. After a kernel that knows nothing of this it returns at once.
   Two exceptions: a weight that nothing in a CUDA graph writes (``constant_weight`` of ``specgraph::linear``);
   and what was written before a kernel's predecessor, if that one lets it begin after its own wait and not before.
   Such reads pass by the first-level cache, which only a wait is known to refresh.
2. Every program waits, on every path: a grid whose programs leave without waiting finishes before its predecessor.
3. ``tl.extra.cuda.gdc_launch_dependents()`` is only a hint, and may come anywhere where nothing makes use of the second
   exception: what begins early waits in its turn.

Both calls sit behind a ``tl.constexpr`` switch, because Triton's interpreter has neither.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
import triton
from torch import Tensor

MAX_COUNTERS = 1 << 14
_own_counters: ContextVar[Tensor | None] = ContextVar("own_counters", default=None)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of an NVIDIA GPU; (0, 0) of anything else, and where kernels are interpreted."""
    if device.type != "cuda" or torch.version.hip or triton.knobs.runtime.interpret:
        return 0, 0
    return torch.cuda.get_device_capability(device)


def supports_pdl(device: torch.device) -> bool:
    """Whether kernels on ``device`` may be launched programmatically."""
    return _capability(device) >= (9, 0)


def is_hopper(device: torch.device) -> bool:
    """Whether ``device`` may run kernels written for compute capability 9.x."""
    return _capability(device)[0] == 9


GLUON_RELEASE = "3.6"
"""The release of Triton that the Gluon kernels have been tried with: Gluon still changes between releases."""


def runs_gluon(device: torch.device) -> bool:
    """Whether the kernels written for Hopper in Gluon run on ``device``; the Triton form gives the same bits."""
    return is_hopper(device) and triton.__version__.startswith(f"{GLUON_RELEASE}.")


def launch_options(pdl: bool) -> dict[str, Any]:
    """The launch keywords beside the kernel's own ``PDL`` switch; none without, since the interpreter knows none."""
    return {"launch_pdl": True} if pdl else {}


def arrival_counters(device: torch.device) -> Tensor:
    """``MAX_COUNTERS`` int32 zeros for "the last program to arrive does the rest"; that one sets its counter back to 0.

    One buffer serves every launch, which spares each of them a fill: kernels that use it must follow one another, as
    those of a step do. Inside of :func:`own_counters` it is the buffer given there; elsewhere all launches on a device
    share one, and so must be on one stream. It must exist before a CUDA graph is captured, or its zeros would be part
    of that graph.
    """
    own = _own_counters.get()
    return _shared_counters(device) if own is None or own.device != device else own


def new_counters(device: torch.device) -> Tensor:
    """A fresh buffer for :func:`own_counters`."""
    return torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)


@contextlib.contextmanager
def own_counters(counters: Tensor | None) -> Iterator[None]:
    """Launches of this thread count arrivals in ``counters`` for a while; None changes nothing.

    For a CUDA graph, which keeps the address and may be replayed while kernels on another stream run.
    """
    token = _own_counters.set(counters if counters is not None else _own_counters.get())
    try:
        yield
    finally:
        _own_counters.reset(token)


@functools.cache
def _shared_counters(device: torch.device) -> Tensor:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("The first run of a kernel cannot be captured: run it once before the CUDA graph.")
    return new_counters(device)
