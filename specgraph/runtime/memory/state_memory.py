"""The memory of the sequences that decode together: a state, its pages, and its snapshots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from specgraph.ir.program import Program
from specgraph.ir.state import allocate, num_bytes
from specgraph.kernels.launch import new_counters
from specgraph.kernels.state import EARLIER
from specgraph.runtime.memory.earlier_outputs import EarlierOutputs
from specgraph.runtime.memory.pages import PagePool, Reservation
from specgraph.runtime.memory.sizes import StateSizes
from specgraph.runtime.memory.sizing import page_bytes
from specgraph.runtime.memory.snapshots import Snapshots
from specgraph.runtime.memory.state_rows import Admission, StateRowInitializer, staged

Reached = tuple[Reservation, Tensor, int, int]
"""Of a sequence whose state can be copied: what it has reserved, its prompt, its row, and the boundary reached."""


class StateMemory:
    """The memory of the sequences that decode together.

    Attributes:
        sizes: what it has room for.
        earlier: the outputs of earlier requests of the decoder.
        state: the tensors that the step reads and writes.
        pages: those of the KV cache, and what is known of them.
        snapshots: copies of recurrent state; None if the target has none, or nothing is shared.
        counters: arrival counters of launches, which other streams must not touch; None on a CPU.
        num_bytes: what the state and its snapshots take at most.
    """

    def __init__(self, program: Program, sizes: StateSizes, pages: PagePool, earlier: EarlierOutputs) -> None:
        device = program.target.device
        self.sizes, self.pages, self.earlier = sizes, pages, earlier
        self.state = allocate(program, sizes.by_letter(), device)
        pool = pages.snapshots
        self.snapshots = Snapshots(program, self.state, pool.count) if pool and pool.count else None
        self.counters = None if device.type == "cpu" else new_counters(device)
        self.num_bytes = num_bytes(program, self.state) + (pool.num_bytes if pool else 0)
        self._initializer = StateRowInitializer(program, self.state)
        self._page_bytes, self._lazy = page_bytes(program), device.type == "cpu"

    @property
    def used_bytes(self) -> int:
        """What it takes so far, at most: on a CPU, a page takes memory only once a sequence has had it."""
        return self.num_bytes - self._lazy * (self.pages.count - self.pages.num_touched) * self._page_bytes

    def admit(self, entering: Sequence[Admission]) -> None:
        """Begin sequences, each in its row, with the state that it shares."""
        self._initialize(entering)
        if EARLIER in self.state:
            there = self.state[EARLIER]
            there.copy_(staged(self.earlier.tokens(), there.device), non_blocking=True)
        if self.snapshots is not None:
            self.snapshots.load([(new.snapshot, new.state_row) for new in entering if new.snapshot is not None])

    def _initialize(self, entering: Sequence[Admission]) -> None:
        self._initializer.admit(entering)

    def keep_states(self, reached: Iterable[Reached], *, target_only: bool = False) -> dict[int, int]:
        """Take snapshots behind the last step that was enqueued, and return the row of each."""
        if self.snapshots is None:
            return {}
        # Where a snapshot made room for another one in the same step, only the last is written.
        taken = {
            snapshot: row
            for reserved, prompt, row, boundary in reached
            if (snapshot := self.pages.take_snapshot(reserved, prompt, boundary, target_only=target_only)) is not None
        }
        self.snapshots.save(taken)
        return taken
