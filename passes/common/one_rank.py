"""The program of one of the devices that share a target, from the program in which their nodes stand side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from specgraph.ir.devices import move_node
from specgraph.ir.drafter import BoundDrafter, Mask
from specgraph.ir.graphs import DEVICE, calls, get_attribute, new_module, remove_dead_code, set_attribute
from specgraph.ir.linear import Linear, linears
from specgraph.ir.program import Program
from specgraph.ir.shapes import LAYOUT
from specgraph.ir.tensors import view_of
from specgraph.passes.common.device_parts import ALL_REDUCE
from specgraph.passes.common.patterns import replace_by

ALL_REDUCE_RANK = torch.ops.specgraph.all_reduce_rank.default


def keep_rank(program: Program, rank: int, world_size: int, device: torch.device) -> None:
    """Keep what device ``rank`` of ``world_size`` runs, and move the program to ``device``.

    What is whole on every device, drafters included, has then a copy there. Tensors that show the same memory still do.
    """
    target = program.modules["target"]
    _keep_nodes(target.graph, rank, world_size)
    remove_dead_code(target)
    program.modules["target"] = new_module(target, target.graph, "target")
    if device != program.target.device:
        _Move(program, device).run()
    if device.type == "cuda":
        sort_weights(program)
    _own_weights(program.modules["target"])


def sort_weights(program: Program) -> None:
    """Let weights stand as kernels of GPUs take them. Those of a model on a GPU do before, those from a CPU do not."""
    for module in program.modules.values():
        done = dict[str, Mapping[str, Any]]()
        for linear in filter(_reads_attributes, linears(module.graph)):
            name, tensors = str(linear.weight[0].target), linear.tensors(module)[: len(linear.weight)]
            if name not in done and (found := linear.scheme.in_gpu_order(tensors)) is not None:
                done[name], tensors = found
                for node, tensor in zip(linear.weight, tensors, strict=True):
                    _put(module, str(node.target), tensor)
                    if "val" in node.meta:
                        node.meta["val"] = node.meta["val"].new_empty(tensor.shape, dtype=tensor.dtype)
            linear.node.kwargs = {**linear.node.kwargs, **done.get(name, {})}
        module.recompile()


def _own_weights(module: fx.GraphModule) -> None:
    """Let nothing that is done to the weights of linear layers behind this, such as merging them, reach the model.

    Parts of weights whose ops want rows that follow each other in memory are copied, and so are the biases of stacks.
    """
    for linear in filter(_reads_attributes, linears(module.graph)):
        for place, node in enumerate(linear.constants):
            tensor = get_attribute(module, str(node.target)).detach()
            as_it_lies = linear.scheme.strided and place < len(linear.weight)
            _put(module, str(node.target), tensor if as_it_lies else tensor.contiguous())


def _put(module: fx.GraphModule, name: str, tensor: Tensor) -> None:
    """Put a tensor in the place of another one, as a parameter if that is one."""
    parameter = isinstance(get_attribute(module, name), nn.Parameter)
    set_attribute(module, name, nn.Parameter(tensor, requires_grad=False) if parameter else tensor)


def _reads_attributes(linear: Linear) -> bool:
    return all(isinstance(node, fx.Node) and node.op == "get_attr" for node in linear.constants)


def _keep_nodes(graph: fx.Graph, rank: int, world_size: int) -> None:
    """Sums take the device's own part. What the other devices compute is dead code then."""
    for node in list(calls(graph, ALL_REDUCE)):
        (parts,) = node.args
        own = parts[rank]  # type: ignore[index]
        replace_by(node, ALL_REDUCE_RANK, (own,), {"rank": rank, "world_size": world_size}, "all_reduce")
    for node in graph.nodes:
        if node.meta.get(DEVICE) == rank:
            del node.meta[DEVICE]


class _Move:
    """Moves a program to another device. A tensor is moved once, however many names it has."""

    def __init__(self, program: Program, device: torch.device) -> None:
        self._program, self._device = program, device
        self._moved: dict[object, Tensor] = {}

    def run(self) -> None:
        """Move the modules, the drafter, and what is noted of both."""
        program, device = self._program, self._device
        for module in program.modules.values():
            for node in module.graph.nodes:
                if node.op == "get_attr":
                    set_attribute(module, str(node.target), self.tensor(get_attribute(module, str(node.target))))
                self._note(node)
            module.recompile()
        for node in program.graph.nodes:
            self._note(node)
        program.target = replace(program.target, device=device)
        program.drafter = self._drafter(program.drafter)

    def tensor(self, tensor: Tensor) -> Tensor:
        """A tensor there."""
        key = view_of(tensor)
        if key not in self._moved:
            there = tensor.detach().to(self._device)
            parameter = isinstance(tensor, nn.Parameter)
            self._moved[key] = nn.Parameter(there, requires_grad=False) if parameter else there
        return self._moved[key]

    def _drafter(self, drafter: BoundDrafter) -> BoundDrafter:
        models = {name: replace(info, device=self._device) for name, info in drafter.models.items()}
        values = {field.name: getattr(drafter, field.name) for field in fields(drafter)}
        tensors: dict[str, Any] = {n: self.tensor(value) for n, value in values.items() if isinstance(value, Tensor)}
        mask = drafter.mask
        if mask is not None and mask.hidden is not None:
            mask = Mask(mask.token_id, self.tensor(mask.hidden))
        return replace(drafter, models=models, mask=mask, **tensors)

    def _note(self, node: fx.Node) -> None:
        """Where a node computes; what passes have noted of how its value lies there is found anew."""
        node.meta.pop(LAYOUT, None)
        move_node(node, self._device)
