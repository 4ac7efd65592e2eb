"""How probable it is that drafts are accepted, as the tokens of a sequence have shown."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

FIRST = 0.3
"""What the acceptance of a draft behind accepted ones is taken to be before any is known: so little that dear drafts
are tried only after some would have been right, which is seen without verifying them."""
OWN, SHARED = 1 / 4, 1 / 32
"""The weight of the last draft in the estimate of its own sequence, and in the estimate of all sequences."""


@dataclass
class Survival:
    """For each draft position, the estimated probability that the draft and all before it are accepted.

    Attributes:
        rates: one per position. A later draft never has a larger one where it is read by :meth:`expected`.
        weight: that of the last draft.
    """

    rates: list[float]
    weight: float

    def add(self, place: int, *, accepted: bool) -> None:
        """Take note of a draft."""
        self.rates[place] += self.weight * (accepted - self.rates[place])

    def expected(self, count: int) -> float:
        """How many of the first ``count`` drafts are accepted, on average."""
        return sum(itertools.accumulate(self.rates[:count], min))


@dataclass
class _Open:
    """Drafts of which not all are judged yet.

    Attributes:
        begin: the number of new tokens that the sequence had before them.
        judged: how many of them have turned out to be right.
    """

    begin: int
    drafts: Sequence[int]
    judged: int = 0


@dataclass
class Outlook:
    """The estimate of one sequence, whose drafts are judged by the tokens that it emits later.

    A draft need not have been verified to be judged. So the estimate goes on where no draft is verified, and shows when
    the sequence has begun to repeat itself.

    Attributes:
        own: the estimate of this sequence.
        shared: that of all sequences, which is told the same.
    """

    own: Survival
    shared: Survival
    _open: deque[_Open] = field(default_factory=deque)

    @classmethod
    def beginning(cls, shared: Survival) -> Outlook:
        """That of a new sequence, which begins with what is known of all."""
        return cls(Survival([*shared.rates], OWN), shared)

    def propose(self, begin: int, drafts: Sequence[int]) -> None:
        """The sequence, which has ``begin`` new tokens, is about to go on, and these are its drafts."""
        if drafts:
            self._open.append(_Open(begin, drafts))

    def judge(self, tokens: Sequence[int]) -> None:
        """The sequence has these new tokens by now."""
        for _ in range(len(self._open)):
            proposal = self._open.popleft()
            if self._goes_on(proposal, tokens):
                self._open.append(proposal)

    def _goes_on(self, proposal: _Open, tokens: Sequence[int]) -> bool:
        """Judge the drafts for which there are tokens; whether all of them were right and some are left."""
        drafts = proposal.drafts
        while proposal.judged < len(drafts) and proposal.begin + proposal.judged < len(tokens):
            place = proposal.judged
            if drafts[place] != tokens[proposal.begin + place]:
                for missed in range(place, len(drafts)):
                    self._add(missed, accepted=False)
                return False
            self._add(place, accepted=True)
            proposal.judged += 1
        return proposal.judged < len(drafts)

    def _add(self, place: int, *, accepted: bool) -> None:
        self.own.add(place, accepted=accepted)
        self.shared.add(place, accepted=accepted)
