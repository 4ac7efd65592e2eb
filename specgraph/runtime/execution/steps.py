"""The steps of an engine: those that the device may still be running, and what the ones that were read emitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from specgraph.errors import InputError, NumericsError, SpecgraphError
from specgraph.runtime.execution.pause import Pause
from specgraph.runtime.execution.results import DraftTraceView, Results
from specgraph.runtime.schedule.num_drafts import Reasons
from specgraph.runtime.schedule.scheduler import Plan
from specgraph.runtime.schedule.sequences import ActiveSequence


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
        drafts: how many drafts of the sequence it verified at most, if it decoded.
    """

    number: int
    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    decoding: bool = False
    confidence: Sequence[float] = ()
    finish_reason: str | None = None
    error: SpecgraphError | None = None
    traced: DraftTraceView | None = None
    drafts: int = 0


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
        why: what the choice of K followed from, if it was chosen.
    """

    outputs: list[Output]
    prompt_tokens: int
    seconds: float
    drafts: int = 0
    ran: bool = True
    reused_tokens: int = 0
    host_seconds: float | None = None
    why: Reasons | None = None

    @property
    def decoding(self) -> bool:
        """Whether any sequence decoded in it."""
        return any(output.decoding for output in self.outputs)


@dataclass(frozen=True)
class InFlightStep:
    """A step that the device may still be running.

    Attributes:
        plan: what it runs.
        forced: how many next tokens each of the first sequences is given, whose prompts it runs; empty if it runs none.
        prompt_tokens: how many tokens of prompts it runs.
        pause: what the host did in the middle of it.
        drafts: how many drafts of a sequence it verifies at most.
        noted: what the choice of K is to know of it when it is read.
    """

    results: Results
    plan: Plan
    forced: Sequence[int] = ()
    prompt_tokens: int = 0
    pause: Pause | None = None
    drafts: int = 0
    noted: Any = None

    def verified(self, place: int) -> int:
        """How many drafts of the sequence at ``place`` it verifies at most."""
        each, own = self.plan.choice.each, place - len(self.forced)
        if own < 0:
            return 0
        return self.drafts if each is None else min(each[own], self.drafts)

    def refused(self, place: int, bad: int, given: int, count: int) -> tuple[int, SpecgraphError | None]:
        """How many of the ``count`` tokens that came out of the unforced rows of a sequence are right, and why no more.

        All of them and None, if nothing is wrong. ``place`` is that of the sequence, and ``given`` the number of its
        forced tokens. ``bad`` says which of its rows has nothing but -inf
        (:func:`~specgraph.kernels.step.tokens.bad_rows`); sequences with a NaN are not asked about. A row that no token
        came from does not count: it is behind a rejected draft, or behind an EOS.
        """
        errors = {} if self.pause is None else dict(self.pause.errors.get(place, {}))
        row = bad - 1 - given
        if 0 <= row < count and row not in errors and not self.plan.sequences[place].request.as_transformers:
            errors[row] = no_token(self.plan.sequences[place], row)
        first = min(errors, default=count)
        return (first, errors[first]) if first < count else (count, None)


def no_token(sequence: ActiveSequence, count: int) -> SpecgraphError:
    """The error of a sequence that has no token to go on with, ``count`` tokens behind what it has emitted."""
    new = len(sequence.new_tokens) + count
    names = sequence.request.forbidding(new)
    where = f"sequence {sequence.number} behind {sequence.request.prompt.numel()} prompt and {new} new tokens"
    if not names:
        return NumericsError(
            f"The target's logits are -inf for every token in {where}, so no token is left. Check the weights and the "
            "dtype; the decoder itself is still usable."
        )
    options = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return InputError(
        f"No token is left for {where}: {options} {'forbids' if len(names) == 1 else 'together forbid'} all of them. "
        "Allow one at least, or leave out one of these options."
    )
