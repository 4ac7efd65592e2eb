"""Puts a lookup in front of the drafter: a sequence whose end has occurred before takes what followed it there.

The pass rewrites the step graph alone and knows nothing of the drafter. It takes the drafts that the drafter made, in a
chain, in parallel or in one call, looks the history of each sequence up, and proposes what it found there. A sequence
in which it found nothing keeps the drafter's own drafts. The choice is made on the device, per sequence and step.

The drafter runs in every step all the same: its cache must hold all accepted tokens when its own drafts are wanted
again, and a step has the same launches whatever its values are. So the pass does not make a step shorter; it makes more
tokens come out of it where the text repeats itself.

Looked-up tokens are point masses. For rules that compare distributions, the state ``point_mass`` says which sequences
have them, so that verification divides by no distribution there.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from specgraph.drafters.lookup import HISTORY, LookupDrafter
from specgraph.drafters.ngram import NGramDrafter
from specgraph.drafters.step import POINT_MASS, DraftStep
from specgraph.drafters.suffix import SuffixDrafter
from specgraph.errors import ConfigError, PassError
from specgraph.ir.program import Program
from specgraph.kernels import step as functions
from specgraph.passes.base import Pass, PassResult, check_option_rule

LOOKUPS: dict[str, type[LookupDrafter]] = {cls.kind: cls for cls in (NGramDrafter, SuffixDrafter)}


@dataclass(frozen=True)
class LookupFirst(Pass, requires={"draft"}, redrafts=True):
    """Options: ``first``, the kind of lookup, or None to leave the graph as it is; ``match``, the tokens at the end of
    a sequence that must have occurred before; ``rule``, the verification rule."""

    first: str | None = None
    match: int = 8
    rule: str = "strict"

    def __post_init__(self) -> None:
        check_option_rule(self.name, self.rule)
        if self.first is not None and self.first not in LOOKUPS:
            raise ConfigError(f"{self.name}: first is one of {', '.join(LOOKUPS)}, or null, not {self.first!r}.")

    @property
    def skipped(self) -> str | None:
        """A reason unless ``first`` is set."""
        return "draft.first is not set" if self.first is None else None

    def apply(self, program: Program) -> PassResult:
        """Append the lookup and the choice behind the drafter's nodes."""
        step = DraftStep(program, self.rule)
        own = step.take_drafts()
        if not own:
            raise PassError(f"{self.name}: {program.drafter.name} makes no drafts; leave draft.first out.")
        found = self._look_up(step)
        chosen = step.propose(functions.prefer_found, found, *own, name="chosen")
        chosen.meta["rule"] = self.rule
        self._keep_point_masses(step, found)
        program.set_output(program.one("logits"), chosen)
        return PassResult(1, expected=1, notes=(f"{self.first} first, where {self.match} tokens match",))

    def _look_up(self, step: DraftStep) -> fx.Node:
        """The drafts ``[B, K]`` that the lookup finds, after the accepted tokens have been recorded."""
        history = step.state("history", HISTORY)
        step.call(functions.record_accepted_, history, step.window, step.emitted, step.start, step.num_emitted,
                  step.rows, name="record_accepted_")  # fmt: skip
        lookup = LOOKUPS[str(self.first)].requiring(step.program.drafter.num_speculative_tokens, self.match)
        lookup.look_up(step, history, step.length, name="found")
        (found,) = step.take_drafts()
        return found

    def _keep_point_masses(self, step: DraftStep, found: fx.Node) -> None:
        """Mark the sequences that have looked-up drafts, if verification asks what the others were drawn from."""
        if "draft_logits" not in step.program.inputs:
            return
        if POINT_MASS in step.program.inputs:
            raise PassError(
                f"{self.name}: {step.program.drafter.name} says itself which drafts are point masses; leave out "
                "draft.first."
            )
        step.keep_point_mass(step.call(functions.any_found, found, name="was_found"))
