"""``process_logits, accept, residual, sample_next, emit`` and ``token_logprobs`` become one ``specgraph::verify``.

The pattern is found from its last node, and every piece must read what its neighbours read: the same drafts, the same
processed logits, the same row counts. A researcher's changed piece is left alone and reported. ``bad_rows`` of the same
rows joins them, which saves reading the logits again; of other rows it stays as it is.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from specgraph.ir.graphs import arguments, calls
from specgraph.ir.program import Program
from specgraph.kernels import step, verify
from specgraph.kernels.sampling.sample import process_logits
from specgraph.passes.base import NearMiss, Pass, PassResult
from specgraph.passes.common.patterns import Mismatch, erase_unused, producer

VERIFY = torch.ops.specgraph.verify.default
_KEYWORDS = tuple(a.name for a in VERIFY._schema.arguments if a.has_default_value())
"""The op's options: everything in its schema that may be left out."""
LOGPROBS, BAD = (verify.Verified._fields.index(name) for name in ("logprobs", "bad"))
"""Places among the op's results; the first ones are those of ``emit``."""
_SHARED = ("draft_tokens", "draft_logits", "num_rows", "num_forced", "processed", "num_accepted", "seeds", "positions",
           "rule", "target_to_draft", "point_mass")  # fmt: skip


@dataclass(frozen=True)
class _Match:
    """The pieces of one verification: their nodes and their arguments by name."""

    emit: fx.Node
    pieces: tuple[fx.Node, ...]
    arguments: dict[str, Any]


@dataclass(frozen=True)
class FuseVerify(Pass):
    """No options."""

    name: ClassVar[str] = "fuse_verify"
    requires: ClassVar[frozenset[str]] = frozenset({"verify"})

    def apply(self, program: Program) -> PassResult:
        """Replace every occurrence; one is expected."""
        matches, misses = [], []
        for node in calls(program.graph, verify.emit):
            try:
                matches.append(_match(node))
            except Mismatch as reason:
                misses.append(NearMiss(node.name, str(reason)))
        for match in matches:
            _fuse(program, match)
        return PassResult(len(matches), expected=1, near_misses=tuple(misses))


def _producer(value: Any, function: Any, reader: fx.Node) -> fx.Node:
    """The node behind ``value``, which must call ``function``."""
    node = producer(value, function)
    if node is not None:
        return node
    found = getattr(value, "target", value)
    raise Mismatch(f"{reader.name} reads {getattr(found, '__name__', found)}, not {function.__name__}")


def _match(emit: fx.Node) -> _Match:
    """Walk up from ``emit`` and check that all pieces agree."""
    sample = _producer(arguments(emit)["token"], verify.sample_next, emit)
    residual = _producer(arguments(sample)["residual"], verify.residual, sample)
    accept = _producer(arguments(emit)["num_accepted"], verify.accept, emit)
    process = _producer(arguments(accept)["processed"], process_logits, accept)
    pieces = (process, accept, residual, sample, emit)
    merged: dict[str, Any] = {}
    for piece in pieces:
        for name, value in arguments(piece).items():
            if name in _SHARED and merged.setdefault(name, value) != value:
                raise Mismatch(f"{piece.name} reads {value} as {name}, where {merged[name]} was read before")
            merged[name] = value
    logprobs = [n for n in process.users if n.target is verify.token_logprobs]
    _check_users(pieces, logprobs)
    _check_logprobs(emit, logprobs, merged)
    return _Match(emit, (*pieces, *logprobs), merged)


def _check_logprobs(emit: fx.Node, logprobs: list[fx.Node], merged: dict[str, Any]) -> None:
    """Log-probabilities of this verification's own logits and tokens, of one kind: what the op can give."""
    kinds = {arguments(node)["logprobs"] for node in logprobs}
    if len(kinds) > 1:
        raise Mismatch(f"{logprobs[0].name} and {logprobs[1].name} ask for different log-probabilities")
    for node in logprobs:
        own = arguments(node)
        tokens = own["emitted"]
        if tokens.target is not operator.getitem or tokens.args != (emit, 0):
            raise Mismatch(f"{node.name} reads {tokens.name}, not the tokens of {emit.name}")
        for name in ("logits", "num_forced"):
            if own[name] is not merged[name]:
                raise Mismatch(f"{node.name} reads {own[name]} as {name}, where {merged[name]} was read before")


def _check_users(pieces: tuple[fx.Node, ...], logprobs: list[fx.Node]) -> None:
    """Nothing outside may read what disappears."""
    inside = {*pieces, *logprobs}
    for piece in pieces[:-1]:
        outside = [user.name for user in piece.users if user not in inside]
        if outside:
            raise Mismatch(f"{piece.name} is also read by {', '.join(outside)}")


def _fuse(program: Program, match: _Match) -> None:
    graph, given = program.graph, match.arguments
    kept = producer(given["draft_logits"], step.select_state)
    if kept is not None:  # the op reads the buffer itself
        given["draft_logits"], given["draft_rows"] = kept.args
    names = [a.name for a in VERIFY._schema.arguments]
    logprobs = [n for n in match.pieces if n.target is verify.token_logprobs]
    mode = arguments(logprobs[0])["logprobs"] if logprobs else "none"
    with graph.inserting_before(match.emit):
        positional = [given.get(n) for n in names if n not in _KEYWORDS]
        keywords = {n: given[n] for n in _KEYWORDS if given.get(n) is not None}
        fused = graph.call_function(VERIFY, tuple(positional), {**keywords, "logprobs": mode})
        fused.name = "verification"
    match.emit.replace_all_uses_with(fused)
    for node, index in (*((n, LOGPROBS) for n in logprobs), *((n, BAD) for n in _nan_checks(match))):
        with graph.inserting_before(node):
            item = graph.call_function(operator.getitem, (fused, index))
        item.meta["role"] = node.meta.get("role")
        node.replace_all_uses_with(item)
        graph.erase_node(node)
        item.name = node.name
    for piece in reversed([p for p in match.pieces if p not in logprobs]):
        graph.erase_node(piece)
    if kept is not None:
        erase_unused(kept)


def _nan_checks(match: _Match) -> list[fx.Node]:
    """``bad_rows`` of the logits, rows and window that are verified here, behind the verification."""
    logits, drafts = match.arguments["logits"], match.arguments["draft_tokens"]
    window = drafts.args[0] if drafts.target is step.draft_tokens else None
    verified = {"window": window, "num_rows": match.arguments["num_rows"], "num_forced": match.arguments["num_forced"]}
    checks = [n for n in logits.users if n.target is step.bad_rows and match.emit < n]
    return [n for n in checks if all(arguments(n)[name] is value for name, value in verified.items())]
