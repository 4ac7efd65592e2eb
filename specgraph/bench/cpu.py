"""Times whole answers on a CPU, with transformers' ``generate`` and assisted generation beside our decoders.

Everything runs in one process, and the decoders take turns: each decodes a prompt before any decodes the next. So a
machine that other work slows down slows all of them down. The time of a prompt is the best of several rounds.
"""

from __future__ import annotations

import contextlib
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
from specgraph.bench.report import Cell, Row
from specgraph.compiler.compile import compile_speculative
from specgraph.config import Config
from specgraph.runtime.decoder import SpeculativeDecoder
from specgraph.schemes.load import load_causal_lm

Decode = Callable[[Tensor], tuple[Tensor, list[int]]]
"""From a prompt, 1-D int64, to its new tokens, and how many of them each decode step emitted (empty if unknown)."""
GENERATE, ASSISTED = "transformers generate", "transformers assisted"


@dataclass
class _Contender:
    """A decoder, and what has been measured of it: for each prompt the best seconds, the tokens, those of each step."""

    name: str
    decode: Decode
    assistant: str | None = None
    lossless: bool = True
    first_s: float = 0.0
    best: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, Tensor] = field(default_factory=dict)
    steps: dict[int, list[int]] = field(default_factory=dict)

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


def bench_cpu(model: PreTrainedModel, options: BenchConfig, config: Config, prompts: Sequence[Tensor]) -> Iterator[Row]:
    """Measure transformers and a decoder for each of ``options.drafts``, with each of ``options.threads``.

    Decoders are compiled anew for every number of threads, because compiled code is for one of them.
    """
    for threads in options.threads:
        with _threads(threads):
            contenders = list(_contenders(model, options, config))
            for contender in contenders:
                begin = time.perf_counter()
                contender.decode(prompts[0])
                contender.first_s += time.perf_counter() - begin
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


def _rows(threads: int, contenders: Sequence[_Contender]) -> Iterator[Row]:
    """A row for each decoder.

    It has, beside the number of threads that PyTorch's operations may use and the name of the decoder (transformers'
    ``generate``, its assisted generation with the assistant, or ours, named by the draft):

    - new tokens of all prompts, over the sum of the best time of each, and the ratios of this speed to that of
      transformers' ``generate`` and to that of assisted generation with the same draft model, if there is one
    - emitted tokens per decode step, where they are known
    - how many prompts got the tokens of transformers' ``generate``, where the rule is lossless
    - the seconds of compiling and of the first prompt
    """
    generate, *others = contenders
    assisted = {other.assistant: other.speed for other in reversed(others) if other.assistant is not None}
    for one in contenders:
        same = sum(torch.equal(tokens, generate.tokens[index]) for index, tokens in one.tokens.items())
        to_assisted = None if one.assistant is None else one.speed / assisted[one.assistant]
        yield Row(
            f"{one.name}, {threads} threads",
            f"{one.speed:.1f} tokens/s",
            {
                "threads": Cell(threads, "threads"),
                "decoder": Cell(one.name, "decoder"),
                "tokens_per_second": Cell(one.speed, "tokens/s", ".1f"),
                "to_generate": Cell(one.speed / generate.speed, "x generate", ".2f"),
                "to_assisted": Cell(to_assisted, "x assisted", ".2f"),
                "tokens_per_step": Cell(one.per_step, "tokens/step", ".2f"),
                "equal": Cell(f"{same} of {len(one.tokens)}" if one.lossless else None, "equal"),
                "first_s": Cell(one.first_s, "first s", ".1f"),
            },
        )
