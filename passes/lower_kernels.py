"""ATen nodes of the traced modules become ``specgraph::*`` ops.

This pass decides how fast a step is, and whether its bits depend on the batch. A linear layer is joined with the nodes
around it, so that one launch computes all of them: the scale of a norm before it, the activation, gated or not, the
residual, and the parts of a norm after it.

The pass then looks at every remaining floating-point node. Under ``numerics: bitwise``, a node whose rows may depend on
the number of rows is an error. Under ``numerics: fast``, such a node stays as it is.

A linear layer whose scheme (:mod:`specgraph.ir.linear`) has no op that takes in its neighbours stays as it was traced.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import triton
from torch import Tensor, fx, nn

import specgraph.kernels.linear.concat
import specgraph.kernels.linear.embedding
import specgraph.kernels.linear.norm  # noqa: F401  (all register ops)
from specgraph.compat import OpOverload
from specgraph.errors import ConfigError, PassError
from specgraph.ir.graphs import arguments, calls, get_attribute, set_attribute
from specgraph.ir.linear import DENSE, Linear, describe, linears
from specgraph.ir.program import Program
from specgraph.kernels import ops
from specgraph.kernels.launch import GLUON_RELEASE, is_hopper, runs_gluon
from specgraph.kernels.linear.linear import ACTIVATIONS
from specgraph.passes.base import LoweringPass, NearMiss, PassResult
from specgraph.passes.common.gate_norms import gate_norms
from specgraph.passes.common.group_norms import group_norms
from specgraph.passes.common.patterns import (
    aten,
    dispatched,
    dtype_of,
    is_float,
    keep_meta,
    only_user,
    producer,
    replace,
    weight_name,
)
from specgraph.passes.common.reductions import ONE_LAUNCH, ORDERED, lower_reductions

CONCAT = torch.ops.specgraph.concat.default
EMBEDDING = torch.ops.specgraph.embedding.default
NORM_PARTS = torch.ops.specgraph.norm_parts.default
RMS_NORM = torch.ops.specgraph.rms_norm.default
PAIR = torch.ops.specgraph.rms_norm_pair.default
NUMERICS = ("bitwise", "fast")
PROMISED = "cuda"
"""The device type for which ``bitwise`` is promised. On a CPU, as in tests, lowered programs run the reference."""

ROW_WISE = frozenset({
    # They move elements and compute none.
    "cat", "clone", "constant_pad_nd", "copy", "embedding", "flip", "gather", "index", "index_select", "pad", "repeat",
    "repeat_interleave", "roll", "scatter", "select_scatter", "slice_scatter", "stack", "to", "_to_copy", "type_as",
    "_unsafe_view",
    # They make tensors of constants.
    "arange", "empty", "empty_like", "full", "full_like", "new_empty", "new_full", "new_ones", "new_zeros", "one_hot",
    "ones", "ones_like", "scalar_tensor", "zeros", "zeros_like",
    # PyTorch computes each row in one block of threads, whose shape is a function of the row's length.
    "amax", "amin", "argmax", "argsort", "log_softmax", "_log_softmax", "max", "softmax", "_softmax", "sort", "topk",
})  # fmt: skip
"""ATen ops that are neither views nor pointwise, and whose result in one row does not depend on the number of rows."""


@dataclass
class _Joined:
    """A linear layer and the neighbours that are joined to it. The joined op replaces ``end``, the last of them."""

    end: fx.Node
    x: Any
    residual: Any = None
    sum_sq: Any = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LowerKernels(LoweringPass):
    """Options: ``enabled``; ``numerics``, ``bitwise`` or ``fast``.

    Both values rewrite the same nodes into the same ops, except that only ``bitwise`` writes sums out as additions, and
    ``fast`` refuses no node.
    """

    numerics: str = "bitwise"

    name: ClassVar[str] = "lower_kernels"
    requires: ClassVar[frozenset[str]] = frozenset({"kv_cache", "traced"})
    invalidates: ClassVar[frozenset[str]] = frozenset({"traced", "own_weights"})

    def __post_init__(self) -> None:
        if self.numerics not in NUMERICS:
            raise ConfigError(f"lower_kernels: numerics is one of {', '.join(NUMERICS)}, not {self.numerics!r}.")

    def apply(self, program: Program) -> PassResult:
        """Rewrite every module. Under ``bitwise``, refuse a node whose rows may depend on the number of rows."""
        chosen, left, misses = Counter[str](), Counter[str](), list[NearMiss]()
        bitwise = self.numerics == "bitwise"
        for name, module in program.modules.items():
            _turn_weights(module)
            _turn_products(module.graph)
            misses += [NearMiss(f"{name}.{node}", reason) for node, reason in _lower_linears(module, chosen)]
            _pair_norms(module, chosen)
            _join_norms(module, chosen)
            gate_norms(module, chosen)
            group_norms(module, chosen)
            _lower_copies(module, chosen)
            lower_reductions(module, ORDERED if bitwise else ONE_LAUNCH, chosen)
            if bitwise:
                _check_rows(name, module)
            else:
                left.update(str(node.target) for node in _row_dependent(module))
            module.recompile()
        why = f"left as they are, though a row's bits may depend on the other rows: {', '.join(_counted(left))}"
        notes = (*_counted(chosen), *([why] if left else []), *_slower(program.target.device))
        return PassResult(chosen.total(), near_misses=tuple(misses), notes=notes)


def _counted(counts: Counter[str]) -> tuple[str, ...]:
    return tuple(f"{count} x {what}" for what, count in sorted(counts.items()))


def _slower(device: torch.device) -> tuple[str, ...]:
    """A note if this release of Triton cannot run the Gluon kernels that this GPU could run."""
    if not is_hopper(device) or runs_gluon(device):
        return ()
    return (
        f"linears with few rows run a Triton kernel, some percent slower than the Gluon kernel, which needs Triton "
        f"{GLUON_RELEASE}; this is {triton.__version__}",
    )


@torch.no_grad()
def _turn_weights(module: fx.GraphModule) -> None:
    """``addmm(bias, x, weight)`` with ``weight [I, O]`` becomes a linear of ``[O, I]``.

    The weight is stored transposed, and the model's own parameter becomes a view of the stored tensor.
    """
    graph = module.graph
    for node in list(calls(graph, aten.addmm.default)):
        bias, x, weight = node.args
        name = weight_name(weight)
        if name is None or node.kwargs:
            continue
        parameter = get_attribute(module, name)
        turned = parameter.t().contiguous()
        parameter.data = turned.t()
        set_attribute(module, f"{name}_turned", nn.Parameter(turned, requires_grad=False))
        with graph.inserting_before(node):
            attribute = graph.get_attr(f"{name}_turned")
            attribute.meta["val"] = turned
            replace(graph, node, graph.call_function(DENSE.traced, (x, attribute, bias)))


def _turn_products(graph: fx.Graph) -> None:
    """``matmul(weight, x.transpose(1, 2))`` becomes a linear of ``x`` ``[B, T, I]``, whose result is transposed."""
    for node in list(calls(graph, aten.matmul.default)):
        weight, columns = node.args
        turned = producer(columns, aten.transpose.int)
        if weight_name(weight) is None or turned is None or tuple(turned.args[1:]) not in ((1, 2), (2, 1)):
            continue
        with graph.inserting_before(node):
            rows = graph.call_function(DENSE.traced, (turned.args[0], weight, None))
            rows.meta["val"] = node.meta["val"].transpose(1, 2)
            replace(graph, node, graph.call_function(aten.transpose.int, (rows, 1, 2)))


def _lower_linears(module: fx.GraphModule, chosen: Counter[str]) -> list[tuple[str, str]]:
    """Lower every linear layer; returns those that stay as they are, by name, with the reason."""
    graph, stay = module.graph, []
    norms: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
    for linear in linears(graph):
        if not linear.is_traced:
            continue
        if linear.scheme.lowered is None:
            stay.append((linear.node.name, f"no op of {linear.scheme.name} weights takes in the nodes around it"))
            continue
        joined = _Joined(linear.node, linear.x)
        taken = _take_norm(joined, norms), _take_activation(joined), _take_residual(joined)
        parts = [part for part in taken if part]
        if any(weight_name(tensor) is None for tensor in linear.weight):  # computed in the step, such as a cast one
            joined.options["constant_weight"] = False
        with graph.inserting_before(joined.end):
            given = (joined.x, *linear.weight, linear.bias, joined.residual, joined.sum_sq)
            new = graph.create_node("call_function", linear.scheme.lowered, given, joined.options, name="linear")
        replace(graph, joined.end, new)
        chosen[" + ".join(["linear", *parts])] += 1
    return stay


def _take_norm(linear: _Joined, parts: dict[fx.Node, tuple[fx.Node, fx.Node]]) -> str | None:
    """Join the norm before the linear, if only linears read it. ``parts`` collects the parts of norms found so far."""
    norm = producer(linear.x, RMS_NORM)
    # In float16 the product of weight and input could overflow, because the scale comes only afterwards.
    if norm is None or norm.args[1] is None or dtype_of(norm) == torch.float16:
        return None
    if not all(_scales(describe(user), norm) for user in norm.users):
        return None
    if norm not in parts:
        parts[norm] = _norm_parts(norm)
    linear.x, linear.sum_sq = parts[norm]
    linear.options["norm_eps"] = norm.kwargs["eps"]
    return "norm"


def _scales(linear: Linear | None, norm: fx.Node) -> bool:
    """Whether a reader of a norm is a linear layer of its result, whose op can take the scale in."""
    if linear is None or linear.expert_ids is not None or linear.scheme.lowered is None:
        return False
    return linear.x is norm and norm not in linear.constants


def _norm_parts(norm: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Insert the two parts of ``norm`` before it: its input times its weight, and the sums of squares of its input."""
    graph = norm.graph
    with graph.inserting_before(norm):
        options = {"norm_offset": norm.kwargs["offset"]}
        parts = graph.create_node("call_function", NORM_PARTS, norm.args, options, name="norm_parts")
        weighted, sum_sq = (graph.call_function(operator.getitem, (parts, i)) for i in range(2))
    return keep_meta(weighted, norm), sum_sq


def _join_norms(module: fx.GraphModule, chosen: Counter[str]) -> None:
    """Let a linear compute the parts of the norm that reads its output, wherever a linear produces that input."""
    graph = module.graph
    for parts in list(calls(graph, NORM_PARTS)):
        x: Any = parts.args[0]
        linear = describe(x)
        if linear is None or linear.node.target is not linear.scheme.lowered or linear.scheme.with_norm is None:
            chosen["norm apart"] += 1
            continue
        with graph.inserting_before(x):
            read: Any = parts.args[1]
            weight = keep_meta(graph.get_attr(str(read.target)), read)  # the norm's own node may come later
            behind = (linear.bias, linear.epilogue["residual"], linear.epilogue["sum_sq"])
            given = (linear.x, *linear.weight, weight, *behind)
            options = {**x.kwargs, **parts.kwargs}
            joined = graph.create_node("call_function", linear.scheme.with_norm, given, options, name="linear_norm")
            out, weighted, sum_sq = (graph.call_function(operator.getitem, (joined, i)) for i in range(3))
        replace(graph, x, out)
        for user in list(parts.users):
            replace(graph, user, sum_sq if user.args[1] else weighted)
        chosen["norm joined to the linear before"] += 1


def _take_activation(linear: _Joined) -> str | None:
    """Join ``act(linear)``, or ``act(gate) * up`` of a merged linear; returns its name."""
    user = only_user(linear.end)
    if user is None:
        return None
    if user.target in (aten.split_with_sizes.default, aten.chunk.default):
        return _take_gate(linear, user)
    name = _activation(user)
    if name is not None:
        linear.end = user
        linear.options["activation"] = name
    return name


def _take_gate(linear: _Joined, split: fx.Node) -> str | None:
    parts = {user.args[1]: user for user in split.users if user.target is operator.getitem}
    sizes, dim = split.args[1], arguments(split)["dim"]
    if split.target is aten.chunk.default:
        width = linear.end.meta["val"].shape[-1]
        sizes = [width // 2] * 2 if sizes == 2 and width % 2 == 0 else None
    if dim not in (-1, linear.end.meta["val"].dim() - 1):
        return None
    if set(parts) != {0, 1} or not isinstance(sizes, list | tuple) or len(sizes) != 2 or sizes[0] != sizes[1]:
        return None
    act = only_user(parts[0])
    name = None if act is None else _activation(act)
    product = None if act is None else only_user(act)
    if name is None or product is None or product is not only_user(parts[1]) or product.target is not aten.mul.Tensor:
        return None
    if f"{name}_mul" not in ACTIVATIONS:
        return None
    linear.end = product
    linear.options["activation"] = f"{name}_mul"
    return f"{name}_mul"


def _activation(node: fx.Node) -> str | None:
    if node.target is aten.gelu.default:
        return "gelu_tanh" if node.kwargs.get("approximate") == "tanh" else "gelu"
    return {aten.silu.default: "silu", aten.relu.default: "relu"}.get(node.target)  # type: ignore[call-overload, no-any-return]


def _take_residual(linear: _Joined) -> str | None:
    """Join the addition that follows, if it adds a tensor of the same shape and dtype."""
    add = only_user(linear.end)
    if add is None or add.target is not aten.add.Tensor or add.kwargs or len(add.args) != 2:
        return None
    other = add.args[1] if add.args[0] is linear.end else add.args[0]
    mine = linear.end.meta.get("val")
    theirs = other.meta.get("val") if isinstance(other, fx.Node) else None
    if not isinstance(mine, Tensor) or not isinstance(theirs, Tensor) or other is linear.end:
        return None
    if theirs.shape != mine.shape or theirs.dtype != mine.dtype:
        return None
    linear.end, linear.residual = add, other
    return "residual"


def _pair_norms(module: fx.GraphModule, chosen: Counter[str]) -> None:
    """Make one op of ``cat([rms_norm(x), rms_norm(y)], -1)``, and of the embedding ``x`` if only the norm reads it."""
    graph = module.graph
    for node in list(calls(graph, aten.cat.default)):
        parts: Any = node.args[0]
        norms = [part for part in parts if producer(part, RMS_NORM) and only_user(part) is node]
        value = node.meta.get("val")
        if len(parts) != 2 or len(norms) != 2:
            continue
        (x, x_weight), (y, y_weight) = (norm.args for norm in norms)
        shapes = [norm.meta["val"].shape if "val" in norm.meta else None for norm in norms]
        last = isinstance(value, Tensor) and node.args[1:] in ((-1,), (value.dim() - 1,))
        if not last or shapes[0] is None or shapes[0] != shapes[1] or dtype_of(norms[0]) != dtype_of(norms[1]):
            continue
        options = {f"{name}_{option}": norm.kwargs[option] for name, norm in zip("xy", norms, strict=True)
                   for option in ("eps", "offset")}  # fmt: skip
        given, embedding = [x, y, x_weight, y_weight], producer(x, aten.embedding.default)
        if embedding is not None and only_user(embedding) is norms[0]:
            given = [embedding.args[0], y, x_weight, y_weight, embedding.args[1]]
        with graph.inserting_before(node):
            new = graph.create_node("call_function", PAIR, tuple(given), options, name="norms")
        replace(graph, node, new)
        chosen["rms_norm_pair"] += 1


def _lower_copies(module: fx.GraphModule, chosen: Counter[str]) -> None:
    """Look tokens up, and put rows side by side, by kernels whose end the layer behind need not await."""
    graph = module.graph
    for node in list(calls(graph, aten.embedding.default)):
        with graph.inserting_before(node):
            replace(graph, node, graph.create_node("call_function", EMBEDDING, node.args[:2], name="embedding"))
        chosen["embedding"] += 1
    for node in list(calls(graph, aten.cat.default)):
        if _side_by_side(node):
            with graph.inserting_before(node):
                replace(graph, node, graph.create_node("call_function", CONCAT, node.args[:1], name="concat"))
            chosen["concat"] += 1


def _side_by_side(cat: fx.Node) -> bool:
    """Whether rows ``[B, T, W]`` of one floating-point dtype are joined along the last dimension.

    Halves of heads, which lie apart in memory, are left to PyTorch.
    """
    value, parts = cat.meta.get("val"), cat.args[0]
    if not isinstance(value, Tensor) or value.dim() != 3 or not is_float(cat) or cat.args[1:] not in ((-1,), (2,)):
        return False
    return len({dtype_of(part) for part in parts}) == 1  # type: ignore[union-attr]


def _check_rows(name: str, module: fx.GraphModule) -> None:
    """Refuse a module with a floating-point node whose rows may depend on the number of rows."""
    for node in _row_dependent(module):
        raise PassError(
            f"lower_kernels: {name}.{node.name} ({node.target}) may give a row other bits when the number of rows "
            "changes, which numerics=bitwise rules out; compile with numerics=fast, which leaves it to PyTorch."
        )


def _row_dependent(module: fx.GraphModule) -> Iterator[fx.Node]:
    """The floating-point nodes whose rows may depend on the number of rows."""
    for node in module.graph.nodes:
        if node.op != "call_function" or not is_float(node) or _row_wise(node.target):
            continue
        if not all(map(_row_wise, dispatched(node))):
            yield node


def _row_wise(target: Any) -> bool:
    if not isinstance(target, OpOverload):
        return target is operator.getitem or str(getattr(target, "__module__", "")).startswith("specgraph.")
    own = ops.find(target)
    if own is not None:
        return own.batch_invariant(PROMISED)
    pointwise = torch.Tag.pointwise in target.tags or target.is_view
    return pointwise or target._schema.name.split("::")[1] in ROW_WISE
