"""The state of one decoding run: the tensors that the step graph reads and writes, and the windows of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specgraph.ir.program import Program
from specgraph.ir.state import State, allocate, each_buffer
from specgraph.kernels.step import scatter_state_
from specgraph.runtime.requests import Request


def state_sizes(program: Program, request: Request) -> dict[str, int]:
    """What the letters of :class:`~specgraph.kernels.state.Buffer` stand for in a request."""
    blocks = _blocks(program, request)
    return {
        "B": len(request.prompts),
        "M": max(blocks),
        "N": sum(blocks),
        "S": max(request.limits),
        "E": max(1, len(request.eos_ids)),
    }


def new_state(program: Program, request: Request, device: torch.device) -> State:
    """A fresh state at the beginning of a request, of just its size."""
    state = allocate(program, state_sizes(program, request), device)
    fill_state(program, state, request)
    return state


def _blocks(program: Program, request: Request) -> list[int]:
    block_size = program.block_size  # looked up in all buffers, so once for all sequences
    return [-(-limit // block_size) for limit in request.limits]


def clear_state(program: Program, state: State) -> None:
    """No sequence is active any more: every buffer is reset as it declares."""
    each_buffer(program, state, lambda buffer, tensor: buffer.reset_(tensor))


def fill_state(program: Program, state: State, request: Request) -> None:
    """Set a state to the beginning of a request, whatever it held: blocks for each sequence's whole length, sampling
    options. Sequences beyond those of the request stay inactive.
    """
    clear_state(program, state)
    # On the host first: one copy to the device instead of one per sequence.
    table = torch.full(state["block_table"].shape, -1, dtype=torch.int64, device="cpu")
    first = 0
    for row, count in enumerate(_blocks(program, request)):
        table[row, :count] = torch.arange(first, first + count, device="cpu")
        first += count
    _upload(table, state["block_table"])
    state["rows"].copy_(torch.arange(len(state["rows"]), device=state["rows"].device))
    _fill(state, "max_length", request.limits)
    _fill(state, "eos_ids", [*request.eos_ids, *[-1] * (len(state["eos_ids"]) - len(request.eos_ids))])
    for name in ("temperature", "top_k", "top_p", "min_p", "seeds"):
        _fill(state, name, getattr(request.sampling, name))


def _fill(state: State, name: str, values: Sequence[float]) -> None:
    if name in state:
        _upload(torch.tensor(values, dtype=state[name].dtype, device="cpu"), state[name][: len(values)])


def _upload(values: Tensor, there: Tensor) -> None:
    """Copy from the host without waiting for the device."""
    there.copy_(staged(values, there.device), non_blocking=True)


def staged(values: Tensor, device: torch.device) -> Tensor:
    """``values`` in memory from which a copy to ``device`` does not make the host wait.

    Pinned memory is PyTorch's: it is handed out again only after the copies from it have run, so the host may go ahead.
    """
    return values.pin_memory() if device.type == "cuda" else values


class Chunk(NamedTuple):
    """A window of prompt tokens, still on the host.

    Attributes:
        rows: the sequences that it runs.
        forced: how many next tokens each of them is given.
        num_tokens: the number of prompt tokens in it.
        block: int64 ``[b, 3 + W]``, one line per sequence: its row, its number of real rows, the number of next tokens
            that it is given, and its window. It is one tensor, so that one copy takes it to the device.
    """

    rows: list[int]
    forced: list[int]
    num_tokens: int
    block: Tensor


class Prefill:
    """Cuts prompts into the windows of wide steps.

    A chunk of a prompt is at most ``chunk`` rows. Its next tokens are known, so they are forced; the last row of the
    prompt is the first whose next token is not. A wide step runs sequences whose prompt is pending, and no others. At
    most half of its rows are padding: a sequence with little left to run does not join one with much.
    """

    def __init__(self, request: Request, chunk: int, width: int) -> None:
        """``width`` is the number of rows of a decode step, which no window is narrower than."""
        # A sequence without room for a token never starts.
        pairs = zip(request.prompts, request.limits, strict=True)
        self._prompts = {row: prompt for row, (prompt, limit) in enumerate(pairs) if limit > prompt.numel()}
        self._done = dict.fromkeys(self._prompts, 0)
        self._chunk = chunk
        self._width = width

    def total(self) -> int:
        """Prompt tokens in all."""
        return sum(p.numel() for p in self._prompts.values())

    def pending(self) -> list[int]:
        """Sequences that still have prompt tokens to run."""
        return [row for row, done in self._done.items() if done < self._prompts[row].numel()]

    def chunk(self) -> Chunk:
        """The next wide window; call it while sequences are pending."""
        rows = self._together()
        counts = [self._next_rows(row) for row in rows]
        # One token more than rows: what follows the chunk's last row is known, too, unless the prompt ends there.
        known = [self._prompts[r][self._done[r] : self._done[r] + n + 1] for r, n in zip(rows, counts, strict=True)]
        forced = [tokens.numel() - 1 for tokens in known]
        block = torch.zeros(len(rows), 3 + max(self._width, max(counts) + 1), dtype=torch.int64, device="cpu")
        block[:, :3] = torch.tensor([rows, counts, forced], device="cpu").T
        for line, tokens in zip(block, known, strict=True):
            line[3 : 3 + tokens.numel()] = tokens
        self._done.update({row: self._done[row] + count for row, count in zip(rows, counts, strict=True)})
        return Chunk(rows, forced, sum(counts), block)

    def _next_rows(self, row: int) -> int:
        return min(self._chunk, self._prompts[row].numel() - self._done[row])

    def _together(self) -> list[int]:
        """The pending sequences of the next window: those with the most rows to run, while at most half is padding."""
        waiting = sorted(self.pending(), key=self._next_rows, reverse=True)
        widest, total, taken = self._next_rows(waiting[0]), 0, 0
        for row in waiting:
            total += self._next_rows(row)
            if (taken + 1) * widest > 2 * total:
                break
            taken += 1
        return sorted(waiting[:taken])


def load_chunk(state: State, chunk: Chunk, least: int = 1) -> tuple[Tensor, Tensor]:
    """Set the row counts of a chunk's sequences in ``state``, and give what its call brings.

    That is the row index int64 ``[b]`` and the window int64 ``[b, W]``. There are at least ``least`` entries; those
    without a sequence are inactive.
    """
    device, missing = state["num_rows"].device, max(0, least - len(chunk.rows))
    block = torch.nn.functional.pad(chunk.block, (0, 0, 0, missing))
    block[len(chunk.rows) :, 0] = -1
    block = staged(block, device).to(device, non_blocking=True)
    rows, num_rows, num_forced = (column.contiguous() for column in block[:, :3].unbind(1))
    scatter_state_(rows, [state["num_rows"], state["num_forced"]], [num_rows, num_forced])
    return rows, block[:, 3:].contiguous()
