"""How many pages there is room for."""

from __future__ import annotations

import math
import os

import torch

from specgraph.config import CacheConfig
from specgraph.errors import InputError
from specgraph.ir.program import Program
from specgraph.ir.state import block_sizes
from specgraph.kernels.state import buffers_of
from specgraph.runtime.pages import num_pages
from specgraph.runtime.snapshots import FEWEST, snapshot_bytes

SNAPSHOT_SHARE = 0.1
"""The share of the free memory that snapshots of recurrent state take at most, unless their number is given."""


def page_bytes(program: Program) -> int:
    """Bytes of one page, over all layers of the target and of the drafter."""
    pools = [b for spec in program.inputs.values() for b in buffers_of(spec) if b.owner == "pages"]
    return sum(math.prod(int(size) for size in pool.shape[1:]) * pool.dtype.itemsize for pool in pools)


def page_size(program: Program, cache: CacheConfig) -> int:
    """The number of tokens of a page. Without attention there are none, and what is counted takes no memory."""
    return program.block_size if block_sizes(program) else cache.block_size


def most_pages(program: Program, cache: CacheConfig, wanted: int, kept_bytes: int = 0) -> int:
    """The number of pages that a session gets if ``wanted`` is what it could use.

    ``kept_bytes`` are those of a state that is freed for the new one.

    Raises:
        InputError: there is no memory for a single page.
    """
    most = wanted if cache.pool_tokens is None else min(wanted, num_pages(cache.pool_tokens, page_size(program, cache)))
    free, size = free_bytes(program.target.device), page_bytes(program)
    if free is None or not size:
        return most
    room = int(cache.memory_share * (free + kept_bytes) / size)
    if room < 1:
        raise InputError(
            f"There is no memory for the KV cache: a page takes {size} bytes, and {free + kept_bytes} "
            f"are free, of which cache.memory_share allows {cache.memory_share}. Free some, or raise the share."
        )
    return min(most, room)


def most_snapshots(program: Program, cache: CacheConfig, max_batch_size: int, kept_bytes: int = 0) -> int:
    """The number of snapshots of recurrent state; 0 if the target has none, or nothing is shared.

    ``kept_bytes`` are those of a state that is freed for the new one.
    """
    size = snapshot_bytes(program)
    if not size or not cache.reuse_prefixes:
        return 0
    if cache.snapshots is not None:
        return cache.snapshots
    wanted, free = max(FEWEST, 2 * max_batch_size), free_bytes(program.target.device)
    return wanted if free is None else min(wanted, int(SNAPSHOT_SHARE * (free + kept_bytes) / size))


def free_bytes(device: torch.device) -> int | None:
    """Memory that can be allocated on a device; None if the system does not say."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
