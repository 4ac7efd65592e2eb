"""How many pages, snapshots and rows of recurrent state there is room for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from specgraph.config import CacheConfig
from specgraph.errors import InputError
from specgraph.ir.program import Program
from specgraph.ir.state import block_sizes
from specgraph.kernels.state import buffers_of
from specgraph.runtime.memory.host_memory import available_bytes
from specgraph.runtime.memory.pages import num_pages
from specgraph.runtime.memory.sizes import StateSizes
from specgraph.runtime.memory.snapshots import FEWEST, snapshot_bytes

SNAPSHOT_SHARE = 0.1
"""The share of the free memory that snapshots of recurrent state take at most, unless their number is given."""
SHARE = 0.9
"""The share of the free memory that pages take at most, where ``cache.memory_share`` does not say."""
CPU_SHARE = 0.25
"""The same of a session on a CPU, whose memory other programs share. A sequence of the longest length comes first."""
CPU_TOKENS = 2048
"""For how many tokens of each sequence a session on a CPU has pages, where nothing says."""


def page_bytes(program: Program) -> int:
    """Bytes of one page, over all layers of the target and of the drafter."""
    pools = [b for spec in program.inputs.values() for b in buffers_of(spec) if b.owner == "pages"]
    return sum(pool.row_bytes({}) for pool in pools)


def page_size(program: Program, cache: CacheConfig) -> int:
    """The number of tokens of a page. Without attention there are none, and what is counted takes no memory."""
    return program.block_size if block_sizes(program) else cache.block_size


def state_bytes(program: Program) -> int:
    """Bytes of recurrent state and cached rows of a sequence, over all layers; 0 without recurrent layers."""
    buffers = [buffer for spec in program.inputs.values() for buffer in buffers_of(spec)]
    return sum(b.row_bytes({}) for b in buffers if b.chunk is not None or b.settled_rows is not None)


def modest(program: Program, cache: CacheConfig, sizes: StateSizes) -> StateSizes:
    """``sizes`` that a session asks for where the configuration does not say: on a CPU, less than it could use.

    There are pages for one sequence of the longest length at least. More are for ``CPU_TOKENS`` tokens
    of each sequence, but they take no more than ``CPU_SHARE`` of the free memory.
    """
    device = program.target.device
    if device.type != "cpu" or cache.memory_share is not None:
        return sizes
    allowed = CPU_SHARE * free_bytes(device)
    rows, size = most_rows(program, sizes.rows, allowed), page_bytes(program)
    if cache.pool_tokens is not None:
        return replace(sizes, rows=rows)
    pages = rows * num_pages(CPU_TOKENS, page_size(program, cache))
    pages = int(min(pages, allowed / size)) if size else pages
    return replace(sizes, rows=rows, num_pages=min(sizes.num_pages, max(sizes.pages_per_sequence, pages)))


def limited(
    program: Program, cache: CacheConfig, sizes: StateSizes, max_batch_size: int, kept: int = 0,
    others: Sequence[Program] = (),
) -> StateSizes:  # fmt: skip
    """``sizes`` of a session, with as many rows, snapshots and pages as there is memory for, also for the same of
    ``others``, which are those of other GPUs.

    Snapshots come first (:data:`SNAPSHOT_SHARE`). Of what is left, rows of recurrent state take half at most, and what
    they leave is for pages. ``kept`` are the bytes of a state that is freed for the new one.

    Raises:
        InputError: there is no memory for a single page.
    """
    free = min(free_bytes(each.target.device) for each in (program, *others)) + kept
    share = SHARE if cache.memory_share is None else cache.memory_share
    copies = most_snapshots(program, cache, max_batch_size, free)
    taken = copies * snapshot_bytes(program)
    rows = most_rows(program, sizes.rows, share * free - taken)
    taken += rows * state_bytes(program)
    size, pages = page_bytes(program), sizes.num_pages
    if cache.pool_tokens is not None:
        pages = min(pages, num_pages(cache.pool_tokens, page_size(program, cache)))
    if size and share * free - taken < size:
        beside = f", and recurrent state takes {taken} of these" if taken else ""
        raise InputError(
            f"There is no memory for the KV cache: a page takes {size} bytes, and {free} are free, of which "
            f"cache.memory_share allows {share}{beside}. Free some, or raise the share."
        )
    pages = int(min(pages, (share * free - taken) / size)) if size else pages
    return replace(sizes, rows=rows, snapshots=copies, num_pages=pages)


def most_rows(program: Program, wanted: int, allowed: float) -> int:
    """How many of the ``wanted`` rows a session gets: all, or a power of two.

    Their state takes no more than half of the bytes that are ``allowed``.
    """
    size = state_bytes(program)
    most = max(1, allowed / 2 / size) if size else math.inf
    return wanted if wanted <= most else 1 << (int(most).bit_length() - 1)


def most_snapshots(program: Program, cache: CacheConfig, max_batch_size: int, free: float) -> int:
    """The number of snapshots of recurrent state, where so many bytes are ``free``.

    It is 0 if the target has no such state, or nothing is shared.
    """
    size = snapshot_bytes(program)
    if not size or not cache.reuse_prefixes:
        return 0
    if cache.snapshots is not None:
        return cache.snapshots
    return int(min(max(FEWEST, 2 * max_batch_size), SNAPSHOT_SHARE * free / size))


def free_bytes(device: torch.device) -> float:
    """Memory that can be allocated on a device; infinite if the system does not say."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return available_bytes()
