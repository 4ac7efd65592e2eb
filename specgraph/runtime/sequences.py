"""The sequences of an engine, and the steps that the device may still be running over them."""

from __future__ import annotations

from dataclasses import dataclass, field

from specgraph.errors import NumericsError, SpecgraphError
from specgraph.runtime.cuda_graphs import Results
from specgraph.runtime.outlook import Outlook
from specgraph.runtime.pages import Reservation
from specgraph.runtime.pause import Pause
from specgraph.runtime.requests import Request


@dataclass(eq=False)
class Running:
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
class UnderWay:
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
    sequences: list[Running]
    forced: list[int] = field(default_factory=list)
    going_on: frozenset[Running] = frozenset()
    prompt_tokens: int = 0
    pause: Pause | None = None
    drafts: int = 0

    def failed(self) -> dict[Running, SpecgraphError]:
        """The sequences for which the host could not do its part, and why."""
        errors = {} if self.pause is None else self.pause.errors
        return {self.sequences[entry]: error for entry, error in errors.items() if not self.sequences[entry].ended}


def not_a_number(number: int) -> NumericsError:
    """The error of a sequence whose logits are not numbers."""
    return NumericsError(
        f"The target's logits are NaN in sequence {number}, unless its logits processors have made them so. Check the "
        "weights and the dtype; the decoder itself is still usable."
    )
