"""Plans the steps of an engine: which sequences enter, and what the next step runs. It needs no device.

Sequences are admitted in the order in which they came. One that finds no free state row, or not enough free pages for
its whole length, waits, and so do those behind it; what is admitted never waits for memory again. While prompts are
pending, a step runs some of their tokens and all sequences that decode; decode steps follow.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from specgraph.runtime.memory.pages import PagePool, Reservation
from specgraph.runtime.schedule.num_drafts import NO_CHOICE, Choice
from specgraph.runtime.schedule.policy import Policy
from specgraph.runtime.schedule.prefill import PendingPrompt
from specgraph.runtime.schedule.prompt_shapes import FULL_ROWS, MOST_ROWS, fill, group_size, rows_beside
from specgraph.runtime.schedule.sequences import ActiveSequence, Phase


class Entry(NamedTuple):
    """A sequence that enters a row of the state, with its reserved pages, and what is to be run of its prompt."""

    sequence: ActiveSequence
    state_row: int
    reserved: Reservation
    prompt: PendingPrompt


@dataclass(frozen=True)
class Plan:
    """What happens next. The first sequences of the queue are those of ``entering``.

    Attributes:
        entering: sequences that are admitted before the step, whose prompts may begin in it.
        prompts: how many prompt tokens the step runs of each sequence, in the order in which they came.
        decoding: the sequences that decode in the step, by their state rows.
        choice: how many drafts are made and verified of those that decode.
        plain: whether all of them are too long for the drafter, and no prompt runs, so that it is left out.
        going_on: those whose prompt is not at its end with this step.
    """

    entering: Sequence[Entry] = ()
    prompts: Mapping[ActiveSequence, int] = field(default_factory=dict)
    decoding: Sequence[ActiveSequence] = ()
    choice: Choice = NO_CHOICE
    plain: bool = False
    going_on: frozenset[ActiveSequence] = frozenset()

    @functools.cached_property
    def sequences(self) -> list[ActiveSequence]:
        """All sequences of the step, in the order of its entries."""
        return [*self.prompts, *self.decoding]

    @property
    def packed(self) -> bool:
        """Whether modules run real rows alone, since sequences have different numbers of them."""
        return bool(self.prompts) or self.choice.each is not None

    @functools.cached_property
    def hosted(self) -> list[tuple[int, ActiveSequence]]:
        """The sequences whose logits the host changes, behind the entry of each: the step pauses for them.

        No token comes out of a sequence whose prompt goes on, so it is not among them.
        """
        return [(n, s) for n, s in enumerate(self.sequences) if s.request.host and s not in self.going_on]


class Scheduler:
    """Makes plans. :meth:`plan` changes nothing but ``pages``, where it reserves those of sequences that enter."""

    def __init__(
        self, policy: Policy, pages: PagePool, num_state_rows: int, width: int,
        choose_drafts: Callable[[Sequence[ActiveSequence]], Choice] | None = None,
    ) -> None:  # fmt: skip
        """``width`` is the number of tokens that a decode step runs of a sequence, with the drafter's own K.

        ``choose_drafts`` gives it for a step of some sequences; without it, their number decides (``policy.drafts``).
        """
        self._policy, self._pages = policy, pages
        self._num_state_rows, self._width, self._present_width = num_state_rows, width, width
        self._choose_drafts = choose_drafts or (lambda decoding: Choice(policy.drafts_of(len(decoding))))
        self._num_ended = self._num_decode_steps = 0
        self._ran_prompts = False

    def plan(self, waiting: Sequence[ActiveSequence], running: Collection[ActiveSequence], free: Sequence[int]) -> Plan:
        """What happens next, where some sequences wait, some run (in the order in which they entered), and the rows of
        the state in ``free`` belong to no sequence."""
        decodes = any(sequence.phase is Phase.DECODE for sequence in running)
        entering = self._admitted(waiting, free, decodes)
        pending = {s: s.prompt for s in running if s.phase is Phase.PREFILL}
        pending |= {new.sequence: new.prompt for new in entering}
        # A step gives each of them a token at least. So one whose length is filled by steps under way is left out.
        decoding = sorted(
            [s for s in running if s.phase is Phase.DECODE and s.tokens_left > 0], key=attrgetter("state_row")
        )
        too_long = self._policy.all_too_long([*pending, *decoding])
        if pending and decoding and not self._policy.joint:
            if self._policy.fair and self._ran_prompts:
                pending = {}
            else:
                decoding = []
        undrafted = too_long and not self._policy.looks_up
        choice = Choice(0) if undrafted else self._choose_drafts(decoding) if decoding else NO_CHOICE
        prompts = self._prompts(pending, choice.num_rows(len(decoding), self._width - 1), decodes=decodes)
        going_on = frozenset(s for s, count in prompts.items() if count < pending[s].left)
        return Plan(entering, prompts, decoding, choice, too_long and not pending, going_on)

    def ran(self, plan: Plan, width: int) -> None:
        """The step of ``plan`` is enqueued; one that decodes runs ``width`` tokens of a sequence at present."""
        self._present_width = width
        self._ran_prompts = bool(plan.prompts)
        self._num_decode_steps += bool(plan.decoding)

    def ended(self) -> None:
        """A sequence has left its state row."""
        self._num_ended += 1

    def _admitted(self, waiting: Sequence[ActiveSequence], free: Sequence[int], decodes: bool) -> list[Entry]:
        """The first sequences of the queue for which there are state rows and pages.

        Where nobody waits for single tokens, sequences enter in groups beside those that decode.
        """
        entering: list[Entry] = []
        if decodes and not self._policy.fair:
            ends = (1 + self._num_ended) / (1 + self._num_decode_steps)
            policy = self._policy
            enough = group_size(self._num_state_rows, self._present_width, ends, policy.overhead, joint=policy.joint)
            if len(free) < min(enough, len(waiting)):
                return entering
        if waiting and free:
            self._pages.check_weights()
        for sequence, state_row in zip(waiting, free, strict=False):
            request = sequence.request
            reserved = self._pages.reserve(request.prompt, request.limit)
            if reserved is None:
                break
            begin, boundaries = reserved.num_shared * self._pages.block_size, [*reserved.boundaries]
            prompt = PendingPrompt(request.prompt, begin, request.prompt.numel(), boundaries, self._pages.within)
            entering.append(Entry(sequence, state_row, reserved, prompt))
        return entering

    def _prompts(
        self,
        pending: Mapping[ActiveSequence, PendingPrompt],
        decoding: Sequence[int],
        *,
        decodes: bool,
    ) -> dict[ActiveSequence, int]:
        """How many tokens the step runs of prompts that are ``pending``, beside sequences with so many rows each."""
        if not pending:
            return {}
        budget = self._budget(len(decoding), sum(decoding), decodes=decodes)
        left = [prompt.left for prompt in itertools.islice(pending.values(), budget)]
        counts = fill(left, self._policy.chunk, budget, len(decoding), self._width)
        return {s: prompt.up_to_boundary(n) for (s, prompt), n in zip(pending.items(), counts, strict=False)}

    def _budget(self, count: int, rows: int, *, decodes: bool) -> int:
        """The most prompt tokens of a step in which ``count`` sequences decode, with so many ``rows`` in all.

        Where nobody waits for single tokens, large steps are better, unless nearly all sequences decode and have so few
        tokens that those of prompts cost hardly anything beside them.
        """
        if not (count or (self._policy.fair and decodes)):
            return MOST_ROWS
        crowded = 4 * count >= 3 * self._num_state_rows and 2 * rows <= FULL_ROWS
        return rows_beside(rows, patient=not (self._policy.fair or crowded))
