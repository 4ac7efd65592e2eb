"""Compares K by what it is worth with plain decoding and with every fixed K, for drafts that are accepted by chance.

    python -m benchmarks.choice_of_k [target=llama-3-8b-shape] [draft=eagle3] [k=7] [batches=1,8,32,128]
                                     [rates=0.05,0.3,0.6,0.9] [steps=150] [prompt=128]

All numbers of drafts are steps of one decoder, whose choice is set from outside for those that are fixed; plain
decoding is a decoder of its own. Each is decoded once before it is measured, in which costs are learned and graphs
captured. Figures are tokens per second.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specgraph.bench.models import random_head, random_target
from specgraph.bench.steps import random_prompts
from specgraph.compiler.compile import compile_speculative
from specgraph.config import load_config
from specgraph.runtime.decoder import SpeculativeDecoder
from specgraph.runtime.schedule.recent_acceptance import RecentAcceptance

DEFAULTS = {
    "target": "llama-3-8b-shape", "draft": "eagle3", "k": "7", "batches": "1,8,32,128", "rates": "0.05,0.3,0.6,0.9",
    "steps": "150", "prompt": "128", "device": "cuda", "dtype": "bfloat16",
}  # fmt: skip


def tokens_per_second(decoder: SpeculativeDecoder, prompts: Sequence[Tensor], steps: int, most: int) -> float:
    """Of the second half of some steps after the prompts, which emit up to ``most`` tokens each."""
    stream = decoder.stream(prompts, max_new_tokens=(steps + 8) * most, eos_token_id=[], temperature=0)
    emitted, done, begin = 0, 0, 0.0
    for chunk in stream:
        done += done > 0 or all(chunk.tokens)
        emitted += sum(map(len, chunk.tokens)) if done > steps // 2 + 1 else 0
        if done == steps // 2 + 1:
            begin = time.perf_counter()
        if done > steps:
            break
    seconds = time.perf_counter() - begin
    stream.close()
    return emitted / seconds


def always(k: int) -> Callable[..., int | None]:
    """A choice that falls on K whatever was accepted."""
    return lambda worth, *_: k if k < worth.choices[-1] else None


def main(arguments: Sequence[str]) -> None:
    """Print a table for each acceptance rate."""
    options = {**DEFAULTS, **dict(argument.split("=", 1) for argument in arguments)}
    most, steps, length = int(options["k"]), int(options["steps"]), int(options["prompt"])
    batches = [int(each) for each in options["batches"].split(",")]
    device, dtype = torch.device(options["device"]), getattr(torch, options["dtype"])
    model = random_target(options["target"], device, dtype)
    common: dict[str, Any] = {"max_batch_size": max(batches), "max_length": length + (steps + 9) * (most + 1)}
    prompts = random_prompts(model.config.get_text_config().vocab_size, max(batches), length)

    def compiled(draft: dict[str, Any], rate: float = 0.0) -> SpeculativeDecoder:
        verify = {"rule": "synthetic", "acceptance_rate": rate} if rate else {}
        config = load_config({**common, "draft": draft, "verify": verify})
        return compile_speculative(model, config, draft=random_head(model, config.draft))

    def measured(decoder: SpeculativeDecoder, batch: int, most: int) -> float:
        tokens_per_second(decoder, prompts[:batch], steps, most)
        return tokens_per_second(decoder, prompts[:batch], steps, most)

    decoder = compiled({"kind": "none"})
    plain = {batch: measured(decoder, batch, 1) for batch in batches}
    choose = RecentAcceptance.choose
    for rate in map(float, options["rates"].split(",")):
        del decoder
        gc.collect()
        decoder = compiled({"kind": options["draft"], "num_speculative_tokens": most, "adaptive": True}, rate)
        for batch in batches:
            fixed = {}
            for k in (k for k in (0, 1, 2, 3, 5, 7, 11, 15) if k <= most):
                RecentAcceptance.choose = always(k)  # type: ignore[method-assign]
                fixed[k] = measured(decoder, batch, most + 1)
            RecentAcceptance.choose = choose  # type: ignore[method-assign]
            tokens_per_second(decoder, prompts[:batch], steps, most + 1)
            before = Counter(decoder._engines.chosen)
            auto = tokens_per_second(decoder, prompts[:batch], steps, most + 1)
            best = max(fixed, key=fixed.__getitem__)
            chosen = ", ".join(f"{k}: {n}" for k, n in sorted((decoder._engines.chosen - before).items()))
            table = " ".join(f"{k}: {value / plain[batch]:.3f}" for k, value in fixed.items())
            print(f"rate {rate} batch {batch}: plain {plain[batch]:.1f}; of plain {table}; auto", end=" ")
            ratios = f"{auto / plain[batch]:.3f}, of the best (K = {best}) {auto / fixed[best]:.3f}"
            print(f"{ratios}; chosen {chosen}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
