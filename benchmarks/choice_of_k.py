"""Compares K by what it is worth with plain decoding and with every fixed K, for drafts that are accepted by chance.

    python -m benchmarks.choice_of_k [target=llama-3-8b-shape] [draft=eagle3] [draft.num_speculative_tokens=7]
                                     [batch_sizes=[1,8,32,128]] [rates=[0.05,0.3,0.6,0.9]] [steps=150]
                                     [queue=8] [new_tokens=128] [verify.odd_acceptance_rate=0.9]

With ``verify.odd_acceptance_rate``, every other sequence has that probability and the others ``rates``. With
``queue=8``, eight batches of sequences of ``new_tokens`` wait, so that another one begins where one ends.

All numbers of drafts are steps of one decoder, whose choice is set from outside for those that are fixed; plain
decoding is a decoder of its own. Each is decoded once before it is measured, in which costs are learned and graphs
captured. Figures are tokens per second.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.command import read_options, target_of
from specgraph.bench.config import BenchConfig
from specgraph.bench.steps import head_of, needed_length, random_prompts
from specgraph.compiler.compile import compile_speculative
from specgraph.config import Config, load_config
from specgraph.runtime.decoder import SpeculativeDecoder
from specgraph.runtime.schedule import recent_acceptance
from specgraph.runtime.schedule.num_drafts import Choice
from specgraph.runtime.schedule.recent_acceptance import RecentAcceptance, choices

DEFAULTS = {
    "target": "llama-3-8b-shape", "draft": "eagle3", "draft.num_speculative_tokens": 7, "verify": "synthetic",
    "batch_sizes": [1, 8, 32, 128], "steps": 150,
}  # fmt: skip


@dataclass
class ChoiceConfig(BenchConfig):
    """The options of this script."""

    rates: list[float] = field(default_factory=lambda: [0.05, 0.3, 0.6, 0.9])
    """Probabilities that a draft is accepted; each is measured."""
    fixed: list[int] = field(default_factory=list)
    """The fixed K that are measured; empty: all among which there is a choice."""
    queue: int = 0
    """How many times as many sequences as a batch has are decoded; 0: a batch that stays together."""
    new_tokens: int = 128
    """Of each sequence that comes from a queue."""


def tokens_per_second(decoder: SpeculativeDecoder, prompts: Sequence[Tensor], options: ChoiceConfig) -> float:
    """Of the second half of ``steps`` behind the prompts of the first batch."""
    steps, longest = options.steps, (decoder.config.max_length or 0) - options.prompt_length
    batch, begun = len(prompts), set[int]()
    prompts, length = [*prompts] * max(1, options.queue), options.new_tokens if options.queue else longest
    seeds = [*range(len(prompts))]
    stream = decoder.stream(prompts, max_new_tokens=length, eos_token_id=[], temperature=0, seed=seeds)
    emitted, done, begin = 0, 0, 0.0
    for chunk in stream:
        begun.update(number for number, own in enumerate(chunk.tokens) if own)
        done += len(begun) >= batch
        emitted += sum(map(len, chunk.tokens)) if done > steps // 2 + 1 else 0
        if done == steps // 2 + 1:
            begin = time.perf_counter()
        if done > steps:
            break
    seconds = time.perf_counter() - begin
    stream.close()
    return emitted / seconds


def second_time(decoder: SpeculativeDecoder, prompts: Sequence[Tensor], options: ChoiceConfig) -> float:
    """Tokens per second where everything has been decoded once before."""
    tokens_per_second(decoder, prompts, options)
    return tokens_per_second(decoder, prompts, options)


def always(k: int) -> Callable[..., Choice]:
    """A choice that falls on K whatever was accepted."""
    return lambda worth, *_: Choice(k if k < worth.choices[-1] else None)


def compiled(model: PreTrainedModel, options: BenchConfig, config: Config) -> SpeculativeDecoder:
    """A decoder with room for all batches and steps."""
    k, batch = config.draft.num_speculative_tokens, max(options.batches)
    # The first sequences decode while the prompts of others run, of which a step takes 512 tokens at least.
    longest = needed_length(options, k) + batch * options.prompt_length // 512 * (k + 1)
    own = dataclasses.replace(config, max_batch_size=batch, max_length=longest)
    return compile_speculative(model, own, draft=head_of(model, own))


def compare(decoder: SpeculativeDecoder, prompts: Sequence[Tensor], options: ChoiceConfig, plain: float) -> None:
    """Print a line about one batch, for whose plain decoding tokens per second are given."""
    choose, fixed = RecentAcceptance.choose, {}
    for k in options.fixed or choices(decoder.config.draft.num_speculative_tokens):
        RecentAcceptance.choose = always(k)  # type: ignore[method-assign]
        fixed[k] = second_time(decoder, prompts, options)
        print(f"K = {k}: {fixed[k] / plain:.3f};", end=" ", flush=True)
    RecentAcceptance.choose = choose  # type: ignore[method-assign]
    best = max(fixed, key=fixed.__getitem__)
    if decoder.config.verify.odd_acceptance_rate is not None:
        packed_rows, recent_acceptance._packed_rows = recent_acceptance._packed_rows, lambda *_: []  # type: ignore[assignment, misc]
        print(f"one chosen K for all: {second_time(decoder, prompts, options) / plain:.3f};", end=" ", flush=True)
        recent_acceptance._packed_rows = packed_rows
    tokens_per_second(decoder, prompts, options)
    before = Counter(decoder._engines.chosen)
    auto = tokens_per_second(decoder, prompts, options)
    chosen = ", ".join(f"{k}: {n}" for k, n in sorted((decoder._engines.chosen - before).items()))
    print(f"auto {auto / plain:.3f}, of the best (K = {best}) {auto / fixed[best]:.3f}; chosen {chosen}")
    print(*recent_acceptance.describe(decoder._engines._acceptance, decoder._engines.typical), sep="\n", flush=True)


def main(words: Sequence[str]) -> None:
    """Print a line for each acceptance rate and batch."""
    config, options = read_options(words, ChoiceConfig, DEFAULTS)
    model = target_of(options)
    every = random_prompts(model.config.get_text_config().vocab_size, max(options.batches), options.prompt_length)
    without = load_config({"draft": "none"})
    decoder = compiled(model, options, dataclasses.replace(config, draft=without.draft, verify=without.verify))
    plain = {batch: second_time(decoder, every[:batch], options) for batch in options.batches}
    for rate in options.rates:
        del decoder
        gc.collect()
        draft = dataclasses.replace(config.draft, adaptive=True)
        verify = dataclasses.replace(config.verify, acceptance_rate=rate)
        decoder = compiled(model, options, dataclasses.replace(config, draft=draft, verify=verify))
        for batch in options.batches:
            print(f"rate {rate}, batch {batch}, plain {plain[batch]:.0f} tokens/s;", end=" ", flush=True)
            compare(decoder, every[:batch], options, plain[batch])


if __name__ == "__main__":
    main(sys.argv[1:])
