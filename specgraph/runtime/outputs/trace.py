"""What happened to every draft of a call: ``generate(trace=True)``."""

from __future__ import annotations

import json
import math
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from specgraph.runtime.execution.results import TracedRow
from specgraph.runtime.execution.steps import Output, Step
from specgraph.runtime.schedule.num_drafts import Reasons

FORMAT = 1
"""The version of the lines that :meth:`Trace.to_json_lines` gives."""
_GREEN, _RED, _DIM, _OFF = "\033[32m", "\033[31;9m", "\033[2m", "\033[0m"


@dataclass(frozen=True)
class TracedDraft:
    """A draft that a step verified.

    Attributes:
        token: its id.
        accepted: whether the step emitted it.
        target_probability: under the target at its place, after the drafts before it and all options of the request;
            at temperature 1 for a greedy sequence. Behind a rejected draft, that is of a text that nobody wrote.
        draft_probability: what it was drawn with, in the same sense; None if it was not drawn, as by a lookup.
        target_rank: its rank among all tokens by the target's logits, after processors and before temperature and
            truncation: 1 is the token that the target would choose greedily.
    """

    token: int
    accepted: bool
    target_probability: float
    draft_probability: float | None
    target_rank: int


@dataclass(frozen=True)
class TracedStep:
    """What one step did for one sequence.

    Attributes:
        step: the number of the step, from 0. Steps are counted through all sequences.
        sequence: the place of the sequence among all.
        position: of the first token that it emitted, padding not counted.
        drafts: those that it verified, in order.
        tokens: those that it emitted: the accepted drafts, and one that the target chose by itself, unless an accepted
            draft is an EOS, or the sequence failed behind it because no token was left.
        seconds: from the end of the step before it to its own.
        prompt: whether it ran the rest of a prompt, so that there were no drafts.
        own_probability: that of :attr:`own_token` under the target, in the same sense as a draft's and at the same
            place as that of the rejected draft; None if there is no such token.
        own_rank: its rank, in the same sense as a draft's.
        why: what the choice of K followed from, by the times of traced steps; None if K was not chosen by that.
    """

    step: int
    sequence: int
    position: int
    drafts: tuple[TracedDraft, ...]
    tokens: tuple[int, ...]
    seconds: float
    prompt: bool = False
    own_probability: float | None = None
    own_rank: int | None = None
    why: Reasons | None = None

    @property
    def rejected(self) -> TracedDraft | None:
        """The first draft that was not accepted."""
        return next((draft for draft in self.drafts if not draft.accepted), None)

    @property
    def num_accepted(self) -> int:
        """How many drafts were accepted."""
        return sum(draft.accepted for draft in self.drafts)

    @property
    def own_token(self) -> int | None:
        """The token that the target chose by itself; None if the sequence ended with an accepted draft."""
        return self.tokens[-1] if len(self.tokens) > self.num_accepted else None


class Trace(Sequence[TracedStep]):
    """The steps of a call, in the order in which they ran; one item for each step and sequence in it.

    They are put together when somebody looks at them, so that a call spends no time on it.

    Attributes:
        prompts: the token ids of every sequence's prompt.
        about: the target, the drafter, the verification rule, K, and the temperature of every sequence (0 is greedy).
    """

    def __init__(self, prompts: Sequence[Sequence[int]], about: dict[str, Any]) -> None:
        self.prompts, self.about = prompts, about
        self._lengths = [*map(len, prompts)]
        self._known: list[TracedStep] = []
        self._lock = threading.Lock()
        self._waiting: deque[Step] = deque()
        self._made: dict[int, TracedRow] = {}
        """What the last step said of every sequence: its drafts are those that the next step verifies."""
        self._number = 0

    @overload
    def __getitem__(self, index: int) -> TracedStep: ...
    @overload
    def __getitem__(self, index: slice) -> list[TracedStep]: ...
    def __getitem__(self, index: int | slice) -> TracedStep | list[TracedStep]:
        return self._steps[index]

    def __len__(self) -> int:
        return len(self._steps)

    def __repr__(self) -> str:
        return f"Trace({len(self)} steps of {len(self.prompts)} sequences, {self.about})"

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has all that is known, and gets no more."""
        return type(self), (self.prompts, self.about), None, iter(self._steps)

    @property
    def _steps(self) -> list[TracedStep]:
        with self._lock:
            self._known.extend(self._read())
            return self._known

    def add(self, step: Step) -> None:
        """Take note of a step."""
        self._waiting.append(step)

    def append(self, step: TracedStep) -> None:
        """Add what a step did for a sequence, which is how a trace is copied."""
        self._known.append(step)

    def of(self, sequence: int) -> list[TracedStep]:
        """The steps of one sequence."""
        return [step for step in self._steps if step.sequence == sequence]

    def to_json_lines(self, tokenizer: Any = None) -> Iterator[str]:
        """A line with what the trace is about, and one for each step and sequence.

        ``tokenizer`` adds the texts of prompts and tokens. A probability that is not known is null.
        """
        about: dict[str, Any] = {"trace": FORMAT, **self.about, "prompts": [[*map(int, own)] for own in self.prompts]}
        if tokenizer is not None:
            about["texts"] = [tokenizer.decode(own) for own in about["prompts"]]
        yield json.dumps(about)
        for step in self._steps:
            yield json.dumps(_record(step, tokenizer))

    def save(self, file: str | Path, tokenizer: Any = None) -> Path:
        """Write :meth:`to_json_lines` to a file, which is written over."""
        path = Path(file)
        path.write_text("".join(f"{line}\n" for line in self.to_json_lines(tokenizer)), encoding="utf-8")
        return path

    def text(self, tokenizer: Any = None, *, color: bool | None = None) -> str:
        """For people: a line for each step, with accepted drafts in green and the rejected one struck through in red.

        Behind a rejected draft stand its probability and its rank under the target, and its probability under the
        drafter. Behind the token that the target chose instead stand its probability and its rank under the target.
        Drafts behind a rejected one are dimmed. Without ``color``, an accepted draft stands in brackets, and one that
        was not between tildes; None is with colours if standard output is a terminal. Without ``tokenizer``, tokens are
        numbers.
        """
        color = sys.stdout.isatty() if color is None else color
        lines = [[f"sequence {sequence}"] for sequence in range(len(self.prompts))]
        for step in self._steps:
            lines[step.sequence].append(_line(step, tokenizer, color=color))
        return "\n".join(line for own in lines for line in own)

    def _read(self) -> Iterator[TracedStep]:
        """What the steps did that were noted since this was called last."""
        while self._waiting:
            step = self._waiting.popleft()
            for output in step.outputs:
                if output.traced is None:
                    continue
                traced = output.traced.read()
                if output.tokens:
                    yield self._step(step, output, traced)
                self._made[output.number] = traced
            self._number += step.ran

    def _step(self, step: Step, output: Output, traced: TracedRow) -> TracedStep:
        number, tokens = output.number, tuple(output.tokens)
        made = self._made.get(number) if output.decoding else None
        drafts = [] if made is None else [*zip(made.drafts[: output.drafts], made.drawn, strict=False)]
        # Behind these ends nothing is emitted, so also no token of the target's own.
        ended = output.finish_reason in ("eos", "stop", "error")
        judged = tuple(
            TracedDraft(token, _is_accepted(place, token, tokens, ended=ended), math.exp(traced.verified[place]),
                        _probability(drawn), traced.ranks[place])
            for place, (token, drawn) in enumerate(drafts)
        )  # fmt: skip
        position = self._lengths[number]
        self._lengths[number] += len(tokens)
        own, rank = own_standing(judged, tokens, traced)
        seconds, prompt, why = step.seconds, not output.decoding, step.why if output.decoding else None
        return TracedStep(self._number, number, position, judged, tokens, seconds, prompt, own, rank, why)


def _record(step: TracedStep, tokenizer: Any) -> dict[str, Any]:
    drafts = [
        {
            "token": draft.token,
            **({} if tokenizer is None else {"text": tokenizer.decode([draft.token])}),
            "accepted": draft.accepted,
            "target": _known(draft.target_probability),
            "rank": draft.target_rank,
            "draft": _known(draft.draft_probability),
        }
        for draft in step.drafts
    ]
    record = {
        "step": step.step, "sequence": step.sequence, "position": step.position, "seconds": step.seconds,
        "prompt": step.prompt, "drafts": drafts, "tokens": [*step.tokens],
        "own": _known(step.own_probability), "own_rank": step.own_rank,
        "why": None if step.why is None else step.why.to_record(),
    }  # fmt: skip
    return record if tokenizer is None else record | {"texts": [tokenizer.decode([token]) for token in step.tokens]}


def _known(probability: float | None) -> float | None:
    return None if probability is None or math.isnan(probability) else probability


def _line(step: TracedStep, tokenizer: Any, *, color: bool) -> str:
    parts, behind = [], False
    for draft in step.drafts:
        shown = _shown(draft.token, tokenizer)
        if draft.accepted:
            parts.append(f"{_GREEN}{shown}{_OFF}" if color else f"[{shown}]")
        elif behind:
            parts.append(f"{_DIM}{shown}{_OFF}" if color else f"~{shown}~")
        else:
            drawn = "" if draft.draft_probability is None else f", draft {draft.draft_probability:.2g}"
            why = f"(target {draft.target_probability:.2g}, rank {draft.target_rank}{drawn})"
            parts.append(f"{_RED}{shown}{_OFF} {why}" if color else f"~{shown}~ {why}")
            behind = True
    own = step.own_token
    if own is not None:
        why = "" if step.rejected is None else f" (target {step.own_probability:.2g}, rank {step.own_rank})"
        parts.append(_shown(own, tokenizer) + why)
    return f"{step.step:6d} {1e3 * step.seconds:8.2f} ms  {' '.join(parts)}"


def _shown(token: int, tokenizer: Any) -> str:
    """A token on one line, with its spaces visible."""
    if tokenizer is None:
        return str(token)
    return tokenizer.decode([token]).replace("\n", "\\n").replace("\t", "\\t").replace(" ", "·")


def _is_accepted(place: int, token: int, emitted: Sequence[int], *, ended: bool) -> bool:
    """Whether a step emitted a draft: the last token that it emits is the target's own, unless it ends a sequence."""
    last = len(emitted) - 1
    return place < last or (place == last and ended and emitted[last] == token)


def own_standing(
    drafts: Sequence[TracedDraft], emitted: Sequence[int], traced: TracedRow
) -> tuple[float, int] | tuple[None, None]:
    """The probability and the rank of the token that the target chose by itself.

    The step says them of the last token that it emitted. Where the host has cut what it emitted, that is another token.
    The last one that is left is then a draft.
    """
    place = len(emitted) - 1
    if place < len(drafts) and (draft := drafts[place]).token == emitted[place]:
        return (None, None) if draft.accepted else (draft.target_probability, draft.target_rank)
    return math.exp(traced.last), traced.last_rank


def _probability(logprob: float) -> float | None:
    return None if math.isnan(logprob) else math.exp(logprob)
