"""Counts the bytes that one decode step must move, on the step graph before it is lowered.

Every call of a module reads its weights once, for all rows of the batch together. From every cache it reads the context
of each sequence, or as much of it as the sliding window covers. Of an embedding table only a few rows are read, so it
does not count, and neither do small tensors (activations, logits, new keys and values, what a step keeps in small
buffers). A packed weight counts as it is stored. Of the experts of a layer, those count that the rows use on average,
if rows choose independently and all experts are equally likely.

A recurrent op with a state reads that state once for each sequence, and writes it once in a chunk of tokens. It also
reads the rows that it has cached since then, which are half of a full chunk on average, and writes the new rows. An op
that keeps nothing but its last rows, such as a convolution, reads all of them. A draft call whose rows later steps
write again (:data:`~specgraph.ir.drafter.SCRATCH`), as in a chain behind its first call, writes no state.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar, cast

import torch
from torch import fx

from specgraph.ir.drafter import SCRATCH
from specgraph.ir.graphs import get_attribute
from specgraph.ir.linear import Linear, describe
from specgraph.ir.program import TARGET_MODULES, Program
from specgraph.kernels.state import RECURRENT, STATEFUL, Buffer, buffers_of

STAGE = "insert_verify"
"""The last stage before passes join or fuse anything."""
Key = TypeVar("Key")


@dataclass(frozen=True)
class Traffic:
    """The bytes that one step must move.

    Attributes:
        target_weights, draft_weights: the weights of the target and of the drafter.
        cache: the keys and values of the contexts.
        state: what recurrent layers keep, read and written.
    """

    target_weights: int
    draft_weights: int
    cache: int
    state: int = 0

    @property
    def total(self) -> int:
        return self.target_weights + self.draft_weights + self.cache + self.state


@dataclass(frozen=True)
class Reads:
    """The reads of one call of a module, and the states that its recurrent ops write.

    Attributes:
        weights: pairs of bytes and the share of them that one row reads: 1, or less if they are of experts.
        caches: pairs of bytes for each token of the context and the sliding window; None reads the whole context.
        states: for recurrent ops, the bytes of a sequence's state, those of a cached row, and the most settled rows
            that a call reads. The state has 0 bytes if an op keeps rows alone.
    """

    weights: tuple[tuple[int, float], ...]
    caches: tuple[tuple[int, float | None], ...]
    states: tuple[tuple[int, int, int], ...] = ()

    def weight_bytes(self, rows: int) -> int:
        """The bytes of weights for ``rows`` rows; of experts, the average share counts."""
        return round(sum(size * (1 - (1 - share) ** rows) for size, share in self.weights))

    def cache_bytes(self, context: float) -> float:
        """The bytes of the page pools for one sequence with a context of so many tokens."""
        return sum(size * (context if window is None else min(context, window)) for size, window in self.caches)

    def state_bytes(self, rows: int, tokens: float) -> float:
        """The bytes that recurrent ops move for one sequence with so many new ``rows``.

        ``tokens`` is how many tokens the call folds into its states on average: those that a step gives, or none.
        """
        total = 0.0
        for state, row, settled in self.states:
            cached = settled / 2 if state else settled
            total += state * (1 + tokens / (settled + 1)) + row * (cached + rows)
        return total


@dataclass(frozen=True)
class CallReads:
    """The reads of one node of the step graph.

    Attributes:
        node: its name.
        module: the module that it calls.
        reads: what the module reads in one call.
        settles: whether the call keeps rows that later steps read. Only such a call writes a state.
    """

    node: str
    module: str
    reads: Reads
    settles: bool = True

    @staticmethod
    def of_record(record: dict[str, Any]) -> CallReads:
        """Read the result of :meth:`to_record` from JSON. Older dumps do not say which calls settle rows."""
        sizes = {name: tuple(tuple(entry) for entry in entries) for name, entries in record["reads"].items()}
        return CallReads(record["node"], record["module"], Reads(**sizes), record.get("settles", True))

    def to_record(self) -> dict[str, Any]:
        """Plain values, which JSON can hold."""
        return asdict(self)


def step_traffic(
    program: Program, batch: int, context: float, num_speculative_tokens: int, tokens: float = 1.0
) -> Traffic:
    """The bytes that a step moves for ``batch`` sequences whose contexts have ``context`` tokens on average.

    ``tokens`` is how many tokens a sequence gets in a step. A state is written the more often the more these are.
    """
    return traffic(step_reads(program), [context] * batch, num_speculative_tokens, tokens)


def traffic(
    calls: Iterable[CallReads], contexts: Sequence[float], num_speculative_tokens: int, tokens: float = 1.0
) -> Traffic:
    """The bytes that a step with these calls moves for sequences whose contexts have so many tokens.

    A draft call counts as if it had one row for each sequence, which matters only for the number of experts it uses.
    """
    target, draft, cache, state, batch = 0, 0, 0.0, 0.0, len(contexts)
    for call in calls:
        of_target = call.module in TARGET_MODULES and call.settles  # drafts may run the first layers, too
        rows = num_speculative_tokens + 1 if of_target else 1
        size = call.reads.weight_bytes(batch * rows)
        target, draft = (target + size, draft) if of_target else (target, draft + size)
        cache += sum(call.reads.cache_bytes(context) for context in contexts)
        state += batch * call.reads.state_bytes(rows, tokens if call.settles else 0.0)
    return Traffic(target, draft, round(cache), round(state))


def state_size(program: Program) -> int:
    """The bytes of memory in which the target's recurrent ops keep one sequence: their states, and room for rows."""
    ops = _recurrent_buffers(program.modules.unchanged["target"])
    return sum(buffer.row_bytes({}) for buffers in ops for buffer in buffers)


def sent_bytes(program: Program, rows: int) -> int:
    """The bytes that one of several devices sends to the others in a step with so many rows of the target: its part of
    every sum, to each of them. 0 if the target runs on one device.
    """
    graph, total = program.modules.unchanged["target"].graph, 0
    for node in graph.find_nodes(op="call_function", target=torch.ops.specgraph.all_reduce_rank.default):
        value = node.meta["val"]
        total += value.shape[-1] * value.element_size() * (cast(int, node.kwargs["world_size"]) - 1)
    return rows * total


def step_reads(program: Program) -> list[CallReads]:
    """The reads of every call of a module in the step graph, in order."""
    found: dict[str, Reads] = {}
    calls = []
    for node in program.graph.nodes:
        if node.op == "call_module":
            name = str(node.target)
            found[name] = found.get(name) or reads_of(program.modules.unchanged[name])
            calls.append(CallReads(node.name, name, found[name], not node.meta.get(SCRATCH, False)))
    return calls


def reads_of(module: fx.GraphModule) -> Reads:
    """The reads of a call of a module. Each of the distinct tensors that its graph names counts once."""
    shares: dict[tuple[int, torch.Size], tuple[int, float]] = {}
    caches: list[tuple[int, float | None]] = []
    for node in module.graph.nodes:
        if node.op == "get_attr":
            tensor = get_attribute(module, node.target)
            share = max((_share(user, node, tensor) for user in node.users), default=0.0)
            place = tensor.data_ptr(), tensor.shape
            known = shares.get(place, (0, 0.0))[1]
            shares[place] = tensor.numel() * tensor.element_size(), max(known, share)
        elif node.op == "placeholder":
            caches += _caches(node)
    weights = _summed((size, share) for size, share in shares.values() if share)
    return Reads(weights, _summed(caches), _states(module))


def _summed(pairs: Iterable[tuple[int, Key]]) -> tuple[tuple[int, Key], ...]:
    """The sum of the sizes that go with the same key."""
    sums: dict[Key, int] = {}
    for size, key in pairs:
        sums[key] = sums.get(key, 0) + size
    return tuple((size, key) for key, size in sums.items())


def _share(user: fx.Node, node: fx.Node, tensor: torch.Tensor) -> float:
    """The share of a tensor that one of its users reads for one row."""
    if user.target == torch.ops.aten.embedding.default and user.args[0] is node:
        return 0.0
    linear = describe(user)
    if linear is None or linear.expert_ids is None or node not in linear.constants:
        return 1.0
    return experts_per_row(linear) / len(tensor)


def experts_per_row(linear: Linear) -> int:
    """The number of experts that a row meets in a linear layer of experts."""
    size = linear.expert_ids.meta["val"].shape[0]  # batch times rows, which are symbols, times a number
    count = int(size.node.expr.as_coeff_Mul()[0])
    assert 0 < count <= len(linear.weight[0].meta["val"]), f"{linear.node.name} has {size} rows"
    return count


def _caches(node: fx.Node) -> list[tuple[int, float | None]]:
    """Bytes for each token and the window, for every buffer of an input that ops read from the page pools."""
    found = []
    for index, buffer in enumerate(buffers_of(node.meta.get("state", ()))):
        windows = _windows(node, index) if buffer.owner == "pages" else []
        if windows:
            window = None if None in windows else max(cast(list[float], windows))
            found.append((buffer.row_bytes({}) // int(buffer.shape[1]), window))  # of one token of a page
    return found


def _windows(caches: fx.Node, index: int) -> list[float | None]:
    """The windows of the ops that read a buffer, None for one that reads all of it. An op that only writes has none."""
    items = (item for item in caches.users if item.args[1:] == (index,))
    writers = [form.op for form in STATEFUL.values() if not form.reads]
    windows = [user.kwargs.get("window") for item in items for user in item.users if user.target not in writers]
    return [None if window is None else float(cast(float, window)) for window in windows]


def _recurrent_buffers(module: fx.GraphModule) -> list[tuple[Buffer, ...]]:
    """The buffers of every recurrent op of a module."""
    stateful, found = [form.op for form in RECURRENT.values()], dict[fx.Node, list[Buffer]]()
    for node in module.graph.find_nodes(op="placeholder"):
        buffers = buffers_of(node.meta.get("state", ()))
        for item in (user for user in node.users if user.target is operator.getitem):
            for user in (user for user in item.users if user.target in stateful):
                found.setdefault(user, []).append(buffers[cast(int, item.args[1])])
    return [tuple(buffers) for buffers in found.values()]


def _states(module: fx.GraphModule) -> tuple[tuple[int, int, int], ...]:
    """The bytes that the recurrent ops of a module move (:attr:`Reads.states`); ops whose rows are alike are summed."""
    sums: dict[tuple[int, bool], tuple[int, int]] = {}
    for buffers in _recurrent_buffers(module):
        state = sum(buffer.row_bytes({}) for buffer in buffers if buffer.settled_rows is None)
        rows = [buffer for buffer in buffers if buffer.settled_rows is not None]
        row = sum(buffer.row_bytes({}) // int(buffer.shape[1]) for buffer in rows)
        settled = max((buffer.settled_rows or 0 for buffer in rows), default=0)
        known = sums.get((settled, state > 0), (0, 0))
        sums[settled, state > 0] = known[0] + state, known[1] + row
    return tuple((state, row, settled) for (settled, _), (state, row) in sums.items())
