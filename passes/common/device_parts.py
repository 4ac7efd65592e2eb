"""Computes parts of values in a traced graph, for devices that share the work of one.

A *part* of a value is a range of one of its dimensions. A device that multiplies some of the inputs of a linear layer
needs a part of these inputs. To compute it, the nodes in front of the layer are copied for the device, each for the
part that the next one needs: an activation of some features, the attention of some heads, a view of some columns. The
copies begin with linear layers of which the device has some rows of the weight, or with other weights of which it has a
part. Where something else reads what was copied, up to a mean or a sum over what is cut, it is copied as well, and a
sum over devices takes the place of that. What lies in one tensor with what is cut, and all devices need, is computed
apart.

Nothing here knows a model. What cannot be computed by parts raises :class:`Mismatch`, with the reason.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from specgraph.ir.graphs import DEVICE, arguments, get_attribute, set_attribute
from specgraph.ir.linear import DENSE, describe
from specgraph.ir.scheme import Scheme
from specgraph.ir.shapes import LAYOUT, called
from specgraph.passes.common.patterns import (
    CONVERSIONS,
    PARTS,
    Mismatch,
    aten,
    dtype_of,
    grouped,
    insert,
    insert_valued,
    keep_meta,
    only_user,
    replace,
    same_sizes,
    value_of,
)

ATTENTION = torch.ops.specgraph.attention.default
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints)
SAME = (*CONVERSIONS, aten.alias.default, aten.contiguous.default, aten.copy.default, aten.dropout.default)
"""Ops without the tag of a function of elements that give every element of their input at its own place."""
ALL_REDUCE = torch.ops.specgraph.all_reduce.default
WHOLE = (ALL_REDUCE, aten.embedding.default)
"""What gives a whole value to every device."""
NORMS = (aten.layer_norm.default, aten.rms_norm.default)
REDUCTIONS = (aten.mean.dim, aten.sum.dim_IntList)
"""Ops that over a dimension that is cut are a sum over devices."""


EVERY = -1
"""In the place of the number of a device: all of them compute a value, each for itself."""


class WholeError(Mismatch):
    """What was to be computed by parts is a value that every device has, such as the hidden states between layers."""


class Part(NamedTuple):
    """The elements from ``begin`` on, ``size`` of them, of the dimension ``dim`` of a value.

    With ``every``, they are so many of each run of ``every`` elements: where rows and heads are one dimension, of the
    heads of each row.
    """

    dim: int
    begin: int
    size: int
    every: int | None = None


@dataclass(frozen=True, eq=False)
class Product:
    """A product of rows with a weight, or with the matrices of a stack, however the model writes it.

    Attributes:
        node: the call.
        scheme: how the weight is stored.
        x: the rows.
        weight: the nodes that read the tensors of the weight.
        bias: the node that reads the bias; or None.
        expert_ids: which matrix of a stack each row meets; None if there is one matrix.
        swapped: whether the inputs come before the outputs in a matrix.
    """

    node: fx.Node
    scheme: Scheme
    x: Any
    weight: tuple[fx.Node, ...]
    bias: fx.Node | None
    expert_ids: Any = None
    swapped: bool = False

    def call(self, x: Any, weight: Sequence[fx.Node], bias: fx.Node | None, name: str) -> fx.Node:
        """The same product of other tensors, in front of this one."""
        op: Any = self.node.target
        args: tuple[Any, ...] = (x, *self.scheme.operands(weight))
        if op is aten.addmm.default:
            op, args = (aten.mm.default, args) if bias is None else (op, (bias, *args))
        elif self.expert_ids is not None:
            args = (*args, bias, self.expert_ids)
        elif bias is not None:
            args = (*args, bias)
        given = self.node.kwargs
        options = {
            each.name: given[each.name] for each in op._schema.arguments if each.kwarg_only and each.name in given
        }
        return insert(self.node, op, args, options, name)


def product_of(node: fx.Node) -> Product | None:
    """``node`` as a product that can be cut; None if it is none."""
    linear = describe(node)
    if linear is not None and (linear.is_traced or (linear.expert_ids is not None and not linear.epilogue.get("gate"))):
        found = Product(
            node, linear.scheme, linear.x, linear.weight, linear.bias, linear.expert_ids,
            linear.epilogue.get("transposed", False),
        )  # fmt: skip
    elif node.target is aten.addmm.default and not node.kwargs:  # linear layers of GPT-2, whose weights are [I, O]
        bias, x, weight = cast(list[fx.Node], node.args)
        found = Product(node, DENSE, x, (weight,), bias, swapped=True)
    else:
        return None
    named = found.weight if found.bias is None else (*found.weight, found.bias)
    return found if all(each.op == "get_attr" for each in named) else None


@dataclass(eq=False)
class Region:
    """The nodes in front of one product that devices share, and their copies.

    Attributes:
        module: what the nodes are in.
        last: the product.
        values: what tracing would have noted for parts, by what they are parts of. Regions of a module share it, since
            fake tensors take long to make.
        only: the device whose nodes will be left, and where it is; None if all are.
        covered: the nodes that have been copied, and need not run whole any more.
        cut: the nodes that read the numbers of the weights of the products among them.
        made: the new nodes, in the order in which they were made.
        totals: the means and sums over what is cut, and what each device adds to them.
        items: what every device needs of what devices share, and a copy of it.
    """

    module: fx.GraphModule
    last: fx.Node
    values: dict[object, Any]
    only: tuple[int, torch.device] | None = None
    covered: dict[fx.Node, None] = field(default_factory=dict)
    cut: dict[fx.Node, None] = field(default_factory=dict)
    made: dict[fx.Node, None] = field(default_factory=dict)
    totals: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    items: dict[fx.Node, fx.Node] = field(default_factory=dict)
    _known: dict[tuple[fx.Node, Part, int], fx.Node] = field(default_factory=dict)

    def part(self, value: Any, part: Part, device: int) -> Any:
        """The node that computes ``part`` of ``value`` on a device.

        Raises:
            Mismatch: an op needs all of a value. ``WholeError``: there is no product that could be cut.
        """
        tensor = value_of(value)
        if tensor is None:
            raise Mismatch(f"the shape of {value} is not known")
        if part.begin == 0 and part.size == (part.every or tensor.shape[part.dim]):
            return value  # every device needs all of it, as of the only key head
        key = (value, part, device)
        if key not in self._known:
            self._known[key] = self._computed(value, part, device)
        return self._known[key]

    def partial_sum(self, product: Product, part: Part, device: int, *, bias: bool) -> fx.Node:
        """What a device adds to the result of a product: the part of its inputs times the columns of these."""
        x = self.part(product.x, part, device)
        weight = self._weight(product, [part], device, of_inputs=True)
        new = product.call(x, weight, product.bias if bias else None, _name(product.node, device))
        return self._noted(new, product.node, None, device)

    def rows(self, product: Product, parts: Sequence[Part], device: int) -> fx.Node:
        """Some outputs of a product, those of one part behind those of another: of so many rows of its weight."""
        node, (first, *_) = product.node, parts
        self.covered[node] = None
        if first.dim != node.meta["val"].dim() - 1:
            raise Mismatch(f"{node.name} would be cut between rows")
        self.cut[product.weight[0]] = None
        weight, bias = self._weight(product, parts, device, of_inputs=False), None
        if product.bias is not None:
            tensor = self._tensor(product.bias)
            pieces = [tensor.narrow(-1, part.begin, part.size) for part in parts]
            bias = self._read(product.bias, self._joined(pieces, -1, device), "outputs", parts, device)
        new = product.call(product.x, weight, bias, _name(node, device))
        return self._noted(new, node, first._replace(size=sum(part.size for part in parts)), device)

    def follow(self, node: fx.Node, source: fx.Node, part: fx.Node, device: int) -> fx.Node:
        """What ``node`` makes of ``source``, of what a device adds to that."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda value: part if value is source else value)
        return self._noted(insert(node, node.target, args, kwargs, _name(node, device)), node, None, device)

    def follow_all(self, before: fx.Node, chain: Sequence[fx.Node], parts: list[fx.Node]) -> list[fx.Node]:
        """What the nodes of a chain, each of which reads the one before it, make of what every device adds."""
        for node in chain:
            parts = [self.follow(node, before, own, device) for device, own in enumerate(parts)]
            before = node
        return parts

    def close(self) -> None:
        """Copy what else reads a node that was copied, up to means and sums over what is cut, which become sums over
        devices. Such a node would run whole, too.

        Raises:
            Mismatch: something needs all of the node in another way.
        """
        seen = set[fx.Node]()
        while waiting := [node for node in self.covered if node not in seen]:
            seen.update(waiting)
            for node in waiting:
                inside = {*self.covered, *self.made, *self.totals, *self.items, self.last}
                for user in [user for user in node.users if user not in inside]:
                    self._copy_reader(node, user)

    def finish(self) -> None:
        """Put sums over devices in the place of means and sums. Those that need not wait for each other are one."""
        for group in list(grouped(sorted(self.totals), self._together)):
            own = [self._beside(group, device) for device in range(len(self.totals[group[0]]))]
            total = keep_meta(insert(group[0], ALL_REDUCE, (own,), name="all_reduce"), own[0])
            for place, node in enumerate(group):
                alone = insert_valued(node, aten.slice.Tensor, total, -1, place, place + 1) if group[1:] else total
                replace(node, alone)
        for node, copy in self.items.items():
            replace(node, copy)

    def undo(self) -> None:
        """Erase the copies."""
        for node in reversed(self.made):
            self.module.graph.erase_node(node)

    def _copy_reader(self, node: fx.Node, user: fx.Node) -> None:
        """Copy ``user``, which reads all of ``node``: it computes elements, or is a mean or a sum over what is cut.

        An item that lies beside those that are cut, such as the only keys, is computed whole.
        """
        found = [(device, part) for known, part, device in self._known if known is node and device != EVERY]
        if node.target in PARTS and user.target is operator.getitem and not found:
            dim = arguments(node)["dim"] % user.meta["val"].dim()
            self.items[user] = _item(self, user, Part(dim, 0, user.meta["val"].shape[dim]), EVERY)
            return
        devices, parts = [device for device, _ in found], [part for _, part in found]
        value, given = value_of(node), value_of(user)
        if value is None or given is None or devices != [*range(len(found))] or len({p.size for p in parts}) != 1:
            raise Mismatch(f"{user.name} ({called(user)}) reads all of {node.name}")
        if user.target in REDUCTIONS and _is_over(user, parts[0]):
            self.totals[user] = self._total(node, user, parts)
        elif _is_pointwise(user) and "hidden_state" not in user.meta and same_sizes(given.shape, value.shape):
            for device, part in found:
                self.part(user, part, device)
        else:
            raise Mismatch(f"{user.name} ({called(user)}) reads all of {node.name}")

    def _total(self, source: fx.Node, node: fx.Node, parts: Sequence[Part]) -> list[fx.Node]:
        """What every device adds to a mean or a sum over what is cut."""
        times, whole = Counter(part.begin for part in parts), source.meta["val"].shape[parts[0].dim]
        if sorted(times) != [*range(0, whole, parts[0].size)] or len({*times.values()}) != 1:
            raise Mismatch(f"{node.name} reads all of {source.name}, of which devices have unequal shares")
        own = [self.follow(node, source, self.part(source, part, device), device) for device, part in enumerate(parts)]
        count = len(parts) if node.target is aten.mean.dim else times[0]  # several may have the same part
        if count == 1:
            return own
        shares = (insert(node, aten.div.Tensor, (value, count), name=value.name) for value in own)
        return [self._noted(share, node, None, device) for device, share in enumerate(shares)]

    def _together(self, nodes: list[fx.Node]) -> bool:
        """Whether one sum can be that of the last of some means, and of those before it, which can be one.

        What devices add to the last one moves in front of the first then.
        """
        first, last = nodes[0], nodes[-1]
        alike = same_sizes(first.meta["val"].shape, last.meta["val"].shape) and dtype_of(first) == dtype_of(last)
        if not alike or not _is_one(first.meta["val"].shape[-1]):
            return False
        needed, waiting = set[fx.Node](), [*self.totals[last]]
        while waiting:
            node = waiting.pop()
            if node in nodes:
                return False
            if node > first and node not in needed:
                needed.add(node)
                waiting += node.all_input_nodes
        for node in sorted(needed):
            first.prepend(node)
        return True

    def _beside(self, nodes: list[fx.Node], device: int) -> fx.Node:
        """What a device adds to several means or sums, side by side."""
        values = [self.totals[node][device] for node in nodes]
        if len(values) == 1:
            return values[0]
        joined = insert_valued(nodes[0], aten.cat.default, values, -1)
        joined.meta[DEVICE] = device
        return joined

    def _computed(self, node: fx.Node, part: Part, device: int) -> fx.Node:
        if node.op == "get_attr" and part.every is None:
            tensor = self._tensor(node).narrow(part.dim, part.begin, part.size)
            return self._read(node, tensor, f"dim{part.dim}", [part], device)
        if node.op != "call_function" or "hidden_state" in node.meta or node.target in WHOLE:
            raise WholeError(f"{node.name} is whole on every device")
        self.covered[node] = None
        product = product_of(node)
        if product is not None:
            return self.rows(product, [part], device)
        rule = _pointwise if _is_pointwise(node) else RULES.get(node.target)
        if rule is None or (part.every is not None and rule not in (_pointwise, _view, _mean, _norm)):
            raise Mismatch(f"{node.name} ({called(node)}) is not known to be computed by parts")
        found = rule(self, node, part, device)
        return found if isinstance(found, fx.Node) else self.copy(node, part, device, *found)

    def _weight(self, product: Product, parts: Sequence[Part], device: int, *, of_inputs: bool) -> list[fx.Node]:
        """Nodes that read the weight of some inputs or outputs. They are the product's own for what all have in common.

        What lies at one place is a view of the same memory wherever the scheme has one.
        """
        whole = [self._tensor(node).mT if product.swapped else self._tensor(node) for node in product.weight]
        try:
            cut = [product.scheme.part(whole, part.begin, part.size, of_inputs=of_inputs) for part in parts]
        except ValueError as reason:
            raise Mismatch(str(reason)) from reason
        nodes, what = list[fx.Node](), "inputs" if of_inputs else "outputs"
        for node, tensor, *pieces in zip(product.weight, whole, *cut, strict=True):
            if pieces[0] is tensor:
                nodes.append(node)
                continue
            own = self._joined(pieces, -2, device)
            nodes.append(self._read(node, own.mT if product.swapped else own, what, parts, device))
        return nodes

    def _joined(self, pieces: Sequence[Tensor], dim: int, device: int) -> Tensor:
        """One tensor of several, a copy where the device is; of a device that will not be left, without memory."""
        if len(pieces) == 1:
            return pieces[0]
        if self.only is None or device in (EVERY, self.only[0]):
            there = pieces[0].device if self.only is None else self.only[1]
            return torch.cat([piece.to(there) for piece in pieces], dim)
        shape = [*pieces[0].shape]
        shape[dim] = sum(piece.shape[dim] for piece in pieces)
        return pieces[0].new_empty(1).expand(shape)

    def _tensor(self, node: fx.Node) -> Tensor:
        return get_attribute(self.module, str(node.target)).detach()

    def _read(self, node: fx.Node, tensor: Tensor, what: str, parts: Sequence[Part], device: int) -> fx.Node:
        """A node that reads what a device has of the tensor that ``node`` reads."""
        places = "_".join(f"{part.begin}_{part.begin + part.size}" for part in parts)
        name = f"{_suffixed(str(node.target), device)}_{what}_{places}"
        set_attribute(self.module, name, tensor)
        with self.module.graph.inserting_before(node):
            new = self._noted(self.module.graph.get_attr(name), node, None, device)
        if "val" in new.meta:
            new.meta["val"] = self._of_shape(new.meta["val"], tensor.shape)
        return new

    def copy(self, node: fx.Node, part: Part, device: int, args: Any, kwargs: Any = None) -> fx.Node:
        """A copy of a node with other arguments, which computes a part of what the node does."""
        new = insert(node, node.target, args, node.kwargs if kwargs is None else kwargs, _name(node, device))
        return self._noted(new, node, part, device)

    def _noted(self, new: fx.Node, like: fx.Node, part: Part | None, device: int) -> fx.Node:
        value = like.meta.get("val")
        new.meta = {key: noted for key, noted in like.meta.items() if key not in ("pass_name", "hidden_state", LAYOUT)}
        if part is not None and value is not None:
            new.meta["val"] = self._narrowed(value, part)
        if device != EVERY:
            new.meta[DEVICE] = device
        self.made[new] = None
        return new

    def _narrowed(self, value: Any, part: Part) -> Any:
        """A value of the shape of a part; of each of several values, the same part."""
        if isinstance(value, (list, tuple)):
            return [self._narrowed(each, part) for each in value]
        shape = list(value.shape)
        shape[part.dim] = part.size if part.every is None else shape[part.dim] // part.every * part.size
        return self._of_shape(value, shape)

    def _of_shape(self, value: Any, shape: Sequence[Any]) -> Any:
        key = str([*shape]), value.dtype
        if key not in self.values:
            self.values[key] = value.new_empty(shape)
        return self.values[key]

    def operand(self, value: Any, like: Tensor, part: Part, device: int) -> Any:
        """The part of an operand that goes with a part of ``like``, to which the operand broadcasts."""
        tensor = value_of(value)
        if tensor is None:
            return value
        dim = part.dim - (like.dim() - tensor.dim())
        return value if dim < 0 or _is_one(tensor.shape[dim]) else self.part(value, part._replace(dim=dim), device)


def products_behind(value: Any) -> Iterator[Product]:
    """The products whose results ``value`` is computed from without another one in between, in one layer."""
    waiting, seen = [value], set[fx.Node]()
    while waiting:
        node = waiting.pop()
        if not isinstance(node, fx.Node) or node in seen or "hidden_state" in node.meta or node.target in WHOLE:
            continue
        seen.add(node)
        if (product := product_of(node)) is not None:
            yield product
        else:
            waiting += node.all_input_nodes


def up_to_sum(node: fx.Node) -> list[fx.Node]:
    """What follows a product up to a sum over some of its results, as over experts, with views and rounding behind it.

    Each is linear in the one before it, and nothing else reads that. So sums over devices come out the same behind it.
    """
    chain, end = list[fx.Node](), 0
    while "hidden_state" not in node.meta and (user := only_user(node)) is not None:
        summed, same = user.target is aten.sum.dim_IntList, user.target in (*VIEWS, *CONVERSIONS)
        if not (summed or same or (user.target is aten.mul.Tensor and user.args.count(node) == 1)):
            break
        chain.append(user)
        end, node = len(chain) if summed or (same and 0 < end == len(chain) - 1) else end, user
    return chain[:end]


def behind_sum(node: Any) -> list[fx.Node]:
    """A sum over devices, and what follows it up to ``node``; empty if there is none.

    Each is linear in the one before it, and nothing else reads that.
    """
    if not isinstance(node, fx.Node) or only_user(node) is None or "hidden_state" in node.meta:
        return []
    if node.target is ALL_REDUCE:
        return [node]
    linear = node.target in (*VIEWS, *CONVERSIONS, aten.mul.Tensor)
    chains = [chain for value in (node.args if linear else ()) if (chain := behind_sum(value))]
    return [*chains[0], node] if len(chains) == 1 else []


def _is_pointwise(node: fx.Node) -> bool:
    return node.target in SAME or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _is_over(node: fx.Node, part: Part) -> bool:
    """Whether a mean or a sum is over the dimension of a part, and over all of it."""
    given = arguments(node)
    dims = given["self"].meta["val"].dim()
    return part.every is None and part.dim in {dim % dims for dim in given["dim"] or range(dims)}


def _name(node: fx.Node, device: int) -> str:
    return _suffixed(node.name, device)


def _suffixed(name: str, device: int) -> str:
    return f"{name}_every" if device == EVERY else f"{name}_device{device}"


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _pointwise(region: Region, node: fx.Node, part: Part, device: int) -> Any:
    like = node.meta["val"]
    mapped: Any = fx.map_arg((node.args, node.kwargs), lambda value: region.operand(value, like, part, device))
    return mapped


def _transpose(region: Region, node: fx.Node, part: Part, device: int) -> Any:
    x, *dims = node.args
    a, b = (dim % node.meta["val"].dim() for dim in dims)
    return ((region.part(x, part._replace(dim={a: b, b: a}.get(part.dim, part.dim)), device), a, b),)


def _view(region: Region, node: fx.Node, part: Part, device: int) -> Any:
    """The dimension that is cut is one of the input as well, or a piece of one, or the outermost of several in it.

    In one of both, it may be one dimension with those in front of it.
    """
    x, *rest = node.args
    whole, given = node.meta["val"].shape, x.meta["val"].shape  # type: ignore[union-attr]
    if same_sizes(whole[: part.dim + 1], given[: part.dim + 1]):
        return ((region.part(x, part, device), *_resized(rest, part)),)
    inner, count = _elements(whole[part.dim + 1 :]), part.every or whole[part.dim]
    for dim in reversed(range(len(given))):
        own = _elements(given[dim + 1 :])
        if inner is None or own is None:
            break
        heads, of_rows = count * inner // own, dim == 0 < part.dim and not isinstance(given[dim], int)
        if heads * own != count * inner or heads == 1 or not (of_rows or given[dim] == heads):
            continue
        if any(number * inner % own for number in (part.begin, part.size)):
            raise Mismatch(f"{node.name} would be cut inside of one of {heads} heads or groups of {own} values")
        begin, size = (number * inner // own for number in (part.begin, part.size))
        own_part = Part(dim, begin, size, heads if of_rows else None)
        return ((region.part(x, own_part, device), *_resized(rest, part)),)
    raise Mismatch(f"{node.name} mixes the dimension that is cut with another one")


def _resized(given: Any, part: Part) -> list[Any]:
    """The arguments of a view behind its input: if they are sizes, with that of the part."""
    if not isinstance(given[0], (list, tuple)):
        return list(given)
    sizes = list(given[0])
    if part.every is not None and sizes[part.dim] != -1:
        raise Mismatch(f"a view gives {sizes[part.dim]}, and not -1, as the number of heads of all rows")
    sizes[part.dim] = -1 if sizes[part.dim] == -1 else part.size
    return [sizes]


def _elements(sizes: Any) -> int | None:
    """The product of sizes; None if one of them is not known."""
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else None


def _ones(region: Region, node: fx.Node, part: Part, device: int) -> Any:
    """There is one dimension more, or less, which has one element."""
    x, at = node.args
    dims, given = node.meta["val"].dim(), x.meta["val"].dim()  # type: ignore[union-attr]
    behind = part.dim >= at % max(dims, given)
    return ((region.part(x, part._replace(dim=part.dim + (given - dims) * behind), device), at),)


def _slice(region: Region, node: fx.Node, part: Part, device: int) -> Any:
    given = arguments(node)
    x, dim, begin = given["self"], given["dim"] % node.meta["val"].dim(), given["start"] or 0
    if dim != part.dim:
        return ((region.part(x, part, device), *node.args[1:]),)
    step, whole = given["step"], x.meta["val"].shape[dim]
    if step == 1 and begin >= 0:
        return region.part(x, part._replace(begin=part.begin + begin), device)
    if not 0 <= begin < step or node.meta["val"].shape[dim] * step != whole:
        raise Mismatch(f"{node.name} takes every {step}. value from {begin} on of what is cut")
    # Values of pairs, or of more: of some whole ones, the same places.
    return ((region.part(x, Part(dim, part.begin * step, part.size * step), device), *node.args[1:]),)


def _scatter(region: Region, node: fx.Node, part: Part, device: int) -> Any:
    """A tensor with another one in the place of a range of it, which is of another dimension than the one cut."""
    x, written, dim, *where = cast(Any, node.args)
    if dim % node.meta["val"].dim() == part.dim:
        raise Mismatch(f"{node.name} writes a range of what would be cut")
    return ((region.part(x, part, device), region.part(written, part, device), dim, *where),)


def _of_size(region: Region, node: fx.Node, part: Part, device: int) -> Any:
    """A tensor that is repeated along dimensions, or a new one, which takes no more than the dtype of another one."""
    x, sizes, *rest = cast(Any, node.args)
    whole, given = node.meta["val"], x.meta["val"]
    if node.target is aten.expand.default:
        x = region.operand(x, whole, part, device)
    elif same_sizes(whole.shape[: part.dim + 1], given.shape[: part.dim + 1]):
        x = region.part(x, part, device)
    return ((x, *_resized([sizes], part), *rest),)


def _complex(region: Region, node: fx.Node, part: Part, device: int) -> Any:
    """Complex numbers from pairs, or pairs from complex numbers. A pair is the last dimension, and is not cut."""
    x = cast(Any, node.args[0])
    if part.dim == x.meta["val"].dim():
        raise Mismatch(f"{node.name} would be cut inside of complex numbers")
    return ((region.part(x, part, device),),)


def _item(region: Region, node: fx.Node, part: Part, device: int) -> Any:
    """One of the tensors into which another one is cut: along the dimension that is cut, a range of it."""
    parts, index = cast(Any, node.args)
    if getattr(parts, "target", None) not in PARTS:
        raise Mismatch(f"{node.name} is an item of {parts}")
    given, key = arguments(parts), (parts, part, device)
    region.covered[parts] = None
    x, is_cut = given["self"], given["dim"] % node.meta["val"].dim() == part.dim
    if not is_cut and key not in region._known:
        region._known[key] = region.copy(parts, part, device, (region.part(x, part, device), *parts.args[1:]))
    elif is_cut:
        sizes = [value.shape[part.dim] for value in parts.meta["val"]]
        own = [part._replace(begin=part.begin + sum(sizes[:place])) for place in range(len(sizes))]
        product = product_of(x)
        if product is None or product.expert_ids is None or len({*sizes}) > 1:
            return region.part(x, own[index], device)
        if key not in region._known:  # one product for all items, as before, so that it can take in the gate behind it
            count_or_size = {aten.chunk.default: len(own), aten.split.Tensor: part.size}
            pieces = count_or_size.get(parts.target, [part.size] * len(own))
            args = (region.rows(product, own, device), pieces, *parts.args[2:])
            region._known[key] = region.copy(parts, part, device, args)
    return ((region._known[key], index),)


def _side_by_side(region: Region, node: fx.Node, part: Part, device: int) -> Any:
    """Tensors one behind the other, or in a new dimension. Each is cut, in another dimension, or one alone."""
    tensors, *rest = cast(Any, node.args)
    at, stacked, begin = (*rest, 0)[0] % node.meta["val"].dim(), node.target is aten.stack.default, part.begin
    for tensor in tensors if at == part.dim and not stacked else ():
        if 0 <= begin <= tensor.meta["val"].shape[at] - part.size:
            return region.part(tensor, part._replace(begin=begin), device)
        begin -= tensor.meta["val"].shape[at]
    if at == part.dim:
        raise Mismatch(f"{node.name} joins what would be cut")
    own = part._replace(dim=part.dim - (stacked and part.dim > at))
    return (([region.part(each, own, device) for each in tensors], *rest),)


def _mean(region: Region, node: fx.Node, part: Part, device: int) -> Any:
    given = arguments(node)
    dims = [dim % given["self"].meta["val"].dim() for dim in given["dim"] or ()]
    source = region.part(given["self"], part, device)
    if not dims or part.dim in dims or not given["keepdim"]:
        raise Mismatch(f"{node.name} is a mean over all of what would be cut")
    return ((source, *node.args[1:]),)


def _norm(region: Region, node: fx.Node, part: Part, device: int) -> Any:
    x, sizes, *rest = node.args
    source = region.part(x, part, device)
    if part.dim < node.meta["val"].dim() - len(sizes):  # type: ignore[arg-type]
        return ((source, sizes, *rest),)
    if node.target is not aten.rms_norm.default or len(sizes) != 1 or arguments(node)["eps"] is None:  # type: ignore[arg-type]
        raise Mismatch(f"{node.name} is a norm over all of what would be cut")
    return region.part(_written_out(node), part, device)


def _written_out(norm: fx.Node) -> fx.Node:
    """Put ``x * rsqrt(mean(x^2) + eps) * weight`` in the place of an op that computes it, for its mean is a sum."""
    x, weight, eps = (arguments(norm)[name] for name in ("input", "weight", "eps"))
    dtype, exact = norm.meta["val"].dtype, torch.promote_types(norm.meta["val"].dtype, torch.float32)
    wide = x if dtype == exact else insert_valued(norm, aten.to.dtype, x, exact)
    mean = insert_valued(norm, aten.mean.dim, insert_valued(norm, aten.mul.Tensor, wide, wide), [-1], True)
    scale = insert_valued(norm, aten.rsqrt.default, insert_valued(norm, aten.add.Tensor, mean, eps))
    result = insert_valued(norm, aten.mul.Tensor, wide, scale)
    result = result if weight is None else insert_valued(norm, aten.mul.Tensor, result, weight)
    result = result if dtype == exact else insert_valued(norm, aten.to.dtype, result, dtype)
    replace(norm, result)
    return result


def _keys(node: fx.Node, part: Part, heads: int, keys: int) -> Part:
    """The key heads that some heads read, which several devices may have."""
    if part.dim != 2:
        raise Mismatch(f"{node.name} would be cut elsewhere than between heads")
    group = heads // keys
    first, last = part.begin // group, (part.begin + part.size - 1) // group
    aligned = part.size % group == 0 and part.begin % group == 0
    if not aligned and first != last:
        raise Mismatch(f"{part.size} heads for a device are no whole groups of the {group} that share a key head")
    return Part(2, first, last - first + 1)


def _attention(region: Region, node: fx.Node, part: Part, device: int) -> Any:
    """Some heads of ``[B, T, H, D]``."""
    q, k, v, *sinks = cast(Any, node.args)
    keys = _keys(node, part, q.meta["val"].shape[1], k.meta["val"].shape[1])._replace(dim=1)
    own = [region.part(sink, part._replace(dim=0), device) if sink is not None else None for sink in sinks]
    heads = part._replace(dim=1)
    return ((region.part(q, heads, device), region.part(k, keys, device), region.part(v, keys, device), *own),)


def _delta_rule(region: Region, node: fx.Node, part: Part, device: int) -> Any:
    """Some heads of ``[B, T, H, Dv]``. Every head has a state of its own."""
    q, k, *of_heads = cast(Any, node.args)
    keys = _keys(node, part, node.meta["val"].shape[2], k.meta["val"].shape[2])
    own = [region.part(each, part, device) if each is not None else None for each in of_heads]
    return ((region.part(q, keys, device), region.part(k, keys, device), *own),)


def _conv(region: Region, node: fx.Node, part: Part, device: int) -> Any:
    """Some channels of ``[B, D, T]``, each of which has its own weights and last inputs."""
    x, *weights = node.args
    if part.dim != 1:
        raise Mismatch(f"{node.name} would be cut elsewhere than between channels")
    own = [region.part(each, part._replace(dim=0), device) if each is not None else None for each in weights]
    return ((region.part(x, part, device), *own),)


RULES: dict[Any, Callable[[Region, fx.Node, Part, int], Any]] = {
    **dict.fromkeys(VIEWS, _view), **dict.fromkeys(NORMS, _norm),
    aten.transpose.int: _transpose, aten.slice.Tensor: _slice, operator.getitem: _item, aten.mean.dim: _mean,
    aten.cat.default: _side_by_side, aten.stack.default: _side_by_side, aten.squeeze.dim: _ones,
    aten.unsqueeze.default: _ones, aten.slice_scatter.default: _scatter, aten.new_empty.default: _of_size,
    aten.expand.default: _of_size, aten.view_as_complex.default: _complex, aten.view_as_real.default: _complex,
    ATTENTION: _attention, torch.ops.specgraph.gated_delta_rule.default: _delta_rule,
    torch.ops.specgraph.causal_conv.default: _conv,
}  # fmt: skip
"""For every op that can be computed by parts: the arguments of the copy for a part, and perhaps its keywords, or the
node that computes the part by itself."""
