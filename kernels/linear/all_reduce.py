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

from specgraph.kernels.attention.tiles import loop_bound
from specgraph.kernels.checks import require
from specgraph.kernels.launch import gdc_launch_dependents, gdc_wait, launch
from specgraph.kernels.linear.linear import NORM_PARTS, NormParts, norm_parts_fake, with_norm_parts
from specgraph.kernels.linear.linear_triton import NORM_GROUP
from specgraph.kernels.linear.strides import aligned, alignment_of
from specgraph.kernels.ops import Variant, declare
from specgraph.kernels.peers import MOST_PROGRAMS, SLOT, PeerGroup, ThreadGroup, current_group, waits

BLOCK = 2048
"""Values of a tile, if one for each program is enough. Else a tile has as many as a program may exchange at once, since
it waits for every tile."""
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
    """:class:`AllReduce` of ``x`` and what the same call is given on the other devices, which have graphs of their own.
    Then ``residual`` is added, in float32 or wider, too, before the sum is rounded.

    Attributes:
        x: this device's part, of any shape and a floating-point dtype; contiguous.
        residual: of the shape and dtype of ``x``, and equal on all devices; or None.
        rank: the number of this device among them, from 0.
        world_size: how many devices there are.
    """

    x: Tensor
    residual: Tensor | None = None
    _: KW_ONLY
    rank: int
    world_size: int


@dataclass(slots=True)
class AllReduceRankNorm:
    """:class:`AllReduceRank`, then :class:`~specgraph.kernels.linear.linear.NormParts` of its result:
    ``(out, weighted, sum_sq)``.
    """

    x: Tensor
    norm_weight: Tensor
    residual: Tensor | None = None
    _: KW_ONLY
    rank: int
    world_size: int
    norm_offset: float = 0.0


def all_reduce_rank_reference(given: AllReduceRank | AllReduceRankNorm) -> Tensor:
    """:class:`AllReduceRank` where every device has a thread."""
    group = current_group()
    assert isinstance(group, ThreadGroup), "a CPU has threads"
    parts = group.gather(given.x, given.rank) if waits() else [given.x]
    exact = torch.promote_types(given.x.dtype, torch.float32)
    total = all_reduce_reference(AllReduce([part.to(exact) for part in parts]))
    return (total if given.residual is None else total + given.residual.to(exact)).to(given.x.dtype)


def all_reduce_rank_norm_reference(given: AllReduceRankNorm) -> tuple[Tensor, Tensor, Tensor]:
    """:class:`AllReduceRankNorm` in the same way."""
    return with_norm_parts(given, all_reduce_rank_reference(given))


def all_reduce_rank_triton(given: AllReduceRank) -> Tensor:
    """:class:`AllReduceRank` between GPUs; NaN if another one does not come."""
    out = torch.empty_like(given.x, memory_format=torch.contiguous_format)
    _launch(given, out)
    return out


def all_reduce_rank_norm_triton(given: AllReduceRankNorm) -> tuple[Tensor, Tensor, Tensor]:
    """:class:`AllReduceRankNorm` in the same way; in a row of whole norm groups, their sums are part of the launch."""
    x, features = given.x, given.x.shape[-1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if features % NORM_GROUP:
        _launch(given, out)
        return (out, *NORM_PARTS.function(out, given.norm_weight, norm_offset=given.norm_offset))
    weighted = torch.empty_like(out)
    exact = torch.promote_types(x.dtype, torch.float32)
    sum_sq = x.new_empty(*x.shape[:-1], features // NORM_GROUP, dtype=exact)
    _launch(given, out, (aligned(given.norm_weight), weighted, sum_sq), given.norm_offset)
    return out, weighted, sum_sq


def _launch(
    given: AllReduceRank | AllReduceRankNorm, out: Tensor, norm: tuple[Tensor | None, ...] = (None, None, None),
    norm_offset: float = 0.0,
) -> None:  # fmt: skip
    """Fill ``out``, and the parts of the norm behind it: its weight, ``weighted``, ``sum_sq``."""
    group, rank, x = current_group(), given.rank, given.x
    assert isinstance(group, PeerGroup), "GPUs meet in their memory"
    slot = SLOT // x.element_size()
    block = BLOCK if x.numel() <= MOST_PROGRAMS * BLOCK else slot
    programs, width = min(triton.cdiv(x.numel(), block), MOST_PROGRAMS), x.shape[-1] if x.dim() else 1
    alignment = alignment_of(width)
    launch(
        all_reduce_kernel, (programs,), aligned(x), aligned(given.residual), out, *norm,
        tuple(slots.view(x.dtype) for slots in group.slots), tuple(group.arrivals), group.counts[rank],
        group.faults[rank], x.numel() // alignment, width, norm_offset, int(waits()), MOST_TRIES, RANK=rank,
        WORLD_SIZE=given.world_size, PROGRAMS=MOST_PROGRAMS, BLOCK=block, SLOT=slot, ALIGNMENT=alignment,
        GROUP=NORM_GROUP, WIDE=tl.float64 if x.dtype == torch.float64 else tl.float32, num_warps=8,
    )  # fmt: skip


@triton.jit
def _arrived(arrival, number, most_tries):
    """Wait until another device has written its values for exchange ``number``; whether it has, and did not give up."""
    missing = number - tl.atomic_add(arrival, 0, sem="acquire", scope="sys")
    tries = 0
    while (missing > 0) & (tries < most_tries):
        missing = number - tl.atomic_add(arrival, 0, sem="acquire", scope="sys")
        tries += 1
    return missing <= 0


@triton.jit
def _sum_of_ranks(
    own, number, broken, slots, arrivals, most_tries,
    RANK: tl.constexpr, WORLD_SIZE: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, SLOT: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """The sum of ``own`` ``[BLOCK]`` over all ranks in exchange ``number``, and whether anybody has waited in vain."""
    program, place = tl.program_id(0), tl.arange(0, BLOCK)
    own = tl.where(broken, float("nan"), own)
    turn = (number & 1) * WORLD_SIZE
    for rank in tl.static_range(WORLD_SIZE):
        if rank != RANK:
            there = slots[rank] + ((turn + RANK) * PROGRAMS + program) * SLOT
            tl.store(there + place, own)
    tl.debug_barrier()  # all threads have written before one of them says so
    for rank in tl.static_range(WORLD_SIZE):
        if rank != RANK:
            tl.atomic_xchg(arrivals[rank] + RANK * PROGRAMS + program, number, sem="release", scope="sys")
    for rank in tl.static_range(WORLD_SIZE):
        if rank != RANK:
            broken |= not _arrived(arrivals[RANK] + rank * PROGRAMS + program, number, most_tries)
    tl.debug_barrier()
    total = own.to(WIDE)
    for rank in tl.static_range(WORLD_SIZE):
        part = own
        if rank != RANK:
            here = slots[RANK] + ((turn + rank) * PROGRAMS + program) * SLOT
            part = tl.load(here + place, cache_modifier=".cg")  # past the L1 cache, which knows of no other GPU
        total = part.to(WIDE) if rank == 0 else total + part.to(WIDE)
    return tl.where(broken, float("nan"), total), broken


@triton.jit(do_not_specialize=["size", "exchanges", "most_tries", "norm_offset"])
def all_reduce_kernel(
    x, residual, out, norm_weight, weighted, sum_sq, slots, arrivals, counts, fault, size, features, norm_offset,
    exchanges, most_tries, RANK: tl.constexpr, WORLD_SIZE: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
    SLOT: tl.constexpr, ALIGNMENT: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out = x`` of rank 0 + ``x`` of rank 1 + ... + ``residual``, and the parts of a norm of it if it has a weight.

    Tiles are ``[BLOCK]``, those of sums of squares ``[BLOCK // GROUP]``. See :class:`PeerGroup` for the memory.
    Differences of numbers of exchanges are right even where the numbers have run over.
    """
    program, place = tl.program_id(0), tl.arange(0, BLOCK)
    size *= ALIGNMENT
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    number, broken = tl.load(counts + program), tl.load(fault) != 0
    for begin in range(loop_bound(program * BLOCK), loop_bound(size), loop_bound(tl.num_programs(0) * BLOCK)):
        inside = begin + place < size
        own = tl.load(x + begin + place, mask=inside, other=0.0)
        total = own.to(WIDE)
        if exchanges:
            number += 1
            total, broken = _sum_of_ranks(
                own, number, broken, slots, arrivals, most_tries, RANK, WORLD_SIZE, PROGRAMS, BLOCK, SLOT, WIDE
            )
        if residual is not None:
            total += tl.load(residual + begin + place, mask=inside, other=0.0).to(WIDE)
        rounded = total.to(out.dtype.element_ty)
        tl.store(out + begin + place, rounded, mask=inside)
        if norm_weight is not None:
            value = tl.where(inside, rounded.to(WIDE), 0.0)
            weight = tl.load(norm_weight + (begin + place) % features).to(WIDE) + norm_offset
            tl.store(weighted + begin + place, (value * weight).to(out.dtype.element_ty), mask=inside)
            squares = tl.sum(tl.reshape(value * value, [BLOCK // GROUP, GROUP]), 1)
            group = begin // GROUP + tl.arange(0, BLOCK // GROUP)
            tl.store(sum_sq + group, squares, mask=group < size // GROUP)
    if exchanges:
        tl.store(counts + program, number)
        if broken:
            tl.store(fault, 1)


def _all_reduce_rank_fake(given: AllReduceRank) -> Tensor:
    x, residual = given.x, given.residual
    require(x.is_floating_point(), lambda: f"x must be floating-point, not {x.dtype}")
    require(0 <= given.rank < given.world_size, lambda: f"rank is {given.rank}; it must be below {given.world_size}")
    alike = residual is None or (residual.shape == x.shape and residual.dtype == x.dtype)
    require(alike, lambda: f"residual must be as x, {x.dtype} {[*x.shape]}, not {residual}")
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _all_reduce_rank_norm_fake(given: AllReduceRankNorm) -> tuple[Tensor, Tensor, Tensor]:
    out = _all_reduce_rank_fake(AllReduceRank(given.x, given.residual, rank=given.rank, world_size=given.world_size))
    return (out, *norm_parts_fake(NormParts(out, given.norm_weight, norm_offset=given.norm_offset)))


ALL_REDUCE_RANK = declare(
    "all_reduce_rank", AllReduceRank, _all_reduce_rank_fake,
    (Variant("triton", all_reduce_rank_triton, True), Variant("reference", all_reduce_rank_reference, True)),
)  # fmt: skip
ALL_REDUCE_RANK_NORM = declare(
    "all_reduce_rank_norm", AllReduceRankNorm, _all_reduce_rank_norm_fake,
    (Variant("triton", all_reduce_rank_norm_triton, True), Variant("reference", all_reduce_rank_norm_reference, True)),
)  # fmt: skip
