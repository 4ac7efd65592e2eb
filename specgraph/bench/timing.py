"""Measures how long calls take on a device, and how fast its memory is."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import timeit
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

Call = Callable[[], object]

_BLOCK = 4096
_PER_PROGRAM = 8
_GPU_BYTES = 4 * 2**30
_CPU_BYTES = 2**28


@triton.jit  # type: ignore[untyped-decorator]
def _sweep_kernel(values, sums, BLOCK: tl.constexpr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Read ``COUNT`` blocks and write their sum, so that the compiler cannot remove the reads."""
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for index in range(COUNT):
        total += tl.load(values + (program * COUNT + index) * BLOCK + columns)
    tl.store(sums + program, tl.sum(total, axis=0))


def sweep(values: Tensor) -> Tensor:
    """The sums of 32768 consecutive float32 values each. It reads each value once and writes almost nothing."""
    count = values.numel() // (_BLOCK * _PER_PROGRAM)
    sums = torch.empty(count, dtype=torch.float32, device=values.device)
    _sweep_kernel[(count,)](values, sums, BLOCK=_BLOCK, COUNT=_PER_PROGRAM, num_warps=8)
    return sums


def measure_bandwidth(device: torch.device, size: int | None = None) -> float:
    """Bytes per second, measured on a GPU by reading and on a CPU by copying, where read and written bytes count."""
    if device.type == "cuda":
        values = torch.randn((size or _GPU_BYTES) // 4, device=device)
        return values.nbytes / median_seconds(device, [lambda: sweep(values)], repeats=20, warmup=3)
    source = torch.ones((size or _CPU_BYTES) // 4, device=device)
    copy = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(device, [lambda: copy.copy_(source)], repeats=5, warmup=1)


def measure_matmul(device: torch.device, dtype: torch.dtype, size: int | None = None) -> float:
    """Operations per second of PyTorch's product of two square matrices, where a multiplication and an addition count
    as two."""
    width = size or (8192 if device.type == "cuda" else 1024)
    a, b = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
    return 2 * width**3 / median_seconds(device, [lambda: a @ b], repeats=10, warmup=2)


def median_seconds(device: torch.device, calls: Sequence[Call], repeats: int, warmup: int) -> float:
    """The median time of one of ``calls``, which run one after the other.

    On a GPU they run in one CUDA graph, so that the host's work does not count. If the calls read different memory,
    none of them finds its weights in the L2 cache.
    """
    cuda = device.type == "cuda"
    with torch.cuda.device(device) if cuda else contextlib.nullcontext():
        run = _captured(calls) if cuda else lambda: [call() for call in calls]
        for _ in range(warmup):
            run()
        seconds = _gpu_seconds(run, repeats) if cuda else timeit.repeat(run, repeat=repeats, number=1)
    return statistics.median(seconds) / len(calls)


def _captured(calls: Sequence[Call]) -> Call:
    """One CUDA graph of the calls. Each call runs once before, because kernels are compiled in their first run."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def _gpu_seconds(run: Call, repeats: int) -> list[float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(marks)]
