"""Time specgraph::verify (strict) with the kernels of the tree in PYTHONPATH. python time_scan.py LABEL"""

import sys

import torch

from benchmarks.case import Place
from benchmarks.kernels import _verify
from specgraph.bench.timing import median_seconds
from specgraph.kernels import catalogue  # noqa: F401

label, device = sys.argv[1], torch.device("cuda")
place = Place(device, torch.bfloat16)
for vocab in (32000, 128256, 151936):
    for batch in (1, 8, 32, 64):
        for k in (0, 3, 7):
            for temperature in (0.0, 0.8):
                case = _verify(place, vocab, batch, k + 1, temperature, None)
                copies = min(64, max(1, -(-(2**28) // case.bytes)))
                calls = [case.make()[0] for _ in range(copies)]
                us = 1e6 * median_seconds(device, calls, repeats=50, warmup=5)
                print(f"{label} V={vocab} batch={batch} K={k} T={temperature}: {us:.2f} us", flush=True)
