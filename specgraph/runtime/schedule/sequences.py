"""A sequence of an engine on its way from the queue to its end."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from specgraph.runtime.memory.pages import Reservation
from specgraph.runtime.requests.request import Request
from specgraph.runtime.schedule.acceptance import Outlook
from specgraph.runtime.schedule.prefill import PendingPrompt


class Phase(enum.Enum):
    """How far a sequence is: in the queue, then in a state row while its prompt runs, then decoding, then ended."""

    WAITING = enum.auto()
    PREFILL = enum.auto()
    DECODE = enum.auto()
    DONE = enum.auto()


@dataclass(eq=False)
class ActiveSequence:
    """A sequence of an engine. It has a state row, pages and a pending prompt as soon as it no longer waits.

    Attributes:
        tokens_left: the most tokens that may be missing when the steps under way are done.
        outlook: how probable it is that its drafts are accepted, where K is chosen by what it is worth.
    """

    number: int
    request: Request
    phase: Phase = Phase.WAITING
    state_row: int = -1
    reserved: Reservation = field(default_factory=Reservation)
    new_tokens: list[int] = field(default_factory=list)
    tokens_left: int = 0
    outlook: Outlook | None = None
    prompt: PendingPrompt = field(init=False)
