"""What ``generate``, ``stream`` and sessions give besides tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specgraph.runtime.steps import Step


@dataclass
class Stats:
    """Counts of one ``generate`` call.

    A decode step of a sequence is one verification after its prompt is done; the prefill step, which gives the first
    token, is not one.
    """

    num_speculative_tokens: int
    emitted_per_step: list[list[int]] = field(default_factory=list)
    """For every sequence, the tokens each of its decode steps emitted, bonus token included, nothing after an EOS."""
    steps: int = 0
    """Runs of the step graph, prefill included."""
    reused_tokens: int = 0
    """Tokens of prompts that need not be run, since an earlier sequence began with them."""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    confidence: list[list[list[float]]] = field(default_factory=list)
    """For every sequence, what the drafter thought of the drafts that each of its decode steps verified: for each draft
    the probability that it is accepted if those before it are. An empty list for drafters that do not say."""

    def _counts(self) -> list[int]:
        return [n for sequence in self.emitted_per_step for n in sequence]

    @property
    def acceptance_length(self) -> float:
        """Tokens per decode step and sequence, the bonus token included; NaN without a decode step."""
        counts = self._counts()
        return sum(counts) / len(counts) if counts else math.nan

    @property
    def acceptance_length_stderr(self) -> float:
        """Standard error of :attr:`acceptance_length`, decode steps taken as independent."""
        counts = self._counts()
        if len(counts) < 2:
            return math.nan
        return float(torch.tensor(counts, dtype=torch.float64, device="cpu").std() / math.sqrt(len(counts)))

    @property
    def acceptance_per_position(self) -> list[float]:
        """For each draft position, the share of decode steps that accepted it: K numbers.

        With K by load, the steps count that verified fewer drafts, too.
        """
        counts = self._counts()
        if not counts:
            return [math.nan] * self.num_speculative_tokens
        return [
            sum(n > position for n in counts) / len(counts) for position in range(1, self.num_speculative_tokens + 1)
        ]

    @property
    def confidence_per_position(self) -> list[float]:
        """For each draft position, how probable the drafter thought it that the step accepts it: K numbers, or none.

        A step accepts a draft if it accepts all before it, so these are the means of products. A well-trained head
        comes near :attr:`acceptance_per_position`. A draft that a step did not verify has the probability 0.
        """
        steps = [step for sequence in self.confidence for step in sequence]
        steps = [[*step, *[0.0] * (self.num_speculative_tokens - len(step))] for step in steps] if any(steps) else []
        values = torch.tensor(steps, dtype=torch.float64, device="cpu")
        mean: list[float] = values.cumprod(1).mean(0).tolist() if steps else []
        return mean

    @property
    def tokens(self) -> int:
        """Tokens that decode steps emitted."""
        return sum(self._counts())


@dataclass
class GenerateOutput:
    """The result of ``generate``.

    Attributes:
        sequences: int64 ``[B, S]``, prompt and continuation, padded on the right with the pad id (and on the left as
            given, for left-padded prompts).
        new_tokens: one 1-D int64 tensor per sequence: the continuation alone, up to and including an EOS.
        logprobs: one 1-D float32 tensor per sequence beside ``new_tokens``, or None if not asked for.
        stats: counts and times.
        finish_reasons: why each sequence ended: ``eos``, ``length`` (as asked, or the decoder's ``max_length``), or
            ``stop`` for a stopping criterion.
    """

    sequences: Tensor
    new_tokens: list[Tensor]
    logprobs: list[Tensor] | None
    stats: Stats
    finish_reasons: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class StreamChunk:
    """What one step emitted: for every sequence the new ids (a possibly empty list) and whether it has ended."""

    tokens: list[list[int]]
    finished: list[bool]
    logprobs: list[list[float]] | None


class Stream(Iterator[StreamChunk]):
    """What the steps of a ``stream`` call emit, one after the other.

    Attributes:
        stats: counts and times so far.
    """

    def __init__(self, chunks: Generator[StreamChunk, None, None], stats: Stats) -> None:
        self.stats = stats
        self._chunks = chunks

    def __next__(self) -> StreamChunk:
        return next(self._chunks)

    def close(self) -> None:
        """End it before its time."""
        self._chunks.close()


@dataclass(frozen=True)
class Room:
    """What of a session is free, of how much.

    Attributes:
        free_rows, rows: sequences that could be decoded beside those that are, and at most.
        free_pages, pages: pages of the KV cache that no sequence has reserved, and all of them.
    """

    free_rows: int
    rows: int
    free_pages: int
    pages: int


@dataclass
class SessionStats:
    """Counts of a session since it began. They take no more memory as it goes on.

    Attributes:
        steps: runs of the step graph.
        seconds: the time they took.
        prompt_tokens: tokens of prompts that were run.
        reused_tokens: tokens of prompts that need not be run, since another sequence began with them.
        new_tokens: tokens that were emitted.
        ended: sequences that have ended, by their finish reason.
        decode_steps: decode steps, each counted once for every sequence in it.
        decoded_tokens: tokens that these emitted.
    """

    steps: int = 0
    seconds: float = 0.0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    new_tokens: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    decode_steps: int = 0
    decoded_tokens: int = 0

    @property
    def acceptance_length(self) -> float:
        """Tokens per decode step and sequence, the bonus token included; NaN without a decode step."""
        return self.decoded_tokens / self.decode_steps if self.decode_steps else math.nan

    @property
    def prefix_hit_rate(self) -> float:
        """The share of prompt tokens that were not run, since their pages were there; NaN without prompts."""
        total = self.prompt_tokens + self.reused_tokens
        return self.reused_tokens / total if total else math.nan

    def add(self, step: Step) -> None:
        """Count a step."""
        self.steps += step.ran
        self.seconds += step.seconds
        self.prompt_tokens += step.prompt_tokens
        self.reused_tokens += step.reused_tokens
        for output in step.outputs:
            self.new_tokens += len(output.tokens)
            if output.finish_reason is not None:
                self.ended[output.finish_reason] += 1
            if output.decoding:
                self.decode_steps += 1
                self.decoded_tokens += len(output.tokens)
