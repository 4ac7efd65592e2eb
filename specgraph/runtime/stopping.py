"""Ends sequences where a caller's stopping criteria say so.

Criteria run on the host, after a step was read and before the next one is enqueued. A sequence that stops is cancelled;
what steps emit for it after that is dropped.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.generation import MaxTimeCriteria, StopStringCriteria

from specgraph.errors import InputError
from specgraph.runtime.engine import Engine
from specgraph.runtime.requests import Request
from specgraph.runtime.steps import Output, Step
from specgraph.runtime.text import check_tokenizer
from specgraph.runtime.values import check_function, name_of

Criterion = Callable[[Tensor, Any], Any]
"""As transformers' ``StoppingCriteria``: of the tokens int64 ``[1, S]`` of a sequence and of scores, which are always
None here, whether it ends with the last of them."""


def read_criteria(given: Any) -> list[Criterion]:
    """The criteria that a caller gives: one, several, or None.

    Raises:
        InputError: something among them cannot be called.
    """
    # transformers' list of criteria can be called itself, but looks at a whole batch.
    several = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
    for criterion in several:
        what = "a StoppingCriteria of transformers or a list of them"
        check_function("stopping_criteria", what, criterion, "tokens", "scores")
    return several


def read_stop_strings(given: Any) -> list[str]:
    """The stop strings that a caller gives: one, several, or None.

    Raises:
        InputError: they are no strings.
    """
    strings = [given] if isinstance(given, str) else [] if given is None else given
    if not isinstance(strings, list | tuple | Set) or not all(isinstance(text, str) and text for text in strings):
        raise InputError(f"stop_strings is a text or a list of texts that are not empty, not {strings!r}.")
    return list(strings)


def stop_criteria(strings: list[str], tokenizer: Any, seconds: float | None) -> list[Criterion]:
    """Criteria that end a sequence behind one of ``strings``, and every sequence after so many seconds from now.

    Raises:
        InputError: there is no tokenizer that could read the strings, or transformers cannot look for them with this
            one.
    """
    criteria: list[Criterion] = []
    if strings and tokenizer is None:
        raise InputError("stop_strings needs the model's tokenizer; pass it as tokenizer=.")
    if strings:
        criteria.append(_stop_strings(strings, tokenizer))
    if seconds is not None:
        criteria.append(MaxTimeCriteria(max_time=seconds))
    return criteria


_KEPT, _LOCK = 32, threading.Lock()
_MADE: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], Criterion]] = weakref.WeakKeyDictionary()
"""The last criteria of each tokenizer, since making one reads the whole vocabulary: 20 ms for 3,072 tokens, which the
requests of a server would all wait for."""


def _stop_strings(strings: list[str], tokenizer: Any) -> Criterion:
    check_tokenizer(tokenizer)
    if not hasattr(tokenizer, "__len__"):
        return _stop_criterion(strings, tokenizer)
    key = len(tokenizer), *strings  # whoever adds tokens gets another criterion
    with _LOCK:
        made = _MADE.setdefault(tokenizer, {})
        criterion = made.pop(key, None) or _stop_criterion(strings, tokenizer)
        made[key] = criterion  # behind all others, of which the first is the one that was used the longest time ago
        while len(made) > _KEPT:
            del made[next(iter(made))]
    return criterion


def _stop_criterion(strings: list[str], tokenizer: Any) -> Criterion:
    try:
        criterion: Criterion = StopStringCriteria(stop_strings=strings, tokenizer=tokenizer)
    except (ValueError, IndexError) as error:
        reason = str(error).strip().splitlines()[0].split(". ")[0].rstrip(".")
        raise InputError(
            f"transformers cannot look for the stop_strings {strings} with this {type(tokenizer).__name__} ({reason}); "
            "give a stopping criterion that looks for them."
        ) from error
    return criterion


@dataclass
class _Watched:
    """What criteria see of a sequence: the first ``length`` of ``tokens`` int64 ``[S]``."""

    criteria: Sequence[Criterion]
    tokens: Tensor
    length: int

    def keep(self, tokens: Sequence[int]) -> int | None:
        """Show the criteria one token after the other; how many there are up to the one that ends the sequence."""
        for count, token in enumerate(tokens, start=1):
            self.tokens[self.length] = token
            self.length += 1
            seen = self.tokens[: self.length].unsqueeze(0)
            if any(_says_stop(criterion, seen) for criterion in self.criteria):
                return count
        return None


class Stopping:
    """Ends sequences of an engine whose criteria say so.

    A criterion is asked for every token, with the prompt as it was given and all new tokens up to this one, so a
    sequence ends where it would without drafts.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._watched: dict[int, _Watched] = {}
        self._stopped: set[int] = set()

    def add(self, number: int, request: Request, criteria: Sequence[Criterion]) -> None:
        """Watch a sequence that is about to be submitted. May be called from any thread."""
        if criteria:
            self._watched[number] = _Watched(criteria, _with_room(request), request.given.numel())

    def drop(self, number: int) -> None:
        """Forget a sequence that was not submitted after all."""
        self._watched.pop(number, None)

    def cut(self, step: Step) -> Step:
        """A step in which sequences end where a criterion says so, and in which those that have ended do not occur."""
        if not self._watched and not self._stopped:
            return step
        return replace(step, outputs=[self._cut(output) for output in step.outputs if not self._is_over(output)])

    def _is_over(self, output: Output) -> bool:
        """Whether a criterion has ended this sequence before. The last output of such a sequence says that the engine
        has cancelled it."""
        over = output.number in self._stopped
        if over and output.finish_reason is not None:
            self._stopped.discard(output.number)
        return over

    def _cut(self, output: Output) -> Output:
        """An output up to the token at which a criterion ends the sequence, if one does."""
        number, watched = output.number, self._watched.get(output.number)
        if watched is None:
            return output
        count, reason = watched.keep(output.tokens), output.finish_reason
        if count is not None and reason is None:
            self._stopped.add(number)
            self._engine.cancel(number)
        if count is not None or reason is not None:
            del self._watched[number]
        if count is None:
            return output
        reason = reason if reason and count == len(output.tokens) else "stop"
        return output._replace(tokens=output.tokens[:count], logprobs=output.logprobs[:count], finish_reason=reason)


def _says_stop(criterion: Criterion, seen: Tensor) -> bool:
    answer = criterion(seen, None)
    try:
        said = torch.as_tensor(answer)
    except (TypeError, ValueError, RuntimeError):
        said = torch.empty(0)
    if said.numel() != 1:
        gave = f"a tensor {list(answer.shape)}" if isinstance(answer, Tensor) else repr(answer)
        raise InputError(
            "A stopping criterion is asked for one sequence at a time and answers with one bool for it; "
            f"{name_of(criterion)} gave {gave:.60}."
        )
    return bool(said)


def _with_room(request: Request) -> Tensor:
    """A prompt with room for what its sequence adds at most."""
    return torch.cat([request.given, request.given.new_zeros(request.limit - request.prompt.numel())])
