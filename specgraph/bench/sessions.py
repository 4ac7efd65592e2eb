"""Times the decoding of many prompts: in batches, one after the other, and as one session that is filled and drained.

A batch ends with its longest sequence, and until then the rows of the others are idle. A session gives a free row to
the next prompt. Both are the same calls of one decoder, ``generate`` over as many prompts as it decodes together and
``generate`` over all of them, so their ratio is what sessions gain.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specgraph.bench.config import BenchConfig
from specgraph.bench.report import Cell, Row
from specgraph.bench.steps import counts_of, head_of, with_drafts
from specgraph.compiler.compile import compile_speculative
from specgraph.config import Config
from specgraph.ir.program import Program
from specgraph.ir.traffic import STAGE, step_traffic
from specgraph.runtime.decoder import SpeculativeDecoder
from specgraph.runtime.outputs.output import StreamChunk

Call = dict[str, Any]
"""The arguments of ``generate`` or ``stream``."""
BATCHES, SESSION = "in batches", "as a session"


@dataclass(frozen=True)
class Workload:
    """Prompts to decode greedily.

    Attributes:
        prompts: 1-D int64 tensors.
        new_tokens: for each of them, how many tokens it may add.
        eos_ids: None for the model's own; an empty list lets every sequence add all of its tokens.
    """

    prompts: Sequence[Tensor]
    new_tokens: Sequence[int]
    eos_ids: list[int] | None

    def calls(self, size: int) -> list[Call]:
        """Calls that decode ``size`` prompts each, in order. The seed of a prompt is its place among all."""
        parts = [slice(at, at + size) for at in range(0, len(self.prompts), size)]
        return [
            {
                "input_ids": self.prompts[part],
                "max_new_tokens": self.new_tokens[part],
                "seed": list(range(len(self.prompts)))[part],
                "eos_token_id": self.eos_ids,
                "temperature": 0.0,
            }
            for part in parts
        ]


def random_workload(options: BenchConfig, vocab_size: int) -> Workload:
    """Random tokens; lengths and numbers of new tokens are uniform in the ranges of ``options``, seeded."""
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int, count: int) -> Tensor:
        return torch.randint(low, high + 1, (count,), generator=generator)

    lengths, new_tokens = (
        draw(low, high, options.num_prompts).tolist() for low, high in (options.prompt_range, options.new_range)
    )
    return Workload([draw(0, vocab_size - 1, length) for length in lengths], new_tokens, [])


def file_workload(options: BenchConfig, prompts: Sequence[Tensor]) -> Workload:
    """The prompts of ``options.prompts``, repeated in order as often as needed. They end at the model's EOS ids."""
    repeated = list(itertools.islice(itertools.cycle(prompts), options.num_prompts))
    return Workload(repeated, [options.new_range[1]] * len(repeated), None)


def bench_sessions(
    model: PreTrainedModel, workload: Workload, options: BenchConfig, config: Config, bandwidth: float
) -> Iterator[Row]:
    """Measure every K; a decoder is compiled for each.

    No page is shared: the same prompts are decoded several times, which would look like prompts that begin alike.
    """
    config = dataclasses.replace(config, cache=dataclasses.replace(config.cache, reuse_prefixes=False))
    for k in counts_of(options, config):
        own = with_drafts(config, k)
        begin = time.perf_counter()
        decoder = compile_speculative(model, own, draft=head_of(model, own))
        yield from measure(decoder, workload, k, bandwidth, options.rounds, begin)
        del decoder
        gc.collect()  # frees the graphs and the GPU memory of this decoder before the next one needs memory


def measure(
    decoder: SpeculativeDecoder, workload: Workload, k: int, bandwidth: float, rounds: int = 1,
    begin: float | None = None,
) -> list[Row]:  # fmt: skip
    """Decode a workload in both ways in turn; of ``rounds``, the fastest counts for each.

    A round before them, in which kernels are compiled and graphs captured, is streamed, which tells what each step had
    to read. The others run the same steps, because nothing in them is random. ``begin`` is the time at which compiling
    began.
    """
    begin = time.perf_counter() if begin is None else begin
    # The session comes first: its state is the largest, and batches then use it, too.
    calls = {SESSION: workload.calls(len(workload.prompts)), BATCHES: workload.calls(decoder.config.max_batch_size)}
    work = {how: _counted(decoder, calls[how]) for how in calls}
    compile_s = time.perf_counter() - begin
    turns = [{how: _timed(decoder, calls[how]) for how in (BATCHES, SESSION)} for _ in range(rounds)]
    timed = {how: min((turn[how] for turn in turns), key=lambda run: run.seconds) for how in (BATCHES, SESSION)}
    return [_row(decoder, k, how, work[how], timed, bandwidth, compile_s) for how in timed]


@dataclass(frozen=True)
class _Timed:
    seconds: float
    tokens: list[Tensor]
    acceptance_length: float

    @property
    def speed(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds


def _row(
    decoder: SpeculativeDecoder, k: int, how: str, work: Work, timed: Mapping[str, _Timed], bandwidth: float,
    compile_s: float,
) -> Row:  # fmt: skip
    """The measurement of one way to decode all prompts.

    The row has, beside K and the way:

    - the steps that ran prompts alone, those in which sequences decoded, and how many of the latter ran prompts, too
    - the emitted tokens of all sequences, per decode step and sequence, and per second, with the ratio of this speed to
      that of batches
    - the time for all prompts, and the time in which the bytes of all steps can be read at the measured bandwidth, with
      the share that this limit is of the time, and its inverse. Of prompts only the weights of their steps count, and
      not the products, which take longer.
    - the sequences whose tokens are not those that they got in batches. There are none where a row's bits do not depend
      on the other rows.
    - the seconds of ``compile_speculative``, and of a first round that is not measured
    """
    own, batches = timed[how], timed[BATCHES]
    limit = work.num_bytes(decoder.stages[STAGE], k) / bandwidth
    differing = sum(not torch.equal(a, b) for a, b in zip(own.tokens, batches.tokens, strict=True))
    return Row(
        f"{how}, K = {k}",
        f"{own.seconds:.3g} s",
        {
            "k": Cell(k, "K"),
            "how": Cell(how, "decoded"),
            "prompt_steps": Cell(work.prompt_steps, "prompt steps"),
            "decode_steps": Cell(work.decode_steps.total(), "decode steps"),
            "shared_steps": Cell(work.shared_steps, "with prompts"),
            "new_tokens": Cell(sum(map(len, own.tokens)), "tokens"),
            "acceptance_length": Cell(own.acceptance_length, "tokens/step", ".2f"),
            "seconds": Cell(own.seconds, "s", ".2f"),
            "tokens_per_second": Cell(own.speed, "tokens/s", ".1f"),
            "speedup": Cell(own.speed / batches.speed, "x batches", ".2f"),
            "limit_s": Cell(limit, "limit s", ".2f"),
            "share": Cell(limit / own.seconds, "share of limit", ".2f"),
            "ratio": Cell(own.seconds / limit),
            "differing": Cell(differing, "differ"),
            "compile_s": Cell(compile_s, "compile s", ".1f"),
        },
    )


def _timed(decoder: SpeculativeDecoder, calls: Sequence[Call]) -> _Timed:
    begin = time.perf_counter()
    outputs = [decoder.generate(**call) for call in calls]
    seconds = time.perf_counter() - begin
    steps = [emitted for out in outputs for sequence in out.stats.emitted_per_step for emitted in sequence]
    tokens = [tokens for out in outputs for tokens in out.new_tokens]
    return _Timed(seconds, tokens, sum(steps) / len(steps) if steps else math.nan)


def _counted(decoder: SpeculativeDecoder, calls: Sequence[Call]) -> Work:
    """The steps of some calls."""
    work = Work()
    for call in calls:
        work.add_call([len(prompt) for prompt in call["input_ids"]], decoder.stream(**call))
    return work


@dataclass
class Work:
    """Counts steps, by the number of sequences that decode in them.

    Attributes:
        decode_steps: steps in which sequences decoded, by their number.
        contexts: by the same number, the lengths of all sequences in these steps.
        emitted: by the same number, the tokens that all sequences got in these steps.
        shared_steps: how many of them ran prompts, too.
        prompt_steps: steps that ran prompts alone.
        prompt_tokens: the tokens that these ran.
    """

    decode_steps: Counter[int] = field(default_factory=Counter)
    contexts: Counter[int] = field(default_factory=Counter)
    emitted: Counter[int] = field(default_factory=Counter)
    shared_steps: int = 0
    prompt_steps: int = 0
    prompt_tokens: int = 0

    def add_call(self, lengths: Sequence[int], chunks: Iterable[StreamChunk]) -> None:
        """Count the steps of a streamed call with prompts of these lengths.

        A sequence decodes in a step that emits tokens of it, unless these are its first.
        """
        known, begun = list(lengths), set[int]()
        for chunk in chunks:
            emitting = [place for place, new in enumerate(chunk.tokens) if new]
            decoding = [place for place in emitting if place in begun]
            if decoding:
                self.decode_steps[len(decoding)] += 1
                self.contexts[len(decoding)] += sum(known[place] for place in decoding)
                self.emitted[len(decoding)] += sum(len(chunk.tokens[place]) for place in decoding)
                self.shared_steps += chunk.prompt_tokens > 0
            else:
                self.prompt_steps += 1
                self.prompt_tokens += chunk.prompt_tokens
            begun.update(emitting)
            for place in emitting:
                known[place] += len(chunk.tokens[place])

    def num_bytes(self, program: Program, k: int) -> int:
        """The bytes that the steps must read; of those that ran prompts, only the weights count."""
        total = 0
        for batch, steps in self.decode_steps.items():
            decoded = steps * batch
            context, tokens = self.contexts[batch] / decoded, self.emitted[batch] / decoded
            total += steps * step_traffic(program, batch, context, k, tokens).total
        if self.prompt_steps:
            rows = self.prompt_tokens // self.prompt_steps
            found = step_traffic(program, max(1, rows // (k + 1)), 0.0, k)
            total += self.prompt_steps * (found.target_weights + found.draft_weights)
        return total
