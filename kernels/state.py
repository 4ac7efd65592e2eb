"""What a step keeps between calls: typed buffers, and the ops that ask for them.

A stateful op declares its own state here, beside its reference: which buffers it asks for, and how its arguments change
once it has them. Everything that allocates, resets, slices, counts or prints state reads these declarations and knows
no kind of layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

Owner = Literal["sequence", "pages", "call"]
FIRST = {"sequence": "B", "pages": "N"}
"""What the first dimension of a buffer counts, by its owner."""


@dataclass(frozen=True)
class Buffer:
    """A tensor that the step graph takes as an input, and how it lives.

    Attributes:
        shape: numbers, and letters for what only a decoder knows: ``B`` sequences whose state is kept, ``b`` of them
            that a call runs, ``T`` rows of this call, ``M`` pages per sequence, ``N`` pages in all, ``S`` the longest
            sequence, ``E`` EOS ids of a sequence, ``W`` tokens of the words that a sequence has biases for.
        dtype: of its elements.
        fill: what a fresh or reset element holds.
        owner: whose it is. ``sequence``: each row is one sequence's, and is reset when a sequence starts there. A call
            runs any sequences: it names their rows in its input :data:`ROWS`.
            ``pages``: a pool of pages that sequences reach through their block table; it is shared by all sequences and
            never reset, since nobody reads a page that its sequence has not written.
            ``call``: one request's or one call's own, the same for every batch, reset when a request starts.
        indexed: how a call reaches the rows of its sequences. A small buffer is gathered at the head of the step, and
            scattered at its end if the step has written it. An indexed buffer is too large for that: the functions
            that read or write it take the row index, too.
        tokens: whether element ``i`` of a row is the sequence's token at position ``i``. Steps write those that they
            run. Where a sequence begins behind rows that it shares, the tokens of these are written when it begins.
        settled_rows: of a buffer ``[B, R, ...]`` with the last rows of every sequence: the most settled rows
            (:mod:`specgraph.kernels.recurrent.span`) that a call reads there. None for any other buffer.
        chunk: of a buffer without which a sequence cannot go on from a position up to which its keys and values are
            shared: the rows between two positions from which it can. A copy of a row serves another sequence from the
            last such position before the end of the settled rows. Of any other buffer (None), a sequence that goes on
            from there begins with a fresh row.
    """

    shape: tuple[int | str, ...]
    dtype: torch.dtype = torch.int64
    fill: float = 0
    owner: Owner = "sequence"
    indexed: bool = False
    tokens: bool = False
    settled_rows: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.indexed and self.owner != "sequence":
            raise ValueError(f"A buffer of {self.owner} has no row for each sequence that an index could name.")
        first = FIRST.get(self.owner)
        if first is not None and self.shape[:1] != (first,):
            raise ValueError(f"A buffer of {self.owner} begins with the dimension {first!r}, not {self.shape[:1]}.")

    def allocate(self, sizes: Mapping[str, int], device: torch.device | str) -> Tensor:
        """A fresh tensor filled with :attr:`fill`."""
        return torch.full(self.dimensions(sizes), self.fill, dtype=self.dtype, device=device)

    def dimensions(self, sizes: Mapping[str, int]) -> list[int]:
        """Its shape, in numbers."""
        return [sizes[n] if isinstance(n, str) else n for n in self.shape]

    def row_bytes(self, sizes: Mapping[str, int]) -> int:
        """Bytes of what one element of the first dimension counts."""
        return math.prod(sizes[n] if isinstance(n, str) else n for n in self.shape[1:]) * self.dtype.itemsize


def per_call(*shape: int | str, dtype: torch.dtype = torch.int64, fill: float = 0) -> Buffer:
    """A buffer that belongs to one call or one request."""
    return Buffer(shape, dtype, fill, "call")


def page_pool(*shape: int, dtype: torch.dtype) -> Buffer:
    """A pool of pages, ``[N, block_size, ...]``; ``shape`` begins with ``block_size``, the tokens of a page."""
    return Buffer(("N", *shape), dtype, owner="pages")


ROWS = "rows"
"""The input of a step that names the row of the state of each of its sequences: int64 ``[b]``, -1 for no sequence."""
ROW_INDEX = per_call("B", fill=-1)
"""The row index, until the pass ``index_rows`` lets a call run fewer sequences than there are."""
MAX_DRAFTS = "max_drafts"
"""The state int64 ``[B]`` of a drafter whose drafts take a row each: how many of a sequence a packed step makes."""
CONFIDENCE = "confidence"
"""The state float32 ``[B, K]`` of a drafter that estimates whether its drafts will be accepted: the probability of each
draft in the next window, if those before it are accepted."""

FIRST_HIDDEN = "first_hidden_states"
"""The state ``[B, K, H]`` of a drafter that runs the target's first layers: what leaves these, for the first K rows of
the next window, the last draft's excluded."""

EARLIER = "earlier_outputs"
"""The state int64 ``[E]`` of a drafter that looks up what its decoder has made for others: the last tokens of the
outputs of earlier requests, each output followed by a :data:`SEPARATOR`."""
SEPARATOR = (1 << 31) - 1
"""What equals no token."""


Input = Buffer | tuple["Input", ...]
"""One buffer, or a tuple of inputs that the step takes as one argument."""


def map_input(function: Callable[..., Any], spec: Input, *values: Any) -> Any:
    """``function(buffer, *values)`` for every buffer of an input, in the input's own nesting."""
    if isinstance(spec, Buffer):
        return function(spec, *values)
    parts = zip(spec, *values, strict=True)
    return tuple(map_input(function, part, *own) for part, *own in parts)


def buffers_of(spec: Input) -> tuple[Buffer, ...]:
    """Every buffer of an input, in order."""
    return (spec,) if isinstance(spec, Buffer) else tuple(b for part in spec for b in buffers_of(part))


@dataclass(frozen=True)
class Stateful:
    """What an op that was traced without memory becomes once it has one.

    Attributes:
        op: the stateful op that takes its place.
        names: what each buffer is called in the graph.
        buffers: from the operands' values, as tracing found them, and the tokens per page to the buffers it asks for.
        arguments: from the traced op's arguments, the nodes of its buffers, and the nodes ``(slots, block_table,
            positions)`` of the call's rows to the stateful op's positional arguments.
        reads: whether the op reads the rows of its context, which ``bench`` counts. An op that only writes does not.
    """

    op: Callable[..., Any]
    names: tuple[str, ...]
    buffers: Callable[[Sequence[Tensor], int], tuple[Buffer, ...]]
    arguments: Callable[[Sequence[Any], Sequence[Any], Any], tuple[Any, ...]]
    reads: bool = True


STATEFUL: dict[Callable[..., Any], Stateful] = {}
"""The stateful form of every traced op that has one; the op's own file adds it."""


@dataclass(frozen=True)
class Recurrent(Stateful):
    """What a recurrent op that was traced without memory becomes once it has a state.

    Its ``buffers``, all indexed, follow from the most rows of a call that are not settled
    (:mod:`specgraph.kernels.recurrent.span`) in place of the tokens per page, and its ``arguments`` take the node of
    the call's span in place of those of its rows.

    Attributes:
        operations: from the arguments of ``op`` but for its buffers and its span, as an object of the class that
            declares them, to the floating-point operations that one row needs by the op's definition. Those on single
            elements, such as gates, do not count.
    """

    operations: Callable[[Any], int] = field(kw_only=True)


RECURRENT: dict[Callable[..., Any], Recurrent] = {}
"""The form with a state of every recurrent op; the op's own file adds it."""
