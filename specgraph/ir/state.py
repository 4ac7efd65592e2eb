"""The tensors that a step reads and writes between calls, allocated and visited as their buffers declare."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from specgraph.kernels.state import ROWS, Buffer, Input, map_input

State = dict[str, Any]
"""Tensors by the name of the step's input; a tuple of them where the input is one."""
WINDOW = "window"
"""The input that every call brings by itself."""


class HasInputs(Protocol):
    """What describes its state: a program, or a stage that was loaded from a dump."""

    @property
    def inputs(self) -> Mapping[str, Input]: ...


def allocate(program: HasInputs, sizes: Mapping[str, int], device: torch.device) -> State:
    """Fresh tensors for every input of the step but ``window``; ``sizes`` gives the letters of shapes; ``b`` is
    ``B``, and ``W`` is 1, unless they are given.

    The row index names all sequences, in order. A call that runs only some of them brings its own.
    """
    specs = {name: spec for name, spec in program.inputs.items() if name != WINDOW}
    sizes = {"b": sizes["B"], "W": 1, **sizes}
    state = {name: map_input(lambda b: b.allocate(sizes, device), spec) for name, spec in specs.items()}
    if ROWS in state:
        state[ROWS].copy_(torch.arange(sizes["b"], device=device))
    return state


def each_buffer(program: HasInputs, state: State, function: Callable[[Buffer, Tensor], Any]) -> State:
    """``function(buffer, tensor)`` for every tensor of a state, in the state's own nesting."""
    return {name: map_input(function, program.inputs[name], value) for name, value in state.items()}


def num_bytes(program: HasInputs, state: State) -> int:
    """Bytes of all tensors of a state."""
    sizes: list[int] = []
    each_buffer(program, state, lambda _, tensor: sizes.append(tensor.numel() * tensor.element_size()))
    return sum(sizes)
