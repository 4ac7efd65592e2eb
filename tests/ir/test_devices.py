"""Constants from another device. The device ``meta`` stands for the model's, so that no GPU is needed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from specgraph.ir.devices import move_foreign_nodes
from specgraph.ir.graphs import set_attribute

aten = torch.ops.aten
META = torch.device("meta")


class Built:
    """A graph under construction whose nodes know their values."""

    def __init__(self) -> None:
        self.root, self.graph = nn.Module(), fx.Graph()

    def input(self, value: Tensor) -> fx.Node:
        node = self.graph.placeholder("x")
        node.meta["val"] = value
        return node

    def attribute(self, name: str, value: Tensor) -> fx.Node:
        set_attribute(self.root, name, value)
        node = self.graph.get_attr(name)
        node.meta["val"] = value
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = target(*fx.node.map_arg(args, lambda arg: arg.meta["val"]), **kwargs)
        return node

    def module(self, *outputs: fx.Node) -> fx.GraphModule:
        self.graph.output(outputs)
        return fx.GraphModule(self.root, self.graph)


def targets(module: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.op not in ("placeholder", "output")]


def test_what_is_computed_elsewhere_from_nothing_becomes_an_attribute() -> None:
    built = Built()
    steps = built.call(aten.arange.start_step, 0, 8, 2, dtype=torch.float32, device=torch.device("cpu"))
    scale = built.attribute("scale", torch.tensor(0.5))
    frequencies = built.call(aten.to.device, built.call(aten.mul.Tensor, steps, scale), META, torch.float32)
    module = built.module(built.call(aten.mul.Tensor, frequencies, built.input(torch.ones(4, device=META))))
    assert move_foreign_nodes(module, META) == 1
    assert targets(module) == ["folded_constant_0", "aten.mul.Tensor"]
    assert module.folded_constant_0.device == META and module.folded_constant_0.shape == (4,)
    assert move_foreign_nodes(module, META) == 0


def test_values_are_those_that_the_same_operations_give() -> None:
    """The nodes run on the CPU and are said to run elsewhere, so that there is something to compare."""
    built = Built()
    steps = built.call(aten.arange.start_step, 0, 8, 2, dtype=torch.float32, device=META)
    steps.kwargs = {"dtype": torch.float32, "device": torch.device("cpu")}
    there = built.graph.call_function(aten.to.device, (steps, torch.device("cpu"), torch.float64))
    there.meta["val"] = torch.zeros(4, dtype=torch.float64)
    module = built.module(there)
    assert move_foreign_nodes(module, torch.device("cpu")) == 1
    assert module()[0].tolist() == [0.0, 2.0, 4.0, 6.0] and module()[0].dtype == torch.float64


def test_a_constant_that_takes_the_size_of_an_input_is_expanded_on_the_device() -> None:
    built = Built()
    given = built.input(torch.ones(3, 5, device=META))
    size = built.graph.call_function(aten.sym_size.int, (given, 0))
    size.meta["val"] = 3
    steps = built.call(aten.arange.default, 4, device=torch.device("cpu"))
    spread = built.graph.call_function(aten.expand.default, (steps, [size, 4]))
    spread.meta["val"] = torch.zeros(3, 4)
    zeros = built.graph.call_function(aten.zeros.default, ([size],), {"device": torch.device("cpu")})
    zeros.meta["val"] = torch.zeros(3)
    arrived = built.call(aten.to.device, spread, META, torch.int64)
    module = built.module(arrived, zeros)
    assert move_foreign_nodes(module, META) == 1
    assert targets(module) == ["aten.sym_size.int", "folded_constant_0", "aten.expand.default", "aten.zeros.default",
                               "aten.to.device"]  # fmt: skip
    results = module(torch.ones(3, 5, device=META))
    assert [(value.device, tuple(value.shape)) for value in results] == [(META, (3, 4)), (META, (3,))]


def test_what_lies_on_the_device_stays() -> None:
    built = Built()
    own = built.call(aten.arange.default, 4, device=META)
    module = built.module(built.call(aten.add.Tensor, own, built.input(torch.ones(4, device=META))))
    before = targets(module)
    assert move_foreign_nodes(module, META) == 0 and targets(module) == before
