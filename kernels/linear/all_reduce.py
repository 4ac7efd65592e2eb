"""``specgraph::all_reduce`` and ``specgraph::all_reduce_rank``: the sum of what several devices have computed, in the
order of the devices.

A product whose inputs lie on several devices is a sum over them: each device multiplies the inputs that it has. Every
device adds the same numbers in the same order, so that all have the same bits, from run to run and whatever other rows
there are.

Where one graph has the nodes of all devices, ``all_reduce`` takes their parts. In the graph of one device,
``all_reduce_rank`` takes its own part and meets those of the others (:mod:`specgraph.kernels.peers`). On GPUs this is
an all-reduce in one shot: every program writes its values into the memory of each other GPU, says so, waits until it
has theirs, and adds them all.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.checks import require
from specgraph.kernels.ops import Variant, declare
from specgraph.kernels.peers import BLOCK, MOST_PROGRAMS, PeerGroup, ThreadGroup, current_group, waits

MOST_TRIES = 1 << 24
"""How often a program looks whether another device has come, which takes some ten seconds, before it gives up."""


@dataclass(slots=True)
class AllReduce:
    """``parts[0] + parts[1] + ...`` from left to right, in float32 or wider, rounded once to the dtype of the parts.

    Attributes:
        parts: one tensor of each device, by its number; all of one shape and one floating-point dtype.
    """

    parts: list[Tensor]


def all_reduce_reference(given: AllReduce) -> Tensor:
    """:class:`AllReduce` in plain PyTorch."""
    first, *others = given.parts
    total = first.to(torch.promote_types(first.dtype, torch.float32), copy=True)
    for part in others:
        total += part
    return total.to(first.dtype)


def _all_reduce_fake(given: AllReduce) -> Tensor:
    first = given.parts[0]
    require(first.is_floating_point(), lambda: f"parts must be floating-point, not {first.dtype}")
    for part in given.parts:
        alike = part.dtype == first.dtype and part.shape == first.shape
        require(alike, lambda: f"parts must be alike, not {[(str(p.dtype), [*p.shape]) for p in given.parts]}")
    return torch.empty_like(first, memory_format=torch.contiguous_format)


ALL_REDUCE = declare("all_reduce", AllReduce, _all_reduce_fake, (Variant("reference", all_reduce_reference, True),))


@dataclass(slots=True)
class AllReduceRank:
    """:class:`AllReduce` of ``x`` and what the same call gives on the other devices, which have graphs of their own.

    Attributes:
        x: this device's part, of any shape and a floating-point dtype; contiguous.
        rank: the number of this device among them, from 0.
        world_size: how many devices there are.
    """

    x: Tensor
    _: KW_ONLY
    rank: int
    world_size: int


def all_reduce_rank_reference(given: AllReduceRank) -> Tensor:
    """:class:`AllReduceRank` where every device has a thread."""
    group = current_group()
    assert isinstance(group, ThreadGroup), "a CPU has threads"
    return all_reduce_reference(AllReduce(group.gather(given.x, given.rank)))


def all_reduce_rank_triton(given: AllReduceRank) -> Tensor:
    """:class:`AllReduceRank` between GPUs; NaN if another one does not come."""
    group, rank, x = current_group(), given.rank, given.x.contiguous()
    assert isinstance(group, PeerGroup), "GPUs meet in their memory"
    out = torch.empty_like(x)
    programs = min(triton.cdiv(x.numel(), BLOCK), MOST_PROGRAMS)
    if programs:
        all_reduce_kernel[(programs,)](
            x, out, tuple(group.slots), tuple(group.arrivals), group.counts[rank], group.faults[rank], x.numel(),
            int(waits()), MOST_TRIES, RANK=rank, WORLD_SIZE=given.world_size, PROGRAMS=MOST_PROGRAMS, BLOCK=BLOCK,
            WIDE=tl.float64 if x.dtype == torch.float64 else tl.float32, num_warps=8,
        )  # fmt: skip
    return out


@triton.jit
def _arrived(arrival, number, most_tries):
    """Wait until another device has written its values for exchange ``number``; whether it has, and did not give up."""
    missing = number - tl.atomic_add(arrival, 0, sem="acquire", scope="sys")
    tries = 0
    while (missing > 0) & (tries < most_tries):
        missing = number - tl.atomic_add(arrival, 0, sem="acquire", scope="sys")
        tries += 1
    return missing <= 0


@triton.jit(do_not_specialize=["size", "exchanges", "most_tries"])
def all_reduce_kernel(
    x, out, slots, arrivals, counts, fault, size, exchanges, most_tries,
    RANK: tl.constexpr, WORLD_SIZE: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """``out = x`` of rank 0 + ``x`` of rank 1 + ...; every tile is ``[BLOCK]``. See :class:`PeerGroup` for the rest.

    Differences of numbers of exchanges are right even where the numbers have run over.
    """
    program, place = tl.program_id(0), tl.arange(0, BLOCK)
    number, broken = tl.load(counts + program), tl.load(fault) != 0
    for begin in range(program * BLOCK, size, tl.num_programs(0) * BLOCK):
        inside = begin + place < size
        own = tl.load(x + begin + place, mask=inside, other=0.0)
        total = own.to(WIDE)
        if exchanges:
            number += 1
            own = tl.where(broken, float("nan"), own)
            turn = (number & 1) * WORLD_SIZE
            for rank in tl.static_range(WORLD_SIZE):
                if rank != RANK:
                    there = slots[rank].to(x.dtype) + ((turn + RANK) * PROGRAMS + program) * BLOCK
                    tl.store(there + place, own)
            tl.debug_barrier()  # all threads have written before one of them says so
            for rank in tl.static_range(WORLD_SIZE):
                if rank != RANK:
                    tl.atomic_xchg(arrivals[rank] + RANK * PROGRAMS + program, number, sem="release", scope="sys")
            for rank in tl.static_range(WORLD_SIZE):
                if rank != RANK:
                    broken |= not _arrived(arrivals[RANK] + rank * PROGRAMS + program, number, most_tries)
            tl.debug_barrier()
            for rank in tl.static_range(WORLD_SIZE):
                part = own
                if rank != RANK:
                    here = slots[RANK].to(x.dtype) + ((turn + rank) * PROGRAMS + program) * BLOCK
                    part = tl.load(here + place, volatile=True)
                total = part.to(WIDE) if rank == 0 else total + part.to(WIDE)
            total = tl.where(broken, float("nan"), total)
        tl.store(out + begin + place, total.to(out.dtype.element_ty), mask=inside)
    if exchanges:
        tl.store(counts + program, number)
        if broken:
            tl.store(fault, 1)


def _all_reduce_rank_fake(given: AllReduceRank) -> Tensor:
    require(given.x.is_floating_point(), lambda: f"x must be floating-point, not {given.x.dtype}")
    require(
        0 <= given.rank < given.world_size, lambda: f"rank is {given.rank}; it must be below {given.world_size}"
    )
    return torch.empty_like(given.x, memory_format=torch.contiguous_format)


ALL_REDUCE_RANK = declare(
    "all_reduce_rank", AllReduceRank, _all_reduce_rank_fake,
    (Variant("triton", all_reduce_rank_triton, True), Variant("reference", all_reduce_rank_reference, True)),
)  # fmt: skip
