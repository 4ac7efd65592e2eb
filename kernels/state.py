"""What a step keeps between calls: typed buffers, and the ops that ask for them.

A stateful op declares its own state here, beside its reference: which buffers it asks for, and how its arguments change
once it has them. Everything that allocates, resets, slices, counts or prints state reads these declarations and knows
no kind of layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
        shape: numbers, and letters for what only a decoder knows: ``B`` sequences, ``T`` rows of this call, ``M`` pages
            per sequence, ``N`` pages in all, ``S`` the longest sequence, ``E`` EOS ids.
        dtype: of its elements.
        fill: what a fresh or reset element holds.
        owner: whose it is. ``sequence``: row ``b`` is a sequence's, is reset when a sequence starts there, and a
            smaller batch takes the first rows. ``pages``: a pool of pages that sequences reach through their block
            table; it is shared by all batches and never reset, since nobody reads a page that its sequence has not
            written.
            ``call``: one request's or one call's own, the same for every batch, reset when a request starts.
    """

    shape: tuple[int | str, ...]
    dtype: torch.dtype = torch.int64
    fill: float = 0
    owner: Owner = "sequence"

    def __post_init__(self) -> None:
        first = FIRST.get(self.owner)
        if first is not None and self.shape[:1] != (first,):
            raise ValueError(f"A buffer of {self.owner} begins with the dimension {first!r}, not {self.shape[:1]}.")

    def allocate(self, sizes: Mapping[str, int], device: torch.device | str) -> Tensor:
        """A fresh tensor filled with :attr:`fill`."""
        shape = [sizes[n] if isinstance(n, str) else n for n in self.shape]
        return torch.full(shape, self.fill, dtype=self.dtype, device=device)

    def reset_(self, tensor: Tensor) -> None:
        """Make ``tensor`` as good as fresh."""
        if self.owner != "pages":
            tensor.fill_(self.fill)

    def first(self, tensor: Tensor, batch: int) -> Tensor:
        """The part of ``tensor`` that a batch of the first ``batch`` sequences sees: a view."""
        return tensor[:batch] if self.owner == "sequence" else tensor


def per_call(*shape: int | str, dtype: torch.dtype = torch.int64, fill: float = 0) -> Buffer:
    """A buffer that belongs to one call or one request."""
    return Buffer(shape, dtype, fill, "call")


def page_pool(*shape: int, dtype: torch.dtype) -> Buffer:
    """A pool of pages, ``[N, block_size, ...]``; ``shape`` begins with ``block_size``, the tokens of a page."""
    return Buffer(("N", *shape), dtype, owner="pages")


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
    """

    op: Callable[..., Any]
    names: tuple[str, ...]
    buffers: Callable[[Sequence[Tensor], int], tuple[Buffer, ...]]
    arguments: Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], tuple[Any, ...]]


STATEFUL: dict[Callable[..., Any], Stateful] = {}
"""The stateful form of every traced op that has one; the op's own file adds it."""
