"""Times whole decode steps of a compiled decoder."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specgraph.bench.config import BenchConfig
from specgraph.bench.models import random_head
from specgraph.bench.report import GB, MB, Cell, Row
from specgraph.compiler.compile import compile_speculative
from specgraph.config import Config, DraftConfig
from specgraph.config.compose import AUTO
from specgraph.config.draft import LOOKUPS
from specgraph.drafters.base import DraftHead
from specgraph.errors import ConfigError
from specgraph.ir.traffic import STAGE, sent_bytes, state_size, step_traffic
from specgraph.runtime.decoder import SpeculativeDecoder


@dataclass(frozen=True)
class Timed:
    """Timed steps: the seconds of each, the tokens per sequence and step, and the mean length of the context."""

    seconds: list[float]
    tokens_per_step: float
    context: float


def bench_steps(model: PreTrainedModel, options: BenchConfig, config: Config, bandwidth: float) -> Iterator[Row]:
    """Measure every K and batch size. A decoder is compiled for each K.

    Raises:
        ConfigError: the measured steps do not fit into the target's positions.
    """
    config = dataclasses.replace(config, max_batch_size=max(options.batches))
    counts = counts_of(options, config)
    for k in counts:
        keys = f"prompt_length={options.prompt_length} and steps={options.steps} at K = {k}"
        check_positions(model, options, needed_length(options, k), keys)
    for k in counts:
        own = dataclasses.replace(with_drafts(config, k), max_length=needed_length(options, k))
        head = head_of(model, own)
        begin = time.perf_counter()
        decoder = compile_speculative(model, own, draft=head)
        seconds = time.perf_counter() - begin
        for batch in options.batches:
            yield _measure(decoder, options, batch, k, seconds, bandwidth)
        del decoder, head
        gc.collect()  # frees the graphs and the GPU memory of this decoder before the next one needs memory


def needed_length(options: BenchConfig, k: int) -> int:
    """The most positions that the prompt and all steps can take.

    A few steps more are counted, because results are read some steps later.
    """
    return options.prompt_length + (options.warmup + options.steps + 4) * (k + 1) + 1


def check_positions(model: PreTrainedModel, options: BenchConfig, needed: int, keys: str) -> None:
    """Refuse so many positions, for which ``keys`` ask, if the target has fewer."""
    text: Any = model.config.get_text_config()
    known = getattr(text, "max_position_embeddings", None)
    if known is not None and needed > known:
        raise ConfigError(
            f"{keys} take up to {needed} positions, but {options.target} is right for {known}; lower one of them."
        )


def head_of(model: PreTrainedModel, config: Config) -> DraftHead | None:
    """A random head, if the configuration names a drafter with heads but no checkpoint."""
    return None if config.draft.model is not None else random_head(model, config.draft)


def counts_of(options: BenchConfig, config: Config) -> list[int]:
    """The values of K that are measured; 0 alone without a drafter."""
    return options.counts if config.draft.kind != "none" else [0]


def with_drafts(config: Config, k: int | str) -> Config:
    """The configuration for K drafts, whatever the load, or for a number that is chosen for each step (``auto``)."""
    most = config.draft.num_speculative_tokens if isinstance(k, str) else max(k, 1)
    draft = dataclasses.replace(
        config.draft, num_speculative_tokens=most, num_speculative_tokens_by_load=None, adaptive=k == AUTO
    )
    return dataclasses.replace(config, draft=draft)


def _measure(
    decoder: SpeculativeDecoder, options: BenchConfig, batch: int, k: int, compile_s: float, bandwidth: float
) -> Row:
    """Measure one K and batch size.

    The row has, beside the batch and K:

    - the median and the mean time of a step
    - emitted tokens per sequence and step, and of the whole batch per second at the median time. With
      ``verify=synthetic`` they follow from the acceptance rate, unless drafts are looked up, of which a step may have
      fewer than K; otherwise they are measured.
    - the bytes of weights, and of keys and values, that one step must read, and those of recurrent state that it must
      read and write
    - the bytes that a GPU sends to others that share the target
    - the memory that the recurrent state of one sequence takes, with the rows behind it
    - the time that moving these bytes takes at the measured bandwidth, and the ratio of the time to this limit
    - the seconds of ``compile_speculative`` and of the first steps
    - the most memory that was in use on a GPU; 0 on a CPU
    """
    program = decoder.stages[STAGE]
    device = program.target.device
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    begin = time.perf_counter()
    prompts = random_prompts(program.target.vocab_size, batch, options.prompt_length)
    time_steps(decoder, prompts, k, options, first=True)  # compiles kernels, captures graphs
    first = time.perf_counter() - begin
    timed = time_steps(decoder, prompts, k, options)
    traffic = step_traffic(program, batch, timed.context, k, timed.tokens_per_step)
    shared = len(decoder.ranks) > 1
    seconds, limit = statistics.median(timed.seconds), traffic.total / bandwidth
    rate = decoder.config.verify.acceptance_rate
    synthetic = decoder.config.verify.rule == "synthetic" and not _looks_up(decoder.config.draft)
    emitted = sum(rate**i for i in range(k + 1)) if synthetic else timed.tokens_per_step
    return Row(
        f"batch {batch}, K = {k}",
        f"{1e3 * seconds:.3f} ms per step",
        {
            "batch": Cell(batch, "batch"),
            "k": Cell(k, "K"),
            "ms": Cell(1e3 * seconds, "ms/step", ".3f"),
            "mean_ms": Cell(1e3 * statistics.fmean(timed.seconds)),
            "tokens_per_step": Cell(emitted, "tokens/step", ".2f"),
            "tokens_per_second": Cell(batch * emitted / seconds, "tokens/s", ".1f"),
            "target_bytes": Cell(traffic.target_weights, "target GB", ".3f", GB),
            "draft_bytes": Cell(traffic.draft_weights, "draft GB", ".3f", GB),
            "cache_bytes": Cell(traffic.cache, "cache GB", ".3f", GB),
            "state_bytes": Cell(traffic.state, "state GB", ".3f", GB),
            "sent_bytes": Cell(sent_bytes(program, batch * (k + 1)), "sent MB" * shared, ".3f", MB),
            "sequence_bytes": Cell(state_size(program), "state GB/seq", ".3f", GB),
            "limit_ms": Cell(1e3 * limit, "limit ms", ".3f"),
            "ratio": Cell(seconds / limit, "ms/limit", ".2f"),
            "compile_s": Cell(compile_s + first, "compile s", ".1f"),
            "peak_bytes": Cell(torch.cuda.max_memory_allocated(device) if cuda else 0, "peak GB", ".3f", GB),
        },
    )


def random_prompts(vocab_size: int, batch: int, length: int, seed: int = 0) -> list[Tensor]:
    """Random prompts, which are the same in every call with the same ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator) for _ in range(batch)]


def _looks_up(draft: DraftConfig) -> bool:
    """Whether a step may have fewer than K drafts, because they are looked up."""
    return draft.kind in LOOKUPS or draft.first is not None


def time_steps(
    decoder: SpeculativeDecoder, prompts: Sequence[Tensor], k: int, options: BenchConfig, temperature: float = 0.0, *,
    first: bool = False,
) -> Timed:  # fmt: skip
    """Decode, and measure the time from the results of one step to those of the next.

    The steps that run the prompt and the ``warmup`` steps after it do not count, and neither do steps after the next
    ``steps`` ones. The ``first`` run ends after one step, with caches of the size that all steps need.
    """
    longest = needed_length(options, k) - options.prompt_length
    steps, warmup = (1, 0) if first else (options.steps, options.warmup)
    stream = decoder.stream(prompts, max_new_tokens=longest, eos_token_id=[], temperature=temperature, seed=0)
    lengths = sum(prompt.numel() for prompt in prompts)
    seconds: list[float] = []
    emitted, contexts, decoded, before = 0, 0, -1, 0.0
    for chunk in stream:
        now = time.perf_counter()
        new = sum(map(len, chunk.tokens))
        decoded += decoded >= 0 or all(chunk.tokens)  # the step that ends all prompts is step 0
        if decoded > warmup:
            seconds.append(now - before)
            emitted, contexts = emitted + new, contexts + lengths
        lengths, before = lengths + new, now
        if len(seconds) == steps:
            break
    stream.close()
    scale = len(seconds) * len(prompts)
    return Timed(seconds, emitted / scale, contexts / scale)
