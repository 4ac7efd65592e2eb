"""Times whole requests for one token: what a caller waits for the first token of a prompt."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from specgraph.bench.arithmetic import prompt_flops
from specgraph.bench.config import BenchConfig
from specgraph.bench.report import GB, Cell, Row
from specgraph.bench.steps import check_positions, head_of, random_prompts, with_drafts
from specgraph.compiler.compile import compile_speculative
from specgraph.config import Config
from specgraph.ir.traffic import STAGE, step_traffic
from specgraph.runtime.decoder import SpeculativeDecoder

REPEATS = 3
"""How many requests are timed; the fastest counts."""


def bench_first_token(
    model: PreTrainedModel, options: BenchConfig, config: Config, bandwidth: float, rate: float
) -> Iterator[Row]:
    """Measure every length of prompts and batch size; the smallest number of drafts decides about K.

    ``bandwidth`` is in bytes per second, ``rate`` in operations per second.

    Raises:
        ConfigError: a prompt does not fit into the target's positions.
    """
    longest = max(options.prompt_lengths) + 1
    check_positions(model, options, longest, f"prompt_lengths={options.prompt_lengths}")
    config = with_drafts(config, min(options.counts))
    config = dataclasses.replace(config, max_batch_size=max(options.batches), max_length=longest)
    decoder = compile_speculative(model, config, draft=head_of(model, config))
    # Allocates for the largest request, so that none of those that follow finds too little room and allocates anew.
    _request_ms(decoder, longest - 1, max(options.batches), seed=0)
    for length in options.prompt_lengths:
        for batch in options.batches:
            yield _measure(decoder, length, batch, bandwidth, rate)


def _measure(decoder: SpeculativeDecoder, length: int, batch: int, bandwidth: float, rate: float) -> Row:
    """Measure one length and batch size.

    The row has, beside these two:

    - the time of ``generate`` for one token, from the call to its return; the fastest of three
    - the time that reading the weights of the target takes at the measured bandwidth
    - the time that the operations of the prompts take at the measured rate of a large product
      (:mod:`specgraph.bench.arithmetic`)
    - the longer of the two, which is the limit, and the ratio of the time to it
    - the time of the first such call, which compiles kernels and captures CUDA graphs
    - the most memory that was in use on a GPU; 0 on a CPU
    """
    program = decoder.stages[STAGE]
    device = program.target.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    # Every request has prompts of its own, since pages of the same tokens might be used again.
    first, *times = (_request_ms(decoder, length, batch, seed) for seed in range(1, REPEATS + 2))
    bytes_ms = 1e3 * step_traffic(program, batch, 0.0, 0).target_weights / bandwidth
    flops_ms = 1e3 * batch * prompt_flops(program, length) / rate
    limit = max(bytes_ms, flops_ms)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return Row(
        f"{length} tokens x {batch}",
        f"{min(times):.3g} ms",
        {
            "prompt_length": Cell(length, "prompt"),
            "batch": Cell(batch, "batch"),
            "ms": Cell(min(times), "ms", ".3f"),
            "bytes_ms": Cell(bytes_ms, "bytes ms", ".3f"),
            "flops_ms": Cell(flops_ms, "FLOPs ms", ".3f"),
            "limit_ms": Cell(limit),
            "ratio": Cell(min(times) / limit, "ms/limit", ".2f"),
            "first_ms": Cell(first, "first call ms", ".3f"),
            "peak_bytes": Cell(peak, "peak GB", ".3f", GB),
        },
    )


def _request_ms(decoder: SpeculativeDecoder, length: int, batch: int, seed: int) -> float:
    """The milliseconds of one request, whose prompts ``seed`` decides."""
    prompts = random_prompts(decoder.stages[STAGE].target.vocab_size, batch, length, seed)
    begin = time.perf_counter()
    decoder.generate(prompts, max_new_tokens=1, eos_token_id=[], temperature=0.0, seed=0)
    return 1e3 * (time.perf_counter() - begin)
