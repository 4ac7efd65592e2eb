"""Copies of recurrent state, from which another sequence with the same beginning goes on.

A page holds keys and values of its own tokens, so a sequence may begin behind any page that it shares. A recurrent
state is a single one for all tokens before it, so a sequence may begin only where a copy of it was kept: a *snapshot*.
The op of a layer leaves its state at the last multiple of its chunk at which all rows were settled
(:mod:`specgraph.kernels.recurrent.span`). A copy that is taken while less than a chunk is settled behind such a
boundary is therefore the state at the boundary. It is a function of the tokens before the boundary alone, because
prompts, decoding and scoring are one arithmetic.

Which buffers are copied is what they declare (``Buffer.chunk``). Copies run on the stream of the steps, between two
steps, from and to buffers of fixed addresses; so the host does not wait, and captured graphs know nothing of them.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specgraph.compat import foreach_copy
from specgraph.ir.state import HasInputs, State, each_buffer
from specgraph.kernels.state import Buffer, buffers_of

FEWEST = 16
"""How many snapshots there are at least, and two for each sequence, unless an option or the memory says otherwise."""


class Boundaries(NamedTuple):
    """Where the state of a sequence can be copied, so that another one goes on from there.

    Attributes:
        every: the tokens from one boundary to the next, a multiple of the tokens of a page.
        within: a copy is taken while fewer than so many rows behind the boundary are settled.
    """

    every: int
    within: int

    def last(self, length: int) -> int:
        """The last boundary of the first ``length`` tokens."""
        return length // self.every * self.every


def copied_buffers(program: HasInputs) -> list[Buffer]:
    """The buffers that a snapshot holds a row of; none if the target keeps nothing but keys and values."""
    return [buffer for spec in program.inputs.values() for buffer in buffers_of(spec) if buffer.chunk is not None]


def boundaries(program: HasInputs, block_size: int) -> Boundaries | None:
    """Where snapshots of a program's state can be, with pages of ``block_size`` tokens; None if it needs none."""
    chunks = [buffer.chunk for buffer in copied_buffers(program) if buffer.chunk is not None]
    return Boundaries(math.lcm(block_size, *chunks), min(chunks)) if chunks else None


def snapshot_bytes(program: HasInputs) -> int:
    """Bytes of one snapshot, over all layers."""
    return sum(buffer.row_bytes({}) for buffer in copied_buffers(program))


class SnapshotPool:
    """Which snapshots there are, each known by the page that ends at its boundary.

    A snapshot goes with the name of its page. If all are in use when one is to be taken, that of the page which was
    not used for the longest time makes room.

    Attributes:
        count: how many there is room for.
        boundaries: where they can be.
        num_bytes: of all of them.
    """

    def __init__(self, count: int, boundaries: Boundaries, size: int = 0) -> None:
        """``size`` is the bytes of one."""
        self.count, self.boundaries, self.num_bytes = count, boundaries, count * size
        self._free = list(range(count - 1, -1, -1))
        self._known: OrderedDict[int, int] = OrderedDict()
        """By page, the longest unused first."""

    def __contains__(self, page: int) -> bool:
        return page in self._known

    @property
    def num_known(self) -> int:
        """How many snapshots sequences could go on from."""
        return len(self._known)

    def use(self, page: int) -> int:
        """The snapshot of a page that has one; it counts as used now."""
        self._known.move_to_end(page)
        return self._known[page]

    def take(self) -> int | None:
        """A snapshot to be written, which nobody finds until :meth:`name` is called; None if there is none.

        A sequence that goes on from it already has enqueued its copy before whoever writes it now.
        """
        if not self._free and self._known:
            self.drop(next(iter(self._known)))
        return self._free.pop() if self._free else None

    def name(self, page: int, snapshot: int) -> None:
        """Let ``snapshot`` be that of ``page``, which keeps its own if it has one."""
        if page in self._known:
            self.give_back(snapshot)
        else:
            self._known[page] = snapshot

    def drop(self, page: int) -> None:
        """A page is not known any more, and neither is its snapshot, if it has one."""
        if page in self._known:
            self._free.append(self._known.pop(page))

    def give_back(self, snapshot: int) -> None:
        """One that was taken will not be named."""
        self._free.append(snapshot)

    def forget(self) -> None:
        """No snapshot is of use any more."""
        self._free += self._known.values()
        self._known.clear()


class Snapshots:
    """The memory of snapshots, and the copies between it and the rows of a state."""

    def __init__(self, program: HasInputs, state: State, count: int) -> None:
        """``count`` snapshots, whose elements are not defined until they are saved."""
        self._pairs: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        """Each buffer and its snapshots, by their dtype."""
        for tensor in (tensor for _, buffer, tensor in each_buffer(program, state) if buffer.chunk is not None):
            copies = torch.empty(count, *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)
            self._pairs.setdefault(tensor.dtype, []).append((tensor, copies))

    def save(self, taken: Mapping[int, int]) -> None:
        """Copy the state of rows into snapshots; ``taken`` has a row for each snapshot that is written."""
        for pairs in self._pairs.values():
            _copy([(there[row], copies[snapshot]) for there, copies in pairs for snapshot, row in taken.items()])

    def load(self, given: Sequence[tuple[int, int]]) -> None:
        """Copy snapshots into rows of the state: pairs of a snapshot and a row."""
        for pairs in self._pairs.values():
            _copy([(copies[snapshot], there[row]) for there, copies in pairs for snapshot, row in given])


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy each first tensor into the second; all have one dtype, so that few launches do it on a GPU."""
    if pairs:
        sources, targets = zip(*pairs, strict=True)
        foreach_copy(targets, sources, non_blocking=True)
