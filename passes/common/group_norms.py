"""RMS norms of heads that need not wait for each other become one ``specgraph::rms_norms``.

Models norm the heads of queries and of keys, and a block drafter those of the keys of all its layers. Norms go together
if all of their inputs are known before any of their results is read. Views between a norm and what computes its input,
or between a norm and what reads its result, are moved along: they compute nothing. So the norm of keys also waits for a
projection of queries that stands behind it, and that projection then follows the projection of keys directly, whose end
it need not await to load its weights.
"""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import torch
from torch import fx

from specgraph.ir.graphs import arguments, calls
from specgraph.passes.common.patterns import RMS_NORM, grouped, insert, insert_weight, items, keep_meta, value_of

RMS_NORMS = torch.ops.specgraph.rms_norms.default
MAX_NORMS = 16
"""The most norms of one launch. Its kernel has a branch for each."""


def group_norms(graph: fx.Graph, chosen: Counter[str]) -> None:
    """Join the norms of heads of one graph, and count them in ``chosen``."""
    for group in list(grouped(filter(_of_heads, calls(graph, RMS_NORM)), _fits)):
        if len(group) > 1:
            _join(group)
            chosen["rms_norms"] += 1


def _fits(norms: list[fx.Node]) -> bool:
    """Whether these norms can be computed together, if all but the last can."""
    return len(norms) <= MAX_NORMS and _alike(norms[0], norms[-1]) and _together(norms)


def _of_heads(norm: fx.Node) -> bool:
    value = value_of(norm)
    return value is not None and value.dim() == 4 and arguments(norm)["weight"] is not None


def _alike(norm: fx.Node, other: fx.Node) -> bool:
    """Whether two norms differ in their weights and in the number of heads alone."""
    a, b = norm.meta["val"], other.meta["val"]
    same = a.dtype == b.dtype and a.shape[:2] == b.shape[:2] and a.shape[3] == b.shape[3]
    return bool(same and norm.kwargs == other.kwargs)


def _together(norms: list[fx.Node]) -> bool:
    ready = max(_source(norm.args[0]) for norm in norms)
    readers = set[fx.Node]().union(*map(_readers, norms))
    return readers.isdisjoint(norms) and all(ready < reader for reader in readers)


def _source(value: Any) -> fx.Node:
    """The last node that computes something for ``value``, behind the views that it may be."""
    return max(map(_source, value.all_input_nodes)) if _is_view(value) else value


def _readers(node: fx.Node) -> set[fx.Node]:
    """The nodes that compute something with ``node``, or with a view of it."""
    return set[fx.Node]().union(*(_readers(user) if _is_view(user) else {user} for user in node.users))


def _is_view(node: fx.Node) -> bool:
    return node.op == "call_function" and (node.target is operator.getitem or getattr(node.target, "is_view", False))


def _views_before(value: Any) -> set[fx.Node]:
    """``value`` and what it is a view of, as far as these are views themselves."""
    return {value}.union(*map(_views_before, value.all_input_nodes)) if _is_view(value) else set()


def _views_behind(node: fx.Node) -> set[fx.Node]:
    views = [user for user in node.users if _is_view(user)]
    return {*views}.union(*map(_views_behind, views))


def _join(norms: list[fx.Node]) -> None:
    """Put one node behind the last of the sources. Views that it reads go in front of it, and others behind it."""
    place = max(_source(norm.args[0]) for norm in norms).next
    for view in sorted(set[fx.Node]().union(*(_views_before(norm.args[0]) for norm in norms))):
        if view is place:
            place = place.next
        elif view > place:
            place.prepend(view)
    early = [view for norm in norms for view in _views_behind(norm) if view < place]
    weights = [insert_weight(place, norm.args[1]) for norm in norms]  # type: ignore[arg-type]
    given = [norm.args[0] for norm in norms], weights
    results = items(place, insert(place, RMS_NORMS, given, norms[0].kwargs, "rms_norms"), len(norms))
    for norm, result in zip(norms, results, strict=True):
        norm.replace_all_uses_with(keep_meta(result, norm))
        norm.graph.erase_node(norm)
    for view in sorted(early, reverse=True):
        results[-1].append(view)
