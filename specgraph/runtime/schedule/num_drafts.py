"""K by what it is worth: how many drafts the next step verifies, where the host may look at them for free.

Every draft is one more row in the target's call. On a CPU, rows are dear: five rows of a float32 linear layer take up
to twice the time of one. So a step verifies the number of drafts that promises the most tokens per second. The promise
follows from how often the drafts at each position were right lately, and the price from what steps of so many rows
have taken in this decoder.

:class:`ChoosesDrafts` is what an engine asks for a :class:`Choice`.

:class:`Worth` looks at the drafts themselves, at least at their number. That biases no output, because this is done
only for drafts that are a function of the accepted tokens: given these tokens, nothing about the drafts is random.
:class:`Longest` leaves no draft out, so it also serves drafters that draw their drafts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from specgraph.runtime.schedule.acceptance import FIRST, SHARED, Outlook, Survival
from specgraph.runtime.schedule.sequences import ActiveSequence
from specgraph.runtime.schedule.step_costs import StepCosts

FEW = 2
"""The number of drafts of the variant between none and all."""
MARGIN = 1.15
"""How many times as many tokens per second more drafts have to promise. The choice falls on what looks better than it
is, since estimates rest on a few drafts: with 1.02, more requests of 48 tokens lost where little is found, and those of
160 gained 0.4% more (docs/real-models.md)."""


def choices(most: int) -> list[int]:
    """The values of K among which a step has a choice, if the drafter's own is ``most``, in ascending order."""
    return sorted({0, min(FEW, most), most})


class Promise(NamedTuple):
    """What a step is expected to bring, and how that counts.

    Attributes:
        drafts: its K.
        rows: those of all sequences together, where each has its own number; None: ``drafts + 1`` of each.
        tokens: those that it emits, of all sequences together.
        seconds: what it takes.
        margin: by what its tokens per second are divided, since a change has to pay for itself.
    """

    drafts: int
    rows: int | None
    tokens: float
    seconds: float
    margin: float = 1.0

    @property
    def worth(self) -> float:
        """By this the best one is chosen."""
        return self.tokens / self.seconds / self.margin

    def __str__(self) -> str:
        over = "" if self.rows is None else f" over {self.rows} rows"
        less = "" if self.margin == 1 else f", which counts as {self.worth:.0f}, since a change has to pay"
        speed = f"{self.tokens / self.seconds:.0f} per second{less}"
        return f"K = {self.drafts}{over} promises {self.tokens:.2f} tokens in {1e3 * self.seconds:.2f} ms ({speed})"


class Reasons(NamedTuple):
    """Why a step has its K.

    Attributes:
        survival: how probable it is that a draft and all before it are accepted, by position, in the mean of sequences.
        promises: of the option that was chosen, and of the next best one; empty where one was tried to learn from it.
    """

    survival: Sequence[float]
    promises: Sequence[Promise]

    def to_record(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {"survival": self.survival, "promises": [promise._asdict() for promise in self.promises]}

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> Reasons:
        """What :meth:`to_record` gave."""
        return cls(record["survival"], [Promise(**promise) for promise in record["promises"]])

    def __str__(self) -> str:
        why = "; ".join(map(str, self.promises)) or "K is tried, since too little is known of what it takes or brings"
        survival = ", ".join(f"{value:.2f}" for value in self.survival)
        return f"{why}; drafts up to each position are accepted with a probability of {survival}"


class Choice(NamedTuple):
    """How many drafts a step makes and verifies.

    Attributes:
        drafts: K, None for the drafter's own.
        each: how many of them each sequence verifies at most; None: all.
        why: what that follows from, where recent acceptance decides.
    """

    drafts: int | None = None
    each: Sequence[int] | None = None
    why: Reasons | None = None

    def num_rows(self, count: int, most: int) -> list[int]:
        """The most rows of each of ``count`` sequences, where ``most`` is the drafter's K."""
        drafts = most if self.drafts is None else self.drafts
        return [drafts + 1] * count if self.each is None else [own + 1 for own in self.each]


NO_CHOICE = Choice()
"""All drafts of all sequences."""


class ChoosesDrafts:
    """Chooses K for the steps of one engine.

    Attributes:
        ahead: whether it looks at the drafts, of which a step then makes as many as it can.
    """

    ahead = True

    def choose(
        self, kind: Hashable, sequences: Sequence[ActiveSequence], drafts: Sequence[Sequence[int]]
    ) -> Choice:  # fmt: skip
        """What a step of ``kind`` verifies of sequences, which have these drafts if it is to look at them."""
        raise NotImplementedError

    def learn(self, kind: Hashable, rows: int, seconds: float) -> None:
        """A decode step of ``kind``, of so many rows, took the host so long. Nothing is learned from that here."""

    def begin(self, rows: Sequence[int]) -> None:
        """New sequences have these state rows."""

    def stop(self, rows: Sequence[int]) -> None:
        """The sequences that have these state rows verify no more drafts (``draft.max_context``)."""

    def enqueued(
        self, kind: Hashable, rows: Sequence[int], num_prompts: int, drafts: int, each: Sequence[int] | None = None
    ) -> Any:  # fmt: skip
        """A step of ``kind`` is enqueued for the sequences in these rows, with K drafts; what ``read`` is to know.

        It runs prompts of the first ``num_prompts`` of them, and verifies so many drafts of ``each`` other one, or all.
        """

    def read(self, step: Any, num_emitted: Sequence[int], seconds: float | None) -> None:
        """Such a step has emitted so many tokens of each sequence; it took so long if it is not None."""


class Worth(ChoosesDrafts):
    """Chooses K for the steps of one engine.

    Attributes:
        costs: what steps have cost, which all engines of a decoder share.
        choices: the values of K among which it chooses, in ascending order. A step of each is a variant of its own.
    """

    def __init__(self, most: int, costs: StepCosts, chosen: Counter[int]) -> None:
        """``most`` is the drafter's K. ``chosen`` counts the steps of each K."""
        self.costs, self._chosen = costs, chosen
        self.choices = choices(most)
        self._shared = Survival([FIRST ** (place + 1) for place in range(most)], SHARED)

    def choose(self, kind: Hashable, sequences: Sequence[ActiveSequence], drafts: Sequence[Sequence[int]]) -> Choice:
        """As :meth:`ChoosesDrafts.choose`; of every sequence, all drafts are verified."""
        outlooks = [self._outlook(sequence) for sequence in sequences]
        for sequence, outlook, own in zip(sequences, outlooks, drafts, strict=True):
            outlook.propose(len(sequence.new_tokens), own)
        longest = max(map(len, drafts), default=0)
        enough = next(k for k in self.choices if k >= longest)
        best, promised = enough, 0.0
        for k in [k for k in self.choices if k <= enough]:
            seconds = self.costs.of(kind, len(sequences) * (k + 1))
            if seconds is None:
                continue
            accepted = (own.own.expected(min(k, len(found))) for own, found in zip(outlooks, drafts, strict=True))
            rate = (len(sequences) + sum(accepted)) / seconds
            if rate > (MARGIN if promised else 1.0) * promised:
                best, promised = k, rate
        self._chosen[best] += 1
        return Choice(best)

    def learn(self, kind: Hashable, rows: int, seconds: float) -> None:
        """Take note of a decode step of ``kind``, of so many rows."""
        self.costs.add(kind, rows, seconds)

    def _outlook(self, sequence: ActiveSequence) -> Outlook:
        if sequence.outlook is None:
            sequence.outlook = Outlook.beginning(self._shared)
        return sequence.outlook


class Longest(ChoosesDrafts):
    """Chooses K for the steps of an engine whose drafter ends its chains itself: all drafts are verified."""

    def __init__(self, chosen: Counter[int]) -> None:
        """``chosen`` counts the steps of each K."""
        self._chosen = chosen

    def choose(self, kind: Hashable, sequences: Sequence[ActiveSequence], drafts: Sequence[Sequence[int]]) -> Choice:
        """As :meth:`ChoosesDrafts.choose`."""
        longest = max(map(len, drafts))
        self._chosen[longest] += 1
        return Choice(longest)
