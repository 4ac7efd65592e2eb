"""Decodes a few tokens with a tiny random model, in a process of its own: ``python -m specgraph.cli.try_decoding``.

``doctor`` starts it once for each device. If a broken compiler or driver kills this process, or never returns,
``doctor`` still goes on and says so.
"""

from __future__ import annotations

import json
import sys
import time

import torch

from specgraph.bench.models import random_target
from specgraph.compiler.compile import compile_speculative

NEW_TOKENS = 16


def try_decoding(device: str, lowering: str) -> dict[str, str | float | bool]:
    """Compile a tiny Llama with random weights and decode with it; compiling compares it with the model's own forward.

    Args:
        device: that of the model, such as ``cpu`` or ``cuda:0``.
        lowering: as the key ``lowering.name``.

    Returns:
        The ``lowering`` that ran, whether the step is a CUDA graph (``cuda_graph``), and the ``seconds`` of everything.
    """
    begin, place = time.perf_counter(), torch.device(device)
    dtype = torch.float32 if place.type == "cpu" else torch.bfloat16
    model = random_target("tiny-shape", place, dtype)
    options = {"lowering.name": lowering, "max_length": 64, "debug.progress": False}
    decoder = compile_speculative(model, options)
    new = decoder.generate([torch.arange(1, 8)], max_new_tokens=NEW_TOKENS).new_tokens[0]
    if new.numel() != NEW_TOKENS:
        raise RuntimeError(f"decoding gave {new.numel()} tokens instead of {NEW_TOKENS}")
    settled = decoder.config.lowering
    return {"lowering": settled.name, "cuda_graph": bool(settled.cuda_graph), "seconds": time.perf_counter() - begin}


if __name__ == "__main__":
    print(json.dumps(try_decoding(*sys.argv[1:])))
