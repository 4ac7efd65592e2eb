"""Moves views in front of functions of elements, so that chains of functions are not interrupted by views.

    select(f(a, b), dim, i)   ->  f(select(a, dim, i), select(b, dim, i))

The same holds for a new dimension of size 1, and for a view that splits the first dimension. A sum that is written out
as additions of selects, such as that of the experts of each token, then is one chain with what computes its terms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, fx

from specgraph.ir.graphs import arguments
from specgraph.passes.common.patterns import (
    aten,
    insert,
    insert_valued,
    keep_meta,
    only_user,
    producer,
    replace,
    same_sizes,
    value_of,
)

SELECT, UNSQUEEZE = aten.select.int, aten.unsqueeze.default
SPLITS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def move_views(graph: fx.Graph, is_function: Callable[[fx.Node], bool]) -> Iterator[tuple[fx.Node, str]]:
    """Move views in front of the nodes that are functions, wherever only functions read what results.

    A function stays where it is if something else reads its result, which would then be computed twice. Where it is
    selects that stay behind a function, this yields the function and the reason.
    """
    waiting = [node for node in reversed(graph.nodes) if is_function(node)]
    while waiting:
        node = waiting.pop()
        if node._erased or not any(_is_view(user) and _leads_to(user, is_function) for user in node.users):
            continue
        reason = _obstacle(node, is_function)
        if reason is None:
            moved = [_move(node, view) for view in list(node.users)]
            waiting += [value for new in moved for value in (new, *_sources(new)) if is_function(value)]
        elif any(user.target is SELECT for user in node.users):
            yield node, reason


def _sources(node: fx.Node) -> list[fx.Node]:
    """What the inputs of a function are views of."""
    return [value.args[0] for value in node.all_input_nodes if _is_view(value)]  # type: ignore[misc]


def _is_view(node: fx.Node) -> bool:
    """Whether a node is one of the views that can be moved."""
    whole, part = value_of(node.args[0] if node.args else None), value_of(node)
    if whole is None or part is None or whole.dim() == 0:
        return False
    if node.target in (SELECT, UNSQUEEZE):
        return not node.kwargs
    splits = producer(node, *SPLITS) is not None and part.dim() == whole.dim() + 1
    return splits and same_sizes(part.shape[2:], whole.shape[1:]) and not same_sizes(whole.shape[:1], (1,))


def _leads_to(view: fx.Node, is_function: Callable[[fx.Node], bool]) -> bool:
    """Whether functions alone read a view, or views of it."""
    return bool(view.users) and all(
        is_function(user) or (_is_view(user) and _leads_to(user, is_function)) for user in view.users
    )


def _obstacle(node: fx.Node, is_function: Callable[[fx.Node], bool]) -> str | None:
    """Why the views of a function's result cannot be moved in front of it; None if they can."""
    for user in node.users:
        if not _is_view(user) or not _leads_to(user, is_function):
            return f"{user.name} reads it beside the views that additions read"
    sizes = node.meta["val"].shape
    selects: list[Any] = [user.args for user in node.users if user.target is SELECT]
    places = {(dim % len(sizes), index) for _, dim, index in selects}
    apart = len(places) == len(node.users) and len({dim for dim, _ in places}) == 1
    if only_user(node) is None and (not apart or any(index < 0 for _, index in places)):
        return "several views may read the same elements, which would be computed more than once"
    unknown = any(not isinstance(size, int) for value in node.all_input_nodes for size in value.meta["val"].shape[1:])
    split = any(user.target in SPLITS for user in node.users)
    return f"a view splits {tuple(sizes)}, of whose sizes not only the first is unknown" if split and unknown else None


def _move(function: fx.Node, view: fx.Node) -> fx.Node:
    """Put in the place of a view of a function's result that function of views; returns it."""
    views = {value: _view_of(value, function.meta["val"], view) for value in function.all_input_nodes}
    args: Any = fx.map_arg(function.args, views.__getitem__)
    kwargs: Any = fx.map_arg(function.kwargs, views.__getitem__)
    new = keep_meta(insert(view, function.target, args, kwargs), view)
    replace(view, new)
    return new


def _view_of(value: fx.Node, whole: Tensor, view: fx.Node) -> fx.Node:
    """The elements of ``value``, which broadcasts to ``whole``, with which ``view`` of ``whole`` is computed."""
    own = value.meta["val"]
    shift = whole.dim() - own.dim()
    if view.target in SPLITS:
        sizes: Any = view.args[1]
        splits = shift == 0 and not same_sizes(own.shape[:1], (1,))
        return insert_valued(view, aten.view.default, value, [*sizes[:2], *own.shape[1:]]) if splits else value
    given = arguments(view)
    dim = given["dim"] % (whole.dim() + (view.target is UNSQUEEZE)) - shift
    if dim < 0:
        return value
    if view.target is UNSQUEEZE:
        return insert_valued(view, UNSQUEEZE, value, dim)
    return insert_valued(view, SELECT, value, dim, 0 if same_sizes(own.shape[dim : dim + 1], (1,)) else given["index"])
