"""Ends sequences where a caller's stopping criteria say so.

Criteria run on the host, after a step was read and before the next one is enqueued. A sequence that stops is cancelled;
what steps emit for it after that is dropped.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Set
from typing import Any

from torch import Tensor
from transformers.generation import MaxTimeCriteria, StopStringCriteria

from specgraph.errors import InputError
from specgraph.ir.known_shapes import Recent
from specgraph.runtime.requests.text import check_tokenizer
from specgraph.runtime.requests.values import is_number, read_functions

Criterion = Callable[[Tensor, Any], Any]
"""As transformers' ``StoppingCriteria``: of the tokens int64 ``[1, S]`` of a sequence and of scores, which are always
None here, whether it ends with the last of them."""


def read_criteria(given: Any) -> list[Criterion]:
    """The criteria that a caller gives: one, several, or None.

    Raises:
        InputError: something among them cannot be called.
    """
    # transformers' list of criteria can be called itself, but looks at a whole batch.
    what = "a StoppingCriteria of transformers or a list of them"
    return read_functions("stopping_criteria", what, given, "tokens", "scores")


def read_stop_strings(given: Any) -> list[str]:
    """The stop strings that a caller gives: one, several, or None.

    Raises:
        InputError: they are no strings.
    """
    strings = [given] if isinstance(given, str) else [] if given is None else given
    if not isinstance(strings, list | tuple | Set) or not all(isinstance(text, str) and text for text in strings):
        raise InputError(f"stop_strings is a text or a list of texts that are not empty, not {strings!r}.")
    return list(strings)


def stop_criteria(strings: list[str], tokenizer: Any, max_time: Any) -> list[Criterion]:
    """Criteria that end a sequence behind one of ``strings``, and every sequence ``max_time`` seconds from now.

    Raises:
        InputError: there is no tokenizer that could read the strings, or transformers cannot look for them with this
            one, or ``max_time`` is no number above 0.
    """
    if max_time is not None and not (is_number(max_time) and max_time > 0):
        raise InputError(f"max_time must be a number of seconds above 0, got {max_time!r}.")
    criteria: list[Criterion] = []
    if strings and tokenizer is None:
        raise InputError("stop_strings needs the model's tokenizer; pass it as tokenizer=.")
    if strings:
        criteria.append(_stop_strings(strings, tokenizer))
    if max_time is not None and max_time != math.inf:
        criteria.append(MaxTimeCriteria(max_time=max_time))
    return criteria


_KEPT = 32
_MADE: weakref.WeakKeyDictionary[Any, Recent[Criterion]] = weakref.WeakKeyDictionary()
"""The last criteria of each tokenizer, since making one reads the whole vocabulary: 20 ms for 3,072 tokens, which the
requests of a server would all wait for."""


def _stop_strings(strings: list[str], tokenizer: Any) -> Criterion:
    check_tokenizer(tokenizer)
    if not hasattr(tokenizer, "__len__"):
        return _stop_criterion(strings, tokenizer)
    key = len(tokenizer), *strings  # whoever adds tokens gets another criterion
    made = _MADE.setdefault(tokenizer, Recent(_KEPT))
    criterion = made.find(key)
    if criterion is None:
        made.keep(key, criterion := _stop_criterion(strings, tokenizer))
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
