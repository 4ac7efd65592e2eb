"""What the compiler asks of a drafter; :mod:`specgraph.drafters` has them."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, fx

from specgraph.ir.model_info import ModelInfo


class Mask(Protocol):
    """What a drafter runs in the place of a token it has not drafted yet, when it drafts in parallel.

    ``token_id`` is an id its embedding takes; ``hidden`` ``[H]`` stands in for the hidden state, for drafters that read
    one.
    """

    @property
    def token_id(self) -> int: ...
    @property
    def hidden(self) -> Tensor | None: ...


class Drafter(Protocol):
    """Facts about a drafter that is bound to a target, and how it writes itself into a step graph."""

    @property
    def name(self) -> str:
        """What reports call it."""

    @property
    def num_speculative_tokens(self) -> int:
        """K, drafts per step and sequence."""

    @property
    def modules(self) -> dict[str, fx.GraphModule]:
        """Its traced graphs, by the names they get in the program."""

    @property
    def models(self) -> dict[str, ModelInfo]:
        """Facts about those of its modules that attend, by their names."""

    @property
    def features(self) -> tuple[int, ...]:
        """Indices ``k`` of the target's hidden states ``hs[k]`` that it reads."""

    @property
    def draft_to_target(self) -> Tensor | None:
        """int64 ``[Vd]``, the target id of every draft id; None if they are the same."""

    @property
    def chained(self) -> bool:
        """Whether it makes its drafts by a chain of calls, which ``parallel_draft`` can fold into one."""

    @property
    def mask(self) -> Mask | None:
        """What makes drafting in parallel possible."""

    @property
    def parallel(self) -> bool:
        """Whether it was trained to draft in parallel, which is then the default."""

    def build(self, step: Any) -> int:
        """Append its nodes to the step graph through a :class:`~specgraph.drafters.step.DraftStep`.

        Returns the number of its calls per step.
        """
