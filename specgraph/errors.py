"""The errors that a user can meet. Their messages say what was given, what is allowed and what to do next."""

import sys
import warnings
from typing import Any


class SpecgraphError(Exception):
    """The base class of all errors that specgraph raises on purpose.

    Attributes:
        output: what ``generate`` has for all sequences of a call in which this one failed while it was decoded (a
            :class:`~specgraph.runtime.outputs.output.GenerateOutput`, whose ``errors`` say which did); None for other
            errors.
    """

    output: Any = None


class UnsupportedModelError(SpecgraphError):
    """The model cannot be decoded correctly, so it is refused by name."""


class ConfigError(SpecgraphError, ValueError):
    """A configuration names something that does not exist or holds a value out of range."""


class PassError(SpecgraphError):
    """A pass could not be applied. The program is as it was before."""


class VerificationError(PassError):
    """After a pass, a program violates an invariant of its level.

    Attributes:
        graph: where: ``step``, or the name of a module; empty where that is not known.
    """

    def __init__(self, message: str, graph: str = "") -> None:
        super().__init__(message)
        self.graph = graph


class NumericsError(SpecgraphError, ArithmeticError):
    """Two stages that must agree do not agree, or a model produced NaN."""


class InputError(SpecgraphError, ValueError):
    """An argument of a call of a decoder or a session is unknown, out of range or not supported."""


class UnknownStageError(SpecgraphError, KeyError):
    """``decoder.stages`` has no stage of this name."""

    __str__ = Exception.__str__  # that of KeyError gives the representation of the text


class BusyError(SpecgraphError):
    """A session has as many waiting sequences as it takes; try again when some of them have ended."""


class SpecgraphWarning(UserWarning):
    """Something the user asked for had no effect, or only part of it."""


def warn_caller(message: str) -> None:
    """Warn whoever called specgraph, at the line of that call, so that Python shows the warning once for each line."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == __package__:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, SpecgraphWarning, stacklevel=level)
