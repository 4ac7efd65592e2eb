"""Errors a user can meet. Each says what was given, what is allowed and what to do next."""


class SpecgraphError(Exception):
    """Base of everything specgraph raises on purpose."""


class UnsupportedModelError(SpecgraphError):
    """The model cannot be decoded correctly, so it is refused by name."""


class ConfigError(SpecgraphError, ValueError):
    """A configuration names something that does not exist or holds a value out of range."""


class PassError(SpecgraphError):
    """A pass could not be applied; the program is as it was before."""


class VerificationError(PassError):
    """A program breaks an invariant of its level after a pass."""


class NumericsError(SpecgraphError, ArithmeticError):
    """Two stages that must agree do not, or a model produced NaN."""


class InputError(SpecgraphError, ValueError):
    """An argument of ``generate`` or ``stream`` is out of range."""


class SpecgraphWarning(UserWarning):
    """Something the user asked for had no effect, or only part of it."""
