"""What the steps of an engine mean for its sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specgraph.errors import SpecgraphError
from specgraph.runtime.cuda_graphs import TracedRow, TracedRows


class DraftTraceView(NamedTuple):
    """What a step says of the drafts of one sequence, not read yet.

    Attributes:
        rows: what it says of all of them.
        place: that of the sequence in the step.
        made: how many of its new drafts the sequence verifies at most.
    """

    rows: TracedRows
    place: int
    made: int

    def read(self) -> TracedRow:
        """What it says."""
        return self.rows.row(self.place, made=self.made)


class Output(NamedTuple):
    """What a step meant for one sequence. There is one for every sequence and step, so making it has to be cheap.

    Attributes:
        number: the sequence's.
        tokens: those it emitted.
        logprobs: one beside each of them, if any are wanted.
        decoding: whether this was a decode step in which it took part.
        confidence: what the drafter thinks of the drafts that it verifies next; empty if it does not say.
        finish_reason: ``eos``, ``length``, ``max_length``, ``stop``, ``cancelled`` or ``error``; None: it goes on.
        error: what went wrong, for ``error``.
        traced: what the step says of its drafts; None if nobody asks.
    """

    number: int
    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    decoding: bool = False
    confidence: Sequence[float] = ()
    finish_reason: str | None = None
    error: SpecgraphError | None = None
    traced: DraftTraceView | None = None


@dataclass(frozen=True)
class Step:
    """One run of the step graph, or none if sequences ended without one.

    Attributes:
        outputs: one for every sequence to which something happened.
        prompt_tokens: those it ran; other sequences may have decoded in the same step.
        seconds: since the step before it was read.
        drafts: how many drafts of a sequence a decode step of this kind verifies at most.
        ran: whether a step was run at all.
        reused_tokens: those of prompts that need not be run, since their pages are there.
        host_seconds: how long the host was at work in the middle of it; None if it was not.
    """

    outputs: list[Output]
    prompt_tokens: int
    seconds: float
    drafts: int = 0
    ran: bool = True
    reused_tokens: int = 0
    host_seconds: float | None = None

    @property
    def decoding(self) -> bool:
        """Whether any sequence decoded in it."""
        return any(output.decoding for output in self.outputs)
