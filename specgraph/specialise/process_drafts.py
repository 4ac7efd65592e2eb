"""Lets drafts be drawn as tokens are: what changes the logits of a row of the target changes those of a draft, too.

``insert_processors`` has put its nodes between the target's logits and verification. This pass puts the same ones in
front of every draw of a draft. There, the tokens of the sequence are those that the step has accepted, and behind them
the drafts before this one. So a draft that has the target's own distribution is accepted under any penalty, as it is
without one. Drafts that one call makes together are drawn one after the other here, since each is part of the context
of the next. The noise of a draft depends on its number, so this alone changes none of them.

What is kept of a draft for rules that compare distributions is what it was drawn from, so tokens are as exact as
before. Processors of the host are left out, since the host would have to be waited for once for every draft.

The decoder applies this pass to the steps of requests that ask for such options.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import fx

from specgraph.errors import PassError
from specgraph.ir.graphs import arguments, calls, set_argument, written_by
from specgraph.ir.program import Program
from specgraph.kernels import step
from specgraph.passes.base import Pass, PassResult
from specgraph.passes.common.patterns import insert
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
        shared = _shared(program, singles[0])
        for number, draw in enumerate(singles):
            _process(draw, singles[:number], processors, shared)
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
    singles = [_single(every, number) for number in range(count)]
    every.replace_all_uses_with(insert(every, torch.cat, (singles, 1), name=f"{every.name}_joined"))
    program.graph.erase_node(every)
    return singles


def _single(every: fx.Node, number: int) -> fx.Node:
    """A node in front of ``every`` that draws one of the drafts that it draws."""
    own = (slice(None), slice(number, number + 1))
    logits = insert(every, operator.getitem, (arguments(every)["logits"], own), name=f"draft_logits_{number}")
    with every.graph.inserting_before(every):
        draw = every.graph.node_copy(every, lambda node: node)
    set_argument(draw, "logits", logits)
    draw.update_kwarg("row", number)
    draw.name = f"token_{number + 1}"
    return draw


def _shared(program: Program, first: fx.Node) -> dict[str, fx.Node]:
    """What processors read before every draft, by the names of their parameters, in front of the ``first`` draw.

    ``window`` is the last accepted token ``[B, 1]``.
    """
    (advance,) = calls(program.graph, step.advance_)
    given, count = arguments(advance), program.drafter.num_speculative_tokens
    emitted = given["emitted"], given["num_emitted"]
    last = insert(first, step.last_accepted, (program.input("window"), *emitted), name="last_accepted")
    begin = insert(first, step.last_position, (given["start"], given["num_emitted"]), name="last_position")
    # There is one row of logits, that of the window's last token, and so many known tokens select it: processors count
    # rows from the first that is not known (kernels/processors/context.py).
    known = insert(first, torch.full_like, (begin, count), name="known_drafts")
    return {"window": last, "start": begin, "num_forced": known}


def _process(draw: fx.Node, before: list[fx.Node], processors: list[fx.Node], shared: Mapping[str, fx.Node]) -> None:
    """Put the processors in front of ``draw``, behind the drafts ``before`` it."""
    vocabulary = (draw.kwargs.get("draft_to_target"), draw.kwargs["target_vocab_size"])
    mapped, changed, window = vocabulary[0] is not None, arguments(draw)["logits"], shared["window"]
    if before:
        window = insert(draw, torch.cat, ([window, *before], 1))
    if mapped:
        changed = insert(draw, step.in_target_vocabulary, (changed, *vocabulary))
    for processor in processors:
        given = {**shared, "logits": changed, "window": window}
        names = zip(parameters(processor.target), processor.args, strict=True)
        args = [given.get(name, old) for name, old in names]
        changed = insert(draw, processor.target, args, name=f"{processor.name}_{draw.kwargs['row']}")
    if mapped:
        changed = insert(draw, step.in_draft_vocabulary, (changed, *vocabulary))
    set_argument(draw, "logits", changed)
