"""Where the devices that share a target exchange what each has computed: one group for all of them, in one process.

An op of a device's graph (:mod:`specgraph.kernels.linear.all_reduce`) meets the same op of the other devices' graphs in
the group of :func:`exchanging`. GPUs meet in each other's memory (:class:`PeerGroup`), devices of a CPU, each of which
has a thread, at a barrier (:class:`ThreadGroup`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import torch
from torch import Tensor

MOST_PROGRAMS = 128
"""Programs of a device that exchange values at once. All of them have to run at the same time, since they wait."""
SLOT = 2048 * 8
"""Bytes that a program exchanges with another device at once at most."""


class PeerGroup:
    """GPUs that write into each other's memory.

    Every GPU has room for what the others send. A program writes into a place of its own, and in turns into one of two,
    so that a GPU that is ahead overwrites nothing that another one is still reading: to be two exchanges ahead, it
    would have to have received what that one sends behind its reading.

    Attributes:
        devices: the GPUs, by rank.
        slots: for each GPU the memory into which others write, uint8 ``[2 x ranks x MOST_PROGRAMS x SLOT]``.
        arrivals: for each GPU, int32 ``[ranks, MOST_PROGRAMS]``: the number of the last exchange for which a program of
            a rank has written its values.
        counts: for each GPU the number of exchanges of each of its programs so far, int32 ``[MOST_PROGRAMS]``. It
            returns to the smallest number behind the largest.
        faults: for each GPU whether it has waited in vain, int32 ``[1]``. From then on it gives NaN, and to the others.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        """The GPUs must be able to reach each other's memory."""
        self.devices = list(devices)
        _reach_each_other(self.devices)
        count = len(self.devices)
        self.slots = [_zeros(device, 2 * count * MOST_PROGRAMS * SLOT, torch.uint8) for device in devices]
        self.arrivals = [_zeros(device, count * MOST_PROGRAMS, torch.int32) for device in devices]
        self.counts = [_zeros(device, MOST_PROGRAMS, torch.int32) for device in devices]
        self.faults = [_zeros(device, 1, torch.int32) for device in devices]
        for device in self.devices:  # nobody may write into memory that is yet to be filled with zeros
            torch.cuda.synchronize(device)

    def waited_in_vain(self) -> list[torch.device]:
        """The GPUs that have waited for another one in vain. To find out waits for all of them."""
        return [device for device, fault in zip(self.devices, self.faults, strict=True) if int(fault)]


def _zeros(device: torch.device, size: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(size, dtype=dtype, device=device)


def _reach_each_other(devices: Sequence[torch.device]) -> None:
    """Let every GPU write into the memory of the others; PyTorch sees to it when it copies from one to the other."""
    for a in devices:
        for b in devices:
            if a != b:
                torch.ones(1, device=a).to(b)


class ThreadGroup:
    """Devices of a CPU, each in a thread of its own."""

    def __init__(self, count: int) -> None:
        self.devices = [torch.device("cpu")] * count
        self._barrier = threading.Barrier(count, timeout=60)
        self._parts: list[Tensor | None] = [None] * count

    def waited_in_vain(self) -> list[torch.device]:
        """None: a thread that waits in vain raises an error."""
        return []

    def gather(self, part: Tensor, rank: int) -> list[Tensor]:
        """The parts of all devices, by rank, when all of them have come."""
        self._parts[rank] = part
        self._barrier.wait()
        parts = [own for own in self._parts if own is not None]
        self._barrier.wait()
        return parts


_group: ContextVar[PeerGroup | ThreadGroup | None] = ContextVar("group", default=None)
_waits: ContextVar[bool] = ContextVar("waits", default=True)


@contextlib.contextmanager
def exchanging(group: PeerGroup | ThreadGroup) -> Iterator[None]:
    """Inside of this context, ops of this thread meet those of other devices in ``group``."""
    token = _group.set(group)
    try:
        yield
    finally:
        _group.reset(token)


@contextlib.contextmanager
def not_waiting() -> Iterator[None]:
    """Inside of this context nothing is exchanged, and sums are a device's own.

    This is for runs whose results nobody reads: while a step is warmed up, no other device runs it.
    """
    token = _waits.set(False)
    try:
        yield
    finally:
        _waits.reset(token)


def waits() -> bool:
    """Whether this is outside of :func:`not_waiting`."""
    return _waits.get()


def current_group() -> PeerGroup | ThreadGroup:
    """The group of :func:`exchanging`.

    Raises:
        RuntimeError: there is none, so a sum would lack what other devices have computed.
    """
    group = _group.get()
    if group is None:
        raise RuntimeError("A graph of one of several devices runs alone; run it inside of kernels.peers.exchanging.")
    return group
