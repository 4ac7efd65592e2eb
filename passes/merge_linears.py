"""Linear layers that read the same input, such as q/k/v or gate/up, become one linear layer.

Their weights are copied into one tensor, one after the other, and the model's own parameters become views of that
tensor. So the memory does not double, the model still works, and a second decoder of the same model finds the weights
merged already. A weight that something else reads as well, such as a tied embedding, is not merged. Nor is a weight of
the target with one of a draft, as it would leave its place for other decoders of the model, which have other drafts.

Linear layers of several modules may share weights, as those of a block drafter do: one module computes keys and values
of the context with them, and another one those of a block. The first module decides the order of the weights in
memory. In the others, the layers whose weights then follow each other become one.

A weight of several tensors is merged tensor by tensor. Weights of different schemes are not merged with each other. A
tensor that says something about the inputs, such as a scale by which they are rounded, must be the same for all. The
merged layer has a copy of it, so that :mod:`specgraph.runtime.model_guard` notices what is written into one of them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, fx, nn

from specgraph.ir.graphs import get_attribute, set_attribute
from specgraph.ir.linear import Linear, describe, linears
from specgraph.ir.program import Program
from specgraph.passes.base import LoweringPass, NearMiss, PassResult
from specgraph.passes.common.module_state import target_tensors
from specgraph.passes.common.patterns import aten, erase_unused, grouped, insert, items, value_of, weight_name

ELSEWHERE = "a weight is read elsewhere, too"
"""Why linear layers are not merged whose weights other nodes read."""


class MergeLinears(LoweringPass, requires={"traced"}, invalidates={"own_weights"}):
    """Options: ``enabled``."""

    def apply(self, program: Program) -> PassResult:
        """Merge every group of every module."""
        readers, placed = _readers(program), set[int]()
        own = {id(tensor) for _, _, tensor in target_tensors(program)}
        matches, misses = 0, list[NearMiss]()
        for name, module in program.modules.items():
            groups = _groups(module, own)
            misses += _mixed(name, groups)
            for group in groups:
                if len(group) == 1:
                    continue
                reason = _refusal(module, group, readers)
                parts = [] if reason is not None else _parts(module, group, placed)
                for part in parts:
                    placed.update(map(id, _tensors(module, part)))
                    _merge(module, part)
                matches += len(parts)
                if not parts:
                    misses.append(NearMiss(f"{name}.{group[0].node.name}", reason or ELSEWHERE))
            module.recompile()
        return PassResult(matches, near_misses=tuple(misses))


def _readers(program: Program) -> dict[int, list[object]]:
    """The readers of each tensor: its module for every linear layer that reads it, and None for every other node."""
    found: dict[int, list[object]] = defaultdict(list)
    for module in program.modules.values():
        for node in module.graph.find_nodes(op="get_attr"):
            readers = (module if _reads(node, user) else None for user in node.users)
            found[id(get_attribute(module, node.target))] += readers
    return found


def _reads(constant: fx.Node, user: fx.Node) -> bool:
    """Whether ``user`` is a linear layer with ``constant`` in its weight or as its bias."""
    linear = describe(user)
    return linear is not None and linear.is_traced and constant in linear.constants


def _groups(module: fx.GraphModule, own: set[int]) -> list[list[Linear]]:
    """For every input, every scheme and either model, the linear layers that read it, in graph order.

    ``own``: the tensors of the target.
    """
    groups: dict[object, list[Linear]] = defaultdict(list)
    for linear in linears(module.graph):
        if linear.is_traced and all(weight_name(constant) is not None for constant in linear.constants):
            groups[linear.x, linear.scheme, id(linear.tensors(module)[0]) in own].append(linear)
    return list(groups.values())


def _mixed(name: str, groups: list[list[Linear]]) -> Iterator[NearMiss]:
    """A near miss for every input that linear layers of several schemes read."""
    by_input: dict[fx.Node, list[str]] = defaultdict(list)
    for first, *_ in groups:
        by_input[first.x].append(first.scheme.name)
    for x, schemes in by_input.items():
        if len(schemes) > 1:
            reason = f"linear layers that read it have weights of two schemes: {' and '.join(schemes)}"
            yield NearMiss(f"{name}.{x.name}", reason)


def _tensors(module: fx.GraphModule, group: list[Linear]) -> list[Tensor]:
    """The weights and biases of linear layers."""
    return [tensor for linear in group for tensor in linear.tensors(module)]


def _parts(module: fx.GraphModule, group: list[Linear], placed: set[int]) -> list[list[Linear]]:
    """The linear layers of ``group`` that are merged with each other.

    These are all of them, unless another module has ``placed`` a weight already: then those that follow each other.
    """
    if not any(id(tensor) in placed for tensor in _tensors(module, group)):
        return [group]

    def follow(part: list[Linear]) -> bool:
        kinds = zip(*(linear.tensors(module) for linear in part), strict=True)
        joined = (kind for place, kind in enumerate(kinds) if place not in part[0].scheme.in_common)
        return all(_adjacent(kind) is not None for kind in joined)

    return [part for part in grouped(group, follow) if len(part) > 1]


def _refusal(module: fx.GraphModule, group: list[Linear], readers: dict[int, list[object]]) -> str | None:
    """The reason why the linear layers of ``group``, which are of one scheme, cannot be merged; None if they can."""
    scheme = group[0].scheme
    reason = scheme.why_not_merged([linear.tensors(module)[: len(linear.weight)] for linear in group])
    if reason is not None:
        return reason
    if len({linear.bias is None for linear in group}) > 1:
        return "some have a bias and some have none"
    for tensor in _tensors(module, group):
        if readers[id(tensor)].count(module) > 1 or None in readers[id(tensor)]:
            return ELSEWHERE
        if tensor.is_inference():
            return "the weights were made in inference mode and cannot become views"
    return None


def _merge(module: fx.GraphModule, group: list[Linear]) -> None:
    first, scheme, kinds = group[0].node, group[0].scheme, zip(*(linear.constants for linear in group), strict=True)
    sizes = [linear.tensors(module)[0].shape[0] for linear in group]
    with module.graph.inserting_before(first):
        constants = [
            _merged_attribute(module, [str(node.target) for node in kind], in_common=place in scheme.in_common)
            for place, kind in enumerate(kinds)
        ]
    count = len(group[0].weight)
    operands = (group[0].x, *scheme.operands(constants[:count]), *constants[count:])
    merged = insert(first, scheme.traced, operands, dict(scheme.options), name="merged")
    value = value_of(first)
    if value is not None:
        merged.meta["val"] = value.new_empty(*value.shape[:-1], sum(sizes))
    outputs = items(first, insert(first, aten.split_with_sizes.default, (merged, sizes, -1)), len(group))
    for linear, output in zip(group, outputs, strict=True):
        output.meta.update(linear.node.meta)
        output.meta.pop("pass_name", None)
        linear.node.replace_all_uses_with(output)
        _reshape_views(output)
        erase_unused(linear.node)


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


def _merged_attribute(module: fx.GraphModule, names: list[str], *, in_common: bool) -> fx.Node:
    """A node that reads one tensor, which holds the tensors ``names`` one after the other, or is a copy of each."""
    target, tensors = _merged_name(names), [get_attribute(module, name) for name in names]
    one = nn.Parameter(tensors[0].detach().clone(), requires_grad=False) if in_common else merge_storage(tensors)
    set_attribute(module, target, one)
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


def _adjacent(tensors: Sequence[Tensor]) -> Tensor | None:
    """The tensor that spans ``tensors``, if they are adjacent in one storage already; else None."""
    first = tensors[0].detach()
    offset = first.storage_offset()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or tensor.storage_offset() != offset or not tensor.is_contiguous():
            return None
        offset += tensor.numel()
    return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride(), first.storage_offset())
