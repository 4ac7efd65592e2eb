"""A variant of the step that also says how probable drafts were, and the token that the target chose by itself.

For the drafts that a step verifies, the op ``score`` gives their probabilities under the target: those that the rule
compares, or at temperature 1 for a greedy sequence. A second call of it does the same for the tokens that the step
emits, since the token in the place of a rejected draft has the same row of logits. For the drafts that the step makes,
the op gives the probabilities that they were drawn with. All of them travel to the host with the other results of the
step, so nothing waits for it.

The decoder applies this pass to the steps of requests that ask for a trace.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from specgraph.ir.graphs import calls
from specgraph.ir.program import Program
from specgraph.kernels import step
from specgraph.passes.base import Pass, PassResult
from specgraph.passes.index_rows import gathered
from specgraph.passes.pause_step import last_processor
from specgraph.passes.process_drafts import DRAWS, LOGITS
from specgraph.passes.score_rows import PROCESSING, SCORE

EMITTED = 4
"""Which argument of ``advance_`` are the emitted tokens; the next one is their number."""
NUM_EMITTED = 3
"""Which argument of a function that draws drafts is the number of emitted tokens."""


@dataclass(frozen=True)
class TraceStep(Pass):
    """Options: ``unused``, options of sampling to do without."""

    unused: tuple[str, ...] = ()

    name: ClassVar[str] = "trace_step"
    requires: ClassVar[frozenset[str]] = frozenset({"verify", "row_index"})
    ensures: ClassVar[frozenset[str]] = frozenset({"traced"})

    def apply(self, program: Program) -> PassResult:
        """Rewrite the step graph, which returns one more tensor; modules and state stay as they are."""
        (advance,) = calls(program.graph, step.advance_)
        sampling = {name: gathered(program, name) for name in PROCESSING if name not in self.unused}
        tracer = _Tracer(program, sampling)
        with program.graph.inserting_before(advance):
            if "temperature" in sampling:
                sampling["temperature"] = tracer.call(step.trace_temperature, sampling["temperature"])
            verified, last = tracer.verified(), tracer.last_emitted(advance)
            draws = [node for node in program.graph.nodes if node.target in DRAWS]
            groups = [*_together(draws)]
            tokens = [tracer.side_by_side(group) for group in groups]
            drawn = [tracer.drawn(*both) for both in zip(groups, tokens, strict=True)]
            drafts: Any = advance.args[6]
            traced = tracer.call(step.trace_columns, verified, last, tokens, drawn, list(drafts), count=_count(program))
        traced.name = "traced"
        (results,) = program.graph.output_node().args
        program.set_output(*results, traced)  # type: ignore[misc]
        note = f"the drafts that are verified, the token behind them, and {len(draws)} draws"
        return PassResult(2 + len(draws), notes=(note,))


def _count(program: Program) -> int:
    """How many drafts of a sequence a step verifies and makes."""
    counts = [int(node.args[2]) - 1 for node in calls(program.graph, step.needed_rows)]  # type: ignore[arg-type]
    return min([*counts, program.drafter.num_speculative_tokens])


def _together(draws: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
    """The draws of each vocabulary. Small ops cost a launch each, so all drafts of a step are scored in one call."""
    vocabularies = {draw: draw.kwargs.get("draft_to_target") for draw in draws}
    for vocabulary in dict.fromkeys(vocabularies.values()):
        yield [draw for draw in draws if vocabularies[draw] is vocabulary]


@dataclass(frozen=True)
class _Tracer:
    """Adds nodes where the graph of ``program`` inserts. ``sampling`` are the options that shape distributions."""

    program: Program
    sampling: dict[str, fx.Node]

    def call(self, function: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.program.graph.call_function(function, args, kwargs)

    def verified(self) -> fx.Node:
        """The log-probabilities ``[B, D]`` of the drafts that the step verifies."""
        logits = last_processor(self.program.one("logits"))
        drafts = self.call(step.verified_drafts, self.program.input("window"), logits)
        rows = [gathered(self.program, name) for name in ("num_rows", "num_forced")]
        return self._score(logits, drafts, self.call(step.num_verified, *rows, drafts))

    def last_emitted(self, advance: fx.Node) -> fx.Node:
        """The log-probability ``[B, 1]`` of the last token that the step emits and hands to ``advance``."""
        logits = last_processor(self.program.one("logits"))
        emitted, num_emitted = advance.args[EMITTED], advance.args[EMITTED + 1]
        forced = gathered(self.program, "num_forced")
        tokens = self.call(step.emitted_tokens, emitted, forced, logits)
        count = self.call(step.num_emitted_rows, emitted, num_emitted, forced, tokens)
        return self.call(step.last_logprob, self._score(logits, tokens, count), count)

    def drawn(self, draws: Sequence[fx.Node], tokens: fx.Node) -> fx.Node:
        """The log-probabilities ``[B, R]`` with which ``draws``, which share a vocabulary, have drawn ``tokens``."""
        first = draws[0]
        count = self.call(step.active_drafts, first.args[NUM_EMITTED], tokens)
        vocabulary = first.kwargs.get("draft_to_target")
        if vocabulary is not None:
            tokens = self.call(step.draft_ids, tokens, vocabulary)
        return self._score(self.side_by_side([draw.args[LOGITS] for draw in draws]), tokens, count)

    def side_by_side(self, values: Sequence[Any]) -> fx.Node:
        """Tensors ``[B, R, ...]`` as one, row behind row."""
        return self.call(torch.cat, [*values], 1) if len(values) > 1 else values[0]

    def _score(self, logits: Any, tokens: fx.Node, count: fx.Node) -> fx.Node:
        processed = "temperature" in self.sampling
        options = {**self.sampling, "logprobs": "processed"} if processed else {}
        return self.call(operator.getitem, self.call(SCORE, logits, tokens, count, **options), 0)
