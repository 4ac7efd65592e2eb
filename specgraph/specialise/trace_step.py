"""A variant of the step that also says how probable drafts were, and the token that the target chose by itself.

For the drafts that a step verifies, the op ``score`` gives their probabilities under the target: those that the rule
compares, or at temperature 1 for a greedy sequence. The same call does so for the tokens that the step emits, since the
token in the place of a rejected draft has the same row of logits. The op ``rank`` says of the same tokens how many
others had larger logits. For the drafts that the step makes, ``score`` gives the probabilities that they were drawn
with. All of them travel to the host with the other results of the step, so nothing
waits for it.

The decoder applies this pass to the steps of requests that ask for a trace.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

import specgraph.kernels.verify.rank  # noqa: F401  (registers the op)
from specgraph.ir.graphs import arguments, calls
from specgraph.ir.program import Program
from specgraph.kernels import step
from specgraph.passes.base import Pass, PassResult
from specgraph.passes.common.patterns import insert, items
from specgraph.specialise.index_rows import gathered
from specgraph.specialise.pause_step import last_processor
from specgraph.specialise.score_rows import PROCESSING, SCORE

RANK = torch.ops.specgraph.rank.default
TRACED = ("traced_tokens", "traced_counts", "traced_rows", "traced_temperature")
"""What the results of ``trace_tokens`` are called in a graph."""
DRAWN = ("draft_ids", "num_drawn")
"""What the results of ``drawn_ids`` are called."""


@dataclass(frozen=True)
class TraceStep(Pass, requires={"verify", "row_index", "grid"}):
    """Options: ``unused``, options of sampling to do without; the temperature is never one of them."""

    unused: tuple[str, ...] = ()

    def apply(self, program: Program) -> PassResult:
        """Rewrite the step graph, which returns one more tensor; modules and state stay as they are."""
        (advance,) = calls(program.graph, step.advance_)
        sampling = {name: gathered(program, name) for name in PROCESSING if name not in self.unused}
        logits, draws = last_processor(program.one("logits")), [*calls(program.graph, step.propose_)]
        tokens, counts, num_rows, temperature = _traced_tokens(program, logits, advance)
        score = functools.partial(_score, advance, {**sampling, "temperature": temperature, "logprobs": "processed"})
        target = score(logits, tokens, num_rows, "target_logprobs")
        ranks = insert(advance, RANK, (logits, tokens, num_rows), name="target_ranks")
        groups = [*_together(draws)]
        drawn = [draw for group in groups for draw in group]
        given = (target, ranks, counts, drawn, [_drawn(advance, score, group) for group in groups])
        drafts = [*arguments(advance)["drafts"]]
        traced = insert(advance, step.trace_columns, (*given, drafts), {"count": _count(program)}, "traced")
        (results,) = program.graph.output_node().args
        program.set_output(*results, traced)  # type: ignore[misc]
        note = f"the drafts that are verified, the token behind them, and {len(draws)} draws"
        return PassResult(2 + len(draws), notes=(note,))


def _count(program: Program) -> int:
    """How many drafts of a sequence a step verifies and makes."""
    counts: list[int] = [arguments(node)["count"] - 1 for node in calls(program.graph, step.needed_rows)]
    return min([*counts, program.drafter.num_speculative_tokens])


def _together(draws: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
    """The draws of each vocabulary. Small ops cost a launch each, so all drafts of a step are scored in one call."""
    vocabularies = {draw: draw.kwargs.get("draft_to_target") for draw in draws}
    for vocabulary in dict.fromkeys(vocabularies.values()):
        yield [draw for draw in draws if vocabularies[draw] is vocabulary]


def _traced_tokens(program: Program, logits: fx.Node, advance: fx.Node) -> list[fx.Node]:
    """What ``trace_tokens`` gives of the rows of ``logits`` and of the tokens that ``advance`` is handed."""
    num_rows, num_forced, temperature = (gathered(program, name) for name in ("num_rows", "num_forced", "temperature"))
    moved, window = arguments(advance), program.input("window")
    given = (window, num_rows, num_forced, moved["emitted"], moved["num_emitted"], temperature, logits)
    return items(advance, insert(advance, step.trace_tokens, given), TRACED)


def _drawn(place: fx.Node, score: Callable[..., fx.Node], draws: Sequence[fx.Node]) -> fx.Node:
    """The log-probabilities ``[B, R]`` with which tokens were drawn by ``draws``, which share a vocabulary."""
    vocabulary = draws[0].kwargs.get("draft_to_target")
    given = ([*draws], arguments(draws[0])["num_emitted"], *([] if vocabulary is None else [vocabulary]))
    ids, count = items(place, insert(place, step.drawn_ids, given), DRAWN)
    logits = [arguments(draw)["logits"] for draw in draws]
    every = logits[0] if len(logits) == 1 else insert(place, torch.cat, (logits, 1), name="drawn_logits")
    return score(every, ids, count, "draft_logprobs")


def _score(place: fx.Node, options: dict[str, Any], logits: Any, tokens: fx.Node, count: fx.Node, name: str) -> fx.Node:
    """The log-probabilities of the ``tokens`` of the first ``count`` ``[B]`` rows of ``logits``."""
    return items(place, insert(place, SCORE, (logits, tokens, count), options), [name])[0]
