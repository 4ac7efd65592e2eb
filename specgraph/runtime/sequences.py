"""The sequences of an engine, and the steps that the device may still be running over them."""

from __future__ import annotations

from dataclasses import dataclass, field

from specgraph.errors import InputError, NumericsError, SpecgraphError
from specgraph.runtime.cuda_graphs import Results
from specgraph.runtime.outlook import Outlook
from specgraph.runtime.pages import Reservation
from specgraph.runtime.pause import Pause
from specgraph.runtime.requests import Request


@dataclass(eq=False)
class ActiveSequence:
    """A sequence on its way: waiting without a row, then in one, then ended."""

    number: int
    request: Request
    row: int = -1
    reserved: Reservation = field(default_factory=Reservation)
    new_tokens: list[int] = field(default_factory=list)
    started: bool = False
    ended: bool = False
    room: int = 0
    """The most tokens that may be missing when the steps under way are done."""
    outlook: Outlook | None = None
    """How probable it is that its drafts are accepted, where K is chosen by what it is worth."""


@dataclass(frozen=True)
class InFlightStep:
    """A step that the device may still be running.

    Attributes:
        sequences: those that it runs, in the order of its entries: first those whose prompts it runs, then those that
            decode.
        forced: how many next tokens each of the first is given; empty in a decode step.
        going_on: those whose prompt is not at its end with this step.
        pause: what the host did in the middle of it.
        drafts: how many drafts of a sequence it verifies at most.
    """

    results: Results
    sequences: list[ActiveSequence]
    forced: list[int] = field(default_factory=list)
    going_on: frozenset[ActiveSequence] = frozenset()
    prompt_tokens: int = 0
    pause: Pause | None = None
    drafts: int = 0

    def refused(self, place: int, bad: int, given: int, count: int) -> tuple[int, SpecgraphError | None]:
        """How many of the ``count`` tokens that came out of the unforced rows of a sequence are right, and why no more.

        All of them and None, if nothing is wrong. ``place`` is that of the sequence, ``bad`` what the step says of its
        logits (:class:`~specgraph.kernels.step.tokens.BadRows`) and ``given`` the number of its forced tokens. A row
        that no token came from does not count: it is behind a rejected draft, or behind an EOS.
        """
        errors = {} if self.pause is None else dict(self.pause.errors.get(place, {}))
        row = bad - 1 - given
        if 0 <= row < count and row not in errors and not self.sequences[place].request.as_transformers:
            errors[row] = no_token(self.sequences[place], row)
        first = min(errors, default=count)
        return (first, errors[first]) if first < count else (count, None)


def not_a_number(number: int) -> NumericsError:
    """The error of a sequence whose logits are not numbers."""
    return NumericsError(
        f"The target's logits are NaN in sequence {number}, unless its logits processors have made them so. Check the "
        "weights and the dtype; the decoder itself is still usable."
    )


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
