"""What the recurrent layers of a draft keep, as the harness records and poisons it."""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.ir.program import Program
from specgraph.ir.state import State
from specgraph.kernels.state import Buffer, buffers_of

DRAFT_STATES = "draft_states"
"""The input with all buffers of a draft's recurrent layers. The first says how many rows are settled."""


def recurrent_state(program: Program, state: State) -> dict[str, Tensor]:
    """What the recurrent layers of a draft keep of every sequence: how many rows are settled, the states, and the last
    settled rows ``[B, R', ...]`` in the order of their positions.
    """
    found: dict[str, Tensor] = {}
    for number, (buffer, own) in enumerate(_buffers(program, state)):
        name = f"{DRAFT_STATES}[{number}]"
        found[name] = own.clone()
        if buffer.settled_rows is not None:
            place, real = _settled_slots(buffer, own, state)
            rows = own[torch.arange(len(own)).unsqueeze(1), place]
            found[name] = rows.masked_fill(~real.view(*real.shape, *[1] * (own.dim() - 2)), 0)
    return found


def poison_unsettled_rows(program: Program, state: State) -> None:
    """Make every cached row NaN that is not one of the last settled ones."""
    for buffer, own in _buffers(program, state):
        if buffer.settled_rows is not None:
            place, real = _settled_slots(buffer, own, state)
            kept = torch.zeros(own.shape[:2], dtype=torch.bool).scatter_(1, place, real)
            own[~kept] = torch.nan


def _buffers(program: Program, state: State) -> list[tuple[Buffer, Tensor]]:
    """The buffers of a draft's recurrent layers."""
    return [*zip(buffers_of(program.inputs.get(DRAFT_STATES, ())), state.get(DRAFT_STATES, ()), strict=True)]


def _settled_slots(buffer: Buffer, rows: Tensor, state: State) -> tuple[Tensor, Tensor]:
    """Where a buffer keeps the last settled rows of every sequence, and which of them there are: ``[B, R']`` twice."""
    count = buffer.settled_rows or 0
    position = state[DRAFT_STATES][0].unsqueeze(1) + torch.arange(-count, 0)
    return position % rows.shape[1], position >= 0
