"""Puts what changes logits as a request asks for (penalties and the like) between the target's logits and verification.

Each processor is one node. It reads the logits, the tokens of the sequence before the window, and the window, whose
drafts complete the context of every row. So the row that verifies the third draft gets the penalties that plain
decoding would give it behind the first two drafts, and what is emitted does not depend on what was drafted. Everything
that read the logits reads the changed ones instead; only ``raw`` log-probabilities are still those of the target's own.

Drafts are drawn from logits that :class:`~specgraph.specialise.process_drafts.ProcessDrafts` lets the same nodes
change, in the steps of requests that ask for any of this.

What a request asks for is state of its sequence, as its temperature is. ``specialise_step`` takes the nodes out of the
steps of requests that ask for nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from specgraph.drafters.lookup import HISTORY
from specgraph.errors import PassError
from specgraph.ir.graphs import arguments, calls, written_by
from specgraph.ir.program import Program
from specgraph.kernels import step
from specgraph.kernels.processors import PROCESSORS
from specgraph.kernels.state import ROW_INDEX, ROWS, Buffer
from specgraph.passes.base import Pass, PassResult
from specgraph.passes.common.patterns import insert
from specgraph.passes.insert_verify import VERIFY

OPTIONS: dict[str, Buffer] = {
    "repetition_penalty": Buffer(("B",), torch.float32, 1.0),
    "frequency_penalty": Buffer(("B",), torch.float32),
    "presence_penalty": Buffer(("B",), torch.float32),
    "bias_tokens": Buffer(("B", "W"), fill=-1),
    "bias_ends": Buffer(("B", "W")),
    "bias_values": Buffer(("B", "W"), torch.float32),
    "bias_until": Buffer(("B", "W")),
    "no_repeat_ngram_size": Buffer(("B",)),
    "forced_bos_token_id": Buffer(("B",), fill=-1),
    "forced_eos_token_id": Buffer(("B",), fill=-1),
}
"""The state that holds what the requests ask for, with the values that change nothing."""
STATE: dict[str, Buffer] = {**OPTIONS, "prompt_length": Buffer(("B",)), "history": HISTORY, ROWS: ROW_INDEX}
"""The state that this pass adds, by the names of the parameters that read it."""


class InsertProcessors(Pass, requires={"verify", "ungathered"}, ensures={"processors"}):
    """No options."""

    def apply(self, program: Program) -> PassResult:
        """Rewrite the step graph; the modules stay as they are.

        Raises:
            PassError: nothing reads the logits, or a processor has a parameter that is no input of the step.
        """
        recorded = "history" in program.inputs
        logits = changed = program.one("logits")
        readers = [*logits.users]
        state = {name: program.placeholder(name, buffer) for name, buffer in STATE.items()}
        state |= {name: program.input(name) for name in ("window", "start", "num_forced", "max_length")}
        for op in PROCESSORS:
            missing = [name for name in parameters(op) if name not in state and name != "logits"]
            if missing:
                raise PassError(
                    f"insert_processors: {op._opname} has the parameter {missing[0]!r}, which is no input of the step; "
                    "declare it in OPTIONS (passes/insert_processors.py)."
                )
            given = [changed if name == "logits" else state[name] for name in parameters(op)]
            changed = insert(first_of(readers), op, given, name=f"after_{op._opname}")
        for reader in readers:
            read_changed(reader, logits, changed)
        if not recorded:
            _record(program, state)
        return PassResult(len(PROCESSORS), notes=(f"{len(OPTIONS)} options of requests change logits",))


def parameters(op: Any) -> list[str]:
    """The names of the arguments of an op."""
    return [argument.name for argument in op._schema.arguments]


def first_of(nodes: list[fx.Node]) -> fx.Node:
    """The one of ``nodes`` that runs first.

    Raises:
        PassError: there is none.
    """
    if not nodes:
        raise PassError("Nothing reads the logits of the target; a pass that changes them runs behind insert_verify.")
    return min(nodes)


def read_changed(reader: fx.Node, logits: fx.Node, changed: fx.Node) -> None:
    """Let a node read the changed logits in the place of ``logits``, but for raw log-probabilities."""
    reader.replace_input_with(logits, changed)
    if reader.target is VERIFY:
        reader.kwargs = {**reader.kwargs, "raw_logits": reader.kwargs.get("raw_logits", logits)}


def _record(program: Program, state: dict[str, Any]) -> None:
    """Keep the tokens of every sequence, where no drafter does so."""
    (advance,) = calls(program.graph, step.advance_)
    accepted = program.one("emitted"), state["start"], program.one("num_emitted")
    given = state["history"], state["window"], *accepted, state[ROWS]
    insert(advance, step.record_accepted_, given, name="recorded")


def kept_for_processors(program: Program) -> bool:
    """Whether the tokens of sequences are kept, and nothing but processors reads them."""
    if "history" not in program.inputs:
        return False
    history = program.input("history")
    readers = [user for user in history.users if history not in written_by(user, step.WRITES)]
    return bool(readers) and all(user.target in PROCESSORS for user in readers)


def removable(node: fx.Node) -> bool:
    """Whether a processor has no option of a request left, so that it gives its logits as they are."""
    options = PROCESSORS.get(node.target)
    return options is not None and all(arguments(node)[name] is None for name in options)
