"""The base class of passes, and the result that a pass reports."""

from __future__ import annotations

import inspect
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from specgraph.errors import ConfigError
from specgraph.ir.program import Program
from specgraph.kernels import catalogue  # noqa: F401  (registers the ops that passes write into graphs)
from specgraph.kernels.sampling.sample import check_rule


def check_option_rule(name: str, rule: str) -> None:
    """Refuse a verification rule that does not exist, as an option of the pass ``name``."""
    try:
        check_rule(rule)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


@dataclass(frozen=True)
class NearMiss:
    """A place that almost matched a pass's pattern: where it is, and the reason why the pass did not rewrite it."""

    where: str
    reason: str


@dataclass(frozen=True)
class PassResult:
    """The result of a pass.

    Attributes:
        matches: how many places it rewrote.
        expected: how many places it should have rewritten; None if any number is right. Another number is an error.
        near_misses: the places that almost matched.
        bytes_shared: the memory that is saved because equal tensors are now one tensor.
        notes: lines for the report.
        equal_tensors: pairs of a tensor and the equal one that replaced it. The pipeline replaces it in the earlier
            stages, too; otherwise these stages, which are kept for reading, would keep the old memory.
    """

    matches: int
    expected: int | None = None
    near_misses: tuple[NearMiss, ...] = ()
    bytes_shared: int = 0
    notes: tuple[str, ...] = ()
    equal_tensors: tuple[tuple[Tensor, Tensor], ...] = field(default=(), repr=False, compare=False)

    @property
    def changed(self) -> bool:
        """Whether the pass rewrote anything."""
        return self.matches > 0


@dataclass(frozen=True)
class Pass(ABC):
    """A rewrite of a program. Its fields are its options; it holds no state and prints nothing.

    Class attributes: ``name`` is the configuration key, by default the name of the class with underscores. ``requires``
    are the facts that must hold for a program before the pass, ``ensures`` those that hold after it, and
    ``invalidates`` those that no longer do (:data:`~specgraph.ir.program.FACTS`). ``exact`` says whether the outputs
    stay equal bit for bit, and ``redrafts`` whether the pass changes which drafts are proposed. All but the name may
    also be given behind the base class: ``class FuseNorm(Pass, requires={"traced"})``.
    """

    name: ClassVar[str]
    requires: ClassVar[frozenset[str]] = frozenset()
    ensures: ClassVar[frozenset[str]] = frozenset()
    invalidates: ClassVar[frozenset[str]] = frozenset()
    exact: ClassVar[bool] = True
    redrafts: ClassVar[bool] = False

    def __init_subclass__(
        cls, *, requires: Iterable[str] | None = None, ensures: Iterable[str] | None = None,
        invalidates: Iterable[str] | None = None, exact: bool | None = None, redrafts: bool | None = None,
    ) -> None:  # fmt: skip
        if "apply" in vars(cls) and not hasattr(cls, "name"):
            cls.name = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", cls.__name__).lower()
        for name, facts in (("requires", requires), ("ensures", ensures), ("invalidates", invalidates)):
            if facts is not None:
                setattr(cls, name, frozenset(facts))
        cls.exact = cls.exact if exact is None else exact
        cls.redrafts = cls.redrafts if redrafts is None else redrafts

    @property
    def skipped(self) -> str | None:
        """The reason why the options leave the pass nothing to do, so that the pipeline does not run it; else None."""
        return None

    @classmethod
    def about(cls) -> str:
        """A description of the pass: the first paragraph of its class's docstring, on one line.

        The class of a pass of specgraph documents its options. There, the file says what the pass does.
        """
        ours = cls.__module__.partition(".")[0] == __package__.partition(".")[0]
        text = (sys.modules[cls.__module__].__doc__ if ours else cls.__doc__) or ""
        generated = text.startswith(f"{cls.__name__}(")  # a dataclass without a docstring gets its signature as one
        return "" if generated else " ".join(inspect.cleandoc(text).partition("\n\n")[0].split())

    @abstractmethod
    def apply(self, program: Program) -> PassResult:
        """Rewrite ``program`` in place. The caller passes a copy, and discards it if the pass raises an error."""


@dataclass(frozen=True)
class LoweringPass(Pass, exact=False):
    """A pass that runs only if lowering uses our own kernels. Options: ``enabled``."""

    enabled: bool | None = True

    @property
    def skipped(self) -> str | None:
        """A reason if ``enabled`` is off, which lowering sets."""
        return None if self.enabled else "this lowering runs no Triton kernels"
