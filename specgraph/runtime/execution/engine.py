"""Decodes sequences in the rows of one state: carries out what a scheduler plans.

Each step is over just the sequences that it concerns, so nothing that a sequence emits depends on what runs beside it.
Steps are enqueued ``lag`` ahead of the one that is read. A row is free as soon as the end of its sequence has been
read: steps that are under way then find it inactive.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from specgraph.errors import BusyError, InputError
from specgraph.kernels.state import FIRST_HIDDEN, MAX_DRAFTS
from specgraph.kernels.step.tokens import NAN_FOUND
from specgraph.runtime.execution.pause import Pause, Paused
from specgraph.runtime.execution.results import DraftTraceView
from specgraph.runtime.execution.runner import Runner
from specgraph.runtime.execution.steps import InFlightStep, Output, Step
from specgraph.runtime.memory.pages import known_tokens, num_pages
from specgraph.runtime.memory.state_rows import Admission
from specgraph.runtime.requests.request import Request
from specgraph.runtime.schedule.num_drafts import Choice
from specgraph.runtime.schedule.policy import Policy
from specgraph.runtime.schedule.prefill import prompt_window
from specgraph.runtime.schedule.scheduler import Entry, Plan, Scheduler
from specgraph.runtime.schedule.sequences import ActiveSequence, Phase
from specgraph.specialise.end_chains import StepModule
from specgraph.specialise.mode import Mode


class Engine:
    """Sequences in the rows of a runner's state.

    :meth:`submit` and :meth:`cancel` may be called from any thread; :meth:`step` from one at a time.
    """

    def __init__(
        self, runner: Runner, make_step: Callable[[Mode], StepModule], policy: Policy, mode: Mode, *,
        always_draws: bool = False,
    ) -> None:  # fmt: skip
        """``make_step`` gives the variant of the step for a mode. ``mode`` is what all sequences get of their steps:
        the kind of log-probabilities, and whether these say what happens to drafts.

        ``always_draws``: the rule draws noise at temperature 0, too.
        """
        self._runner, self._make_step, self._policy = runner, make_step, policy
        self._asked, self._always_draws = mode, always_draws
        self.memory, self.pages = runner.memory, runner.pages
        num_state_rows = self.memory.sizes.rows
        self._free_state_rows = list(range(num_state_rows))
        self._waiting: deque[ActiveSequence] = deque()
        self._cancelled: deque[int] = deque()
        self._ended: list[Output] = []
        self._running: dict[int, ActiveSequence] = {}
        """By state row, in the order in which they entered."""
        self._width = runner.width
        """Rows of a decode step with the drafter's own K."""
        choose_drafts = None if policy.worth is None else self._worthwhile_drafts
        self._scheduler = Scheduler(policy, self.pages, num_state_rows, runner.width, choose_drafts)
        self._under_way: deque[InFlightStep] = deque()
        self._unused: tuple[str, ...] = ()
        self._mode: Mode | None = None
        self._reused_tokens, self._num_captured = 0, runner.num_captured
        self._lock = threading.Lock()
        self._begin = time.perf_counter()

    # What any thread may call

    def submit(self, number: int, request: Request, max_waiting: int | None = None) -> None:
        """Decode a sequence as soon as there is room for it.

        Raises:
            InputError: it is too large for this engine, even alone.
            BusyError: ``max_waiting`` sequences wait already, beside those for which there are rows.
        """
        self._check(request)
        with self._lock:
            if max_waiting is not None and len(self._waiting) >= max_waiting + len(self._free_state_rows):
                raise BusyError(
                    f"{len(self._waiting)} sequences wait already, and this session lets {max_waiting} wait for a row; "
                    "try again later, or open it with a larger max_waiting."
                )
            if request.has_room:
                self._waiting.append(ActiveSequence(number, request))
            else:
                self._ended.append(Output(number, finish_reason=request.limit_reason))

    def cancel(self, number: int) -> None:
        """End a sequence before its time; nothing happens if it has ended, or never was."""
        with self._lock:
            self._cancelled.append(number)

    @property
    def idle(self) -> bool:
        """Whether :meth:`step` has nothing to do."""
        with self._lock:
            return not (self._waiting or self._cancelled or self._ended or self._running)

    @property
    def num_free_rows(self) -> int:
        """How many rows no sequence has."""
        return len(self._free_state_rows)

    @property
    def num_waiting(self) -> int:
        """How many sequences have no row yet."""
        return len(self._waiting)

    # What one thread calls

    def active(self) -> contextlib.AbstractContextManager[None]:
        """What steps enter, to be entered around many of them; no code of others may run inside."""
        return self._runner.active()

    def close(self) -> None:
        """End everything: pages that outlive this engine are free again."""
        self._halt(list(self._running.values()))

    def step(self) -> Step | None:
        """Enqueue a step and read one; None if there is nothing left to do."""
        if not self._under_way and not self._running:
            self._begin = time.perf_counter()
        while True:
            if ended := self._take_ended():
                return Step(ended, 0, 0.0, ran=False)
            plan = self._plan()
            if not self._running:
                # What is enqueued behind the last step has no active sequence, so it is not read.
                self._under_way.clear()
                return None
            # No step is under way where the host must know what the last one emitted.
            lag = 0 if any(s.request.host for s in self._running.values()) else self._runner.lag
            if plan.sequences and len(self._under_way) <= lag:
                with self._runner.active():
                    self._under_way.append(self._enqueue(plan))
                if len(self._under_way) <= lag:
                    continue
            return self._read(self._under_way.popleft())

    def _check(self, request: Request) -> None:
        sizes, needed = self.memory.sizes, num_pages(request.limit, self.pages.block_size)
        most = min(sizes.num_pages, sizes.pages_per_sequence)
        if needed > most:
            raise InputError(
                f"A sequence of {request.limit} tokens needs {needed} pages of the KV cache, and there are "
                f"{most}; ask for fewer tokens, or for a larger pool (cache.pool_tokens)."
            )
        missing = sorted(request.processing.state.keys() - self._runner.state.keys())
        if missing:
            raise InputError(
                f"A sequence asks for {', '.join(missing)}, which this step has no nodes for; compile with "
                "insert_processors in pipeline.order."
            )
        if (tokens := len(request.initial_state.get("bias_tokens", ()))) > sizes.bias_tokens:
            raise InputError(
                f"A sequence has biases for words of {tokens} tokens, and there is room for {sizes.bias_tokens}; give "
                "fewer, or use generate, which makes room."
            )
        if len(request.eos_ids) > sizes.eos_ids:
            raise InputError(
                f"A sequence has {len(request.eos_ids)} EOS ids, and there is room for {sizes.eos_ids}; give fewer."
            )

    def _plan(self) -> Plan:
        """What happens next, with the sequences that enter in their state rows."""
        with self._lock:  # no more are needed to see whether there are more than can enter
            first = [*itertools.islice(self._waiting, len(self._free_state_rows) + 1)]
        plan = self._scheduler.plan(first, self._running.values(), self._free_state_rows)
        for _ in plan.entering:
            self._waiting.popleft()
        if plan.entering:
            self._enter(plan.entering)
        return plan

    def _enter(self, entering: Sequence[Entry]) -> None:
        """Begin sequences in their state rows."""
        self._choose_options([new.sequence.request for new in entering], fresh=not self._running)
        admissions = []
        for sequence, row, reserved, prompt in entering:
            sequence.phase, sequence.state_row = Phase.PREFILL, row
            sequence.reserved, sequence.prompt = reserved, prompt
            self._running[row] = sequence
            admissions.append(Admission(row, sequence.request, reserved.pages, prompt.done, reserved.snapshot))
            self._reused_tokens += prompt.done
        if self._policy.worth is not None:
            self._policy.worth.begin([new.state_row for new in entering])
        del self._free_state_rows[: len(entering)]
        self._runner.admit(admissions)

    def _choose_options(self, requests: list[Request], *, fresh: bool) -> None:
        """Let steps have what these requests and, unless they are the first, those beside them make use of."""
        unused = frozenset.intersection(*(request.unused(always_draws=self._always_draws) for request in requests))
        self._unused = tuple(sorted(unused if fresh else unused & {*self._unused}))

    def _choose_mode(self, plan: Plan) -> None:
        """Run the variant of the step for what is planned, and for the options in use."""
        worth = self._policy.worth
        packed, drafts = plan.packed, plan.choice.drafts
        ahead = worth is not None and worth.ahead and (self._policy.looks_up or not plan.plain)
        if (packed and (ahead or MAX_DRAFTS in self._runner.state)) or (ahead and self._asked.traced):
            drafts = None  # packed rows are real ones alone, and a trace has a place for every draft that is made
        paused, plain = bool(plan.hosted), plan.plain
        completed = FIRST_HIDDEN in self._runner.state and not plan.prompts
        mode = self._asked._replace(
            unused=self._unused, drafts=drafts, paused=paused, packed=packed, completed=completed, ahead=ahead,
            plain=plain,
        )  # fmt: skip
        if mode != self._mode:
            self._mode = mode
            self._runner.use(mode, self._make_step(mode))

    def _enqueue(self, plan: Plan) -> InFlightStep:
        """Run one more step: over prompts, and over what the last steps have laid out for sequences that decode."""
        for sequence in plan.decoding:
            sequence.tokens_left -= 1
        self._choose_mode(plan)
        step = self._enqueue_packed(plan) if plan.packed else self._enqueue_decoding(plan)
        self._scheduler.ran(plan, step.results.width)
        if (worth := self._policy.worth) is None:
            return step
        worth.stop([sequence.state_row for sequence in plan.decoding if self._policy.undrafted(sequence)])
        rows, kind = [sequence.state_row for sequence in plan.sequences], self._kind(plan.sequences)
        noted = worth.enqueued(kind, rows, len(plan.prompts), step.drafts, plan.choice.each)
        return dataclasses.replace(step, noted=noted)

    def _enqueue_decoding(self, plan: Plan) -> InFlightStep:
        worth, decoding = self._policy.worth, plan.sequences
        pause, begin = self._pause(plan), time.perf_counter()
        results = self._runner.decode([s.state_row for s in decoding], pause)
        if worth is not None and not self._asked.traced:
            seconds = time.perf_counter() - begin - (0.0 if pause is None else pause.seconds)
            worth.learn(self._kind(decoding), len(decoding) * results.width, seconds)
        verified = results.width - 1 if plan.choice.drafts is None else plan.choice.drafts
        return InFlightStep(results, plan, pause=pause, drafts=verified)

    def _learn(self, under_way: InFlightStep, num_emitted: Sequence[int], seconds: float) -> None:
        """Tell what chooses K of a step that has emitted so many tokens of each sequence.

        While a graph is captured, the step under way ends and waits to be read, so its time says nothing.
        """
        before, self._num_captured = self._num_captured, self._runner.num_captured
        if (worth := self._policy.worth) is not None:
            alone = under_way.pause is None and not under_way.plan.prompts and before == self._num_captured
            worth.read(under_way.noted, num_emitted, seconds if alone else None)

    def _worthwhile_drafts(self, decoding: Sequence[ActiveSequence]) -> Choice:
        """What the next step verifies of sequences that decode, by what their drafts are worth."""
        worth, rows = self._policy.worth, [s.state_row for s in decoding]
        assert worth is not None, "without it, K depends on the number of sequences alone"
        if not worth.ahead:
            return worth.choose(self._kind(decoding), decoding, ())
        choice = worth.choose(self._kind(decoding), decoding, self._runner.real_drafts(rows))
        assert choice.drafts is not None, "what looks at drafts says how many are verified"
        self._runner.keep_drafts(rows, choice.drafts)
        return choice

    def _kind(self, sequences: Sequence[ActiveSequence]) -> tuple[object, ...]:
        """What distinguishes steps whose rows cost more from others."""
        traced = self._asked.traced and not (self._policy.worth and self._policy.worth.ahead)
        return self._asked.logprobs, self._unused, traced, self._policy.all_too_long(sequences)

    def _pause(self, plan: Plan, forced: Sequence[int] = ()) -> Pause | None:
        """What the host has to do in a step, whose first sequences are ``forced`` if it runs their prompts."""
        own = plan.hosted
        if not own:
            return None
        count = len(forced)
        decoding = [s.state_row for entry, s in own if entry >= count]
        drafts = iter(self._runner.drafts(decoding) if decoding else [])
        parts = [(n, s, [] if n < count else next(drafts), forced[n] if n < count else 0) for n, s in own]
        return Pause([Paused(n, s.request, s.new_tokens, known, given) for n, s, known, given in parts])

    def _enqueue_packed(self, plan: Plan) -> InFlightStep:
        drafts = self._width - 1 if plan.choice.drafts is None else plan.choice.drafts
        parts = [(s.state_row, s.prompt, count) for s, count in plan.prompts.items()]
        num_rows = plan.choice.num_rows(len(plan.decoding), self._width - 1)
        decoding = dict(zip([s.state_row for s in plan.decoding], num_rows, strict=True))
        chunk = prompt_window(parts, decoding, self._width if parts else self._runner.width)
        pause = self._pause(plan, chunk.forced)
        results = self._runner.wide(chunk, pause)
        reached = [(self._running[row], boundary) for row, boundary in chunk.reached]
        self._runner.keep_states((s.reserved, s.request.prompt, s.state_row, boundary) for s, boundary in reached)
        # Whoever shares these pages runs behind this step.
        for sequence in plan.prompts:
            if sequence not in plan.going_on:
                sequence.phase = Phase.DECODE
                sequence.tokens_left = sequence.request.limit - sequence.request.prompt.numel() - 1
                self.pages.offer(sequence.reserved, sequence.request.prompt)
        return InFlightStep(results, plan, chunk.forced, chunk.num_tokens, pause, drafts)

    def _take_ended(self) -> list[Output]:
        """The ends of sequences without a step: of those that have no room for a token, and of those that are to be
        cancelled, whether they wait or run."""
        found = list[ActiveSequence]()
        with self._lock:
            if self._cancelled:
                numbers = {*self._cancelled}
                found = [s for s in (*self._waiting, *self._running.values()) if s.number in numbers]
                self._waiting = deque(s for s in self._waiting if s.number not in numbers)
                self._cancelled.clear()
                self._ended += [Output(s.number, finish_reason="cancelled") for s in found]
        self._halt([s for s in found if s.phase is not Phase.WAITING])
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def _halt(self, sequences: list[ActiveSequence]) -> None:
        """Stop sequences that could go on, on the device, too."""
        if sequences:
            self._runner.stop([s.state_row for s in sequences])
        for sequence in sequences:
            self._leave(sequence)

    def _leave(self, sequence: ActiveSequence) -> None:
        """Free the state row and the pages of a sequence that has ended."""
        decoded, sequence.phase = sequence.phase is Phase.DECODE, Phase.DONE
        self._scheduler.ended()
        self.memory.earlier.add(sequence.new_tokens)
        if decoded and self.pages.reuses:
            self.pages.offer(sequence.reserved, known_tokens(sequence.request.prompt, sequence.new_tokens))
        self.pages.give_back(sequence.reserved)
        del self._running[sequence.state_row]
        bisect.insort(self._free_state_rows, sequence.state_row)

    def _read(self, under_way: InFlightStep) -> Step:
        """Wait for a step, and tell what it meant for each of its sequences that has not ended before."""
        sequences, num_prompts = under_way.plan.sequences, len(under_way.forced)
        read = under_way.results.read(len(sequences), logprobs=self._asked.logprobs != "none")
        told = under_way.results.trace(len(sequences)) if self._asked.traced else None
        pause, going_on = under_way.pause, under_way.plan.going_on
        outputs, broken, failed = [], [], list[ActiveSequence]()
        # What stands in this loop is paid for every token, on a host that has to keep up with the device.
        for place, sequence in enumerate(sequences):
            if sequence.phase is Phase.DONE:
                continue
            bad = read.bad[place]
            if bad == NAN_FOUND:
                broken.append(sequence)
                continue
            tokens, logprobs, left = read.tokens[place], read.logprobs[place], read.num_rows[place]
            given = under_way.forced[place] if place < num_prompts else 0
            if given:  # the last tokens were read; how many of them come before those that were not forced?
                before = max(0, len(tokens) + given - read.num_emitted[place])
                tokens, logprobs = tokens[before:], logprobs[before:]
            error = None
            if bad or (pause and pause.errors):
                right, error = under_way.refused(place, bad, given, len(tokens))
                tokens, logprobs = tokens[:right], logprobs[:right]
            sequence.new_tokens += tokens
            if sequence.outlook is not None:
                sequence.outlook.judge(sequence.new_tokens)
            if pause and sequence not in going_on:
                for processor in sequence.request.host:
                    processor.emitted(len(tokens))
            reason = None
            if error is not None:
                reason = "error"
                failed.append(sequence)
            elif not left and sequence not in going_on:
                request = sequence.request
                reason = "eos" if tokens and tokens[-1] in request.eos_ids else request.limit_reason
                self._leave(sequence)
            decoding = place >= num_prompts and len(tokens) > 0
            traced = None if told is None else DraftTraceView(told, place, max(left - 1, 0))
            rest = read.confidence[place], reason, error, traced, under_way.verified(place)
            outputs.append(Output(sequence.number, tokens, logprobs, decoding, *rest))
        self._halt([*broken, *failed])
        if broken:
            self.pages.forget()  # nobody shall find a NaN there
        unless = ", unless its logits processors have made them so"
        errors = [self._runner.not_a_number(sequence.number, unless) for sequence in broken]
        outputs += [Output(s.number, finish_reason="error", error=e) for s, e in zip(broken, errors, strict=True)]
        begin, self._begin = self._begin, time.perf_counter()
        reused, self._reused_tokens = self._reused_tokens, 0
        seconds, drafts = self._begin - begin, under_way.drafts
        self._learn(under_way, read.num_emitted, seconds)
        waited = None if pause is None else pause.seconds
        ran = under_way.prompt_tokens, seconds, drafts
        return Step(outputs, *ran, reused_tokens=reused, host_seconds=waited, why=under_way.plan.choice.why)
