"""Brings the prompt tokens of a step to the device, as its row index and its window."""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.ir.state import State
from specgraph.kernels.state import MAX_DRAFTS
from specgraph.kernels.step import gather_state, scatter_state_
from specgraph.runtime.memory.state_rows import uploaded
from specgraph.runtime.schedule.prefill import Chunk


def load_chunk(state: State, chunk: Chunk, least: int = 1) -> tuple[Tensor, Tensor]:
    """Bring a chunk to the device, and :func:`load_inputs` it.

    There are at least ``least`` entries; those without a sequence are inactive.
    """
    count = max(least, len(chunk.state_rows))
    inputs = padded_inputs(chunk.inputs, count, chunk.inputs.shape[1] - 3)
    return load_inputs(state, uploaded(inputs, state["num_rows"].device))


def padded_inputs(inputs: Tensor, count: int, width: int) -> Tensor:
    """The inputs ``[b, 3 + W]`` of a :class:`Chunk` with ``count`` entries and windows of ``width`` columns.

    What is added is an entry of no sequence (-1), and a token that no row runs (0). No entry at all, ``[0, 3]``, gives
    inputs that name no sequence.
    """
    entries, columns = inputs.shape
    padded = torch.nn.functional.pad(inputs, (0, 3 + width - columns, 0, count - entries))
    padded[entries:, 0] = -1
    return padded


def load_inputs(state: State, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Set the row counts of a chunk's sequences in ``state``, and give what its call brings.

    ``inputs`` are those of a :class:`Chunk`, on the device. The result is the row index int64 ``[b]`` and the window
    int64 ``[b, W]``. An entry whose row is -1 is no sequence, and sets nothing. For one that decodes, counts and window
    are what its last step has laid out, with no more rows than the chunk allows; and so many rows it is to have in its
    next step, where a drafter makes no others.
    """
    rows, num_rows, num_forced = (column.contiguous() for column in inputs[:, :3].unbind(1))
    decodes, given = num_rows < 0, inputs[:, 3:]
    counts = [state["num_rows"], state["num_forced"]]
    laid_out, *own = gather_state(rows, [state["next_window"], *counts], [0, 0, 0])
    at_most = [torch.minimum(own[0], -num_rows), own[1]]
    values = [torch.where(decodes, old, new) for old, new in zip(at_most, (num_rows, num_forced), strict=True)]
    if MAX_DRAFTS in state:
        counts.append(state[MAX_DRAFTS])
        values.append(torch.where(decodes, -num_rows, laid_out.shape[1]) - 1)
    scatter_state_(rows, counts, values)
    padded = torch.nn.functional.pad(laid_out, (0, given.shape[1] - laid_out.shape[1]))
    return rows, torch.where(decodes.unsqueeze(1), padded, given)
