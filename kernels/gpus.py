"""How many programs a launch has: what depends on the number of multiprocessors of a GPU, in one table per GPU.

Nothing here decides a bit of a result. What does is the same on every GPU and stands beside the sums that it orders:
``num_slices`` of :mod:`specgraph.kernels.linear.product` (split-K),
:class:`~specgraph.kernels.attention.paged.Tiling` (KV splits), and
:func:`~specgraph.kernels.sampling.gumbel.split_size` (splits of the vocabulary).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """The table of one GPU.

    Attributes:
        multiprocessors: how many it has.
        shared_bytes: the shared memory of a multiprocessor, less what the barriers of its programs take.
        attention_programs: tiles of queries and KV splits are distributed over about this many programs.
        search_programs: programs that search the histories of all sequences together, for n-grams and suffixes.
        count_programs: programs that count the tokens of all sequences together.
        product_tiles: with so many tiles of a product of many rows, nearly all multiprocessors have work.
        scan_programs: with so many programs of a scan of logits, about eight for each multiprocessor, they hide each
            other's latency.
        pointwise_tiles: with so many tiles of a pointwise kernel, all multiprocessors have work.
    """

    multiprocessors: int = 132
    shared_bytes: int = 224 * 1024
    attention_programs: int = 264
    search_programs: int = 1056
    count_programs: int = 528
    product_tiles: int = 96
    scan_programs: int = 1024
    pointwise_tiles: int = 256


HOPPER = Gpu()
"""H100 SXM and H200, on which these numbers were measured. Other GPUs use them too, until they are measured."""
