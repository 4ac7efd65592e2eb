"""Linear layers that read the same input, such as q/k/v or gate/up, become one linear layer.

Their weights are copied into one tensor, one after the other, and the model's own parameters become views of that
tensor. So the memory does not double, the model still works, and a second decoder of the same model finds the weights
merged already. A weight that something else reads as well, such as a tied embedding, is not merged.

Linear layers of several modules may share weights, as those of a block drafter do: one module computes keys and values
of the context with them, and another one those of a block. The first module decides the order of the weights in
memory. In the others, the layers whose weights then follow each other become one.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, fx, nn

from specgraph.ir.graphs import arguments, calls, get_attribute, set_attribute
from specgraph.ir.program import Program
from specgraph.passes.base import LoweringPass, NearMiss, PassResult
from specgraph.passes.common.patterns import aten, weight, weight_name

LINEAR = aten.linear.default
ELSEWHERE = "a weight is read elsewhere, too"
"""Why linear layers are not merged whose weights other nodes read."""


@dataclass(frozen=True)
class MergeLinears(LoweringPass):
    """Options: ``enabled``."""

    name: ClassVar[str] = "merge_linears"
    requires: ClassVar[frozenset[str]] = frozenset({"traced"})
    invalidates: ClassVar[frozenset[str]] = frozenset({"own_weights"})

    def apply(self, program: Program) -> PassResult:
        """Merge every group of every module."""
        readers, placed = _readers(program), set[int]()
        matches, misses = 0, []
        for name, module in program.modules.items():
            for group in _groups(module):
                reason = _refusal(module, group, readers)
                parts = [] if reason is not None else _parts(module, group, placed)
                for part in parts:
                    placed.update(map(id, _tensors(module, part)))
                    _merge(module, part)
                matches += len(parts)
                if not parts:
                    misses.append(NearMiss(f"{name}.{group[0].name}", reason or ELSEWHERE))
            module.recompile()
        return PassResult(matches, near_misses=tuple(misses))


def _readers(program: Program) -> dict[int, Counter[object]]:
    """How many nodes read each tensor: for each module that has linear layers which do, their number; and under None
    the number of all other nodes.
    """
    counts: dict[int, Counter[object]] = defaultdict(Counter)
    for module in program.modules.values():
        for node in module.graph.nodes:
            if node.op == "get_attr":
                linears = sum(user.target is LINEAR and user.args[0] is not node for user in node.users)
                found = counts[id(get_attribute(module, node.target))]
                found[module] += linears
                found[None] += len(node.users) - linears
    return counts


def _groups(module: fx.GraphModule) -> list[list[fx.Node]]:
    """For every input that several linear layers read, these layers in graph order."""
    by_input: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in calls(module.graph, LINEAR):
        if weight_name(node.args[1]) is not None:
            by_input[node.all_input_nodes[0]].append(node)
    return [group for group in by_input.values() if len(group) > 1]


def _tensors(module: fx.GraphModule, group: list[fx.Node]) -> list[Tensor]:
    """The weights and biases of linear layers."""
    weights = [get_attribute(module, str(node.args[1].target)) for node in group]  # type: ignore[union-attr]
    return [*weights, *(b for b in (_bias(module, node) for node in group) if b is not None)]


def _parts(module: fx.GraphModule, group: list[fx.Node], placed: set[int]) -> list[list[fx.Node]]:
    """The linear layers of ``group`` that are merged with each other.

    These are all of them, unless another module has ``placed`` a weight already: then those that follow each other.
    """
    if not any(id(tensor) in placed for tensor in _tensors(module, group)):
        return [group]
    parts: list[list[fx.Node]] = [[]]
    for node in group:
        parts += [] if _follow(module, [*parts[-1], node]) else [[]]
        parts[-1].append(node)
    return [part for part in parts if len(part) > 1]


def _follow(module: fx.GraphModule, group: list[fx.Node]) -> bool:
    """Whether the weights of linear layers follow each other in memory, and their biases do."""
    tensors = _tensors(module, group)
    halves = tensors[: len(group)], tensors[len(group) :]
    return all(_adjacent(half) is not None for half in halves if half)


def _refusal(module: fx.GraphModule, group: list[fx.Node], readers: dict[int, Counter[object]]) -> str | None:
    """The reason why the linear layers of ``group`` cannot be merged; None if they can."""
    weights = [get_attribute(module, str(node.args[1].target)) for node in group]  # type: ignore[union-attr]
    biases = [_bias(module, node) for node in group]
    if len({(w.dtype, w.device, w.shape[1]) for w in weights}) > 1:
        return "the weights differ in dtype or device"
    if any(bias is None for bias in biases) and any(bias is not None for bias in biases):
        return "some have a bias and some have none"
    for tensor in _tensors(module, group):
        if readers[id(tensor)][module] > 1 or readers[id(tensor)][None]:
            return ELSEWHERE
        if tensor.is_inference():
            return "the weights were made in inference mode and cannot become views"
    return None


def _bias(module: fx.GraphModule, node: fx.Node) -> Tensor | None:
    return weight(module, arguments(node)["bias"])


def _merge(module: fx.GraphModule, group: list[fx.Node]) -> None:
    graph, first = module.graph, group[0]
    weights = [str(node.args[1].target) for node in group]  # type: ignore[union-attr]
    sizes = [get_attribute(module, name).shape[0] for name in weights]
    with graph.inserting_before(first):
        given = [first.args[0], _merged_attribute(module, weights)]
        if _bias(module, first) is not None:
            given.append(_merged_attribute(module, [str(arguments(node)["bias"].target) for node in group]))
        merged = graph.create_node("call_function", LINEAR, tuple(given), {}, name="merged")
        parts = graph.call_function(aten.split_with_sizes.default, (merged, sizes, -1))
        outputs = [graph.call_function(operator.getitem, (parts, index)) for index in range(len(group))]
    for node, output in zip(group, outputs, strict=True):
        output.meta.update(node.meta)
        output.meta.pop("pass_name", None)
        node.replace_all_uses_with(output)
        _reshape_views(output)
    value = first.meta.get("val")
    if isinstance(value, Tensor):
        merged.meta["val"] = value.new_empty(*value.shape[:-1], sum(sizes))
    for node in group:
        unread = node.args[1:]
        graph.erase_node(node)
        for parameter in unread:
            if isinstance(parameter, fx.Node) and not parameter.users:
                graph.erase_node(parameter)


def _reshape_views(part: fx.Node) -> None:
    """Let views that join the rows of a part with its columns copy it, as rows of a part do not lie together."""
    for user in part.users:
        if user.target is not aten.view.default:
            continue
        before, after = part.meta["val"].shape[:-1], user.meta["val"].shape
        if after[: len(before)] != before:
            user.target = aten.reshape.default
        else:
            _reshape_views(user)


def _merged_attribute(module: fx.GraphModule, names: list[str]) -> fx.Node:
    """A node that reads one tensor, which holds the tensors ``names`` one after the other."""
    target = _merged_name(names)
    set_attribute(module, target, merge_storage([get_attribute(module, name) for name in names]))
    node = module.graph.get_attr(target)
    node.meta["val"] = get_attribute(module, target)
    return node


def _merged_name(names: list[str]) -> str:
    """The names of three projections, for example, give ``layers.0.self_attn.q_proj_k_proj_v_proj.weight``."""
    paths = [name.split(".") for name in names]
    shared = sum(1 for _ in itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False)))
    leaf = paths[0][-1]
    return ".".join([*paths[0][:shared], "_".join("_".join(path[shared:-1]) for path in paths), leaf])


@torch.no_grad()
def merge_storage(tensors: list[Tensor]) -> nn.Parameter:
    """One tensor that holds ``tensors`` one after the other along dimension 0; they become views of it.

    If they are adjacent in memory already, as for the second decoder of a model, nothing is copied.
    """
    merged = _adjacent(tensors)
    if merged is None:
        merged = torch.cat([tensor.detach() for tensor in tensors])
        begin = 0
        for tensor in tensors:
            tensor.data = merged[begin : begin + len(tensor)]
            begin += len(tensor)
    return nn.Parameter(merged, requires_grad=False)


def _adjacent(tensors: list[Tensor]) -> Tensor | None:
    """The tensor that spans ``tensors``, if they are adjacent in one storage already; else None."""
    first = tensors[0].detach()
    offset = first.storage_offset()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or tensor.storage_offset() != offset or not tensor.is_contiguous():
            return None
        offset += tensor.numel()
    return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride(), first.storage_offset())
