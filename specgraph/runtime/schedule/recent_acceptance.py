"""K by what it is worth, where the host does not know the drafts: from how many were accepted lately.

Steps of a GPU are enqueued before the drafts that they verify have come to the host, and drafts that were drawn must
not decide whether they are verified, or the tokens would not be distributed as the target's. So
:class:`RecentAcceptance` looks at what was accepted before, and at what steps have taken: it takes the K that promises
the most tokens per second. All sequences of a step get the same K.

Where no draft is verified, none can be seen to be right. So after a time a few steps draft again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specgraph.runtime.schedule.num_drafts import ChoosesDrafts
from specgraph.runtime.schedule.prompt_shapes import entries
from specgraph.runtime.schedule.sequences import ActiveSequence
from specgraph.runtime.schedule.step_costs import StepCosts

CHOICES = (0, 1, 2, 3, 5, 7, 11, 15)
"""The values of K among which a step has a choice, besides the drafter's own; each is a graph for each batch size."""
FIRST = 0.7
"""What the acceptance of a draft behind accepted ones is taken to be before any is known."""
OWN, SHARED = 1 / 16, 1 / 256
"""The weight of the last draft in the estimate of its own sequence, and in the estimate of all sequences, which is the
mean of the first ones until they have this weight."""
UNSEEN = 1 / 64
"""The part by which the estimate of a draft that was not verified approaches that of the last one that was."""
GAIN = 1.03
"""How many times as many tokens per second another K has to promise than the one of the last steps: the first step of a
larger K has none of the further drafts yet."""
HOPE = 0.95
"""What an unknown step is taken to cost, as a part of what follows from the known ones, so that it is tried."""
AGAIN, AGAIN_FOR = 128, 5
"""After so many steps without drafts, so many have some,"""
AGAIN_SHARE = 0.01
"""unless that would take more than this part of the time; then it is after more steps."""
FALL = 1 / 8192
"""The part by which what a step is known to cost falls for every other step, so that a wrong one is tried again."""


def choices(most: int) -> list[int]:
    """The values of K among which a step has a choice, if the drafter's own is ``most``, in ascending order."""
    return [*(k for k in CHOICES if k < most), most]


class Enqueued(NamedTuple):
    """A decode step that was not read yet.

    Attributes:
        key: what distinguishes its costs, besides its K.
        rows: the state rows of its sequences, int64 ``[n]``.
        verified: how many drafts each may verify, int64 ``[n]``.
        drafts: its K.
    """

    key: Hashable
    rows: NDArray[np.int64]
    verified: NDArray[np.int64]
    drafts: int


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
        self, num_state_rows: int, shared: SharedAcceptance, costs: StepCosts, chosen: Counter[int]
    ) -> None:  # fmt: skip
        """``shared`` and ``costs`` are those of all engines of a decoder. ``chosen`` counts the steps of each K."""
        most = len(shared.rates)
        self.choices = choices(most)
        self._costs, self._chosen = costs, chosen
        self._shared = shared
        self._own = np.tile(shared.rates, (num_state_rows, 1))  # the same for the sequence in each state row
        self._made = np.zeros(num_state_rows, np.int64)  # drafts of the last step that is enqueued
        self._last: dict[Hashable, int] = {}
        self._steps_without, self._again = 0, 0

    def begin(self, rows: Sequence[int]) -> None:
        """New sequences have these state rows; each begins with what is known of all."""
        self._own[rows] = self._shared.rates

    def stop(self, rows: Sequence[int]) -> None:
        """Expect nothing of these sequences, and learn nothing from what they emit."""
        self._own[rows], self._made[rows] = 0.0, 0

    def choose(
        self, kind: Hashable, sequences: Sequence[ActiveSequence], drafts: Sequence[Sequence[int]]
    ) -> int | None:
        """K for a step of ``kind``, None for the drafter's own. ``drafts`` are not looked at."""
        key = self._key(kind, len(sequences))
        best = self._best(key, [sequence.state_row for sequence in sequences])
        self._last[key] = best
        self._chosen[best] += 1
        return best if best < self.choices[-1] else None

    def enqueued(self, kind: Hashable, rows: Sequence[int], num_prompts: int, drafts: int) -> Enqueued:
        """A step is enqueued, of which the sequences that run no prompts verify what their last step has made."""
        index = np.array(rows, np.int64)
        verified = np.minimum(self._made[index], drafts)
        verified[:num_prompts] = 0
        step = Enqueued(self._key(kind, len(rows)), index, verified, drafts)
        self._made[index] = drafts
        return step

    def read(self, step: Enqueued, num_emitted: Sequence[int], seconds: float | None) -> None:
        """The step has emitted so many tokens of each sequence, in so long; None if that says nothing of others."""
        if seconds is not None:
            self._costs.add(step.key, step.drafts + 1, seconds, FALL)
        accepted = np.array(num_emitted, np.int64) - 1
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

    def _best(self, key: Hashable, rows: Sequence[int]) -> int:
        known, most = self._costs.known(key), self.choices[-1]
        for end in (most, 0):  # the costs of both are known before any choice
            if end + 1 not in known:
                return end
        if self._again:
            self._again -= 1
            return self.choices[1]
        expected = np.cumsum(np.cumprod(self._own[rows], axis=1), axis=1).sum(0)  # [most], over all sequences
        tokens = [len(rows) + (expected[k - 1] if k else 0.0) for k in self.choices]
        widths, seconds = zip(*sorted(known.items()), strict=True)
        costs = [known.get(k + 1) or HOPE * np.interp(k + 1, widths, seconds) for k in self.choices]
        rates = {k: n / cost for k, n, cost in zip(self.choices, tokens, costs, strict=True)}
        best, last = max(rates, key=rates.__getitem__), self._last.get(key, most)
        if rates[best] <= GAIN * rates[last]:
            best = last
        self._steps_without = 0 if best else self._steps_without + 1
        if self._steps_without > max(AGAIN, AGAIN_FOR * (costs[1] / costs[0] - 1) / AGAIN_SHARE):
            self._steps_without, self._again = 0, AGAIN_FOR
        return best
