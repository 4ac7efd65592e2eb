"""A state with the graphs that are captured over it, and how large it is.

A :class:`Workspace` has room for the largest batch so far, and over it a graph for each :class:`Shape` of a step: the
number of sequences, and for prompt steps the width of their windows and the number of rows. All are rounded up
(:mod:`specgraph.runtime.schedule.prompt_shapes`). Other graphs begin sequences, for each number of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from specgraph.ir.program import Program
from specgraph.kernels.launch import new_counters
from specgraph.kernels.peers import PeerGroup, ThreadGroup
from specgraph.kernels.state import CONFIDENCE
from specgraph.kernels.step.results import num_columns
from specgraph.runtime.execution.cuda_graphs import GraphPool
from specgraph.runtime.execution.inputs import padded_inputs
from specgraph.runtime.execution.results import Mailbox, num_traced
from specgraph.runtime.memory.earlier_outputs import EarlierOutputs
from specgraph.runtime.memory.pages import PagePool
from specgraph.runtime.memory.sizes import StateSizes, largest
from specgraph.runtime.memory.state_memory import StateMemory
from specgraph.runtime.memory.state_rows import Admission, staged, uploaded
from specgraph.runtime.schedule.prompt_shapes import entries, power_of_two
from specgraph.specialise.mode import Mode

PATIENCE = 8
"""A state shrinks when it is this many sessions since one needed more than a quarter of its pages."""
SHRINK_BYTES = 1 << 30
"""Smaller states are kept: capturing again costs more than they are worth."""


class Shape(NamedTuple):
    """What a graph is captured for.

    Attributes:
        mode: the variant of the step.
        entries: those of its row index, so the most sequences that it runs.
        width: the columns of its windows, if it runs prompts; None for a decode step, whose windows are in the state.
        capacity: how many rows all sequences have together, if it runs prompts.
        half: 2 for what comes behind the pause of a step, which is a graph of its own.
        scores: whether it scores given tokens. A column more of its input then says where windows begin.
    """

    mode: Mode
    entries: int
    width: int | None = None
    capacity: int | None = None
    half: int = 1
    scores: bool = False

    def idle_input(self) -> Tensor:
        """An input of that step without sequences, on the host: a row index ``[b]``, or a chunk's ``[b, 3 + W]``, or
        ``[b, 4 + W]`` if it scores."""
        if self.width is None:
            return torch.full((self.entries,), -1, dtype=torch.int64, device="cpu")
        return padded_inputs(torch.empty(0, 3, dtype=torch.int64, device="cpu"), self.entries, self.width + self.scores)


class PausedValues(NamedTuple):
    """What the first half of a step leaves for the second: its row index, its window, and the values of its graph."""

    rows: Tensor
    window: Tensor
    values: dict[str, Any]


class Captured(NamedTuple):
    """A function as a graph: it is replayed for what lies in ``given``, and a step leaves ``packed``."""

    replay: Callable[[], None]
    packed: Tensor
    given: Tensor


class Workspace(StateMemory):
    """A state and the graphs captured over it; serves one session at a time.

    Attributes:
        counters: those of its graphs, which keep their address.
        mailbox: where results of its steps go.
        paused: what the first halves of steps that pause have left.
        others: those of other GPUs that share the target, for the same sequences and pages.
        group: where these GPUs meet; None if there is one.
        broken: whether one of them has waited in vain, behind which sums are not right any more.
    """

    def __init__(
        self, program: Program, sizes: StateSizes, pages: PagePool, earlier: EarlierOutputs, pool: GraphPool
    ) -> None:
        super().__init__(program, sizes, pages, earlier)
        device = program.target.device
        self.counters = new_counters(device) if self.counters is None else self.counters
        width = self.state["next_window"].shape[1]
        columns = num_columns(width, self.state.get(CONFIDENCE)) + num_traced(width)
        self.mailbox = Mailbox(sizes.rows, width, columns, device)
        self._pool = pool
        self._graphs: dict[Shape, Captured] = {}
        self.paused: dict[Shape, PausedValues] = {}
        self.others: list[Workspace] = []
        self.group: PeerGroup | ThreadGroup | None = None
        self.broken = False
        self._initializers: dict[int, Captured] = {}
        """By the number of sequences that begin."""
        self._weights: dict[int, Tensor] = {}
        """By address. Graphs know addresses alone, and another decoder of this model may move its parameters to other
        storage; so what they were is kept."""

    @property
    def shapes(self) -> list[Shape]:
        """What graphs are captured for so far."""
        return list(self._graphs)

    @property
    def num_captured(self) -> int:
        """How many graphs have been captured, those that begin sequences among them."""
        return len(self._graphs) + len(self._initializers)

    def has(self, shape: Shape) -> bool:
        """Whether that graph is there."""
        return shape in self._graphs

    def captured(self, shape: Shape, step: nn.Module, function: Callable[[Tensor], Tensor]) -> Captured:
        """The graph of ``shape``.

        If it is yet to be captured, ``function`` runs ``step`` for an input, which names no sequence meanwhile.
        """
        if shape not in self._graphs:
            for tensor in (*step.parameters(), *step.buffers()):
                self._weights.setdefault(tensor.data_ptr(), tensor.detach())
            self._graphs[shape] = self._capture(shape.idle_input(), function)
        return self._graphs[shape]

    def _initialize(self, entering: Sequence[Admission]) -> None:
        """Begin sequences by a graph for the next larger number of them."""
        count = entries(len(entering), self.sizes.rows)
        values = self._initializer.values(entering, count)
        if count not in self._initializers:  # capturing begins them, too, and to do so again changes nothing
            self._initializers[count] = self._capture(values, lambda given: self._initializer.load(given, count))
        graph = self._initializers[count]
        graph.given.copy_(staged(values, graph.given.device), non_blocking=True)
        graph.replay()
        self._initializer.write_tokens(entering)

    def _capture(self, values: Tensor, function: Callable[[Tensor], Tensor]) -> Captured:
        given = uploaded(values, self.state["num_rows"].device)
        return Captured(*self._pool.capture(lambda: function(given)), given)

    def describe(self) -> str:
        """Which steps are captured, and the memory that their graphs share."""
        decode = sorted({shape.entries for shape in self.shapes if shape.width is None})
        prompts = sorted({(shape.entries, shape.capacity) for shape in self.shapes if shape.capacity is not None})
        return (
            f"captured for {len({shape.mode[:2] for shape in self.shapes})} kinds of request: decode steps of "
            f"{_listed(decode)} sequences; steps with prompts of {_listed(f'{r} rows of {b}' for b, r in prompts)} "
            f"sequences; these graphs share {self._pool.num_bytes / 1e6:,.0f} MB, and their state takes "
            f"{self.num_bytes / 1e6:,.0f} MB{self._described_snapshots()}"
        )

    def _described_snapshots(self) -> str:
        pool = self.pages.snapshots
        if pool is None or not pool.count:
            return ""
        return f", of which {pool.num_bytes / 1e6:,.0f} MB are for {pool.count} snapshots of recurrent state"


def _listed(items: Iterable[object]) -> str:
    return ", ".join(map(str, items)) or "no"


def next_sizes(idle: StateSizes, idle_bytes: int, recent: Sequence[StateSizes]) -> StateSizes:
    """The sizes of a state that serves the last of the ``recent`` sessions, where one of sizes ``idle`` is there.

    As before if it fits in, and larger if it does not. If the state is large, and the last ``PATIENCE`` sessions needed
    at most a quarter of its pages, what was the most for them.
    """
    lately = largest(recent)
    if len(recent) >= PATIENCE and idle_bytes >= SHRINK_BYTES and 4 * lately.num_pages <= idle.num_pages:
        return lately
    return largest([idle, recent[-1]])


def bucket(sizes: StateSizes, max_batch_size: int, block_size: int) -> StateSizes:
    """Sizes rounded up, so that few graphs serve all sessions; the largest batch is always a bucket.

    Batches are powers of two, pages per sequence too; pages in all are rounded up by at most one part in 32.
    """
    pages, grain = power_of_two(sizes.pages_per_sequence), max(1, power_of_two(sizes.num_pages) // 64)
    return replace(
        sizes,
        rows=entries(sizes.rows, max(max_batch_size, sizes.rows)),
        pages_per_sequence=pages,
        num_pages=-(-sizes.num_pages // grain) * grain,
        max_length=pages * block_size,
        eos_ids=power_of_two(sizes.eos_ids),
        bias_tokens=power_of_two(sizes.bias_tokens),
    )
