"""The Triton form of ``specgraph::paged_attention``: tilings and launches.

It computes what :mod:`specgraph.kernels.attention.attention` defines, for float16, bfloat16 and float32: new keys and
values ``[B, Hkv, T, D]`` are rotated if asked and written to their cache slots, and each query of ``q``
``[B, Hq, T, D]`` attends to the positions of its sequence that it sees. The result is ``[B, T, Hq, Dv]``. Scores and
sums are float32.

A program takes a tile of (query, head) pairs that share a key-value head, so that it reads that head's keys once for
all of them. While decoding, tiles are few, so the context is distributed over programs as well. It is cut at absolute
positions into *KV splits* of ``Tiling.kv_split`` positions, which are read in blocks of ``Tiling.block_keys`` keys;
``Tiling.split_group`` KV splits form a *split group*. A short context has a program for every KV split. In a long one a
program takes whole split groups, so that few partial results have to be merged
(:mod:`specgraph.kernels.attention.work_units`).

The order of the sums is fixed by absolute positions. Within a KV split, blocks are added in order; the KV splits of a
group are merged in order, and then the groups. For a query that does not see a block, KV split or group, merging it
multiplies by one and adds zero. So the bits of a query's result depend on the query and on its keys and values alone.
They do not depend on the other queries, the batch, the width of the block table, the tile of queries, or whether one
program merged in registers or several did through memory. Contraction of products and sums by the compiler is off.

There are three kernels. Calls with few queries per sequence, such as those of a decoding step, go to
:mod:`specgraph.kernels.attention.decode`. Calls with many, such as a prompt's chunk, go to
:mod:`specgraph.kernels.attention.prefill`, or on Hopper to :mod:`specgraph.kernels.attention.prefill_hopper`. They give
the same bits (:mod:`specgraph.kernels.attention.tiles` says why). A call is padded, ``[B, T]``, or of variable length
(``cu_seqlens``, :mod:`specgraph.kernels.attention.packing`).

Sources: online softmax, Milakov and Gimelshein 2018, arXiv 1805.02867; FlashAttention-2, Dao 2023, arXiv 2307.08691;
merging of partial results, Flash-Decoding, Dao et al. 2023. What else was tried is in ``docs/experiments.md``.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels import gpus
from specgraph.kernels.attention.arguments import Cached, PagedAttention
from specgraph.kernels.attention.block_arguments import PagedBlockAttention
from specgraph.kernels.attention.decode import decode_attention_kernel, write_cache_kernel
from specgraph.kernels.attention.prefill import prefill_attention_kernel
from specgraph.kernels.attention.tensors import Heads, new_and_cached
from specgraph.kernels.launch import MAX_COUNTERS, arrival_counters, contiguous, is_hopper, launch, runs_gluon

NUM_WARPS = 4
"""The number of warps is fixed: the sum of a block's weights crosses warps, and their number decides its order."""
PREFILL_PAIRS = 64
"""(Query, head) pairs in a tile of the kernel for many queries: as many as a matrix instruction takes on the left."""
HOPPER_PAIRS = 128
"""The same of the Gluon kernel for many queries: two groups of warps take one matrix instruction's pairs each."""
LANES = 128
"""With ``cu_seqlens``, kernels look at so many sequences at a time to find that of a tile, or at all if there are more.
It is the same for most calls, since each number is a kernel of its own."""
BLOCKS = (16, 32, 64, 128)
"""The numbers of keys that a block may have."""
WRITTEN_TOKENS = 16
"""The keys and values of up to this many new tokens per sequence are written by the launch that attends.

Wider calls write in a launch before.
"""


@dataclass(frozen=True)
class Tiling:
    """Sizes of the tiles. The first three decide the bits of the result. The others do not, and None chooses a default.

    (Two exceptions on a GPU: in float32 ``block_queries`` and ``prefill`` decide bits as well, and so does ``prefill``
    if ``block_keys`` is not 64.)

    Attributes:
        kv_split: positions whose keys are summed together, in blocks of ``block_keys``.
        split_group: KV splits that are merged with each other before they are merged with the rest.
        block_keys: keys of a block.
        block_queries: (query, head) pairs in a tile of the kernel for few queries.
        programs: programs that share a context in the kernel for few queries.
        write_first: whether a launch before attention writes the new keys and values. The kernel for many queries
            always needs that.
        prefill: whether a kernel for many queries is used.
        hopper: whether that may be the Gluon kernel for Hopper.
        num_stages: blocks of keys and values in shared memory.

    Raises:
        ValueError: a KV split is not a whole number of blocks, or the sum over keys is not written for blocks of that
            size.
    """

    kv_split: int = 256
    split_group: int = 4
    block_keys: int = 64
    block_queries: int | None = None
    programs: int | None = None
    write_first: bool | None = None
    prefill: bool | None = None
    hopper: bool = True
    num_stages: int | None = None

    def __post_init__(self) -> None:
        if self.block_keys not in BLOCKS or self.kv_split % self.block_keys:
            raise ValueError(
                f"Blocks have {', '.join(map(str, BLOCKS))} keys and KV splits are whole blocks, "
                f"not block_keys={self.block_keys} and kv_split={self.kv_split}."
            )


def paged_attention_triton(given: PagedAttention, *, tiling: Tiling | None = None) -> Tensor:
    """:class:`PagedAttention` for one of float16, bfloat16 and float32 and head dims up to 256."""
    tiling = tiling or Tiling()
    scale, softcap, block_size = given.scale, given.softcap, given.k_cache.shape[1]
    batch, heads, length, dim = given.q.shape
    groups, value_dim = given.k.shape[1], given.v.shape[3]
    if max(dim, value_dim) > 256:
        raise ValueError(f"paged_attention has kernels for head dims up to 256, not {dim} and {value_dim}.")
    if not scale > 0 or not (softcap is None or softcap > 0):
        raise ValueError(f"paged_attention takes a scale and a softcap above 0, not {scale} and {softcap}.")
    out = given.q.new_empty(batch, length, heads, value_dim)
    if batch * length == 0:
        return out
    q, (k, v, angles, *caches) = Heads.of(given.q), new_and_cached(given)
    slots, block_table, positions = contiguous(given, "slots", "block_table", "positions")
    written = write_constants(given)

    cu_seqlens, sequences = given.cu_seqlens, batch * groups
    pairs, widest = length * heads // groups, max(written["DP"], written["DVP"])
    prefill = tiling.prefill
    if prefill is None:
        count = None if cu_seqlens is None else len(block_table)
        prefill = is_hopper(out.device) and suits_prefill(pairs, sequences, written["DVP"], out.dtype, count)
    write_first = prefill or cu_seqlens is not None
    if not write_first:
        write_first = length > WRITTEN_TOKENS if tiling.write_first is None else tiling.write_first
    if write_first:
        launch(
            write_cache_kernel, (triton.cdiv(length, WRITTEN_TOKENS), sequences), k, v, angles, *caches, slots,
            length, TOKENS=WRITTEN_TOKENS, **written,
        )

    counters = arrival_counters(out.device)  # allocated even if not needed now, since a later call may be captured
    capacity = block_table.shape[1] * block_size
    constants = {
        **written, **read_constants(given, tiling), "SOFTCAP": softcap is not None,
        "LANES": 0 if cu_seqlens is None else max(LANES, triton.next_power_of_2(len(cu_seqlens) - 1)),
    }
    tables = (slots, block_table, positions, cu_seqlens, given.sinks, out)
    factors = score_factors(scale, softcap)
    if prefill and suits_hopper(given, tiling, pairs):
        # Gluon is experimental: other releases of Triton may lack it, so it is imported where it runs.
        gluon = importlib.import_module("specgraph.kernels.attention.prefill_hopper")
        left_out = ("DV", "DP", "DVP", "BLOCK_N", "OFFSET")
        launch(
            gluon.prefill_hopper_kernel, (sequences, num_tiles(pairs, HOPPER_PAIRS, cu_seqlens)), q, angles,
            *(gluon.descriptor(x) for x in (given.k_cache, given.v_cache)), *(x.head for x in caches), *tables,
            len(block_table), block_table.stride(0), length, capacity, *factors,
            **{**{name: constants[name] for name in constants if name not in left_out}, "STAGES": gluon.STAGES},
        )
        return out
    if prefill:
        launch(
            prefill_attention_kernel, (num_tiles(pairs, PREFILL_PAIRS, cu_seqlens), sequences), q, angles, *caches,
            *tables, len(block_table), block_table.stride(0), length, capacity, *factors, BLOCK_M=PREFILL_PAIRS,
            **{**constants, "num_warps": 4 if widest <= 128 else 8},
        )
        return out

    block_m = tiling.block_queries or block_queries(pairs, sequences, out.dtype)
    tiles = num_tiles(pairs, block_m, cu_seqlens)
    splits, programs, work_units = shares(tiles * sequences, capacity, tiling)
    partials = partial_results(out, programs, tiles * sequences * work_units * block_m, written["DVP"])
    launch(
        decode_attention_kernel, (tiles, sequences, programs), q, k, v, angles, *caches, *tables, partials, counters,
        len(block_table), block_table.stride(0), length, splits, work_units, *factors, BLOCK_M=block_m,
        WRITE=0 if write_first else triton.next_power_of_2(max(length, WRITTEN_TOKENS)), SHARED=programs > 1,
        PAGES=pages_of(tiling.kv_split, block_size), **constants,
    )
    return out


def write_constants(given: Cached) -> dict[str, Any]:
    """What kernels that write keys and values ``[B, Hkv, T, D]`` to a cache are compiled for, and their warps."""
    k, cos = given.k, given.cos
    sizes: dict[str, Any] = {**widths(k, given.v), "HEADS": k.shape[1], "ROTARY": 0 if cos is None else cos.shape[2]}
    return {**sizes, "num_warps": NUM_WARPS, "enable_fp_fusion": False}


def read_constants(given: PagedAttention | PagedBlockAttention, tiling: Tiling) -> dict[str, Any]:
    """What kernels that attend to a cache are compiled for beside :func:`write_constants`."""
    caches = (given.k_cache, given.v_cache)
    return {
        "GROUP": given.q.shape[1] // given.k.shape[1], "BLOCK_SIZE": caches[0].shape[1], "KV_SPLIT": tiling.kv_split,
        "SPLIT_GROUP": tiling.split_group, "BLOCK_N": tiling.block_keys, "WINDOW": given.window or 0,
        "SINKS": given.sinks is not None, "OFFSET": offset_type(*caches),
        "STAGES": tiling.num_stages or num_stages(tiling.block_keys, widths(given.k, given.v), given.q.dtype),
    }


def partial_results(out: Tensor, programs: int, columns: int, width: int) -> Tensor | None:
    """Scratch memory for the states of ``columns`` pairs, with values of this width; None for a single program."""
    return out.new_empty(columns * (width + 2), dtype=torch.float32) if programs > 1 else None


def num_tiles(pairs: int, tile: int, cu_seqlens: Tensor | None) -> int:
    """The most tiles of (query, head) pairs; with ``cu_seqlens``, each sequence and the padding begin a tile."""
    return triton.cdiv(pairs, tile) if cu_seqlens is None else pairs // tile + len(cu_seqlens) - 1


def shares(tasks: int, capacity: int, tiling: Tiling) -> tuple[int, int, int]:
    """The KV splits in the longest context that ``capacity`` holds, the programs that share it, and its work units."""
    splits = triton.cdiv(capacity, tiling.kv_split)
    programs = tiling.programs or gpus.HOPPER.attention_programs // tasks
    programs = max(1, min(splits, programs)) if tasks <= MAX_COUNTERS else 1
    # If a context has more KV splits than programs, its work units are split groups.
    return splits, programs, max(programs, triton.cdiv(splits, tiling.split_group))


def widths(k: Tensor, v: Tensor) -> dict[str, int]:
    """The widths of keys and values ``[B, H, T, D]``, and of the tiles that hold them.

    A tile's width is a power of two, and at least the 16 that ``tl.dot`` needs.
    """
    dim, value_dim = k.shape[3], v.shape[3]
    padded, value_padded = (max(16, triton.next_power_of_2(size)) for size in (dim, value_dim))
    return {"D": dim, "DV": value_dim, "DP": padded, "DVP": value_padded}


def offset_type(*caches: Tensor) -> Any:
    """The type in which offsets into the caches are computed: int32, which multiplies faster, if it holds all."""
    return tl.int32 if max(_extent(cache) for cache in caches) < 2**31 else tl.int64


def _extent(x: Tensor) -> int:
    """The distance from the first element of ``x`` to the last one in memory, in elements."""
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def score_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """The factor that makes a score an exponent of 2, and the factor inside the soft cap.

    Without a cap a score is a product of query and key, and the second factor is 0. With a cap it is the hyperbolic
    tangent of the scaled product, which is computed from a power of 2; the second factor makes the product its
    exponent.
    """
    log2e = 1.4426950408889634
    return (scale * log2e, 0.0) if softcap is None else (softcap * log2e, 2 * log2e * scale / softcap)


def block_queries(pairs: int, sequences: int, dtype: torch.dtype) -> int:
    """The number of (query, head) pairs in a tile.

    Tiles have 16 pairs as long as all programs run at once, since a program with a small tile finishes sooner. With
    more programs than that, tiles have 32 pairs, since every tile reads all keys. float32 does not use tensor cores
    here, and the layout that orders its sum over keys depends on the tile, so it always has tiles of 16.

    Args:
        pairs: (query, head) pairs of each key-value head of a sequence.
        sequences: the number of (sequence, key-value head) combinations.
        dtype: the dtype of q, k and v.
    """
    fewest, programs = 16, gpus.HOPPER.attention_programs
    many = dtype.itemsize == 2 and pairs > fewest and triton.cdiv(pairs, fewest) * sequences > programs
    return 2 * fewest if many else fewest


def suits_prefill(pairs: int, sequences: int, value_dim: int, dtype: torch.dtype, varlen: int | None = None) -> bool:
    """Whether the kernel for many queries is faster and gives the same bits on Hopper.

    The arguments are those of :func:`block_queries`, the width of the values, and for a call with ``cu_seqlens`` the
    number of its sequences.

    It is faster if tiles of 16 pairs would be more than a GPU runs at once, and if its own tiles are more than half
    full; with ``cu_seqlens``, if sequences fill a tile on average. (With the heads of Llama-3-8B and contexts of 64 to
    1,400 tokens, 64 queries that decode beside 192 of a prompt take 123 us, and 96 in the kernel for few queries.
    Beside four prompts of 240 tokens they take 159 and 137.) If values have fewer than 64 columns, the kernel for few
    queries multiplies with another instruction, so bits may differ.
    """
    half_full = pairs > PREFILL_PAIRS // 2 if varlen is None else pairs >= PREFILL_PAIRS * varlen
    many = half_full and triton.cdiv(pairs, 16) * sequences > gpus.HOPPER.attention_programs
    return many and dtype.itemsize == 2 and value_dim >= 64


def suits_hopper(given: PagedAttention, tiling: Tiling, pairs: int) -> bool:
    """Whether the Gluon kernel takes a call for the kernel for many queries, and is faster.

    It takes 16-bit heads of 64 or 128, with values as wide as keys, and blocks of 64 keys. The tensor memory
    accelerator copies pages of a power of two of slots, at least 8, whose strides are multiples of 16 bytes. ``pairs``
    are those of a key-value head of a sequence. Where they fill half of a tile at most, or with ``cu_seqlens`` less
    than a tile on average, the smaller tiles of the Triton kernel waste less; ``Tiling.prefill`` goes before this.
    """
    caches = (given.k_cache, given.v_cache)
    dim, page, count = given.q.shape[3], caches[0].shape[1], len(given.block_table)
    full = pairs > HOPPER_PAIRS // 2 if given.cu_seqlens is None else pairs >= HOPPER_PAIRS * count
    return (
        tiling.hopper and runs_gluon(given.q.device) and given.q.dtype.itemsize == 2
        and dim in (64, 128) and given.v.shape[3] == dim and tiling.block_keys == 64
        and page >= 8 and page.bit_count() == 1
        and all(x.data_ptr() % 16 == 0 and x.stride(1) % 8 == 0 for x in caches)
        and given.block_table.shape[1] > 0
        and (full or tiling.prefill is True)
    )  # fmt: skip


def pages_of(kv_split: int, block_size: int) -> int:
    """A number of pages, a power of two, that holds a KV split wherever it begins."""
    whole = kv_split // block_size
    return triton.next_power_of_2(whole if kv_split % block_size == 0 else whole + 2)


def num_stages(block_keys: int, sizes: dict[str, int], dtype: torch.dtype) -> int:
    """The number of blocks of keys and values in shared memory, one of them in use: up to three, in 128 KiB.

    float32 has one: products without tensor cores run out of registers when further blocks are being loaded.
    """
    if dtype.itemsize > 2:
        return 1
    size = block_keys * (sizes["DP"] + sizes["DVP"]) * dtype.itemsize
    return max(1, min(3, 128 * 1024 // size))
