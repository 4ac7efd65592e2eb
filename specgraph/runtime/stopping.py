"""Ends sequences where a caller's stopping criteria say so.

Criteria run on the host, after a step was read and before the next one is enqueued. A sequence that stops is cancelled;
what steps emit for it after that is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.generation import MaxTimeCriteria, StopStringCriteria

from specgraph.errors import InputError
from specgraph.runtime.engine import Engine
from specgraph.runtime.requests import Batch, Request
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


def stop_criteria(strings: Any, tokenizer: Any, seconds: float | None) -> list[Criterion]:
    """Criteria that end a sequence behind one of ``strings``, and every sequence after so many seconds from now.

    Raises:
        InputError: there is no tokenizer that could read the strings, or transformers cannot look for them with this
            one, or they are no strings.
    """
    criteria: list[Criterion] = []
    strings = [strings] if isinstance(strings, str) else [] if strings is None else strings
    if not isinstance(strings, list | tuple | Set) or not all(isinstance(text, str) and text for text in strings):
        raise InputError(f"stop_strings is a text or a list of texts that are not empty, not {strings!r}.")
    if strings and tokenizer is None:
        raise InputError("stop_strings needs the model's tokenizer; pass it as tokenizer=.")
    if strings:
        criteria.append(_stop_strings(list(strings), tokenizer))
    if seconds is not None:
        criteria.append(MaxTimeCriteria(max_time=seconds))
    return criteria


def _stop_strings(strings: list[str], tokenizer: Any) -> Criterion:
    check_tokenizer(tokenizer)
    try:
        criterion: Criterion = StopStringCriteria(stop_strings=strings, tokenizer=tokenizer)
    except (ValueError, IndexError) as error:
        reason = str(error).strip().splitlines()[0].split(". ")[0].rstrip(".")
        raise InputError(
            f"transformers cannot look for the stop_strings {strings} with this {type(tokenizer).__name__} ({reason}); "
            "give a stopping criterion that looks for them."
        ) from error
    return criterion


class Stopping:
    """What a call's criteria see of its sequences.

    A criterion is asked for every token, with the prompt as it was given and all new tokens up to this one, so a
    sequence ends where it would without drafts.
    """

    def __init__(self, criteria: Sequence[Criterion], batch: Batch) -> None:
        self._criteria = criteria
        self._lengths = [request.given.numel() for request in batch.requests]
        self._tokens = [_with_room(request) for request in batch.requests]
        self._stopped: set[int] = set()

    def watch(self, engine: Engine, steps: Iterator[Step]) -> Iterator[Step]:
        """The steps of an engine, in which a sequence ends when a criterion says so."""
        for step in steps:
            outputs = [output for output in step.outputs if output.number not in self._stopped]
            yield replace(step, outputs=[self._cut(engine, output) for output in outputs])

    def _cut(self, engine: Engine, output: Output) -> Output:
        """An output up to the token at which a criterion ends the sequence, if one does."""
        number = output.number
        for count, token in enumerate(output.tokens, start=1):
            length = self._lengths[number] = self._lengths[number] + 1
            self._tokens[number][length - 1] = token
            seen = self._tokens[number][:length].unsqueeze(0)
            if not any(_says_stop(criterion, seen) for criterion in self._criteria):
                continue
            self._stopped.add(number)
            if output.finish_reason is None:
                engine.cancel(number)
            last = count == len(output.tokens)
            reason = output.finish_reason if last and output.finish_reason else "stop"
            return output._replace(tokens=output.tokens[:count], logprobs=output.logprobs[:count], finish_reason=reason)
        return output


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
