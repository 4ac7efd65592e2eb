"""What the launches of several kernels share: programmatic dependent launch, and counters for the last arrival.

Programmatic dependent launch (Hopper and later) starts a kernel's programs while the preceding kernel still runs. A
kernel that is launched by :func:`launch` must keep to three rules. Then it is correct after any kernel:

1. :func:`gdc_wait` comes before the first read of anything that an earlier kernel may have written, and
   before the first write of anything at all, since an earlier kernel may still be reading it. Any number of kernels may
   be unfinished before the wait. The wait ends when the preceding kernel has finished and its writes are visible. That
   kernel has waited too, so all earlier kernels have finished as well. After a kernel that was launched without this
   mechanism, the wait returns at once.

   There are two exceptions. A weight that nothing in a CUDA graph writes may be read before the wait
   (``constant_weight`` of ``specgraph::linear``). And what was written before a kernel's predecessor may be read before
   the wait if the predecessor calls :func:`gdc_launch_dependents` only after its own wait. Such reads bypass the L1
   cache, which only a wait is known to refresh.
2. Every program waits, on every path. A grid whose programs exit without waiting would finish before its predecessor.
3. :func:`gdc_launch_dependents` is only a hint. It may come anywhere unless the next kernel relies on the
   second exception, since a kernel that starts early waits too.

Both take the kernel's ``tl.constexpr`` switch ``PDL``, because Triton's interpreter and other GPUs have neither.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_COUNTERS = 1 << 14
_own_counters: ContextVar[Tensor | None] = ContextVar("own_counters", default=None)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of an NVIDIA GPU, or (0, 0) for any other device and where kernels are interpreted."""
    if device.type != "cuda" or torch.version.hip or triton.knobs.runtime.interpret:
        return 0, 0
    return torch.cuda.get_device_capability(device)


def supports_pdl(device: torch.device) -> bool:
    """Whether ``device`` supports programmatic dependent launch."""
    return _capability(device) >= (9, 0)


def is_hopper(device: torch.device) -> bool:
    """Whether ``device`` runs kernels that are written for compute capability 9.x."""
    return _capability(device)[0] == 9


GLUON_RELEASE = "3.6"
"""The release of Triton with which the Gluon kernels have been tried. Gluon still changes between releases."""


def runs_gluon(device: torch.device) -> bool:
    """Whether the Gluon kernels for Hopper run on ``device``. If not, the Triton form gives the same bits."""
    return is_hopper(device) and triton.__version__.startswith(f"{GLUON_RELEASE}.")


@triton.jit
def gdc_wait(PDL: tl.constexpr):
    """Wait until the preceding kernel has finished and its writes are visible. Without ``PDL`` this is so already."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def gdc_launch_dependents(PDL: tl.constexpr):
    """Let the programs of the next kernel start while this kernel still runs. Without ``PDL`` this does nothing."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch ``kernel``, which has the switch ``PDL``. An empty grid is nothing.

    Its first argument is a tensor on the device, or several of them.
    """
    if 0 not in grid:
        first = arguments[0]
        pdl = supports_pdl((first if isinstance(first, Tensor) else first[0]).device)
        kernel[grid](*arguments, PDL=pdl, **options, **launch_options(pdl))


def block_size(width: int, most: int) -> int:
    """The elements that a program takes of ``width`` in a row: a power of two that holds all of them, or ``most``."""
    return min(1 << max(width - 1, 0).bit_length(), most)


def contiguous(given: object, *names: str) -> list[Any]:
    """The arguments of these names as most kernels read them: their elements lie together. None stays None."""
    return [None if (x := getattr(given, name)) is None else x.contiguous() for name in names]


def dense_rows(x: Tensor) -> Tensor:
    """``x``, or a copy of it whose last dimension lies together."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def merged_dimensions(sizes: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Sizes and strides from the outermost dimension to the innermost; neighbours that are one run are one of them.

    Dimensions of size 1 are left out.
    """
    merged: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return merged


def launch_options(pdl: bool) -> dict[str, Any]:
    """The launch keywords that belong to a kernel's ``PDL`` switch.

    Without it there are none: the interpreter knows none.
    """
    return {"launch_pdl": True} if pdl else {}


def arrival_counters(device: torch.device) -> Tensor:
    """``MAX_COUNTERS`` int32 counters, all 0, with which programs find out which of them arrives last.

    The program that arrives last sets its counter back to 0. So one buffer serves every launch, and no launch has to
    fill it with zeros. Kernels that use it must run one after another, as those of a step do. Inside of
    :func:`own_counters` the buffer is the one given there. Elsewhere all launches on a device share one buffer, and so
    must be on one stream. The buffer must exist before a CUDA graph is captured, or filling it with zeros would become
    part of that graph.
    """
    own = _own_counters.get()
    return _shared_counters(device) if own is None or own.device != device else own


def new_counters(device: torch.device) -> Tensor:
    """A fresh buffer for :func:`own_counters`."""
    return torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)


@contextlib.contextmanager
def own_counters(counters: Tensor | None) -> Iterator[None]:
    """Inside of this context, launches of this thread count arrivals in ``counters``. None changes nothing.

    This is for a CUDA graph, which keeps the address of its counters and may be replayed while kernels on another
    stream run.
    """
    token = _own_counters.set(counters if counters is not None else _own_counters.get())
    try:
        yield
    finally:
        _own_counters.reset(token)


def counts_arrivals_in(counters: Tensor) -> bool:
    """Whether this is inside of :func:`own_counters` with just this buffer."""
    return _own_counters.get() is counters


@functools.cache
def _shared_counters(device: torch.device) -> Tensor:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("The first run of a kernel cannot be captured: run it once before the CUDA graph.")
    return new_counters(device)
