"""The state of one decoding run: tensors the step graph reads and writes, and the prompt windows fed to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specgraph.program import Buffer, Program
from specgraph.requests import Request

State = dict[str, Any]


def allocate(program: Program, sizes: Mapping[str, int], device: torch.device) -> State:
    """Fresh tensors for every input of the step graph but ``window``, which each call brings."""
    state: State = {}
    for name, spec in program.inputs.items():
        if name == "window":
            continue
        buffers = (spec,) if isinstance(spec, Buffer) else spec
        tensors = tuple(buffer.allocate(sizes, device) for buffer in buffers)
        state[name] = tensors[0] if isinstance(spec, Buffer) else tensors
    return state


def new_state(program: Program, request: Request, device: torch.device) -> State:
    """State for a request: blocks allocated up front for each sequence's whole length, sampling options filled in."""
    block_size = program.options["block_size"]
    blocks = [-(-limit // block_size) for limit in request.limits]
    sizes = {
        "B": len(request.prompts),
        "M": max(blocks),
        "N": sum(blocks),
        "S": max(request.limits),
        "E": max(1, len(request.eos_ids)),
    }
    state = allocate(program, sizes, device)
    table = state["block_table"]
    first = 0
    for row, count in enumerate(blocks):
        table[row, :count] = torch.arange(first, first + count, device=device)
        first += count
    _fill(state, "max_length", request.limits)
    _fill(state, "eos_ids", [*request.eos_ids, *[-1] * (sizes["E"] - len(request.eos_ids))])
    for name in ("temperature", "top_k", "top_p", "min_p", "seeds"):
        _fill(state, name, getattr(request.sampling, name))
    return state


def _fill(state: State, name: str, values: Sequence[float]) -> None:
    if name in state:
        state[name].copy_(torch.tensor(values, dtype=state[name].dtype))


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

    def window(self, state: State) -> tuple[Tensor, int]:
        """The next wide window int64 ``[B, W]``, and how many prompt tokens it holds; sets the row counts in ``state``.

        Sequences past their prompt keep the window and the counts the step graph left for them.
        """
        rows = self.pending()
        counts = {r: min(self._chunk, self._prompts[r].numel() - self._done[r]) for r in rows}
        current: Tensor = state["next_window"]
        width = max(current.shape[1], max(counts.values()) + 1)
        window = current.new_zeros(current.shape[0], width)
        window[:, : current.shape[1]] = current
        for row in rows:
            prompt, begin = self._prompts[row], self._done[row]
            # One token more than rows: what follows the chunk's last row is known, too, unless the prompt ends there.
            known = prompt[begin : begin + counts[row] + 1]
            window[row] = 0
            window[row, : known.numel()] = known.to(window.device)
            state["num_rows"][row] = counts[row]
            state["num_forced"][row] = known.numel() - 1
            self._done[row] = begin + counts[row]
        return window, sum(counts.values())
