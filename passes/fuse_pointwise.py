"""Functions of single elements become ``specgraph::pointwise`` ops, each of which is one kernel.

What is left of a layer after the other passes are chains such as ``silu(float32(z)) * norm`` and the gates of recurrent
layers. PyTorch launches a kernel for every function. Here a function takes in those before it whose results nothing
else reads, as far as their shapes broadcast to its own, and the copies that only reshape. Two such chains of one shape
share a kernel if nothing reads the first before the second is known.

Views that stand between functions are moved in front of them. So the sum over the experts of a token is one kernel with
the products by their weights and with the residual.

A chain that combines the outputs of a product of experts, such as ``silu(gate) * up`` or the clamped one of gpt_oss,
becomes the ``gate`` of that product, which has both at hand.

A dump shows what an op computes as an expression. The rounding of every function stays.
"""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from specgraph.ir.graphs import arguments, calls
from specgraph.ir.linear import describe
from specgraph.ir.program import Program
from specgraph.kernels.pointwise.program import DTYPES
from specgraph.passes.base import LoweringPass, NearMiss, PassResult
from specgraph.passes.common.patterns import (
    CASTS,
    aten,
    dtype_of,
    erase_unused,
    grouped,
    half_of,
    insert,
    items,
    keep_meta,
    only_user,
    producer,
    replace,
    replace_by,
    same_sizes,
    value_of,
)
from specgraph.passes.common.views import move_views

POINTWISE = torch.ops.specgraph.pointwise.default
FORMS: dict[Any, str] = {
    aten.add.Tensor: "({} + {})", aten.sub.Tensor: "({} - {})", aten.mul.Tensor: "({} * {})",
    aten.div.Tensor: "({} / {})", aten.neg.default: "(-{})", aten.exp.default: "exp({})",
    aten.relu.default: "relu({})", aten.sigmoid.default: "sigmoid({})", aten.silu.default: "silu({})",
    aten.softplus.default: "softplus({})", aten.clamp_min.default: "clamp_min({}, {})",
    aten.clamp_max.default: "clamp_max({}, {})",
}  # fmt: skip
"""The functions that are joined, and how a program writes each."""
_CLAMPS = {
    (True, True): "clamp_max(clamp_min({}, {}), {})", (True, False): "clamp_min({}, {})",
    (False, True): "clamp_max({}, {})",
}  # fmt: skip
"""The same of ``clamp``, by which of its limits are given."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
MAX_INPUTS = 24
"""The most inputs of one op, so that a kernel keeps its registers. Ten experts have 20 outputs and weights."""


class FusePointwise(LoweringPass, invalidates={"traced"}):
    """Options: ``enabled``."""

    def apply(self, program: Program) -> PassResult:
        """Replace every function of elements in the modules; chains that can be computed together share an op."""
        ops = functions = gates = 0
        misses = list[NearMiss]()
        for name, module in program.modules.where(lambda graph: any(map(_is_function, graph.nodes))):
            _leave_out_clamps(module.graph)
            stay = dict(move_views(module.graph, _is_function))
            misses += [NearMiss(f"{name}.{n.name}", reason) for n, reason in stay.items() if not n._erased]
            chains = list(_chains(module.graph))
            functions += sum(len(chain.nodes) for chain in chains)
            joined = [(chain, halves) for chain in chains if (halves := _halves(chain)) is not None]
            ends, gates = {chain.end for chain, _ in joined}, gates + len(joined)
            left = [chain for chain in chains if chain.end not in ends]
            # From the last to the first: a chain whose end is replaced may be an input of those behind it.
            for group in reversed(list(grouped(left, _fits))):
                _insert(group)
                ops += 1
            for chain, halves in joined:
                _give_gate(chain, halves)
            module.recompile()
        made = [f"{count} x {what}" for count, what in ((ops, "pointwise"), (gates, "gate of experts")) if count]
        notes = (f"{functions} functions of elements are {' and '.join(made)}",) if made else ()
        return PassResult(ops + gates, near_misses=tuple(misses), notes=notes)


@dataclass
class _Chain:
    """A function and those that it takes in.

    Attributes:
        end: the function whose result is read by others.
        nodes: all functions, ``end`` among them.
        within: what only functions of the chain read.
        inputs: what is read, in order and each once.
        text: the expression, with ``{}`` and the index of an input for each.
        source: if a copy that only reshapes is left out, what it copies; all is computed in the shape of that.
    """

    end: fx.Node
    nodes: list[fx.Node]
    within: set[fx.Node]
    inputs: list[fx.Node]
    text: str
    source: fx.Node | None = None


def _leave_out_clamps(graph: fx.Graph) -> None:
    """Read what a clamp without a finite limit returns."""
    for node in list(calls(graph, aten.clamp.default)):
        given = arguments(node)
        if given["min"] in (None, -math.inf) and given["max"] in (None, math.inf):
            replace(node, given["self"])


def _is_function(node: fx.Node) -> bool:
    """Whether a node is a function of single elements of floating-point tensors that a program can write."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor) or not _floats(node):
        return False
    if node.target in CASTS:
        plain = node.target is aten.to.dtype or set(node.kwargs) == {"dtype"}
        return plain and len(node.args) == (2 if node.target is aten.to.dtype else 1) and dtype_of(node) in _NAMES
    form = _form(node)
    return form is not None and not node.kwargs and len(_arguments(node)) == form.count("{}")


def _form(node: fx.Node) -> str | None:
    """How a program writes the function of a node, with ``{}`` for each of :func:`_arguments`; None if it cannot."""
    if node.target is not aten.clamp.default:
        return FORMS.get(node.target)
    _, low, high = (*node.args, None, None)[:3]
    return _CLAMPS.get((low is not None, high is not None))


def _arguments(node: fx.Node) -> list[Any]:
    return [argument for argument in node.args if argument is not None]


def _floats(node: fx.Node) -> bool:
    """Whether a node computes a floating-point tensor from such tensors and from numbers, all on one device."""
    values = [node.meta["val"], *(n.meta.get("val") for n in node.all_input_nodes)]
    if not all(isinstance(v, Tensor) and v.dtype in _NAMES for v in values):
        return False
    numbers = (arg for arg in _arguments(node) if not isinstance(arg, fx.Node | torch.dtype))
    finite = all(isinstance(number, int | float) and math.isfinite(number) for number in numbers)
    return finite and len(values) > 1 and len({v.device for v in values}) == 1


def _chains(graph: fx.Graph) -> Iterator[_Chain]:
    """Every function of the graph in a chain, from the last to the first, and then in the order of the graph."""
    chains, taken = list[_Chain](), set[fx.Node]()
    for node in reversed(graph.nodes):
        if node not in taken and _is_function(node):
            chain = _chain(node)
            taken.update(chain.nodes)
            chains.append(chain)
    yield from reversed(chains)


def _chain(end: fx.Node) -> _Chain:
    chain = _Chain(end, [], _within(end), [], "")
    chain.text = _text(chain, end)
    _leave_out_copies(chain)
    return chain


def _within(end: fx.Node) -> set[fx.Node]:
    """The functions that are computed for ``end`` alone, ``end`` among them."""
    within, waiting = {end}, {*end.all_input_nodes}
    while waiting:
        node = max(waiting)  # the last one, all of whose readers have been looked at
        waiting.remove(node)
        # Nothing is computed twice but a single function of what is computed before.
        once = only_user(node) is not None or not any(map(_is_function, node.all_input_nodes))
        known = once and within.issuperset(node.users) and _is_function(node)
        if known and _broadcasts(node.meta["val"], end.meta["val"]):
            within.add(node)
            waiting.update(node.all_input_nodes)
    return within


def _text(chain: _Chain, node: fx.Node) -> str:
    """The expression of a node, whose functions and inputs are appended to those of the chain."""
    if node not in chain.nodes:
        chain.nodes.append(node)
    if node.target in CASTS:
        return f"{_NAMES[node.meta['val'].dtype]}({_operand(chain, node.args[0])})"
    return str(_form(node)).format(*(_operand(chain, arg) for arg in _arguments(node)))


def _operand(chain: _Chain, value: Any) -> str:
    if not isinstance(value, fx.Node):
        return repr(value)
    room = len(chain.inputs) + len(value.all_input_nodes) <= MAX_INPUTS
    if room and value in chain.within:
        return _text(chain, value)
    if value not in chain.inputs:
        chain.inputs.append(value)
    return f"{{{chain.inputs.index(value)}}}"


def _broadcasts(value: Tensor, whole: Tensor) -> bool:
    """Whether a value can be computed element by element in the shape of the whole."""
    ours, theirs = value.shape, whole.shape
    same = zip(reversed(ours), reversed(theirs), strict=False)
    return len(ours) <= len(theirs) and all(same_sizes((a,), (1,)) or same_sizes((a,), (b,)) for a, b in same)


def _leave_out_copies(chain: _Chain) -> None:
    """Read what a reshape copies, and compute in its shape. Other inputs become views of that shape, or broadcast."""
    shape = chain.end.meta["val"].shape
    sources = [source for value in chain.inputs if (source := _copied(value, shape)) is not None]
    for source in sources:
        inner = source.meta["val"].shape
        small = [v.meta["val"].shape for v in chain.inputs if not same_sizes(v.meta["val"].shape, shape)]
        known = {str(size) for size in inner}
        unknown = [size for size in shape if not isinstance(size, int) and str(size) not in known]
        # Numbers per channel stay where they are if the last dimension does.
        if len(unknown) <= 1 and all(same_sizes(s, inner[-1:]) and same_sizes(s, shape[-1:]) for s in small):
            chain.source = source
            return


def _copied(value: fx.Node, shape: torch.Size) -> fx.Node | None:
    """The source of ``value``, if that only copies it into ``shape`` and nothing else reads the copy."""
    reshape = producer(value, *RESHAPES)
    if reshape is None or only_user(reshape) is None or not same_sizes(value.meta["val"].shape, shape):
        return None
    source = reshape.args[0]
    clone = source if isinstance(source, fx.Node) and source.target is aten.clone.default else None
    if clone is not None and only_user(clone) is not None:
        source = clone.args[0]
    elif reshape.target is not aten.reshape.default:
        return None  # a view, which copies nothing
    copied = value_of(source)
    return source if copied is not None and copied.dim() > 0 else None  # type: ignore[return-value]


@dataclass(frozen=True)
class _Halves:
    """The outputs of a product of experts that a chain combines.

    Attributes:
        product: the node.
        pairs: whether those that are combined are neighbours.
        halves: the node that reads the first of each two, and the one that reads the second.
    """

    product: fx.Node
    pairs: bool
    halves: list[fx.Node]


def _halves(chain: _Chain) -> _Halves | None:
    """What a chain combines, if it can be the gate of a product of experts; else None."""
    parts = {found: value for value in chain.inputs if (found := _half(value)) is not None}
    if len(chain.inputs) != 2 or {place for _, _, place in parts} != {0, 1} or len({part[:2] for part in parts}) != 1:
        return None
    product, pairs, _ = next(iter(parts))
    linear, end, half = describe(product), chain.end.meta["val"], chain.inputs[0].meta["val"]
    readers = {user for value in chain.inputs for user in value.users}
    between = {value for user in product.users for value in ([user] if user in chain.inputs else user.users)}
    alone = readers <= {*chain.nodes} and between <= {*chain.inputs}
    if linear is None or linear.epilogue.get("gate") != "" or not alone:
        return None
    if end.dtype != half.dtype or not same_sizes(end.shape, half.shape):
        return None
    return _Halves(product, pairs, [parts[product, pairs, place] for place in (0, 1)])


def _half(value: fx.Node) -> tuple[fx.Node, bool, int] | None:
    """What ``value`` is half of the columns of, whether it has every second one, and which half it is."""
    strided, half = producer(value, aten.slice.Tensor), half_of(value)
    if strided is not None:
        source, given = strided.args[0], arguments(strided)
        start, pairs, cut = given["start"] or 0, True, (given["dim"], given["step"], given["end"])
        if start not in (0, 1) or cut not in ((1, 2, sys.maxsize), (-1, 2, sys.maxsize)):
            return None
    else:
        if half is None:
            return None
        (source, start), pairs = half, False
    whole = value_of(source)
    even = whole is not None and whole.dim() == 2 and same_sizes(whole.shape[1:], (2 * value.meta["val"].shape[-1],))
    return (source, pairs, start) if even else None  # type: ignore[return-value]


def _give_gate(chain: _Chain, found: _Halves) -> None:
    """Let the product of experts compute a chain."""
    product, options = found.product, {"gate": _numbered(chain, found.halves), "pairs": found.pairs}
    replace_by(chain.end, product.target, product.args, {**product.kwargs, **options}, "gated_experts")


def _fits(group: list[_Chain]) -> bool:
    """Whether one op can compute these chains: they have one shape, and none is read before the last is known."""
    first, last = group[0], group[-1]
    readers = (user for chain in group[:-1] for user in chain.end.users)
    late = last.source is first.source is None and all(last.end < reader for reader in readers)
    alike = late and same_sizes(first.end.meta["val"].shape, last.end.meta["val"].shape)
    return alike and len({value for chain in group for value in chain.inputs}) <= MAX_INPUTS


def _insert(group: list[_Chain]) -> None:
    """Put one op in place of the functions of a group."""
    last = group[-1].end
    inputs = list(dict.fromkeys(value for chain in group for value in chain.inputs))
    texts = [_numbered(chain, inputs) for chain in group]
    source, shape = group[0].source, last.meta["val"].shape
    given = inputs if source is None else _reshaped(last, inputs, source, shape)
    results = items(last, insert(last, POINTWISE, (given, ", ".join(texts)), name="pointwise"), len(group))
    if source is not None:
        sizes = _sizes(last, shape, source)
        results = [insert(last, aten.view.default, (result, sizes)) for result in results]
    for chain, result in zip(group, results, strict=True):
        chain.end.replace_all_uses_with(keep_meta(result, chain.end))
    for chain in group:
        erase_unused(chain.end)


def _numbered(chain: _Chain, inputs: list[fx.Node]) -> str:
    """The expression of a chain, with the op's inputs and with no more brackets than it needs."""
    text = chain.text.format(*(f"x{inputs.index(value)}" for value in chain.inputs))
    return ast.unparse(ast.parse(text, mode="eval"))


def _reshaped(before: fx.Node, inputs: list[fx.Node], source: fx.Node, shape: torch.Size) -> list[fx.Node]:
    """Inputs as an op reads them that computes in the shape of ``source``: what they copy, or views of that shape."""
    inner = source.meta["val"].shape
    sizes, given = _sizes(before, inner, source), list[fx.Node]()
    for value in inputs:
        copied = _copied(value, shape)
        if copied is not None and same_sizes(copied.meta["val"].shape, inner):
            given.append(copied)
        elif same_sizes(value.meta["val"].shape, shape):
            given.append(insert(before, aten.reshape.default, (value, sizes)))
        else:
            given.append(value)
    return given


def _sizes(before: fx.Node, shape: Any, source: fx.Node) -> list[Any]:
    """``shape`` as arguments of a view: numbers, sizes of ``source``, and -1 for a size that is neither."""
    known = [str(size) for size in source.meta["val"].shape]
    return [size if isinstance(size, int) else
            insert(before, aten.sym_size.int, (source, known.index(str(size)))) if str(size) in known else -1
            for size in shape]  # fmt: skip
