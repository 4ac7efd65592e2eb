"""A sequence of an engine on its way from the queue to its end."""

from __future__ import annotations

from dataclasses import dataclass, field

from specgraph.runtime.memory.pages import Reservation
from specgraph.runtime.requests.request import Request
from specgraph.runtime.schedule.acceptance import Outlook


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
