"""What a pass is, and what it reports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from specgraph.errors import ConfigError
from specgraph.ir.program import Program
from specgraph.kernels.sampling.sample import check_rule


def check_option_rule(name: str, rule: str) -> None:
    """Refuse a verification rule that does not exist, as an option of the pass ``name``."""
    try:
        check_rule(rule)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


@dataclass(frozen=True)
class NearMiss:
    """Something a pass looked at and left alone: where it was, and why."""

    where: str
    reason: str


@dataclass(frozen=True)
class PassResult:
    """What a pass did.

    Attributes:
        matches: how many places it rewrote.
        expected: how many it was asked to; None if any number is fine. A difference is loud.
        near_misses: what almost matched.
        bytes_shared: memory that one copy of equal tensors saves.
        notes: lines for the report.
        equal_tensors: pairs of a tensor and the equal one that took its place. Earlier stages may use the new one, too;
            they are made to, so that keeping them for reading does not keep the old memory.
    """

    matches: int
    expected: int | None = None
    near_misses: tuple[NearMiss, ...] = ()
    bytes_shared: int = 0
    notes: tuple[str, ...] = ()
    equal_tensors: tuple[tuple[Tensor, Tensor], ...] = field(default=(), repr=False, compare=False)

    @property
    def changed(self) -> bool:
        """Whether the program is another one now."""
        return self.matches > 0


@dataclass(frozen=True)
class Pass(ABC):
    """A rewrite of a program. Its fields are its options; it holds no state and prints nothing.

    Class attributes: ``name`` is the configuration key, ``requires`` the facts a program must have, ``ensures`` those
    it has afterwards, ``exact`` whether outputs stay equal bit for bit, and ``redrafts`` whether it proposes other
    drafts.
    """

    name: ClassVar[str]
    requires: ClassVar[frozenset[str]] = frozenset()
    ensures: ClassVar[frozenset[str]] = frozenset()
    exact: ClassVar[bool] = True
    redrafts: ClassVar[bool] = False

    @property
    def skipped(self) -> str | None:
        """Why the options leave this pass nothing to do, or None: then the pipeline does not run it."""
        return None

    @abstractmethod
    def apply(self, program: Program) -> PassResult:
        """Rewrite ``program`` in place; the caller passes a copy and drops it if this raises."""


@dataclass(frozen=True)
class LoweringPass(Pass):
    """A pass that runs where lowering uses our own kernels. Option: ``enabled``."""

    enabled: bool | None = True

    exact: ClassVar[bool] = False

    @property
    def skipped(self) -> str | None:
        """Whether lowering asks for it."""
        return None if self.enabled else "lowering runs no kernels"
