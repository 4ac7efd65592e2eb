"""Leaves out what would make drafts behind the end of a chain, in steps that run call by call.

Where the survival of a chain is 0 for all sequences, its further calls give no drafts, and whatever they keep is
scratch. :func:`ending_chains` cuts a step behind every survival. The host looks at it, and runs the part that makes the
next draft only if some sequence wants one. Since the host waits for the step anyway, the first call of the chain, which
catches up, runs no more rows than were accepted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from specgraph.errors import PassError
from specgraph.ir.graphs import calls, copy_module, cut
from specgraph.kernels import step
from specgraph.specialise.pause_step import PausedStep


class EndingStep(torch.nn.Module):
    """A step whose chain of drafts may end early.

    Attributes:
        parts: the first makes the first draft, each further one a draft, and the last one the results of the step.
            They are those of :func:`~specgraph.ir.graphs.cut`.
    """

    def __init__(self, parts: list[fx.GraphModule], survivals: list[str], drafts: list[str]) -> None:
        """``survivals`` names what decides whether a part that makes a draft runs, and ``drafts`` its draft."""
        super().__init__()
        self.first, *links, self.last = parts
        self.links = torch.nn.ModuleList(links)
        self._survivals, self._drafts = survivals, drafts

    def forward(self, made: dict[str, Any] | None = None, **given: Any) -> tuple[Tensor, ...]:
        """What the step returns; ``made`` is what parts of a whole step before this one have made."""
        made = {**(made or {})}
        made |= self.first(made=made, **given)
        for link, survival in zip(self.links, self._survivals, strict=True):
            if not made[survival].any():
                break
            made |= link(made=made, **given)
        none = torch.full_like(made[self._survivals[0]], -1, dtype=torch.int64).unsqueeze(1)
        made |= {name: none for name in self._drafts if name not in made}
        return self.last(made=made, **given)


StepModule = fx.GraphModule | EndingStep | PausedStep
"""A step as it runs."""


def ending_chains(whole: StepModule, *, packed: bool = False) -> StepModule:
    """The step that ends the chains of ``whole``, which is ``whole`` itself if it has none that may end.

    A step that is ``packed`` runs no rows but real ones.

    Raises:
        PassError: something but the drafts themselves reads what a part makes that may be left out.
    """
    if isinstance(whole, PausedStep):
        assert isinstance(whole.after, fx.GraphModule), "it is cut once"
        return PausedStep(whole.before, ending_chains(whole.after, packed=packed))
    assert isinstance(whole, fx.GraphModule), "it is cut once"
    whole = copy_module(whole)  # its graph is that of a stage
    survivals, drafts = ([*calls(whole.graph, made)] for made in (step.survival, step.where_surviving))
    if not survivals:
        return whole
    if not packed:
        _leave_padding(whole)
    _, *links, last = parts = cut(whole, [*survivals, drafts[-1]])
    names = [node.name for node in drafts]
    late = _reads(last) & {name for link in links for name in _makes(link)} - {*names}
    if late:
        raise PassError(f"A chain of drafts ends only if nothing else is read of it, and {', '.join(sorted(late))} is.")
    return EndingStep(parts, [node.name for node in survivals], names)


def _leave_padding(whole: fx.GraphModule) -> None:
    """Let the first call of the chain run the real rows of its sequences."""
    first = next(calls(whole.graph, "draft"))
    with whole.graph.inserting_before(first):
        for name in ("tokens", "positions"):
            given = (first.kwargs[name], first.kwargs["num_rows"])
            first.update_kwarg(name, whole.graph.call_function(step.real_rows, given))


def _reads(part: fx.GraphModule) -> set[str]:
    return {str(node.args[1]) for node in part.graph.find_nodes(op="call_method", target="__getitem__")}


def _makes(part: fx.GraphModule) -> set[str]:
    made: dict[str, Any] = part.graph.output_node().args[0]  # type: ignore[assignment]
    return {*made}
