"""The state of a decoder: how a sequence enters one of its rows, and how it leaves it again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specgraph.drafters.step import SAMPLING
from specgraph.ir.program import Program
from specgraph.ir.state import State, each_buffer
from specgraph.kernels.step import scatter_state_
from specgraph.passes.insert_processors import kept_for_processors
from specgraph.runtime.memory.pages import num_pages
from specgraph.runtime.memory.sizes import StateSizes
from specgraph.runtime.requests.processing import OPTION_STATE
from specgraph.runtime.requests.request import Request

SAID = {"start", "block_table", "max_length", "prompt_length", "eos_ids", *SAMPLING, *OPTION_STATE}
"""The inputs of a step that a request may fill when its sequence begins. All others begin with what they declare."""
_ALIGNMENT = 16
"""Bytes at whose multiples the parts of a staging buffer begin."""


def sizes_for(requests: Sequence[Request], rows: int, block_size: int) -> StateSizes:
    """Room for ``rows`` of these requests at a time, whichever these are."""
    pages = sorted((num_pages(request.limit, block_size) for request in requests), reverse=True)
    return StateSizes(
        rows=min(rows, len(requests)),
        pages_per_sequence=pages[0],
        num_pages=sum(pages[:rows]),
        max_length=max(request.limit for request in requests),
        eos_ids=max(1, *(len(request.eos_ids) for request in requests)),
        bias_tokens=max(1, *(len(request.initial_state.get("bias_tokens", ())) for request in requests)),
    )


class Admission(NamedTuple):
    """A sequence that begins in ``state_row``, with these pages. The first ``begin`` tokens of its prompt are in them.

    ``snapshot`` is the one with the state of the target's recurrent layers behind these tokens.
    """

    state_row: int
    request: Request
    pages: Sequence[int]
    begin: int = 0
    snapshot: int | None = None


class StateRowInitializer:
    """Begins sequences in rows of a state, whatever was there: everything is reset, then set as their requests say.

    What requests say is one tensor of bytes, so that one copy takes it to the device. What puts it in its places,
    :meth:`load`, looks at nothing on the host, so that it can be captured as a CUDA graph for a number of sequences.
    """

    def __init__(self, program: Program, state: State) -> None:
        own = [entry for entry in each_buffer(program, state) if entry[1].owner == "sequence"]
        small = [entry for entry in own if not entry[1].indexed]
        self._large = [(buffer, there) for _, buffer, there in own if buffer.indexed]
        self._only_processors = kept_for_processors(program)
        self._said = [entry for entry in small if entry[0] in SAID]
        self._others = [there for name, _, there in small if name not in SAID]
        self._fresh = [torch.full_like(there, buffer.fill) for name, buffer, there in small if name not in SAID]
        self._device = state["start"].device
        self._staging: dict[int, tuple[Tensor, list[np.ndarray[Any, Any]]]] = {}
        """By the number of sequences, a staging buffer on the host, and the parts of it as tables."""

    def admit(self, entering: Sequence[Admission]) -> None:
        """Begin these sequences, each in its row."""
        self.load(uploaded(self.values(entering, len(entering)), self._device), len(entering))
        self.write_tokens(entering)

    def values(self, entering: Sequence[Admission], count: int) -> Tensor:
        """What these requests say, for ``count`` sequences, uint8 ``[bytes]`` on the host.

        The next call writes over it. If there are fewer, the last is said again: to begin a sequence twice is to begin
        it once.
        """
        if count not in self._staging:
            staging = torch.zeros(sum(self._sizes(count)), dtype=torch.uint8, device="cpu")
            self._staging[count] = staging, [part.view(count, -1).numpy() for part in self._parts(staging, count)]
        staging, (rows, *tables) = self._staging[count]
        rows[:, 0] = _to_length([new.state_row for new in entering], count)
        given = [{"start": [new.begin], "block_table": new.pages, **new.request.initial_state} for new in entering]
        for table, (name, buffer, _) in zip(tables, self._said, strict=True):
            values = [own.get(name, ()) for own in given]
            width = max(map(len, values))
            if any(len(own) < width for own in values):
                values = [[*own, *[buffer.fill] * (width - len(own))] for own in values]
            table[:, width:] = buffer.fill
            table[:, :width] = _to_length(values, count)
        return staging

    def load(self, staging: Tensor, count: int) -> Tensor:
        """Begin the sequences of :meth:`values`, which are on the device, and give their rows, int64 ``[count]``."""
        index, *values = self._parts(staging, count)
        fresh = [default[:count] for default in self._fresh]
        scatter_state_(index, [*(there for _, _, there in self._said), *self._others], [*values, *fresh])
        for buffer, there in self._large:
            there.index_fill_(0, index, buffer.fill)
        return index

    def write_tokens(self, entering: Sequence[Admission]) -> None:
        """The tokens that no step will run, since their rows are there already, where somebody will read them."""
        if self._only_processors:
            entering = [new for new in entering if new.request.processing.state]
        for history in (there for buffer, there in self._large if buffer.tokens):
            for new in entering:
                if new.begin:
                    tokens = staged(new.request.prompt[: new.begin].to(history.dtype), history.device)
                    history[new.state_row, : new.begin].copy_(tokens, non_blocking=True)

    def _parts(self, staging: Tensor, count: int) -> list[Tensor]:
        """The row index int64 ``[count]`` in a staging buffer, and behind it each input's ``[count, ...]``."""
        index, *parts = torch.split(staging, self._sizes(count))
        rows = [there for _, _, there in self._said]
        return [
            _part(index, torch.int64, (count,)),
            *(_part(part, own.dtype, (count, *own.shape[1:])) for part, own in zip(parts, rows, strict=True)),
        ]

    def _sizes(self, count: int) -> list[int]:
        """The bytes of every part, with those behind it up to where the next one begins."""
        rows = [8, *(there[0].numel() * there.element_size() for _, _, there in self._said)]
        return [-(-count * size // _ALIGNMENT) * _ALIGNMENT for size in rows]


def _part(part: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The tensor that lies at the beginning of some bytes."""
    return part[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _to_length(values: list[Any], count: int) -> list[Any]:
    """``values`` with the last one repeated, so that there are ``count``."""
    return values + values[-1:] * (count - len(values))


def stop(state: State, rows: Sequence[int]) -> None:
    """The sequences in ``rows`` are inactive from now on: no step changes anything of theirs."""
    index = uploaded(torch.tensor(rows, dtype=torch.int64, device="cpu"), state["num_rows"].device)
    scatter_state_(index, [state["num_rows"]], [torch.zeros_like(index)])


def staged(values: Tensor, device: torch.device) -> Tensor:
    """``values`` in memory from which a copy to ``device`` does not make the host wait.

    Pinned memory is PyTorch's: it is handed out again only after the copies from it have run, so the host may go ahead.
    """
    return values.pin_memory() if device.type == "cuda" else values


def uploaded(values: Tensor, device: torch.device) -> Tensor:
    """``values`` of the host on ``device``, where they are when the device comes to it; the host does not wait."""
    return staged(values, device).to(device, non_blocking=True)
