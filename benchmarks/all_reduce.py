"""Times sums over GPUs, with the residual and the parts of the next norm, in CUDA graphs that all GPUs replay.

``python -m benchmarks.all_reduce [GPUS]`` prints microseconds of one sum for each width and number of rows: those of
graphs with many sums, from the beginning of the first graph to the end of the last, the best of several. Each sum takes
the result of the one before, as in a step.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

import specgraph.kernels.linear.all_reduce  # noqa: F401  (registers the op)
from specgraph.kernels.peers import PeerGroup, exchanging, not_waiting

ROWS, WIDTHS = (1, 8, 32, 128, 512, 2048), (4096, 8192)
REPEATS = 10


def microseconds(devices: Sequence[torch.device], rows: int, width: int) -> float:
    """The time of one sum of ``[rows, width]`` in bfloat16."""
    group, op = PeerGroup(devices), torch.ops.specgraph.all_reduce_rank_norm
    count, graphs, read = 64 if rows <= 128 else 8, [], []
    for rank, device in enumerate(devices):
        with torch.cuda.device(device), exchanging(group):
            x, gain = torch.randn(rows, width, device=device).bfloat16() / 64, torch.ones(width, device=device)
            gain, residual = gain.bfloat16(), torch.zeros_like(x)
            read.append((x, gain, residual))  # graphs keep no memory but their own
            with not_waiting():
                op(x, gain, residual, rank=rank, world_size=len(devices))
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
                for _ in range(count):
                    x = op(x, gain, residual, rank=rank, world_size=len(devices))[0]
            graphs.append(graph)
    times = []
    for _ in range(REPEATS):
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in devices]
        for device, graph, (begin, end) in zip(devices, graphs, events, strict=True):
            with torch.cuda.device(device):
                begin.record()
                graph.replay()
                end.record()
        for device in devices:
            torch.cuda.synchronize(device)
        times.append(min(begin.elapsed_time(end) for begin, end in events))  # the last to begin waits for nobody
    return 1e3 * min(times) / count


def main() -> None:
    """Print a table."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else torch.cuda.device_count()
    devices = [torch.device("cuda", index) for index in range(count)]
    print(f"{count} x {torch.cuda.get_device_name()}: us of a sum with residual and norm, by rows {ROWS}")
    for width in WIDTHS:
        print(width, *(f"{microseconds(devices, rows, width):8.1f}" for rows in ROWS))


if __name__ == "__main__":
    main()
