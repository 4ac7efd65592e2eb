"""Lets drafts be drawn as tokens are: what changes the logits of a row of the target changes those of a draft, too.

``insert_processors`` has put its nodes between the target's logits and verification. This pass puts the same ones in
front of every draw of a draft. There, the tokens of the sequence are those that the step has accepted, and behind them
the drafts before this one. So a draft that has the target's own distribution is accepted under any penalty, as it is
without one. Drafts that one call makes together are drawn one after the other here, since each is part of the context
of the next. The noise of a draft depends on its number, so this alone changes none of them.

What is kept of a draft for rules that compare distributions is what it was drawn from, so tokens are as exact as
before. Processors of the host are not among these, since the host would have to be waited for once for every draft.

The decoder applies this pass to the steps of requests that ask for such options.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from specgraph.errors import PassError
from specgraph.ir.graphs import arguments, calls, set_argument, written_by
from specgraph.ir.program import Program
from specgraph.kernels import step
from specgraph.passes.base import Pass, PassResult
from specgraph.passes.insert_processors import parameters
from specgraph.specialise.pause_step import processors_behind


class ProcessDrafts(Pass, requires={"verify", "processors"}):
    """No options."""

    def apply(self, program: Program) -> PassResult:
        """Rewrite the step graph; the modules and the state stay as they are."""
        processors = [*processors_behind(program.one("logits"))]
        draws = [*calls(program.graph, step.propose_)]
        if not draws or not processors:
            why = "no drafts are drawn from logits" if processors else "there are no processors"
            return PassResult(0, notes=(why,))
        singles = _one_by_one(program, draws)
        self._record_before(program, singles[0])
        context = _Context.of(program, processors, singles[0])
        for number, draw in enumerate(singles):
            context.process(draw, singles[:number])
        return PassResult(len(singles), notes=(f"{len(processors)} processors before each of {len(singles)} draws",))

    def _record_before(self, program: Program, draw: fx.Node) -> None:
        """Move what keeps the tokens of sequences in front of the first draw.

        Raises:
            PassError: that depends on drafts.
        """
        history = program.input("history")
        for writer in [user for user in history.users if history in written_by(user, step.WRITES)]:
            if writer < draw:
                continue
            late = [node.name for node in writer.all_input_nodes if not node < draw]
            if late:
                raise PassError(
                    f"{self.name}: {writer.name} keeps the tokens that drafts are to be drawn after, and depends on "
                    f"{', '.join(late)}, which is computed later; record accepted tokens before drafts are drawn."
                )
            draw.prepend(writer)


def _one_by_one(program: Program, draws: list[fx.Node]) -> list[fx.Node]:
    """The draws of single drafts ``[B, 1]``, in order. One draw of all drafts becomes K of them.

    Raises:
        PassError: the draws are neither one for each of K drafts nor one for all.
    """
    count = program.drafter.num_speculative_tokens
    if len(draws) == count:
        return sorted(draws, key=lambda draw: int(draw.kwargs["row"]))  # type: ignore[arg-type]
    if len(draws) > 1:
        raise PassError(f"process_drafts: {len(draws)} nodes draw {count} drafts; draw one at a time, or all at once.")
    (every,) = draws
    with program.graph.inserting_before(every):
        singles = [_single(program, every, number) for number in range(count)]
        joined = program.call(torch.cat, singles, 1, name=f"{every.name}_joined")
    every.replace_all_uses_with(joined)
    program.graph.erase_node(every)
    return singles


def _single(program: Program, every: fx.Node, number: int) -> fx.Node:
    """A node that draws one of the drafts that ``every`` draws."""
    own = (slice(None), slice(number, number + 1))
    logits = program.call(operator.getitem, arguments(every)["logits"], own, name=f"draft_logits_{number}")
    draw = program.graph.node_copy(every, lambda node: node)
    set_argument(draw, "logits", logits)
    draw.update_kwarg("row", number)
    draw.name = f"token_{number + 1}"
    return draw


@dataclass(frozen=True)
class _Context:
    """What processors read before a draft, as nodes.

    Attributes:
        program: what they are part of.
        processors: those between the target's logits and verification.
        shared: arguments that are the same for all drafts, by the names of the processors' parameters.
        last: the last accepted token ``[B, 1]``.
    """

    program: Program
    processors: list[fx.Node]
    shared: Mapping[str, fx.Node]
    last: fx.Node

    @classmethod
    def of(cls, program: Program, processors: list[fx.Node], first: fx.Node) -> _Context:
        """Insert what all drafts share in front of the ``first`` draw."""
        (advance,) = calls(program.graph, step.advance_)
        given = arguments(advance)
        start, emitted, num_emitted = given["start"], given["emitted"], given["num_emitted"]
        with program.graph.inserting_before(first):
            window, count = program.input("window"), program.drafter.num_speculative_tokens
            last = program.call(step.last_accepted, window, emitted, num_emitted, name="last_accepted")
            begin = program.call(step.last_position, start, num_emitted, name="last_position")
            # All tokens of the window of a draft are known: no number of them is less than that of the drafts.
            known = program.call(torch.full_like, begin, count, name="known_drafts")
        return cls(program, processors, {"start": begin, "num_forced": known}, last)

    def process(self, draw: fx.Node, before: list[fx.Node]) -> None:
        """Put the processors in front of ``draw``, behind the drafts ``before`` it."""
        graph = self.program.graph
        vocabulary = (draw.kwargs.get("draft_to_target"), draw.kwargs["target_vocab_size"])
        mapped = vocabulary[0] is not None
        logits = arguments(draw)["logits"]
        with graph.inserting_before(draw):
            window = graph.call_function(torch.cat, ([self.last, *before], 1)) if before else self.last
            changed = graph.call_function(step.in_target_vocabulary, (logits, *vocabulary)) if mapped else logits
            for processor in self.processors:
                given = {"logits": changed, "window": window, **self.shared}
                names = parameters(processor.target)
                args = tuple(given.get(name, old) for name, old in zip(names, processor.args, strict=True))
                name = f"{processor.name}_{draw.kwargs['row']}"
                changed = graph.create_node("call_function", processor.target, args, name=name)
            if mapped:
                changed = graph.call_function(step.in_draft_vocabulary, (changed, *vocabulary))
        set_argument(draw, "logits", changed)
