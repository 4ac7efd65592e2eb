"""The state of a decoder: its sizes, how a sequence enters one of its rows, and how it leaves it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specgraph.ir.program import Program
from specgraph.ir.state import State
from specgraph.kernels.state import Buffer, map_input
from specgraph.kernels.step import scatter_state_
from specgraph.runtime.pages import num_pages
from specgraph.runtime.prefill import Chunk
from specgraph.runtime.requests import Request

_ALIGNMENT = 16
"""Bytes at whose multiples tensors begin that share an upload."""


def sizes_for(requests: Sequence[Request], rows: int, block_size: int) -> dict[str, int]:
    """What the letters of :class:`~specgraph.kernels.state.Buffer` stand for, so that ``rows`` of them fit at a time,
    whichever these are."""
    pages = sorted((num_pages(request.limit, block_size) for request in requests), reverse=True)
    return {
        "B": min(rows, len(requests)),
        "M": pages[0],
        "N": sum(pages[:rows]),
        "S": max(request.limit for request in requests),
        "E": max(1, *(len(request.eos_ids) for request in requests)),
    }


class Entering(NamedTuple):
    """A sequence that begins in ``row``, with these pages. The first ``begin`` tokens of its prompt are in them."""

    row: int
    request: Request
    pages: Sequence[int]
    begin: int = 0


class Entrance:
    """Begins sequences in rows of a state, whatever was there: everything is reset, then set as their requests say.

    One copy takes what requests say to the device, and one launch puts it in its places, with what fresh rows hold.
    """

    def __init__(self, program: Program, state: State) -> None:
        own = [entry for entry in _buffers(program, state) if entry[1].owner == "sequence"]
        small = [entry for entry in own if not entry[1].indexed]
        self._large = [(buffer, there) for _, buffer, there in own if buffer.indexed]
        self._said = [entry for entry in small if entry[0] in KNOWN]
        self._kept = [there for name, _, there in small if name not in KNOWN]
        self._fresh = [torch.full_like(there, buffer.fill) for name, buffer, there in small if name not in KNOWN]
        self._device = state["start"].device

    def admit(self, entering: Sequence[Entering]) -> None:
        """Begin these sequences, each in its row."""
        values = [_rows_of([KNOWN[name](new) for new in entering], buffer, there) for name, buffer, there in self._said]
        rows = torch.tensor([new.row for new in entering], dtype=torch.int64, device="cpu")
        index, *values = uploaded_together([rows, *values], self._device)
        fresh = [default[: len(entering)] for default in self._fresh]
        scatter_state_(index, [*(there for _, _, there in self._said), *self._kept], [*values, *fresh])
        for buffer, there in self._large:
            there.index_fill_(0, index, buffer.fill)
            if buffer.tokens:
                _write_tokens(there, entering)


def _write_tokens(history: Tensor, entering: Sequence[Entering]) -> None:
    """The tokens that no step will run, since their rows are there already."""
    for new in entering:
        if new.begin:
            tokens = staged(new.request.prompt[: new.begin].to(history.dtype), history.device)
            history[new.row, : new.begin].copy_(tokens, non_blocking=True)


def stop(state: State, rows: Sequence[int]) -> None:
    """The sequences in ``rows`` are inactive from now on: no step changes anything of theirs."""
    index = torch.tensor(rows, dtype=torch.int64, device="cpu")
    index, nothing = uploaded_together([index, torch.zeros_like(index)], state["num_rows"].device)
    scatter_state_(index, [state["num_rows"]], [nothing])


def _buffers(program: Program, state: State) -> list[tuple[str, Buffer, Tensor]]:
    """Every tensor of a state with the name of its input and what it declares."""
    found: list[tuple[str, Buffer, Tensor]] = []
    for name, value in state.items():
        map_input(lambda buffer, there, name=name: found.append((name, buffer, there)), program.inputs[name], value)
    return found


KNOWN: dict[str, Callable[[Entering], Sequence[float]]] = {
    "start": lambda new: [new.begin],
    "block_table": lambda new: new.pages,
    "max_length": lambda new: [new.request.limit],
    "eos_ids": lambda new: new.request.eos_ids,
    "temperature": lambda new: [new.request.sampling.temperature],
    "top_k": lambda new: [new.request.sampling.top_k],
    "top_p": lambda new: [new.request.sampling.top_p],
    "min_p": lambda new: [new.request.sampling.min_p],
    "seeds": lambda new: [new.request.sampling.seed],
}
"""What is known of a sequence that begins, by the names of a state's inputs: the first values of its row."""


def _rows_of(values: Sequence[Sequence[float]], buffer: Buffer, there: Tensor) -> Tensor:
    """Rows of a buffer ``[b, ...]`` on the host, which begin with ``values`` and are fresh behind them."""
    rows = torch.full((len(values), *there.shape[1:]), buffer.fill, dtype=there.dtype, device="cpu")
    width = max(map(len, values))
    padded = [[*own, *[buffer.fill] * (width - len(own))] for own in values]
    rows.view(len(values), -1)[:, :width] = torch.tensor(padded, dtype=there.dtype, device="cpu")
    return rows


def uploaded_together(values: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of the host on ``device``, by one copy that the host does not wait for."""
    if device.type == "cpu":
        return list(values)
    sizes = [value.numel() * value.element_size() for value in values]
    places = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    packed = torch.empty(sum(places), dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    parts = [part[:size] for part, size in zip(torch.split(packed, places), sizes, strict=True)]
    for part, value in zip(parts, values, strict=True):
        part.copy_(value.contiguous().view(-1).view(torch.uint8))
    there = torch.split(packed.to(device, non_blocking=True), places)
    return [
        part[:size].view(value.dtype).view(value.shape) for part, size, value in zip(there, sizes, values, strict=True)
    ]


def staged(values: Tensor, device: torch.device) -> Tensor:
    """``values`` in memory from which a copy to ``device`` does not make the host wait.

    Pinned memory is PyTorch's: it is handed out again only after the copies from it have run, so the host may go ahead.
    """
    return values.pin_memory() if device.type == "cuda" else values


def uploaded(values: Tensor, device: torch.device) -> Tensor:
    """``values`` of the host on ``device``, where they are when the device comes to it; the host does not wait."""
    return staged(values, device).to(device, non_blocking=True)


def load_chunk(state: State, chunk: Chunk, least: int = 1) -> tuple[Tensor, Tensor]:
    """Bring a chunk to the device, and :func:`load_block` it.

    There are at least ``least`` entries; those without a sequence are inactive.
    """
    count = max(least, len(chunk.rows))
    block = padded_block(chunk.block, count, chunk.block.shape[1] - 3)
    return load_block(state, uploaded(block, state["num_rows"].device))


def padded_block(block: Tensor, count: int, width: int) -> Tensor:
    """The block ``[b, 3 + W]`` of a :class:`Chunk` with ``count`` entries and windows of ``width`` columns.

    What is added is an entry of no sequence (-1), and a token that no row runs (0). No entry at all, ``[0, 3]``, gives
    a block that names no sequence.
    """
    entries, columns = block.shape
    padded = torch.nn.functional.pad(block, (0, 3 + width - columns, 0, count - entries))
    padded[entries:, 0] = -1
    return padded


def load_block(state: State, block: Tensor) -> tuple[Tensor, Tensor]:
    """Set the row counts of a chunk's sequences in ``state``, and give what its call brings.

    ``block`` is that of a :class:`Chunk`, on the device. The result is the row index int64 ``[b]`` and the window int64
    ``[b, W]``. An entry whose row is -1 is no sequence, and sets nothing.
    """
    rows, num_rows, num_forced = (column.contiguous() for column in block[:, :3].unbind(1))
    scatter_state_(rows, [state["num_rows"], state["num_forced"]], [num_rows, num_forced])
    return rows, block[:, 3:].contiguous()
