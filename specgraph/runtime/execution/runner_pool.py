"""The runners of a decoder, each over a state that is kept for the next caller."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specgraph.config import CacheConfig
from specgraph.ir.program import Program
from specgraph.kernels.peers import PeerGroup
from specgraph.passes.insert_recurrent_state import has_recurrent_state
from specgraph.runtime.execution.cuda_graphs import GraphPool
from specgraph.runtime.execution.graph_runner import GraphRunner
from specgraph.runtime.execution.plain_mode import current
from specgraph.runtime.execution.ranks import RanksRunner
from specgraph.runtime.execution.runner import Runner
from specgraph.runtime.execution.workspace import PATIENCE, Workspace, bucket, next_sizes
from specgraph.runtime.memory.earlier_outputs import EarlierOutputs
from specgraph.runtime.memory.pages import PagePool
from specgraph.runtime.memory.sizes import StateSizes
from specgraph.runtime.memory.sizing import limited, page_size
from specgraph.runtime.memory.snapshots import SnapshotPool, boundaries, snapshot_bytes
from specgraph.runtime.memory.state_memory import StateMemory
from specgraph.specialise.step_cache import StepCache


@dataclass
class RunnerPool:
    """Hands out a runner to every session, of which a ``generate`` call is one.

    One workspace is kept for the next, because with it goes a whole KV cache; sessions side by side have one each. It
    grows with what sessions need, and then everything is captured anew; it shrinks as :func:`next_sizes` says.

    Attributes:
        others: the programs of other GPUs that share the target.
        steps: for each of them the variants of its step.
        earlier: the outputs of earlier requests, of which all sessions make use.
    """

    program: Program
    max_batch_size: int
    cache: CacheConfig = field(default_factory=CacheConfig)
    make_pool: Callable[[torch.device], GraphPool] = GraphPool
    others: Sequence[Program] = ()
    steps: Sequence[StepCache] = ()
    idle: Workspace | None = None
    _recent: deque[StateSizes] = field(default_factory=lambda: deque(maxlen=PATIENCE))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.earlier = EarlierOutputs(self.program)

    @functools.cached_property
    def block_size(self) -> int:
        """The number of tokens of a page; found once, because every request asks for it."""
        return page_size(self.program, self.cache)

    @functools.cached_property
    def _weights(self) -> list[Tensor]:
        return list(self.program.tensors())

    def take(self, sizes: StateSizes) -> Runner:
        """A runner over a state in which no sequence is active, and which has room for ``sizes``.

        There may be fewer pages and rows, as many as there is memory for.

        Raises:
            InputError: there is no memory for a single page.
        """
        if self.program.captured:
            space = self._workspace(sizes)
            return RanksRunner(space, self.steps) if self.others else GraphRunner(space)
        sizes = limited(self.program, self._cache, sizes, self.max_batch_size)
        # A size of 1 has code of its own, which would be compiled for the last sequence of a batch.
        least = 2 if self.program.compiled and sizes.rows > 1 else 1
        return Runner(StateMemory(self.program, sizes, self._pages(sizes), self.earlier), least)

    @contextlib.contextmanager
    def lend(self, sizes: StateSizes) -> Iterator[Runner]:
        """A runner as :meth:`take` gives it, until the end of the block."""
        runner = self.take(sizes)
        try:
            yield runner
        finally:
            self.give_back(runner)

    def give_back(self, runner: Runner) -> None:
        """A session has ended, well or not."""
        runner.close()
        if isinstance(runner, GraphRunner) and not runner.space.broken:
            with self._lock:
                if self.idle is None or self.idle.sizes.num_pages < runner.space.sizes.num_pages:
                    self.idle = runner.space

    def forget_prefixes(self) -> None:
        """What the pages of the kept workspace hold is of no use any more."""
        with self._lock:
            if self.idle is not None:
                self.idle.pages.forget()

    def describe(self) -> list[str]:
        """Lines for the report: what is captured in the workspace that is kept for the next request."""
        if not self.program.captured:
            return []
        idle = self.idle
        first_use = "every step is a CUDA graph, captured when a request first needs its shape"
        return [first_use] if idle is None else [first_use, idle.describe()]

    def _workspace(self, sizes: StateSizes) -> Workspace:
        with self._lock:
            space, idle_bytes = self.idle, 0 if self.idle is None else self.idle.num_bytes
            if space is not None and space.sizes.rows >= sizes.rows and space.sizes.num_pages >= sizes.num_pages:
                sizes = dataclasses.replace(sizes, snapshots=space.sizes.snapshots)
            else:
                sizes = limited(self.program, self._cache, sizes, self.max_batch_size, idle_bytes, self.others)
            self._recent.append(wanted := bucket(sizes, self.max_batch_size, self.block_size))
            if space is not None:
                wanted = next_sizes(space.sizes, idle_bytes, self._recent)
            self.idle = None
        if space is None or space.sizes != wanted:
            space = None  # freed before the next one is allocated
            space = self._new_workspace(self.program, wanted, self._pages(wanted))
            if self.others:
                space.others = [self._new_workspace(other, wanted, space.pages) for other in self.others]
                space.group = PeerGroup([program.target.device for program in (self.program, *self.others)])
        return space

    def _new_workspace(self, program: Program, sizes: StateSizes, pages: PagePool) -> Workspace:
        with current(program.target.device):
            return Workspace(program, sizes, pages, self.earlier, self.make_pool(program.target.device))

    @property
    def _cache(self) -> CacheConfig:
        """The cache as it was asked for, but that nothing is shared if a draft has a recurrent state.

        A snapshot stands where the target's rows are settled, and a draft model settles its own one later.
        """
        modules = self.program.modules.unchanged.items()
        alone = not any(has_recurrent_state(module.graph) for name, module in modules if name != "target")
        return self.cache if alone else dataclasses.replace(self.cache, reuse_prefixes=False)

    def _pages(self, sizes: StateSizes) -> PagePool:
        reuse, lookahead = self._cache.reuse_prefixes, self.program.drafter.lookahead
        places = boundaries(self.program, self.block_size)
        snapshots = None if places is None else SnapshotPool(sizes.snapshots, places, snapshot_bytes(self.program))
        return PagePool(
            sizes.num_pages, self.block_size, lookahead, reuse=reuse, weights=self._weights, snapshots=snapshots
        )
