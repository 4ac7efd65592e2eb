"""Describes linear layers, so that a pass need not know which op computes one, nor how its weight is stored.

A *scheme* says how a weight is stored: as which tensors, and by which ops a product with it is computed. A dense matrix
is one scheme among others. :func:`describe` reads a node as a linear layer of its scheme, for every op that the scheme
names. A new scheme is a :class:`~specgraph.ir.scheme.Scheme` with the ops that it names and, if modules of models hold
such weights, with what recognises them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

import specgraph.kernels.linear.experts
import specgraph.kernels.linear.linear  # noqa: F401  (both register ops)
from specgraph.ir.graphs import arguments, get_attribute
from specgraph.ir.packed import packed
from specgraph.ir.scheme import Scheme
from specgraph.kernels.linear.few_rows import few_rows_linear
from specgraph.kernels.packed.formats import FORMATS


@dataclass(frozen=True, eq=False)
class Linear:
    """A node that is a linear layer.

    Attributes:
        node: the call.
        scheme: how its weight is stored.
        x: what it is applied to.
        weight: the tensors of its weight, in the order of :attr:`Scheme.weight`.
        bias: None if there is none.
        expert_ids: which matrix of a stack each row meets; None if there is one matrix.
        epilogue: the other arguments, such as the residual and the activation.
    """

    node: fx.Node
    scheme: Scheme
    x: Any
    weight: tuple[Any, ...]
    bias: Any
    expert_ids: Any
    epilogue: dict[str, Any]

    @property
    def constants(self) -> tuple[Any, ...]:
        """The tensors of the weight, and the bias."""
        return self.weight if self.bias is None else (*self.weight, self.bias)

    @property
    def is_traced(self) -> bool:
        """Whether it is as tracing made it, with one matrix for all rows and nothing fused with it."""
        if self.node.target is not self.scheme.traced:
            return False
        defaults = _defaults(self.scheme.traced)
        return all(value == defaults[name] for name, value in self.epilogue.items())

    @property
    def features(self) -> tuple[int, int]:
        """The inputs and the outputs of one row, as the tracing of ``x`` and of the result noted them."""
        return int(self.x.meta["val"].shape[-1]), int(self.node.meta["val"].shape[-1])

    def tensors(self, module: fx.GraphModule) -> tuple[Tensor, ...]:
        """The values of :attr:`constants`, all of which are attributes of the module."""
        return tuple(get_attribute(module, str(node.target)) for node in self.constants)


DENSE = Scheme(
    "dense",
    torch.ops.aten.linear.default,
    lowered=torch.ops.specgraph.linear.default,
    with_norm=torch.ops.specgraph.linear_norm.default,
    few_rows=few_rows_linear,
    experts=torch.ops.specgraph.expert_linear.default,
)
"""One matrix ``[O, I]`` in the dtype of the input."""

SCHEMES: list[Scheme] = [DENSE, *map(packed, FORMATS.values())]
"""The schemes that are known, in the order in which they are asked whether a module is theirs."""


def describe(node: fx.Node) -> Linear | None:
    """``node`` as a linear layer; None if it is no call of an op of a scheme."""
    if node.op != "call_function":
        return None
    for scheme in SCHEMES:
        if node.target in scheme.ops and all(node.kwargs.get(name) == value for name, value in scheme.options.items()):
            break
    else:
        return None
    given = {name: value for name, value in arguments(node).items() if name not in scheme.options}
    x = given.pop("input" if "input" in given else "x")
    parts = [given.pop(name) for name in scheme.weight]
    weight = tuple(node for part in parts for node in (part if isinstance(part, (list, tuple)) else [part]))
    return Linear(node, scheme, x, weight, given.pop("bias", None), given.pop("expert_ids", None), given)


def linears(graph: fx.Graph) -> Iterator[Linear]:
    """The linear layers of a graph, in its order. The graph may be changed meanwhile."""
    for node in list(graph.nodes):
        linear = describe(node)
        if linear is not None:
            yield linear


def scheme_of(module: nn.Module) -> tuple[Scheme, tuple[Tensor, ...]] | None:
    """The scheme of a module of a model, and the tensors of its weight; None if no scheme needs a hook for it."""
    for scheme in SCHEMES:
        weight = scheme.weight_of(module)
        if weight is not None:
            return scheme, weight
    return None


def stacks_of(module: nn.Module) -> dict[str, tuple[Scheme, tuple[Tensor, ...]]]:
    """The packed stacks of a mixture of experts by their names, each with its scheme; empty if there are none."""
    return {name: (scheme, weight) for scheme in SCHEMES for name, weight in scheme.stacks_of(module).items()}


def packed_tensors(model: nn.Module) -> Iterator[Tensor]:
    """The tensors of all weights of a model that are stored in a scheme which needs a hook.

    Integers beside the weight of a linear layer, such as its shape, are among them.
    """
    for module in model.modules():
        layer = scheme_of(module)
        if layer is not None:
            others = (value for value in module.parameters(recurse=False) if not value.is_floating_point())
            yield from {id(part): part for part in (*layer[1], *others)}.values()
        for _, stack in stacks_of(module).values():
            yield from stack


def _defaults(op: Any) -> dict[str, Any]:
    """The values that the arguments of an op have unless they are given."""
    return {argument.name: argument.default_value for argument in op._schema.arguments}
