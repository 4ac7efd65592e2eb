"""Makes the engines of a decoder, each over a state of its own, and runs their steps in PyTorch's plain mode."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from specgraph.config import Config
from specgraph.drafters.base import chooses_drafts
from specgraph.ir.program import Program
from specgraph.kernels.state import MAX_DRAFTS
from specgraph.kernels.verify import LOSSLESS_RULES
from specgraph.runtime.execution.engine import Engine
from specgraph.runtime.execution.pause import HostTime
from specgraph.runtime.execution.plain_mode import plain_mode
from specgraph.runtime.execution.runner_pool import RunnerPool
from specgraph.runtime.execution.steps import Step
from specgraph.runtime.memory.pages import num_pages
from specgraph.runtime.memory.sizes import StateSizes
from specgraph.runtime.memory.sizing import modest
from specgraph.runtime.schedule.num_drafts import ChoosesDrafts, Longest, Worth, choices
from specgraph.runtime.schedule.policy import Policy
from specgraph.runtime.schedule.prompt_shapes import Overhead
from specgraph.runtime.schedule.recent_acceptance import RecentAcceptance, SharedAcceptance, describe
from specgraph.runtime.schedule.step_costs import StepCosts, TypicalCosts
from specgraph.specialise.end_chains import StepModule
from specgraph.specialise.mode import Mode

SESSION_EOS_IDS = 8
"""For how many EOS ids a sequence of a session has room, unless the model has more."""
SESSION_BIAS_TOKENS = 256
"""For how many tokens of words with a bias a sequence of a session has room."""


@dataclass(frozen=True)
class EngineFactory:
    """What all engines of a decoder share.

    Attributes:
        program: what is decoded.
        config: the decoder's.
        runners: where states come from.
        make_step: gives the variant of the step for a mode.
        host_time: what pauses of steps have cost.
        costs: what decode steps have cost where the host looks at their drafts.
        typical: what they have cost where it does not.
        chosen: how many steps had which K, where it is chosen by what it is worth.
    """

    program: Program
    config: Config
    runners: RunnerPool
    make_step: Callable[[Mode], StepModule]
    host_time: HostTime = field(default_factory=HostTime)
    costs: StepCosts = field(default_factory=StepCosts)
    typical: TypicalCosts = field(default_factory=TypicalCosts)
    chosen: Counter[int] = field(default_factory=Counter)

    @contextlib.contextmanager
    def engine(self, sizes: StateSizes, mode: Mode, *, fair: bool) -> Iterator[Engine]:
        """An engine with a state of its own, which is free for others afterwards. See :class:`Engine` for ``mode``."""
        always_draws = self.config.verify.rule not in LOSSLESS_RULES
        # On a CPU, prompts run through modules as they are, and decode steps through compiled ones.
        joint = not (self.program.compiled and self.program.target.device.type == "cpu")
        chunk = self.config.cache.prefill_chunk
        draft = self.config.draft
        limits = draft.max_context, draft.first is not None
        policy = Policy(chunk, fair, self.overhead, joint, self._drafts_by_load(), self._worth(sizes.rows), *limits)
        with self.plain_mode():
            runner = self.runners.take(sizes)
        engine = Engine(runner, self.make_step, policy, mode, always_draws=always_draws)
        try:
            yield engine
        finally:
            with self.plain_mode():
                # Where closing fails, sequences are still active in the state, and no other session gets it.
                engine.close()
                self.runners.give_back(runner)

    def step(self, engine: Engine) -> Step | None:
        """One step of an engine, behind which the caller's modes are back; None if there is nothing left to do."""
        with self.plain_mode():
            step = engine.step()
        if step is not None and step.host_seconds is not None:
            self.host_time.add(step.host_seconds)
        return step

    @functools.cached_property
    def overhead(self) -> Overhead:
        """What steps cost besides their rows."""
        num_parameters = sum(tensor.numel() for tensor in self.program.tensors())
        return Overhead.of(num_parameters, self.program.target.device.type)

    def session_sizes(self, longest: int, num_eos_ids: int) -> StateSizes:
        """Room for sequences of the ``longest`` length in every row, before memory is looked at; less on a CPU
        (:func:`~specgraph.runtime.memory.sizing.modest`).

        A sequence may have ``num_eos_ids`` EOS ids at least.
        """
        rows, pages = self.config.max_batch_size, num_pages(longest, self.runners.block_size)
        ids = max(SESSION_EOS_IDS, num_eos_ids)
        sizes = StateSizes(rows, pages, rows * pages, longest, ids, SESSION_BIAS_TOKENS)
        return modest(self.program, self.runners.cache, sizes)

    def _drafts_by_load(self) -> dict[int, int | None]:
        """K by the number of sequences in a decode step, None where it is the drafter's own."""
        most, table = self.program.drafter.num_speculative_tokens, self.config.draft.num_speculative_tokens_by_load
        return {count: drafts if drafts < most else None for count, drafts in (table or {}).items()}

    @property
    def adapts(self) -> bool:
        """Whether K is chosen by what it is worth, where ``draft.adaptive`` leaves that open or asks for it."""
        program, config = self.program, self.config
        if not program.drafter.num_speculative_tokens:
            return False
        chosen = chooses_drafts(config.draft, config.verify.rule, program.target.device)
        return chosen and (self._sees_drafts or bool(config.draft.adaptive))

    @property
    def _sees_drafts(self) -> bool:
        """Whether the host may look at drafts: they are functions of the tokens, and there when a step is planned."""
        drafter = self.program.drafter
        return (drafter.looks_up or drafter.least_survival > 0) and not self.program.captured

    def describe(self) -> list[str]:
        """Lines for the report: how K is chosen if it is by what it is worth, and what pauses have cost."""
        return [*self._described_choices(), *self.host_time.describe()]

    def _described_choices(self) -> list[str]:
        if not self.adapts:
            return []
        drafter, numbers, why = self.program.drafter, sorted(self.chosen), list[str]()
        if not self._sees_drafts:
            reason = "by how many drafts were accepted lately, and by what steps have taken"
            why = describe(self._acceptance, self.typical)
        elif not drafter.least_survival:
            numbers, reason = choices(drafter.num_speculative_tokens), "by what its drafts are worth"
        else:
            least = f"{drafter.least_survival:.2g}"
            reason = f"while all drafts are right with a probability of {least}, as the draft sees it"
        among = "; ".join(f"{k} in {self.chosen[k]} steps" for k in numbers)
        return [f"K is chosen for each step, {reason} (draft.adaptive): {among}", *why]

    @functools.cached_property
    def _acceptance(self) -> SharedAcceptance:
        """What all sequences have shown of drafts."""
        return SharedAcceptance(self.program.drafter.num_speculative_tokens)

    def _worth(self, num_state_rows: int) -> ChoosesDrafts | None:
        drafter = self.program.drafter
        if not self.adapts:
            return None
        if not self._sees_drafts:
            # On a CPU, packed rows run through modules that are not compiled.
            kinds = {"ragged": self.program.captured, "limited": MAX_DRAFTS in self.program.inputs}
            return RecentAcceptance(num_state_rows, self._acceptance, self.typical, self.chosen, **kinds)
        if drafter.least_survival:
            return Longest(self.chosen)
        return Worth(drafter.num_speculative_tokens, self.costs, self.chosen)

    def plain_mode(self) -> contextlib.AbstractContextManager[None]:
        """What decoding enters, whatever its caller has entered."""
        return plain_mode(self.program.target.device)
