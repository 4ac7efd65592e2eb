"""The interface of a drafter that the compiler uses. The drafters are in :mod:`specgraph.drafters`."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, fx

from specgraph.ir.model_info import ModelInfo

SCRATCH = "scratch"
"""The note on a draft call that keeps nothing which a later step reads."""


class Mask(Protocol):
    """The input of a drafter for a token that is not drafted yet, when it drafts in parallel.

    ``token_id`` is the mask token, an id of the drafter's embedding. ``hidden`` ``[H]`` takes the place of the hidden
    state, for drafters that read one.
    """

    @property
    def token_id(self) -> int: ...
    @property
    def hidden(self) -> Tensor | None: ...


class Drafter(Protocol):
    """A drafter that is bound to a target: facts about it, and the method that adds its nodes to a step graph."""

    @property
    def name(self) -> str:
        """The name of the drafter in reports."""

    @property
    def num_speculative_tokens(self) -> int:
        """K, the number of drafts per step and sequence."""

    @property
    def modules(self) -> dict[str, fx.GraphModule]:
        """The traced graphs of the drafter, by the names that they get in the program."""

    @property
    def models(self) -> dict[str, ModelInfo]:
        """Facts about those of its modules that have attention, by their names."""

    @property
    def features(self) -> tuple[int, ...]:
        """The indices ``k`` of the target's hidden states ``hs[k]`` that the drafter reads."""

    @property
    def draft_to_target(self) -> Tensor | None:
        """int64 ``[Vd]``, the target id of every draft id; None if the two are the same."""

    @property
    def chained(self) -> bool:
        """Whether it makes its drafts by a chain of calls, which ``parallel_draft`` can replace by one call."""

    @property
    def looks_up(self) -> bool:
        """Whether its drafts are a function of the accepted tokens, which no network computes."""

    @property
    def least_survival(self) -> float:
        """Its chain of drafts ends where the probability that all are accepted falls below this; 0: it never ends."""

    @property
    def mask(self) -> Mask | None:
        """The mask for drafting in parallel; None if the drafter cannot do so."""

    @property
    def parallel(self) -> bool:
        """Whether it was trained to draft in parallel, which is then the default."""

    @property
    def lookahead(self) -> int:
        """How many tokens behind it a row of its cache depends on."""

    def build(self, step: Any) -> int:
        """Append the drafter's nodes to the step graph through a :class:`~specgraph.drafters.step.DraftStep`.

        Returns the number of draft calls per step.
        """
