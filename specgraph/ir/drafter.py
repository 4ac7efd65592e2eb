"""The interface between a drafter and the compiler. The drafters are in :mod:`specgraph.drafters`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, fx

from specgraph.ir.model_info import ModelInfo

SCRATCH = "scratch"
"""The note on a draft call that keeps nothing which a later step reads."""


@dataclass(frozen=True, eq=False)
class Mask:
    """The input of a drafter for a token that is not drafted yet, when it drafts in parallel.

    Attributes:
        token_id: the mask token, an id of the drafter's embedding.
        hidden: ``[H]``, which takes the place of the hidden state, for drafters that read one.
    """

    token_id: int
    hidden: Tensor | None = None


@dataclass(frozen=True, eq=False)
class BoundDrafter(ABC):
    """A drafter that is bound to a target: facts about it, and the method that adds its nodes to a step graph.

    Class attributes: ``chained`` says whether it makes its drafts by a chain of calls, which ``parallel_draft`` can
    replace by one call, ``looks_up`` whether its drafts are a function of the accepted tokens, which no network
    computes, so that K may be chosen after a look at them.

    Attributes:
        num_speculative_tokens: K, the number of drafts per step and sequence.
        modules: its traced graphs, by the names that they get in the program.
        models: facts about those of its modules that have attention, by their names.
        features: the indices ``k`` of the target's hidden states ``hs[k]`` that it reads.
        draft_to_target: int64 ``[Vd]``, the target id of every draft id; None if the two are the same.
        mask: the mask for drafting in parallel; None if it cannot do so.
        parallel: whether it was trained to draft in parallel, which is then the default.
        exit_layer: it runs so many of the target's first layers, which then are a module of their own; None: none.
        least_survival: its chain of drafts ends where the probability that all of them are accepted, as the drafter
            sees it, falls below this. With 0 it always makes K drafts.
    """

    num_speculative_tokens: int = 0
    modules: dict[str, fx.GraphModule] = field(default_factory=dict)
    models: dict[str, ModelInfo] = field(default_factory=dict)
    features: tuple[int, ...] = ()
    draft_to_target: Tensor | None = None
    mask: Mask | None = None
    parallel: bool = False
    least_survival: float = 0.0
    exit_layer: int | None = None

    chained: ClassVar[bool] = False
    looks_up: ClassVar[bool] = False

    @property
    @abstractmethod
    def name(self) -> str:
        """Its name in reports."""

    @property
    def lookahead(self) -> int:
        """How many tokens behind it a row of its cache depends on: row ``p`` is a function of tokens 0 to ``p + this``.

        A shifted drafter's depends on one. Sequences share a page of the cache only if those tokens are the same, too.
        """
        return 1

    @abstractmethod
    def build(self, step: Any) -> int:
        """Append its nodes to the step graph through a :class:`~specgraph.drafters.step.DraftStep`.

        Returns the number of its calls per step.
        """
