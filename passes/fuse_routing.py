"""The ATen nodes with which a mixture of experts chooses experts become one ``specgraph::route``.

The pass starts from the ids that a product of experts takes, and follows them to the ``topk`` that chose them. From
there it reads towards the logits what was compared (a softmax, a sigmoid, a bias, the best groups), and towards the
product what became of the weights (a softmax, the division by their sum, a factor, a conversion).

Weights whose last functions are unknown are taken as far as they are known; the rest stays as it is. A choice that is
made in another way, such as that of phimoe, stays as a whole and is a near miss.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from specgraph.ir.graphs import arguments
from specgraph.ir.linear import linears
from specgraph.ir.program import Program
from specgraph.kernels.linear.route import MAX_EXPERTS
from specgraph.passes.base import LoweringPass, NearMiss, PassResult
from specgraph.passes.common.patterns import (
    CASTS,
    Mismatch,
    aten,
    before_cast,
    dtype_of,
    insert,
    is_last,
    items,
    only_user,
    producer,
    replace,
    value_of,
)

ROUTE = torch.ops.specgraph.route.default
_SOFTMAX = (aten.softmax.int, aten._softmax.default)
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


class FuseRouting(LoweringPass, requires={"traced"}):
    """Options: ``enabled``."""

    def apply(self, program: Program) -> PassResult:
        """Let one op choose the experts of every mixture."""
        matches, misses = 0, list[NearMiss]()
        for name, module in program.modules.where(lambda graph: any(_chosen(graph))):
            for ids in dict.fromkeys(_chosen(module.graph)):
                try:
                    left = _fuse(ids)
                except Mismatch as reason:
                    misses.append(NearMiss(f"{name}.{ids.name}", str(reason)))
                    continue
                matches += 1
                misses += [] if left is None else [NearMiss(f"{name}.{ids.name}", left)]
            module.recompile()
        return PassResult(matches, near_misses=tuple(misses))


def _chosen(graph: fx.Graph) -> Iterator[fx.Node]:
    """The ids of experts that products of the graph take, before they are one list, once for each product."""
    for linear in linears(graph):
        ids = linear.expert_ids
        while ids is not None and (view := producer(ids, *_VIEWS)) is not None:
            ids = view.args[0]
        if ids is not None:
            yield ids


def _fuse(ids: fx.Node) -> str | None:
    """Put one op in the place of what computes ``ids`` and their weights; returns what of the weights it leaves."""
    part = producer(ids, operator.getitem)
    topk = None if part is None or part.args[1] != 1 else producer(part.args[0], aten.topk.default)
    if topk is None:
        raise Mismatch(f"{ids.name} is no result of topk")
    choice, count = _topk(topk)
    compared, groups = _groups(choice)
    scores, bias = _bias(compared)
    logits, scoring = _scoring(scores)
    experts = _experts(logits)
    weights = _weights(topk, ids, scores, alone=bias is None and _kept_are_enough(groups, experts, count))
    end, behind = _behind(weights, scoring)
    if scoring == "none" and "softmax_chosen" not in behind:
        raise Mismatch(f"neither {scores.name} nor what becomes of {weights.name} is a softmax or a sigmoid")
    dtypes = {"score_dtype": dtype_of(scores), "weight_dtype": dtype_of(end)}
    options = {"top_k": count, "scoring": scoring, **dtypes, **groups, **behind}
    left = _left(end)
    new_weights, new_ids = items(topk, insert(topk, ROUTE, (logits, bias), options, "route"), 2)
    replace(end, new_weights)
    replace(ids, new_ids)
    return left


def _experts(logits: fx.Node) -> int:
    """The number of experts of which ``logits`` has a row each."""
    value = value_of(logits)
    experts = None if value is None or value.dim() != 2 else value.shape[1]
    if not isinstance(experts, int) or experts > MAX_EXPERTS:
        raise Mismatch(f"{logits.name} has no rows of at most {MAX_EXPERTS} logits")
    return experts


def _topk(topk: fx.Node) -> tuple[fx.Node, int]:
    """What ``topk`` compares in every row, and how many it takes."""
    given = arguments(topk)
    choice, count = given["self"], given["k"]
    if not is_last(given["dim"], choice) or not given["largest"] or not isinstance(count, int):
        raise Mismatch(f"{topk.name} does not take a fixed number of the largest of every row")
    return choice, count


def _groups(choice: fx.Node) -> tuple[fx.Node, dict[str, Any]]:
    """What is compared before experts outside of the best groups were excluded, and the options that say how."""
    filled = producer(choice, aten.masked_fill.Scalar)
    if filled is None:
        return choice, {}
    compared, mask, fill = arguments(filled).values()
    spread = _mask(mask)
    if fill != -math.inf or spread is None:
        raise Mismatch(f"{filled.name} excludes experts in another way than by -inf outside of the best groups")
    scattered, (groups, size) = spread
    best = producer(scattered.args[2], operator.getitem)
    topk = None if best is None or best.args[1] != 1 else producer(best.args[0], aten.topk.default)
    if topk is None:
        raise Mismatch(f"{scattered.name} does not keep the best groups")
    group_scores, kept = _topk(topk)
    form, source = _group_score(group_scores)
    shape = () if (value := value_of(source)) is None else value.shape
    of_all = source is not None and source.args[0] is compared
    if not of_all or tuple(shape[1:]) != (groups, size):
        raise Mismatch(f"{group_scores.name} is neither the largest score of a group nor the sum of its best two")
    if kept >= groups:
        return compared, {}
    return compared, {"groups": groups, "kept_groups": kept, "group_score": form}


def _mask(mask: Any) -> tuple[fx.Node, tuple[int, int]] | None:
    """The node that marks the groups to keep, and the number and the size of all groups; None if it is no such mask."""
    inverted = producer(mask, aten.bitwise_not.default, aten.logical_not.default)
    value: Any = None if inverted is None else before_cast(inverted.args[0])
    while (copy := _copy(value)) is not None:
        value = copy
    expanded = producer(value, aten.expand.default)
    column = None if expanded is None else producer(expanded.args[0], aten.unsqueeze.default)
    scattered = None if column is None else producer(column.args[0], aten.scatter.value)
    spread = value_of(expanded)
    if column is None or scattered is None or spread is None or spread.dim() != 3 or column.args[1] not in (-1, 2):
        return None
    zeros, dim, _, marked = scattered.args
    if not _is_call(zeros, aten.zeros_like.default) or not is_last(dim, zeros) or marked != 1:
        return None
    _, groups, size = spread.shape
    return (scattered, (groups, size)) if isinstance(groups, int) and isinstance(size, int) else None


def _copy(value: Any) -> fx.Node | None:
    """What ``value`` has the elements of, in the same order; None if it is no copy and no view."""
    source = value.args[0] if _is_call(value, *_VIEWS, aten.clone.default) else None
    return source if isinstance(source, fx.Node) else None


def _group_score(scores: fx.Node) -> tuple[str, fx.Node | None]:
    """How scores ``[R, G]`` of groups are computed, and from what view ``[R, G, E / G]`` of the experts' ones."""
    total, largest = producer(scores, aten.sum.dim_IntList), producer(scores, aten.amax.default)
    best = producer(scores if total is None else total.args[0], operator.getitem)
    first = None if best is None or best.args[1] != 0 else best.args[0]
    pairs, maximum = producer(first, aten.topk.default), producer(first, aten.max.dim)
    if total is not None and pairs is not None and _is_sum_of_rows(total, keepdim=False) and _topk(pairs)[1] == 2:
        return "top2", producer(pairs.args[0], *_VIEWS)
    if total is None and maximum is not None and is_last(maximum.args[1], maximum.args[0]):
        return "max", producer(maximum.args[0], *_VIEWS)
    if largest is not None and largest.args[1] in ([-1], [2]):
        return "max", producer(largest.args[0], *_VIEWS)
    return "", None


def _bias(compared: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """The scores that are compared, and the bias ``[E]`` that is added to them."""
    total = producer(compared, aten.add.Tensor)
    for scores, bias in () if total is None else (total.args[:2], total.args[1::-1]):
        value = value_of(bias)
        if _is_score(scores) and value is not None and value.dim() == 1 and value.is_floating_point():
            return scores, bias  # type: ignore[return-value]
    return compared, None


def _is_score(value: Any) -> bool:
    return producer(value, aten.sigmoid.default, *_SOFTMAX) is not None


def _scoring(scores: fx.Node) -> tuple[fx.Node, str]:
    """The logits from which scores are computed, and by what function."""
    softmax, sigmoid = producer(scores, *_SOFTMAX), producer(scores, aten.sigmoid.default)
    logits: Any = scores
    if softmax is not None and is_last(softmax.args[1], softmax.args[0]):
        logits, name = softmax.args[0], "softmax"
    elif sigmoid is not None:
        logits, name = sigmoid.args[0], "sigmoid"
    else:
        name = "none"
    source = _cast(logits)
    return (logits if source is None or dtype_of(logits) != dtype_of(scores) else source), name


def _weights(topk: fx.Node, ids: fx.Node, scores: fx.Node, *, alone: bool) -> fx.Node:
    """The scores of the chosen experts. ``alone`` says whether what ``topk`` compared are scores and nothing else."""
    values = [user for user in topk.users if user.args[1] == 0 and user.users]
    gathered = [user for user in ids.users if _gathers(user, scores, ids)]
    if not values and len(gathered) == 1:
        return gathered[0]
    if gathered or len(values) != 1:
        raise Mismatch(f"{ids.name} does not choose from {scores.name} once")
    if not alone:
        raise Mismatch(f"{values[0].name} holds more than the scores of the chosen experts")
    return values[0]


def _gathers(node: fx.Node, scores: fx.Node, ids: fx.Node) -> bool:
    gather = producer(node, aten.gather.default)
    if gather is None:
        return False
    source, dim, index = gather.args
    return source is scores and index is ids and is_last(dim, scores)


def _kept_are_enough(groups: dict[str, Any], experts: int, count: int) -> bool:
    """Whether the groups that are kept have as many experts as are chosen, so that none is chosen from others."""
    return not groups or groups["kept_groups"] * (experts // groups["groups"]) >= count


def _behind(weights: fx.Node, scoring: str) -> tuple[fx.Node, dict[str, Any]]:
    """The last known function of the weights, and the options that say what is computed up to it."""
    end, options, dtype = weights, dict[str, Any](), dtype_of(weights)
    softmax = producer(_user(end), *_SOFTMAX)
    if scoring == "none" and softmax is not None and is_last(softmax.args[1], end) and dtype_of(softmax) == dtype:
        end, options["softmax_chosen"] = softmax, True
    elif (quotient := _quotient(_kept_dtype(end))) is not None:
        end, epsilon = quotient
        options |= {"normalise": True} | ({"epsilon": epsilon} if epsilon else {})
    product = producer(_user(end), aten.mul.Tensor)
    factor = None if product is None else next((arg for arg in product.args if isinstance(arg, int | float)), None)
    if product is not None and factor is not None and math.isfinite(factor):
        end = product
        options |= {"scale": float(factor)} if factor != 1 else {}
    converted = only_user(end)
    if converted is not None and _cast(converted) is end:
        end = converted
    return end, options


def _quotient(weights: fx.Node) -> tuple[fx.Node, float] | None:
    """The weights divided by their sum, and the epsilon that is added to that."""
    total = next((user for user in weights.users if _is_sum_of_rows(user, keepdim=True)), None)
    shifted = None if total is None else producer(only_user(total), aten.add.Tensor)
    divisor, epsilon = total, 0.0
    if shifted is not None and isinstance(shifted.args[1], int | float):
        divisor, epsilon = shifted, float(shifted.args[1])
    quotient = None if divisor is None else producer(only_user(divisor), aten.div.Tensor)
    if quotient is None or quotient.args != (weights, divisor) or {*weights.users} != {total, quotient}:
        return None
    return quotient, epsilon


def _left(end: fx.Node) -> str | None:
    """What reads the sum of weights that the op does not divide by it; None if nothing does."""
    for user in end.users:
        if _is_sum_of_rows(user, keepdim=True):
            return f"{user.name} stays: {end.name} is not divided by it alone, or by it and an epsilon"
    return None


def _is_sum_of_rows(node: Any, *, keepdim: bool) -> bool:
    total = producer(node, aten.sum.dim_IntList)
    given = {} if total is None else arguments(total)
    return (
        bool(given)
        and len(given["dim"]) == 1
        and is_last(given["dim"][0], given["self"])
        and (given["keepdim"] == keepdim)
    )


def _user(node: fx.Node) -> fx.Node | None:
    """The only node that reads ``node``, or a conversion of it that changes nothing."""
    return only_user(_kept_dtype(node))


def _kept_dtype(node: fx.Node) -> fx.Node:
    """``node`` behind the conversions to its own dtype, as far as they alone read it."""
    while (user := only_user(node)) is not None and _cast(user) is node and dtype_of(user) == dtype_of(node):
        node = user
    return node


def _cast(node: Any) -> fx.Node | None:
    """What ``node`` converts from one floating-point dtype to another, on the same device; else None."""
    cast = producer(node, *CASTS)
    source = None if cast is None else cast.args[0]
    plain = cast is not None and set(cast.kwargs) <= {"dtype"}
    floats = all(value is not None and value.is_floating_point() for value in map(value_of, (node, source)))
    return source if plain and floats else None  # type: ignore[return-value]


def _is_call(value: Any, *targets: object) -> bool:
    """Whether ``value`` calls one of ``targets``, whatever its keywords say of memory."""
    return isinstance(value, fx.Node) and value.op == "call_function" and value.target in targets
