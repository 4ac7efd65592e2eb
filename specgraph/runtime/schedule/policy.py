"""How an engine chooses its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specgraph.runtime.schedule.num_drafts import ChoosesDrafts
from specgraph.runtime.schedule.prompt_shapes import Overhead
from specgraph.runtime.schedule.sequences import ActiveSequence


@dataclass(frozen=True)
class Policy:
    """How steps are chosen.

    Attributes:
        chunk: the most prompt rows of a sequence in a step.
        fair: whether somebody waits for every token, so that no step may take long and no sequence waits for others to
            enter together with it.
        overhead: what steps cost besides their rows.
        joint: whether sequences that decode take part in steps that run prompts. Else the two take turns, or, if not
            ``fair``, all prompts come first. That is better where decode steps have faster code than prompts have.
        drafts: K by the number of sequences in a decode step: that of the largest key up to this number. None, and an
            empty table, is the drafter's own. A step that runs prompts makes as many as the sequences that decode in it
            would get without them, and the drafter's own number if none does.
        worth: chooses K for every step; None where ``drafts`` decide.
        max_context: the drafter has no drafts for a sequence of more tokens, which the device sees to; None: no
            sequence is too long.
        looks_up: whether a lookup in front of the drafter goes on drafting for sequences that are too long for it.
    """

    chunk: int
    fair: bool
    overhead: Overhead
    joint: bool = True
    drafts: Mapping[int, int | None] = field(default_factory=dict)
    worth: ChoosesDrafts | None = None
    max_context: int | None = None
    looks_up: bool = False

    def too_long(self, sequence: ActiveSequence) -> bool:
        """Whether the drafter has no drafts for a sequence any more, as far as its steps are read."""
        if self.max_context is None:
            return False
        return sequence.request.prompt.numel() + len(sequence.new_tokens) > self.max_context

    def all_too_long(self, sequences: Sequence[ActiveSequence]) -> bool:
        """Whether a step of these sequences needs no drafter. It runs as long as any sequence has drafts of its; the
        device lets the others have none of these."""
        return self.max_context is not None and all(map(self.too_long, sequences))

    def undrafted(self, sequence: ActiveSequence) -> bool:
        """Whether a sequence has no drafts at all any more, as far as its steps are read."""
        return not self.looks_up and self.too_long(sequence)

    def drafts_of(self, count: int) -> int | None:
        """K for a decode step of ``count`` sequences."""
        return self.drafts.get(max((key for key in self.drafts if key <= max(count, 1)), default=0))
