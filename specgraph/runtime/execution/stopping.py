"""Ends sequences where a caller's stopping criteria say so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specgraph.errors import InputError
from specgraph.runtime.execution.engine import Engine
from specgraph.runtime.execution.steps import Output, Step
from specgraph.runtime.requests.request import Request
from specgraph.runtime.requests.stopping import Criterion
from specgraph.runtime.requests.values import name_of


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
            prompt = request.padded_prompt
            tokens = torch.cat([prompt, prompt.new_zeros(request.limit - request.prompt.numel())])
            self._watched[number] = _Watched(criteria, tokens, prompt.numel())

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
