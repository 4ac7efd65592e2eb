"""Times whole answers on a CPU, with transformers' ``generate`` and assisted generation beside our decoders.

Everything runs in one process, and the decoders take turns: each decodes a prompt before any decodes the next. So a
machine that other work slows down slows all of them down. The time of a prompt is the best of several rounds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specgraph.bench.config import BenchConfig
from specgraph.bench.drafts import checkpoint_of, needs_head, with_draft, with_rule
from specgraph.bench.models import random_head
from specgraph.bench.peers import transformers_generate
from specgraph.bench.report import column
from specgraph.checkpoints.causal_lm import load_causal_lm
from specgraph.compiler.compile import compile_speculative
from specgraph.config import Config
from specgraph.runtime.decoder import SpeculativeDecoder

Decode = Callable[[Tensor], tuple[Tensor, list[int]]]
"""From a prompt, 1-D int64, to its new tokens, and how many of them each decode step emitted (empty if unknown)."""
GENERATE, ASSISTED = "transformers generate", "transformers assisted"


@dataclass(frozen=True)
class CpuRow:
    """One decoder with one number of threads.

    Attributes:
        threads: the threads that PyTorch's operations may use.
        decoder: ``transformers generate``, ``transformers assisted`` and its assistant, or ours, named by the draft.
        tokens_per_second: new tokens of all prompts, over the sum of the best time of each.
        to_generate: this speed over that of transformers' ``generate``.
        to_assisted: this speed over that of transformers' assisted generation with the same draft model; None for
            others.
        tokens_per_step: emitted tokens per decode step; None for transformers.
        equal: how many prompts got the tokens of transformers' ``generate``; None where the rule is lossy.
        first_s: the seconds of compiling and of the first prompt.
    """

    threads: int = field(metadata=column("threads"))
    decoder: str = field(metadata=column("decoder"))
    tokens_per_second: float = field(metadata=column("tokens/s", ".1f"))
    to_generate: float = field(metadata=column("x generate", ".2f"))
    to_assisted: float | None = field(metadata=column("x assisted", ".2f"))
    tokens_per_step: float | None = field(metadata=column("tokens/step", ".2f"))
    equal: str | None = field(metadata=column("equal"))
    first_s: float = field(metadata=column("first s", ".1f"))

    @property
    def label(self) -> str:
        """What was measured."""
        return f"{self.decoder}, {self.threads} threads"

    @property
    def time(self) -> str:
        """The speed with its unit."""
        return f"{self.tokens_per_second:.1f} tokens/s"


@dataclass
class _Contender:
    """A decoder, and what has been measured of it: for each prompt the best seconds, the tokens, those of each step."""

    name: str
    decode: Decode
    assistant: str | None = None
    lossless: bool = True
    first_s: float = 0.0
    best: dict[int, float] = dataclasses.field(default_factory=dict)
    tokens: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    steps: dict[int, list[int]] = dataclasses.field(default_factory=dict)

    def run(self, index: int, prompt: Tensor) -> None:
        """Decode one prompt once more."""
        begin = time.perf_counter()
        self.tokens[index], self.steps[index] = self.decode(prompt)
        self.best[index] = min(self.best.get(index, math.inf), time.perf_counter() - begin)

    @property
    def speed(self) -> float:
        return sum(map(len, self.tokens.values())) / sum(self.best.values())

    @property
    def per_step(self) -> float | None:
        steps = [count for one in self.steps.values() for count in one]
        return sum(steps) / len(steps) if steps else None


def bench_cpu(
    model: PreTrainedModel, options: BenchConfig, config: Config, prompts: Sequence[Tensor]
) -> Iterator[CpuRow]:
    """Measure transformers and a decoder for each of ``options.drafts``, with each of ``options.threads``.

    Decoders are compiled anew for every number of threads, because compiled code is for one of them.
    """
    for threads in options.threads:
        with _threads(threads):
            contenders = list(_contenders(model, options, config))
            for contender in contenders:
                contender.first_s += _seconds(contender, prompts[0])
            for index, prompt in [*enumerate(prompts)] * options.rounds:
                for contender in contenders:
                    contender.run(index, prompt)
        yield from _rows(threads, contenders)
        del contenders
        gc.collect()  # frees the decoders before those of the next number of threads need memory


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _seconds(contender: _Contender, prompt: Tensor) -> float:
    begin = time.perf_counter()
    contender.decode(prompt)
    return time.perf_counter() - begin


def _contenders(model: PreTrainedModel, options: BenchConfig, config: Config) -> Iterator[_Contender]:
    count = {"max_new_tokens": options.new_tokens}
    yield _Contender(GENERATE, _peer(model, None, count))
    for draft in options.drafts:
        begin = time.perf_counter()
        decoder, lossless = _decoder(model, draft, config)
        seconds, name = time.perf_counter() - begin, Path(draft).name
        assistant = name if decoder.config.draft.kind == "draft_model" else None
        if assistant is not None:
            loaded = load_causal_lm(draft, model.dtype, f"drafts={draft}")
            yield _Contender(f"{ASSISTED}, {name}", _peer(model, loaded, count), assistant)
        yield _Contender(name, _ours(decoder, count), assistant, lossless, seconds)


def _peer(model: PreTrainedModel, assistant: PreTrainedModel | None, count: dict[str, int]) -> Decode:
    options: dict[str, Any] = {**count, "do_sample": False}
    return lambda prompt: (transformers_generate(model, [prompt], assistant, **options)[0], [])


def _ours(decoder: SpeculativeDecoder, count: dict[str, int]) -> Decode:
    def decode(prompt: Tensor) -> tuple[Tensor, list[int]]:
        out = decoder.generate([prompt], temperature=0.0, max_new_tokens=count["max_new_tokens"])
        return out.new_tokens[0], out.stats.emitted_per_step[0]

    return decode


def _decoder(model: PreTrainedModel, draft: str, config: Config) -> tuple[SpeculativeDecoder, bool]:
    """A decoder with the drafter or the checkpoint that ``draft`` names, and whether it gives the target's own tokens.

    A drafter with heads that is named without a checkpoint has a random head. No target would accept its drafts, so
    ``verify.rule`` decides about them; everything else runs ``strict``.
    """
    named = with_draft(config, draft)
    if not needs_head(draft):
        return compile_speculative(model, with_rule(named, "strict"), draft=checkpoint_of(draft)), True
    decoder = compile_speculative(model, named, draft=random_head(model, named.draft))
    return decoder, config.verify.rule == "strict"


def _rows(threads: int, contenders: Sequence[_Contender]) -> Iterator[CpuRow]:
    generate, *others = contenders
    assisted = {other.assistant: other.speed for other in reversed(others) if other.assistant is not None}
    for one in contenders:
        same = sum(torch.equal(tokens, generate.tokens[index]) for index, tokens in one.tokens.items())
        yield CpuRow(
            threads=threads,
            decoder=one.name,
            tokens_per_second=one.speed,
            to_generate=one.speed / generate.speed,
            to_assisted=None if one.assistant is None else one.speed / assisted[one.assistant],
            tokens_per_step=one.per_step,
            equal=f"{same} of {len(one.tokens)}" if one.lossless else None,
            first_s=one.first_s,
        )
