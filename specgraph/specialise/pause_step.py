"""Lets the host change logits in the middle of a step: the step of requests with processors that are Python.

Behind the last processor of the step graph stands one more node, whose result the host may change in place before
verification reads it. :func:`halves` cuts the step there. The two halves are run, or captured, one after the other, and
the host works between them: what it needs to know, the tokens so far and the drafts, it knows before the first half
begins. Log-probabilities that are ``raw`` stay those of the target's own logits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from specgraph.errors import PassError
from specgraph.ir.graphs import calls, cut
from specgraph.ir.program import Program
from specgraph.kernels import step
from specgraph.kernels.processors import PROCESSORS
from specgraph.passes.base import Pass, PassResult
from specgraph.passes.common.patterns import insert
from specgraph.passes.insert_processors import first_of, read_changed


class PauseStep(Pass, requires={"verify"}):
    """No options."""

    def apply(self, program: Program) -> PassResult:
        """Add the node; the modules and the state stay as they are."""
        logits = last_processor(program.one("logits"))
        readers = [*logits.users]
        changed = insert(first_of(readers), step.for_host, (logits,), name="for_host")
        for reader in readers:
            read_changed(reader, logits, changed)
        return PassResult(1, expected=1)


def last_processor(logits: fx.Node) -> fx.Node:
    """The node with the logits as all processors of the step leave them."""
    return [logits, *processors_behind(logits)][-1]


def processors_behind(logits: fx.Node) -> Iterator[fx.Node]:
    """The processors that change ``logits``, one after the other."""
    for user in logits.users:
        if user.target in PROCESSORS and user.args[0] is logits:
            yield user
            yield from processors_behind(user)


class PausedStep(torch.nn.Module):
    """A step in two halves.

    Attributes:
        before: takes the inputs of the step, and an empty mapping as ``made``. It gives a mapping with everything that
            the second half needs, and with ``for_host``, the logits float32 ``[B, R, V]`` that the host may change, and
            ``logits``, the target's own.
        after: takes this mapping as ``made`` beside the inputs of the step, and gives what the step returns.
    """

    def __init__(self, before: torch.nn.Module, after: torch.nn.Module) -> None:
        super().__init__()
        self.before, self.after = before, after


def halves(whole: fx.GraphModule, logits: str) -> PausedStep:
    """Cut a step behind ``for_host``; ``logits`` is the name of the node with the target's own logits.

    Raises:
        PassError: there is no such place, or several.
    """
    found = [*calls(whole.graph, step.for_host)]
    if len(found) != 1:
        raise PassError(f"A step pauses behind its node for_host, and this one has {len(found)}.")
    return PausedStep(*cut(whole, found, also=(logits,)))
