"""K by what it is worth, where the host does not know the drafts: from how many were accepted lately.

Steps of a GPU are enqueued before the drafts that they verify have come to the host, and drafts that were drawn must
not decide whether they are verified, or the tokens would not be distributed as the target's. So
:class:`RecentAcceptance` looks at what was accepted before, and at what steps have taken: it takes the K that promises
the most tokens per second.

A step has one K: so many drafts are made of every sequence. Where rows are dear, each sequence may verify fewer of them
(``ragged``). The step then runs packed rows, for whose number a graph is captured, and these rows are for the drafts
that are most probably accepted, whosever they are. A drafter whose drafts take a row each makes no more of a sequence
than that (``limited``), and its next step can verify no more; so K of such a step is the drafter's own.

Where no draft is verified, none can be seen to be right. So after a time a few steps draft again.
"""

from __future__ import annotations

import functools
import heapq
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specgraph.runtime.schedule.num_drafts import Choice, ChoosesDrafts, Promise, Reasons
from specgraph.runtime.schedule.prompt_shapes import entries, padded_rows
from specgraph.runtime.schedule.sequences import ActiveSequence
from specgraph.runtime.schedule.step_costs import TypicalCosts

CHOICES = (0, 1, 2, 3, 5, 7, 11, 15)
"""The values of K among which a step has a choice, besides the drafter's own; each is a graph for each batch size."""
MEAN_ROWS = (1.5, 2, 3, 4, 6, 8, 12)
"""How many rows a sequence has in the mean in steps in which each has its own number, before they are rounded up."""
FIRST = 0.7
"""What the acceptance of a draft behind accepted ones is taken to be before any is known."""
OWN, SHARED = 1 / 16, 1 / 256
"""The weight of the last draft in the estimate of its own sequence, and in the estimate of all sequences, which is the
mean of the first ones until they have this weight."""
UNSEEN = 1 / 64
"""The part by which the estimate of a draft that was not verified approaches that of the last one that was."""
HOPE_AGAIN = 1 / 256
"""The part by which the estimate of a sequence's first draft approaches 1 if it verifies none and others do, so that
one is tried again."""
GAIN, GAIN_UNTRIED = 1.03, 1.08
"""How many times as many tokens per second another option has to promise than that of the last steps: the first step
of a larger K has none of the further drafts yet, and what was not tried is captured first, which takes longer than many
steps."""
MAKING = 0.25
"""Which part of the time for one more draft is for making it, and not for verifying it, before any step has shown."""
HOPE = 0.95
"""What an unknown step is taken to cost, as a part of what follows from the known ones, so that it is tried."""
AGAIN, AGAIN_FOR = 128, 5
"""After so many steps without drafts, so many have some,"""
AGAIN_SHARE = 0.01
"""unless that would take more than this part of the time; then it is after more steps."""


def choices(most: int) -> list[int]:
    """The values of K among which a step has a choice, if the drafter's own is ``most``, in ascending order."""
    return [*(k for k in CHOICES if k < most), most]


class Option(NamedTuple):
    """What a step may be.

    Attributes:
        drafts: its K.
        rows: those of all sequences together, where each has its own number; None: ``drafts + 1`` of each.
    """

    drafts: int
    rows: int | None = None


class Enqueued(NamedTuple):
    """A decode step that was not read yet.

    Attributes:
        key: what distinguishes its costs, besides the option.
        option: which one it is.
        rows: the state rows of its sequences, int64 ``[n]``.
        verified: how many drafts each may verify, int64 ``[n]``.
    """

    key: Hashable
    option: Option
    rows: NDArray[np.int64]
    verified: NDArray[np.int64]


class SharedAcceptance:
    """How probable it is that a draft is accepted if those before it are, as all sequences of a decoder have shown.

    Attributes:
        rates: float64 ``[K]``, by the position of the draft.
    """

    def __init__(self, most: int) -> None:
        """``most`` is the drafter's K."""
        self.rates = np.full(most, FIRST)
        self._judged = np.ones(most)  # as if the first estimate had been one draft

    def add(self, judged: NDArray[np.bool_], right: NDArray[np.bool_]) -> None:
        """Take note of drafts ``[n, K]``: which were verified behind accepted ones, and which of these were right."""
        counts = judged.sum(0)
        self._judged += counts
        weights = np.maximum(1 - (1 - SHARED) ** counts, counts / self._judged)
        shares = (right & judged).sum(0) / np.maximum(counts, 1)
        self.rates += weights * (shares - self.rates)


class RecentAcceptance(ChoosesDrafts):
    """Chooses K for the steps of one engine.

    Attributes:
        choices: the values of K among which it chooses, in ascending order; the last is the drafter's own.
    """

    ahead = False

    def __init__(
        self, num_state_rows: int, shared: SharedAcceptance, costs: TypicalCosts, chosen: Counter[int], *,
        ragged: bool = False, limited: bool = False,
    ) -> None:  # fmt: skip
        """``shared`` and ``costs`` are those of all engines of a decoder. ``chosen`` counts the steps of each K."""
        self._ragged, self._limited = ragged, limited
        most = len(shared.rates)
        self.choices = choices(most)
        self._costs, self._chosen = costs, chosen
        self._shared = shared
        self._own = np.tile(shared.rates, (num_state_rows, 1))  # the same for the sequence in each state row
        self._made = np.zeros(num_state_rows, np.int64)  # drafts of the last step that is enqueued
        self._last: dict[Hashable, Option] = {}
        self._steps_without, self._again = 0, 0

    def begin(self, rows: Sequence[int]) -> None:
        """New sequences have these state rows; each begins with what is known of all."""
        self._own[rows] = self._shared.rates

    def stop(self, rows: Sequence[int]) -> None:
        """Expect nothing of these sequences, and learn nothing from what they emit."""
        self._own[rows], self._made[rows] = 0.0, 0

    def choose(self, kind: Hashable, sequences: Sequence[ActiveSequence], drafts: Sequence[Sequence[int]]) -> Choice:
        """As :meth:`ChoosesDrafts.choose`. ``drafts`` are not looked at."""
        key = self._key(kind, len(sequences))
        own = self._own[[sequence.state_row for sequence in sequences]]
        survival = np.cumprod(own, axis=1)  # [n, most]: the probability that this draft and those before it are right
        best, promises = self._best(key, survival)
        why = Reasons(survival.mean(0).tolist(), promises)
        self._last[key] = best
        self._chosen[best.drafts] += 1
        num_drafts = best.drafts if best.drafts < self.choices[-1] else None
        if best.rows is None:
            return Choice(num_drafts, why=why)
        # Of equal drafts the first ones: those of a sequence are never more probable than the ones before them.
        order = np.argsort(-survival[:, : best.drafts], axis=None, kind="stable")[: best.rows - len(own)]
        return Choice(num_drafts, np.bincount(order // best.drafts, minlength=len(own)).tolist(), why)

    def enqueued(
        self, kind: Hashable, rows: Sequence[int], num_prompts: int, drafts: int, each: Sequence[int] | None = None
    ) -> Enqueued:  # fmt: skip
        """A step is enqueued, of which the sequences that run no prompts verify what their last step has made."""
        index = np.array(rows, np.int64)
        verified = np.minimum(self._made[index], drafts)
        verified[:num_prompts] = 0
        option = Option(drafts)
        if each is not None:
            verified[num_prompts:] = np.minimum(verified[num_prompts:], each)
            option = Option(drafts, len(each) + sum(each))
        step = Enqueued(self._key(kind, len(rows)), option, index, verified)
        self._made[index] = drafts
        if self._limited and each is not None:
            self._made[index[num_prompts:]] = each
        return step

    def read(self, step: Enqueued, num_emitted: Sequence[int], seconds: float | None) -> None:
        """The step has emitted so many tokens of each sequence, in so long; None if that says nothing of others."""
        if seconds is not None:
            self._costs.add(step.key, step.option, seconds)
        accepted = np.array(num_emitted, np.int64) - 1
        if step.option.rows is not None:
            idle = step.rows[(accepted >= 0) & (step.verified == 0)]
            self._own[idle, 0] += HOPE_AGAIN * (1 - self._own[idle, 0])
        real = (accepted >= 0) & (step.verified > 0)
        if not real.any():
            return
        rows, accepted, verified = step.rows[real], accepted[real, None], step.verified[real, None]
        places = np.arange(self.choices[-1])
        right, judged = places < accepted, places < np.minimum(accepted + 1, verified)
        own = self._own[rows]
        last = np.take_along_axis(own, verified - 1, 1)
        unseen = np.where(places >= verified, UNSEEN * (last - own), 0.0)
        self._own[rows] = own + np.where(judged, OWN * (right - own), unseen)
        self._shared.add(judged, right)

    def _key(self, kind: Hashable, count: int) -> Hashable:
        return kind, entries(count, len(self._own))

    def _best(self, key: Hashable, survival: NDArray[np.float64]) -> tuple[Option, Sequence[Promise]]:
        """What the step is to be, and what that and the next best promise if it was chosen for that."""
        known, most = self._costs.known(key), self.choices[-1]
        for end in (Option(most), Option(0)):  # the costs of both are known before any choice
            if end not in known:
                return end, ()
        if self._again:
            self._again -= 1
            return Option(self.choices[1]), ()
        promises = self._promises(survival, known, self._last.get(key, Option(most)))
        promised = heapq.nlargest(2, promises, key=attrgetter("worth"))
        best = Option(promised[0].drafts, promised[0].rows)
        self._steps_without = 0 if best.drafts else self._steps_without + 1
        if self._steps_without > max(AGAIN, AGAIN_FOR * self._price_of_one(known) / AGAIN_SHARE):
            self._steps_without, self._again = 0, AGAIN_FOR
        return best, promised

    def _promises(
        self, survival: NDArray[np.float64], known: dict[Option, float], last: Option
    ) -> Iterator[Promise]:  # fmt: skip
        """What every option promises, where the last steps had ``last``."""

        def promise(option: Option, tokens: float, foreseen: float) -> Promise:
            margin = 1.0 if option == last else GAIN if option in known else GAIN_UNTRIED
            return Promise(*option, float(tokens), float(known.get(option, foreseen)), margin)

        count = len(survival)
        widths, seconds = np.array(sorted((o.drafts + 1, cost) for o, cost in known.items() if o.rows is None)).T
        for k in self.choices:
            yield promise(Option(k), count + survival[:, :k].sum(), HOPE * np.interp(k + 1, widths, seconds))
        if not self._ragged:
            return
        # A step takes what its rows take, and for each further draft a part of what one costs that is verified, too.
        making = 0.0 if self._limited else max(0.0, MAKING * float((np.diff(seconds) / np.diff(widths)).min()))
        for k in self.choices[-1:] if self._limited else self.choices[1:]:
            gains = -np.sort(-survival[:, :k], axis=None).cumsum()
            for rows in _packed_rows(count, k):
                foreseen = np.interp(rows / count, widths, seconds) + making * (k + 1 - rows / count)
                yield promise(Option(k, rows), count + gains[rows - count - 1], foreseen)

    def _price_of_one(self, known: dict[Option, float]) -> float:
        """By which part a step takes longer that has a draft."""
        with_one = known.get(Option(self.choices[1]), known[Option(self.choices[-1])])
        return max(0.0, with_one / known[Option(0)] - 1)


def describe(shared: SharedAcceptance, costs: TypicalCosts) -> list[str]:
    """Lines that say what choices follow from: what all sequences have shown of drafts, and what steps take."""
    if not costs.kinds():
        return []
    rates = ", ".join(f"{rate:.2f}" for rate in shared.rates)
    lines = [f"a draft behind accepted ones is accepted with a probability of {rates}, by its position"]
    for kind, count in sorted(costs.kinds(), key=str):
        known: dict[Option, float] = costs.known((kind, count))
        steps = (
            f"K = {o.drafts}{'' if o.rows is None else f' over {o.rows} rows'} {1e3 * known[o]:.2f} ms"
            for o in sorted(known, key=lambda o: (o.drafts, o.rows or 0))
        )
        lines.append(f"a step of up to {count} sequences takes, by what was tried last: {', '.join(steps)}")
    return lines


@functools.lru_cache(maxsize=4096)
def _packed_rows(count: int, k: int) -> list[int]:
    """The numbers of packed rows for which steps of K are captured, between those of no drafts and of all."""
    sizes = {padded_rows(round(mean * count)) for mean in MEAN_ROWS}
    return sorted(rows for rows in sizes if count < rows < count * (k + 1))
