"""Replays the choice of K on a CPU over sequences that a model has written, at given prices of a step.

    python -m benchmarks.replay_k MODEL --rows 1 3 5 --prices 1 1.42 1.65 [--gsm8k FILE] [--batch 1] [--new-tokens 160]

Under ``strict`` tokens do not depend on K. So plain decoding writes them once, and the times of decoding with n-gram
drafts follow from the drafts, from the choices of :class:`~specgraph.runtime.schedule.num_drafts.Worth` and from what
steps of so many rows cost, in any unit. It prints how many times as fast as plain decoding the sequences are, and how
many lose: all tokens, and the first 48 of each.
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import specgraph
from benchmarks.real_models import load
from benchmarks.texts import read_prompts
from specgraph.config.drafters import NGramConfig
from specgraph.kernels.step import ngram_lookup
from specgraph.runtime.schedule.num_drafts import Worth
from specgraph.runtime.schedule.sequences import ActiveSequence
from specgraph.runtime.schedule.step_costs import StepCosts

SHORT = 48
Written = tuple[list[int], list[list[int]]]
"""The new tokens of a sequence, and for each number of them the drafts that follow."""


class Prices(StepCosts):
    """Costs that are given: the straight lines between the points ``(rows, seconds)``."""

    def __init__(self, rows: Sequence[float], seconds: Sequence[float]) -> None:
        super().__init__()
        self.points = [0.0, *rows], [0.0, *seconds]

    def of(self, kind: Hashable, rows: int) -> float:
        """The seconds of a step of so many rows."""
        return float(np.interp(rows, *self.points))


def drafts_behind(prompt: Tensor, new: Sequence[int], most: int) -> list[list[int]]:
    """The drafts that n-gram lookup proposes behind the prompt and each number of new tokens."""
    history = torch.cat([prompt, torch.tensor(new, dtype=prompt.dtype)])
    lengths = prompt.numel() + torch.arange(len(new) + 1)
    known, own = history.expand(len(lengths), -1).contiguous(), NGramConfig()
    found = ngram_lookup(known, None, lengths, most, own.max_ngram, own.min_ngram)
    return [[token for token in row if token >= 0] for row in found.tolist()]


def replay(sequences: Sequence[Written], prices: Prices, worth: Worth) -> float:
    """How many times as fast as plain decoding some sequences are that decode together."""
    state = [ActiveSequence(number, SimpleNamespace()) for number in range(len(sequences))]  # type: ignore[arg-type]
    for sequence, (tokens, _) in zip(state, sequences, strict=True):
        sequence.new_tokens = tokens[:1]  # that of the prompt's step
    seconds = 0.0
    while decoding := [s for s in state if len(s.new_tokens) < len(sequences[s.number][0])]:
        drafts = [sequences[s.number][1][len(s.new_tokens)] for s in decoding]
        k = worth.choose("replay", decoding, drafts).drafts
        assert k is not None, "what looks at drafts says how many"
        seconds += prices.of("replay", len(decoding) * (k + 1))
        for sequence, own in zip(decoding, drafts, strict=True):
            tokens, begin = sequences[sequence.number][0], len(sequence.new_tokens)
            right = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(own[:k], tokens[begin:], strict=False))
            sequence.new_tokens = tokens[: begin + sum(1 for _ in right) + 1]
            if sequence.outlook is not None:
                sequence.outlook.judge(sequence.new_tokens)
    lengths = [len(tokens) for tokens, _ in sequences]
    plain = sum(prices.of("replay", sum(n > step for n in lengths)) for step in range(1, max(lengths)))
    return plain / seconds if seconds else 1.0


def ratios(written: Sequence[Written], batch: int, prices: Prices, most: int, length: int) -> list[float]:
    """Of every batch, in one decoder: what is known of all sequences goes on from batch to batch."""
    worth = Worth(most, prices, Counter())
    cut = [(tokens[:length], drafts) for tokens, drafts in written]
    return [replay(cut[begin : begin + batch], prices, worth) for begin in range(0, len(cut), batch)]


def write(given: argparse.Namespace) -> Iterator[tuple[str, list[Written]]]:
    """The sequences of each set of prompts and each temperature, with their drafts."""
    model, tokenizer = load(given.model, "cpu", given.dtype)
    ends: Any = model.generation_config.eos_token_id
    config = {"draft": {"kind": "none"}, "max_batch_size": 8, "max_length": 1024}
    decoder = specgraph.compile_speculative(model, config)
    for name in ("humaneval", *(["gsm8k"] if given.gsm8k else [])):
        prompts = read_prompts(name, tokenizer, given.prompts, given.gsm8k)
        for temperature in (0.0, 0.7):
            options = {"temperature": temperature, "seed": [*range(len(prompts))], "eos_token_id": ends}
            new = decoder.generate(prompts, max_new_tokens=given.new_tokens, **options).new_tokens
            pairs = zip(prompts, (tokens.tolist() for tokens in new), strict=True)
            yield f"{name}, {temperature}", [(own, drafts_behind(prompt, own, given.k)) for prompt, own in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a folder")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--gsm8k", help="the jsonl file of the questions")
    parser.add_argument("--prompts", type=int, default=16, help="of each set")
    parser.add_argument("--new-tokens", type=int, default=160)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--rows", type=float, nargs="+", default=[1, 3, 5])
    parser.add_argument("--prices", type=float, nargs="+", default=[1, 1.42, 1.65], help="of steps of so many rows")
    given = parser.parse_args()
    most = given.batch * (given.k + 1)
    if max(given.rows) < most:
        parser.error(f"--rows end at {max(given.rows):g}, and a step of --batch and --k has up to {most}.")
    prices = Prices(given.rows, given.prices)
    for name, written in write(given):
        for length in (given.new_tokens, SHORT):
            found = ratios(written, given.batch, prices, given.k, length)
            losing = sum(ratio < 0.995 for ratio in found)
            print(
                f"{name}, {length} tokens: {geometric_mean(found):.3f} times plain on average, {min(found):.3f} at "
                f"least, {losing} of {len(found)} lose",
                flush=True,
            )


if __name__ == "__main__":
    main()
