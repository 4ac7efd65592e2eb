"""Counts and times of a call and of a session."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import torch

from specgraph.runtime.execution.steps import Step


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
    """Of steps that ran prompts, also where other sequences decoded in them."""
    decode_seconds: float = 0.0
    """Of all other steps."""
    steps_by_drafts: Counter[int] = field(default_factory=Counter)
    """Runs in which sequences decoded, by the most drafts of a sequence that they verified."""
    host_steps: int = 0
    """Steps that waited for processors, structure or scores, which are the host's."""
    host_seconds: float = 0.0
    """How long the host was at work in these steps."""
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

        With K by load or by what it is worth, the steps count that verified fewer drafts, too.
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
        return values.cumprod(1).mean(0).tolist() if steps else []

    @property
    def tokens(self) -> int:
        """Tokens that decode steps emitted."""
        return sum(self._counts())


@dataclass(frozen=True)
class Capacity:
    """What of a session is free, of how much.

    Attributes:
        free_rows, rows: sequences that could be decoded beside those that are, and at most.
        free_pages, pages: pages of the KV cache that no sequence has reserved, and all of them.
        waiting: sequences that have no row yet.
        followed: sequences of which a task gets the events from ``follow``.
        snapshots, most_snapshots: copies of recurrent state from which a sequence that begins with the same tokens can
            go on, and how many there is room for; 0 for a target without recurrent layers.
        snapshot_bytes: what the room for them takes.
        used_bytes, most_bytes: memory that the state of the session has taken so far, and what it takes at most: the KV
            cache, recurrent state, snapshots, and what is kept of sequences. On a GPU, all is taken when the session
            begins. On a CPU, a page takes memory from the moment when it is first given to a sequence.
    """

    free_rows: int
    rows: int
    free_pages: int
    pages: int
    waiting: int = 0
    followed: int = 0
    snapshots: int = 0
    most_snapshots: int = 0
    snapshot_bytes: int = 0
    used_bytes: int = 0
    most_bytes: int = 0


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
        steps_by_drafts: runs in which sequences decoded, by the most drafts of a sequence that they verified.
    """

    steps: int = 0
    seconds: float = 0.0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    new_tokens: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    decode_steps: int = 0
    decoded_tokens: int = 0
    steps_by_drafts: Counter[int] = field(default_factory=Counter)

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
        if step.decoding:
            self.steps_by_drafts[step.drafts] += 1
        for output in step.outputs:
            self.new_tokens += len(output.tokens)
            if output.finish_reason is not None:
                self.ended[output.finish_reason] += 1
            if output.decoding:
                self.decode_steps += 1
                self.decoded_tokens += len(output.tokens)
