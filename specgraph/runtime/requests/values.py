"""Reads single values of a caller's: numbers, flags, token ids and functions. Each is refused in one sentence."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from specgraph.errors import InputError

if TYPE_CHECKING:  # the help of the command line knows the options of requests before torch is imported
    from torch import Tensor

PerSequence: TypeAlias = "float | int | Sequence[float] | Sequence[int] | Tensor | None"


def without_tensors(value: Any) -> Any:
    """The numbers of a tensor as Python's own, and any other value as it is."""
    from torch import Tensor  # not before there is a value: see above

    return value.tolist() if isinstance(value, Tensor) else value


def is_number(value: object) -> bool:
    """A real number of Python's or NumPy's; a bool is none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def whole(name: str, value: Any) -> int:
    """An integer, or a float that is one."""
    if not is_number(value) or not math.isfinite(value) or int(value) != value:
        raise InputError(f"{name} must be an integer, got {value!r}.")
    return int(value)


def read_flag(name: str, value: Any) -> bool | None:
    """A bool, or None where nothing is said."""
    if value is not None and not isinstance(value, bool):
        raise InputError(f"{name} is True, False or None, not {value!r}.")
    return value


def read_bound(name: str, value: Any) -> int | None:
    """An integer of at least 0, or None where there is no bound."""
    if value is None:
        return None
    bound = whole(name, value)
    if bound < 0:
        raise InputError(f"{name} must be an integer of at least 0, or None, got {value!r}.")
    return bound


def read_token_ids(name: str, value: Any) -> list[int]:
    """Integers, from one or a list of them."""
    if not is_number(value) and (not isinstance(value, Sequence) or isinstance(value, str)):
        raise InputError(f"{name} must be a token id or a list of them, not {kind_of(value)}.")
    return [whole(name, token) for token in ([value] if is_number(value) else value)]


def check_ids(name: str, tokens: Sequence[Any], vocab_size: int) -> None:
    """Refuse what is no token id."""
    for token in tokens:
        if not 0 <= whole(name, token) < vocab_size:
            raise InputError(f"{name} has {token}, which is not a token id; ids are 0 to {vocab_size - 1}.")


def ids_per_sequence(
    name: str, value: Any, batch: int, vocab_size: int, default: tuple[int, ...] = ()
) -> list[tuple[int, ...]]:
    """Token ids of each sequence: one id, several, or a list with an entry for each. None is the ``default``."""
    plain: Any = without_tensors(value)
    each = isinstance(plain, list | tuple) and any(isinstance(own, list | tuple) for own in plain)
    if each and len(plain) != batch:
        raise InputError(f"{name} has {len(plain)} lists of ids for {batch} sequences.")
    found = [default if own is None else tuple(read_token_ids(name, own)) for own in (plain if each else [plain])]
    for ids in found:
        check_ids(name, ids, vocab_size)
    return found if each else found * batch


def per_sequence(name: str, value: PerSequence, default: float, batch: int) -> list[Any]:
    """One value per sequence from a number or a sequence of them."""
    if value is None:
        return [default] * batch
    plain: Any = without_tensors(value)
    if is_number(plain):
        return [plain] * batch
    if not isinstance(plain, list | tuple) or not all(map(is_number, plain)):
        raise InputError(f"{name} must be a number or one number per sequence, not {kind_of(plain)}.")
    if len(plain) != batch:
        raise InputError(f"{name} has {len(plain)} values for {batch} sequences.")
    return list(plain)


def check_range(name: str, values: Sequence[float], allowed: str, low: float, high: float, *, above: bool) -> None:
    """Every value within ``[low, high]``, or ``(low, high]`` if ``above``."""
    for value in values:
        if not (math.isfinite(value) and (value > low if above else value >= low) and value <= high):
            raise InputError(f"{name} must be {allowed}, got {value}.")


def read_functions(name: str, what: str, given: Any, *takes: str) -> list[Any]:
    """The functions that a caller gives: one, several in a list or tuple, or None. See :func:`check_function`."""
    several = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
    for function in several:
        check_function(name, what, function, *takes)
    return several


def check_function(name: str, what: str, function: object, *takes: str) -> None:
    """Refuse what cannot be called with as many arguments as ``takes`` describes.

    Args:
        name: the argument that it was given for.
        what: what is allowed there, in words.
        function: what was given.
        takes: what each argument of the function will be.
    """
    if isinstance(function, type):
        raise InputError(f"{name} is {what}, not the class {function.__name__}; make an object of it.")
    if not callable(function):
        raise InputError(f"{name} is {what}, not {function!r}.")
    signature = _signature(function)
    try:
        if signature is not None:
            signature.bind(*takes)
    except TypeError as error:
        raise InputError(
            f"{name} is called with {' and '.join(takes)}, but {name_of(function)}{signature} takes other arguments."
        ) from error


def refuse_others(function: str, others: Mapping[str, Any], takes: str) -> None:
    """Refuse arguments that a function does not have. ``takes`` says what it has, as the end of a sentence."""
    if others:
        raise InputError(f"{function} does not take {', '.join(others)}; {takes}.")


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """The parameters of a function; None for some that are not written in Python."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def name_of(function: object) -> str:
    """What errors call a function or an object that can be called."""
    return str(getattr(function, "__name__", type(function).__name__))


def kind_of(value: object) -> str:
    """The type of a value, and of what it begins with if it is a list."""
    kind = type(value).__name__
    return f"{kind} of {type(value[0]).__name__}" if isinstance(value, list | tuple) and value else kind
