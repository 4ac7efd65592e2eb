"""A variant of the step that scores given tokens: the target, its projection onto the vocabulary, and ``score``.

The step of a decoder computes logits for the rows whose next token is unknown. Here all next tokens are given in the
window, and every row that has one gets logits and a log-probability. What drafts, verifies or moves the state on is
left out, so such a step writes nothing but the target's cache. The caller says where its windows begin (``start``), how
many of their rows are real (``num_rows``), and how many next tokens are given (``num_forced``).

The decoder applies this pass when it is first asked to score tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from specgraph.errors import ConfigError, PassError
from specgraph.ir.program import Program
from specgraph.kernels import step
from specgraph.kernels.verify.score import KINDS, Scored
from specgraph.passes.base import Pass, PassResult
from specgraph.passes.common.patterns import insert, items
from specgraph.specialise.index_rows import drop_unread, gathered

SCORE = torch.ops.specgraph.score.default
PROCESSING = ("temperature", "top_k", "top_p", "min_p")
"""The state that says how logits are processed."""


@dataclass(frozen=True)
class ScoreRows(Pass, requires={"verify", "row_index"}):
    """Options: ``logprobs``, ``raw`` or ``processed``; ``unused``, options of sampling to do without."""

    logprobs: str = "raw"
    unused: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.logprobs not in KINDS:
            raise ConfigError(f"score_rows: logprobs is one of {', '.join(KINDS)}, not {self.logprobs!r}.")

    def apply(self, program: Program) -> PassResult:
        """Rewrite the step graph; the modules and the state stay as they are.

        Raises:
            PassError: the rows of the logits are not chosen by ``needed_rows``.
        """
        logits = program.one("logits")
        _take_known_rows(logits)
        before = len(program.graph.nodes)
        scored = self._score(program, logits)
        program.set_output(*scored)
        _sweep(program)
        gone = before + len(scored) + 2 - len(program.graph.nodes)  # two: the window's tokens, and the op
        return PassResult(1, expected=1, notes=(f"log-probabilities: {self.logprobs}; {gone} nodes left out",))

    def _score(self, program: Program, logits: fx.Node) -> list[fx.Node]:
        """The results of ``score``, behind the logits."""
        window, given = program.input("window"), gathered(program, "num_forced")
        options = {} if self.logprobs == "raw" else {
            name: gathered(program, name) for name in PROCESSING if name not in self.unused
        }  # fmt: skip
        place = logits.next
        tokens = insert(place, step.draft_tokens, (window,), name="given_tokens")
        scored = insert(place, SCORE, (logits, tokens, given), {**options, "logprobs": self.logprobs}, "scored")
        results = items(place, scored, len(Scored._fields))
        for node, name in zip(results, Scored._fields, strict=True):
            node.name = name  # which another node may have that is swept away
        return results


def _take_known_rows(logits: fx.Node) -> None:
    """Let the projection run for all rows of the window that have a next token in it."""
    (needed,) = logits.args
    if not isinstance(needed, fx.Node) or needed.target is not step.needed_rows:
        raise PassError(
            f"score_rows: {logits.name} reads {needed}, not the result of needed_rows; leave that in place."
        )
    logits.args = (insert(logits, step.rows_before_last, needed.args[:1], name="known_rows"),)


def _sweep(program: Program) -> None:
    """Erase all that the output does without, whatever it writes: none of it is state of the target."""
    for node in reversed(program.graph.nodes):
        if not node.users and node.op not in ("placeholder", "output"):
            program.graph.erase_node(node)
    drop_unread(program)
