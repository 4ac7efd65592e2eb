"""Several devices share the target's linear layers, experts, attention and recurrences (tensor parallelism).

``linear(x, w)`` becomes ``all_reduce([linear(x_0, w_0), linear(x_1, w_1), ...])``, where ``x_d`` and ``w_d`` are what
device ``d`` has of the inputs and of the columns that go with them. How a weight is cut is known to its scheme.

The pass looks for linear layers whose inputs can be computed by parts: behind attention and recurrences, by heads or
channels, and behind activations and gates, by features. Everything from the linear layers in front of these on is
copied for each device, with its rows of the weights (:mod:`specgraph.passes.common.device_parts`). Sums over devices
stand behind sums over experts, and there is one for two results that are added. A mean or a sum over what is cut, as in
a norm over all heads, is a sum over devices as well, of a number for each row. What is in no such region runs on every
device: other norms, the hidden states between layers, the choice of experts, the vocabulary, and drafters. So there is
one graph for all devices, in which their nodes stand side by side.
``meta["device"]`` says which nodes are of one device alone, and devices wait for each other at an ``all_reduce`` and
nowhere else.

Devices of a CPU run that graph. For GPUs the pass then runs once for each of them, and leaves what this one runs
(:mod:`specgraph.passes.common.one_rank`), so that everything behind it, a CUDA graph included, is the GPU's own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import replace as with_fields
from typing import Any

import torch
from torch import Tensor, fx

from specgraph.errors import ConfigError, PassError
from specgraph.ir.graphs import DEVICE, calls, new_module, remove_dead_code
from specgraph.ir.program import Program
from specgraph.ir.tensors import view_of
from specgraph.passes.base import NearMiss, Pass, PassResult
from specgraph.passes.common.device_parts import (
    ALL_REDUCE,
    ATTENTION,
    VIEWS,
    Part,
    Product,
    Region,
    WholeError,
    behind_sum,
    product_of,
    products_behind,
    up_to_sum,
)
from specgraph.passes.common.module_state import target_tensors
from specgraph.passes.common.one_rank import keep_rank
from specgraph.passes.common.patterns import Mismatch, aten, insert, keep_meta, only_user, replace

VOCABULARY = "tables of embeddings and the projection to the vocabulary are whole on every device"
NEEDED = "every device needs all of it, as of the keys of a group whose heads several have"
NO_REGION = "no layer behind it takes its outputs by parts, and its inputs are whole on every device"


@dataclass(frozen=True)
class Shard(Pass, requires={"traced", "target_only"}, exact=False):
    """Options: ``tensor``, the number of devices; ``rank``, of which of them the graph is to be, and ``device``, where
    that one is; None leaves the graph of all devices.
    """

    tensor: int = 1
    rank: int | None = None
    device: torch.device | None = None

    @property
    def skipped(self) -> str | None:
        """A reason if there is one device."""
        return "one device runs the target (parallel.tensor=1)" if self.tensor == 1 else None

    def apply(self, program: Program) -> PassResult:
        """Rewrite ``target``, and say what each device has.

        Raises:
            ConfigError: nothing of the target can be split.
            PassError: the target has its state already.
        """
        if "kv_cache" in program.facts:
            raise PassError("shard runs before state is inserted: put it before insert_kv_cache in pipeline.order.")
        target, device = program.modules["target"], self.device or program.target.device
        splits, reasons = _split_all(target, self.tensor, None if self.rank is None else (self.rank, device))
        if not splits:
            why = next(reversed(reasons.values()), NO_REGION)
            raise ConfigError(
                f"parallel.tensor={self.tensor} splits nothing of {program.target.name}: {why}. Give a number of "
                "devices that divides its attention heads and its intermediate size, between groups of weights, or "
                "leave parallel out."
            )
        remove_dead_code(target)
        program.modules["target"] = new_module(target, target.graph, "target")
        alike = Counter(re.sub(r"\.\d+\.", ".*.", line) for line in splits)
        notes = [f"{count} x {line}" for line, count in alike.items()]
        notes += [_describe(program, place) for place in range(self.tensor)]
        misses = tuple(_misses(program, reasons))
        if self.rank is not None:
            notes += [f"this is the graph of device {self.rank}, {self.device}"]
            keep_rank(program, self.rank, self.tensor, device)
        caches = sum(1 for _ in calls(program.modules.unchanged["target"].graph, ATTENTION))
        program.target = with_fields(program.target, num_caches=caches)
        return PassResult(len(splits), near_misses=misses, notes=tuple(notes))


def weights_on(program: Program, device: int) -> tuple[list[Tensor], list[Tensor]]:
    """The target's tensors on a device: those that it alone has, and those that are whole on every device."""
    own, whole = dict[object, Tensor](), dict[object, Tensor]()
    for _, node, tensor in target_tensors(program):
        if node.meta.get(DEVICE, device) == device:
            (own if DEVICE in node.meta else whole)[view_of(tensor)] = tensor
    return [*own.values()], [*whole.values()]


def _split_all(
    module: fx.GraphModule, count: int, only: tuple[int, torch.device] | None
) -> tuple[list[str], dict[str, str]]:
    """Split what can be split: a line for each split, and by the names of other weights the reasons against it."""
    splits, reasons, values, covered = list[str](), dict[str, str](), dict[object, Any](), set[fx.Node]()
    # From the last one on: of two products in a row, as of a gate of low rank, the second may be cut for a third one.
    for node in reversed(list(module.graph.nodes)):
        product = None if node._erased or node in covered else product_of(node)
        if product is None or DEVICE in node.meta:
            continue
        region = Region(module, node, values, only)
        try:
            splits.append(_split(region, product, count))
            covered.update(region.covered)
            whole = (node for node in region.made if node.op == "get_attr" and DEVICE not in node.meta)
            reasons.update((str(node.target), NEEDED) for node in whole)
        except WholeError:
            continue
        except Mismatch as reason:
            for tensor in (t for other in (product, *products_behind(product.x)) for t in other.weight):
                reasons.setdefault(str(tensor.target), str(reason))
    for node in list(calls(module.graph, aten.add.Tensor)):
        _join_sums(Region(module, node, values, only), node)
    return splits[::-1], reasons


def _join_sums(region: Region, addition: fx.Node) -> None:
    """Let each device add what two sums over devices would add up, as those of experts and of a shared one."""
    chains = [chain for value in addition.args if (chain := behind_sum(value))]
    if addition.kwargs or len(chains) < 2 or chains[0] == chains[1]:
        return
    (own, *first), (other, *second) = chains
    partial = region.follow_all(own, [*first, addition], own.args[0])  # type: ignore[arg-type]
    others = region.follow_all(other, second, other.args[0])  # type: ignore[arg-type]
    for added, part in zip(partial, others, strict=True):
        added.replace_input_with(chains[1][-1], part)
    views, end = list[fx.Node](), addition
    while "hidden_state" not in end.meta and (user := only_user(end)) is not None and user.target in VIEWS:
        views.append(end := user)
    partial = region.follow_all(addition, views, partial)
    replace(end, insert(end, ALL_REDUCE, (partial,), name="all_reduce"))


def _split(region: Region, product: Product, count: int) -> str:
    """Let each device multiply its part of the inputs of a product; returns a line for the report.

    Raises:
        Mismatch: the inputs cannot be computed by parts, and nothing has changed.
    """
    width, behind = int(product.x.meta["val"].shape[-1]), up_to_sum(product.node)
    at_once = bool(behind) or product.expert_ids is not None  # such a bias is no single one behind the sum
    try:
        share, rest = divmod(width, count)
        parts = [Part(product.x.meta["val"].dim() - 1, device * share, share) for device in range(count)]
        partial = [
            region.partial_sum(product, part, device, bias=at_once and device == 0) for device, part in enumerate(parts)
        ]
        region.close()
        if rest:
            raise Mismatch(f"{width} inputs are not divided by {count} devices")
    except Mismatch:
        region.undo()
        raise
    region.finish()
    partial = region.follow_all(product.node, behind, partial)
    before = [product.node, *behind][-1]
    line = f"{product.weight[0].target}: columns; {', '.join(str(w.target) for w in region.cut)}: rows"
    result = keep_meta(insert(before, ALL_REDUCE, (partial,), name="all_reduce"), before)
    if product.bias is not None and not at_once:  # once, and not by each device
        result = insert(before, aten.add.Tensor, (result, product.bias))
    replace(before, result)
    return line


def _misses(program: Program, reasons: dict[str, str]) -> Iterator[NearMiss]:
    """The matrices that are whole on every device."""
    seen = set[object]()
    for name, node, tensor in target_tensors(program):
        in_parts = any(DEVICE in user.meta for user in node.users)  # a tensor that parts of a weight have in common
        if DEVICE in node.meta or in_parts or tensor.dim() < 2 or view_of(tensor) in seen:
            continue
        seen.add(view_of(tensor))
        table = name == "lm_head" or any(user.target is aten.embedding.default for user in node.users)
        reason = VOCABULARY if table else reasons.get(str(node.target), NO_REGION)
        yield NearMiss(f"{name}.{node.target}", f"{reason} ({tensor.nbytes:,} bytes)")


def _describe(program: Program, device: int) -> str:
    own, whole = (sum(tensor.nbytes for tensor in tensors) for tensors in weights_on(program, device))
    return f"device {device}: {own + whole:,} bytes of weights, {own:,} its own and {whole:,} that every device has"
