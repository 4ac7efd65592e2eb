"""The state of one decoding run: tensors the step graph reads and writes, and the prompt windows fed to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specgraph.ir.program import Program
from specgraph.ir.state import State, allocate, each_buffer
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
    return [-(-limit // program.block_size) for limit in request.limits]


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
    """A window int64 ``[B, W]``, the number of prompt tokens in it, and how many next tokens each sequence is given."""

    window: Tensor
    num_tokens: int
    forced: list[int]


class Prefill:
    """Feeds prompts to the step graph, a chunk at a time; sequences that are done decode in the same calls.

    A chunk of a prompt is at most ``chunk`` rows. Its next tokens are known, so they are forced; the last row of the
    prompt is the first whose next token is not.
    """

    def __init__(self, request: Request, chunk: int) -> None:
        # A sequence without room for a token never starts.
        pairs = zip(request.prompts, request.limits, strict=True)
        self._prompts = {row: prompt for row, (prompt, limit) in enumerate(pairs) if limit > prompt.numel()}
        self._done = dict.fromkeys(self._prompts, 0)
        self._chunk = chunk

    def total(self) -> int:
        """Prompt tokens in all."""
        return sum(p.numel() for p in self._prompts.values())

    def pending(self) -> list[int]:
        """Sequences that still have prompt tokens to run."""
        return [row for row, done in self._done.items() if done < self._prompts[row].numel()]

    def chunk(self, state: State) -> Chunk:
        """The next wide window; sets the row counts in ``state``.

        Sequences past their prompt keep the window and the counts the step graph left for them.
        """
        rows = self.pending()
        counts = [min(self._chunk, self._prompts[r].numel() - self._done[r]) for r in rows]
        # One token more than rows: what follows the chunk's last row is known, too, unless the prompt ends there.
        known = [self._prompts[r][self._done[r] : self._done[r] + n + 1] for r, n in zip(rows, counts, strict=True)]
        current: Tensor = state["next_window"]
        width = max(current.shape[1], max(counts) + 1)
        forced = [0] * current.shape[0]
        # Everything in one block, so that one copy takes it there: the two counts of each sequence, then its tokens.
        block = torch.zeros(current.shape[0], 2 + width, dtype=torch.int64, device="cpu")
        block[:, 0] = -1
        for row, count, tokens in zip(rows, counts, known, strict=True):
            forced[row] = tokens.numel() - 1
            block[row, 0], block[row, 1] = count, forced[row]
            block[row, 2 : 2 + tokens.numel()] = tokens
        self._done.update({row: self._done[row] + count for row, count in zip(rows, counts, strict=True)})
        return Chunk(_spread(block, state), sum(counts), forced)


def _spread(block: Tensor, state: State) -> Tensor:
    """Put the counts of a block into ``state``, and give its window; where a count is -1, what is there stays."""
    current: Tensor = state["next_window"]
    block = staged(block, current.device).to(current.device, non_blocking=True)
    given, window = block[:, 0] >= 0, torch.nn.functional.pad(current, (0, block.shape[1] - 2 - current.shape[1]))
    for column, name in enumerate(("num_rows", "num_forced")):
        state[name].copy_(torch.where(given, block[:, column], state[name]))
    return torch.where(given.unsqueeze(1), block[:, 2:], window)
