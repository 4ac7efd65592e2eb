"""The tensors that a step reads and writes between calls, allocated and visited as their buffers declare."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from specgraph.kernels.state import ROWS, Buffer, Input, buffers_of, map_input

State = dict[str, Any]
"""Tensors by the name of the step's input; a tuple of them where the input is one."""
WINDOW = "window"
"""The input that every call brings by itself."""
_LARGE = 1 << 20
"""Bytes from which on a tensor is worth a mapping of memory of its own."""


class HasInputs(Protocol):
    """An object that describes its state: a program, or a stage that was loaded from a dump."""

    @property
    def inputs(self) -> Mapping[str, Input]: ...


def allocate(program: HasInputs, sizes: Mapping[str, int], device: torch.device) -> State:
    """Fresh tensors for every input of the step but ``window``; ``sizes`` gives the letters of shapes; ``b`` is
    ``B``, and ``W`` is 1, unless they are given.

    The row index names all sequences, in order. A call that runs only some of them brings its own.
    """
    specs = {name: spec for name, spec in program.inputs.items() if name != WINDOW}
    sizes = {"b": sizes["B"], "W": 1, **sizes}
    state = {name: map_input(lambda b: _fresh(b, sizes, device), spec) for name, spec in specs.items()}
    if ROWS in state:
        state[ROWS].copy_(torch.arange(sizes["b"], device=device))
    return state


def _fresh(buffer: Buffer, sizes: Mapping[str, int], device: torch.device) -> Tensor:
    """A fresh tensor. On a CPU, a large one of zeros takes memory only where it is used."""
    shape = buffer.dimensions(sizes)
    large = math.prod(shape) * buffer.dtype.itemsize >= _LARGE
    if device.type == "cpu" and large and not buffer.fill:
        return untouched_zeros(shape, buffer.dtype)
    return buffer.allocate(sizes, device)


def untouched_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU that take memory only where they are read or written, page by page of the system.

    ``torch.zeros`` writes all of them, so that a pool would take its memory although most of it is never used. Memory
    that is only allocated would not do instead: what it held before may be NaN, and a key that is masked still adds
    0 times its value to a sum.
    """
    # Without these flags, a process that is forked would share the memory and not have a copy of it.
    private = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
    given = {"flags": private} if private else {}
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, **given)
    return torch.frombuffer(memory, dtype=dtype).resize_(tuple(shape))  # a view could not be written in every mode


def block_sizes(program: HasInputs) -> set[Any]:
    """The numbers of tokens per page of all page pools: a single one, unless something is wrong; none without pools."""
    return {b.shape[1] for spec in program.inputs.values() for b in buffers_of(spec) if b.owner == "pages"}


def example_state(program: HasInputs, rows: int, *, vocab_size: int, device: torch.device) -> State:
    """A state for two sequences in which ``rows`` rows are real and nothing is forced, with room for some steps."""
    length = 8 * rows + 8
    blocks = -(-length // min(map(int, block_sizes(program)), default=length))
    sizes: Mapping[str, int] = {"B": 2, "T": rows, "M": blocks, "N": 2 * blocks, "S": length, "E": 1}
    state = allocate(program, sizes, device)
    values = {
        "num_rows": torch.tensor(rows),
        "max_length": torch.tensor(length),
        "temperature": torch.tensor(1.0),
        "block_table": torch.arange(2 * blocks).view(2, blocks),
        "verified_tokens": torch.arange(2 * rows).view(2, rows) % vocab_size,
        "seeds": torch.arange(2),
    }
    for name in state.keys() & values.keys():
        state[name].copy_(values[name])
    return state


def random_window(rows: int, *, vocab_size: int, device: torch.device) -> Tensor:
    """Random tokens ``[2, rows]``, the same in every call, for a step over :func:`example_state`."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (2, rows), generator=generator).to(device)


def each_buffer(program: HasInputs, state: State) -> list[tuple[str, Buffer, Tensor]]:
    """Every tensor of a state with the name of its input and what it declares."""
    found: list[tuple[str, Buffer, Tensor]] = []
    for name, value in state.items():
        map_input(lambda buffer, there, name=name: found.append((name, buffer, there)), program.inputs[name], value)
    return found


def num_bytes(program: HasInputs, state: State) -> int:
    """Bytes of all tensors of a state."""
    return sum(tensor.nbytes for *_, tensor in each_buffer(program, state))
