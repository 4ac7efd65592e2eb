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
from typing import Any

import torch
import triton
from torch import Tensor, fx, nn

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
    PARTS,
    RMS_NORM,
    aten,
    dispatched,
    dtype_of,
    half_of,
    insert,
    insert_weight,
    is_float,
    items,
    keep_meta,
    only_user,
    producer,
    replace,
    replace_by,
    value_of,
    weight_name,
)
from specgraph.passes.common.reductions import ONE_LAUNCH, ORDERED, lower_reductions

ALL_REDUCE_RANK = torch.ops.specgraph.all_reduce_rank.default
ALL_REDUCE_RANK_NORM = torch.ops.specgraph.all_reduce_rank_norm.default
CONCAT = torch.ops.specgraph.concat.default
EMBEDDING = torch.ops.specgraph.embedding.default
NORM_PARTS = torch.ops.specgraph.norm_parts.default
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
class LowerKernels(LoweringPass, requires={"kv_cache", "traced"}, invalidates={"traced", "own_weights"}):
    """Options: ``enabled``; ``numerics``, ``bitwise`` or ``fast``.

    Both values rewrite the same nodes into the same ops, except that only ``bitwise`` writes sums out as additions, and
    ``fast`` refuses no node.
    """

    numerics: str = "bitwise"

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
            misses += _lower_linears(name, module.graph, chosen)
            for lower in (_lower_sums, _pair_norms, _join_norms, gate_norms, group_norms, _lower_copies):
                lower(module.graph, chosen)
            lower_reductions(module.graph, ORDERED if bitwise else ONE_LAUNCH, chosen)
            for node in _row_dependent(module.graph):
                if bitwise:
                    raise PassError(
                        f"lower_kernels: {name}.{node.name} ({node.target}) may give a row other bits when the number "
                        "of rows changes, which numerics=bitwise rules out; compile with numerics=fast, which leaves "
                        "it to PyTorch."
                    )
                left[str(node.target)] += 1
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
        given = arguments(node)
        name = weight_name(given["mat2"])
        if name is None or given["alpha"] != 1 or given["beta"] != 1:
            continue
        parameter = get_attribute(module, name)
        turned = parameter.t().contiguous()
        parameter.data = turned.t()
        set_attribute(module, f"{name}_turned", nn.Parameter(turned, requires_grad=False))
        with graph.inserting_before(node):
            attribute = graph.get_attr(f"{name}_turned")
        attribute.meta["val"] = turned
        replace_by(node, DENSE.traced, (given["mat1"], attribute, given["self"]))


def _turn_products(graph: fx.Graph) -> None:
    """``matmul(weight, x.transpose(1, 2))`` becomes a linear of ``x`` ``[B, T, I]``, whose result is transposed."""
    for node in list(calls(graph, aten.matmul.default)):
        weight, columns = arguments(node).values()
        turned = producer(columns, aten.transpose.int)
        if weight_name(weight) is None or turned is None or tuple(turned.args[1:]) not in ((1, 2), (2, 1)):
            continue
        rows = insert(node, DENSE.traced, (turned.args[0], weight, None))
        rows.meta["val"] = node.meta["val"].transpose(1, 2)
        replace_by(node, aten.transpose.int, (rows, 1, 2))


def _lower_linears(name: str, graph: fx.Graph, chosen: Counter[str]) -> list[NearMiss]:
    """Lower every linear layer of the module ``name``; returns those that stay as they are."""
    stay = []
    norms: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
    for linear in linears(graph):
        if not linear.is_traced:
            continue
        if linear.scheme.lowered is None:
            reason = f"no op of {linear.scheme.name} weights takes in the nodes around it"
            stay.append(NearMiss(f"{name}.{linear.node.name}", reason))
            continue
        joined = _Joined(linear.node, linear.x)
        taken = _take_norm(joined, norms), _take_activation(joined), _take_residual(joined)
        parts = [part for part in taken if part]
        if any(weight_name(tensor) is None for tensor in linear.weight):  # computed in the step, such as a cast one
            joined.options["constant_weight"] = False
        weight = linear.scheme.operands(linear.weight)
        given = (joined.x, *weight, linear.bias, joined.residual, joined.sum_sq)
        replace_by(joined.end, linear.scheme.lowered, given, {**linear.scheme.options, **joined.options}, "linear")
        chosen[" + ".join(["linear", *parts])] += 1
    return stay


def _take_norm(linear: _Joined, parts: dict[fx.Node, tuple[fx.Node, fx.Node]]) -> str | None:
    """Join the norm before the linear, if only linears read it. ``parts`` collects the parts of norms found so far."""
    norm = producer(linear.x, RMS_NORM)
    # In float16 the product of weight and input could overflow, because the scale comes only afterwards.
    if norm is None or arguments(norm)["weight"] is None or dtype_of(norm) == torch.float16:
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
    if linear is None or linear.expert_ids is not None:
        return False
    if linear.scheme.lowered is None or linear.scheme.quantises_rows:
        return False
    return linear.x is norm and norm not in linear.constants


def _norm_parts(norm: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Insert the two parts of ``norm`` before it: its input times its weight, and the sums of squares of its input."""
    parts = insert(norm, NORM_PARTS, norm.args, {"norm_offset": norm.kwargs["offset"]}, "norm_parts")
    weighted, sum_sq = items(norm, parts, 2)
    return keep_meta(weighted, norm), sum_sq


def _join_norms(graph: fx.Graph, chosen: Counter[str]) -> None:
    """Let a linear, or a sum over devices, compute the parts of the norm that reads its output."""
    for parts in list(calls(graph, NORM_PARTS)):
        x, weight = (arguments(parts)[name] for name in ("x", "norm_weight"))
        linear = describe(x)
        if producer(x, ALL_REDUCE_RANK) is not None:
            part, *residual = x.args
            with_norm, given = ALL_REDUCE_RANK_NORM, (part, insert_weight(x, weight), *residual)
        elif linear is not None and linear.node.target is linear.scheme.lowered and linear.scheme.with_norm is not None:
            behind = (linear.bias, linear.epilogue["residual"], linear.epilogue["sum_sq"])
            given = (linear.x, *linear.scheme.operands(linear.weight), insert_weight(x, weight), *behind)
            with_norm = linear.scheme.with_norm
        else:
            chosen["norm apart"] += 1
            continue
        joined = insert(x, with_norm, given, {**x.kwargs, **parts.kwargs}, f"{x.name}_norm")
        out, weighted, sum_sq = items(x, joined, 3)
        replace(x, out)
        for user in list(parts.users):
            replace(user, sum_sq if user.args[1] else weighted)
        chosen[f"norm joined to the {'linear' if linear else 'sum'} before"] += 1


def _lower_sums(graph: fx.Graph, chosen: Counter[str]) -> None:
    """Let a sum over devices take in the residual that is added to it."""
    for node in list(calls(graph, ALL_REDUCE_RANK)):
        joined = _Joined(node, node.args[0])
        if _take_residual(joined) is not None:
            replace_by(joined.end, ALL_REDUCE_RANK, (joined.x, joined.residual), node.kwargs, "all_reduce")
            chosen["all_reduce + residual"] += 1


def _take_activation(linear: _Joined) -> str | None:
    """Join ``act(linear)``, or ``act(gate) * up`` of a merged linear; returns its name."""
    user = only_user(linear.end)
    if user is None:
        return None
    if user.target in PARTS:
        return _take_gate(linear, user)
    name = _activation(user)
    if name is not None:
        linear.end = user
        linear.options["activation"] = name
    return name


def _take_gate(linear: _Joined, split: fx.Node) -> str | None:
    parts = {user.args[1]: user for user in split.users if user.target is operator.getitem}
    if set(parts) != {0, 1} or None in map(half_of, parts.values()):
        return None
    act = only_user(parts[0])
    name = None if act is None else _activation(act)
    product = None if act is None else producer(only_user(act), aten.mul.Tensor)
    if product is None or product is not only_user(parts[1]) or f"{name}_mul" not in ACTIVATIONS:
        return None
    linear.end = product
    linear.options["activation"] = f"{name}_mul"
    return f"{name}_mul"


def _activation(node: fx.Node) -> str | None:
    if node.target is aten.gelu.default:
        return "gelu_tanh" if node.kwargs.get("approximate") == "tanh" else "gelu"
    return {aten.silu.default: "silu", aten.relu.default: "relu"}.get(node.target)  # type: ignore[call-overload]


def _take_residual(linear: _Joined) -> str | None:
    """Join the addition that follows, if it adds a tensor of the same shape and dtype."""
    add = producer(only_user(linear.end), aten.add.Tensor)
    if add is None:
        return None
    other: Any = add.args[1] if add.args[0] is linear.end else add.args[0]
    if other is linear.end or not _alike(value_of(linear.end), value_of(other)):
        return None
    linear.end, linear.residual = add, other
    return "residual"


def _alike(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two values are known, and of one shape and dtype."""
    return a is not None and b is not None and a.shape == b.shape and a.dtype == b.dtype


def _pair_norms(graph: fx.Graph, chosen: Counter[str]) -> None:
    """Make one op of ``cat([rms_norm(x), rms_norm(y)], -1)``, and of the embedding ``x`` if only the norm reads it."""
    for node in list(calls(graph, aten.cat.default)):
        parts: Any = node.args[0]
        norms = [part for part in parts if producer(part, RMS_NORM) and only_user(part) is node]
        if len(parts) != 2 or len(norms) != 2:
            continue
        (x, x_weight), (y, y_weight) = (norm.args for norm in norms)
        value, *values = map(value_of, (node, *norms))
        if value is None or node.args[1:] not in ((-1,), (value.dim() - 1,)) or not _alike(*values):
            continue
        options = {f"{name}_{option}": norm.kwargs[option] for name, norm in zip("xy", norms, strict=True)
                   for option in ("eps", "offset")}  # fmt: skip
        given, embedding = [x, y, x_weight, y_weight], producer(x, aten.embedding.default)
        if embedding is not None and only_user(embedding) is norms[0]:
            given = [embedding.args[0], y, x_weight, y_weight, embedding.args[1]]
        replace_by(node, PAIR, given, options, "norms")
        chosen["rms_norm_pair"] += 1


def _lower_copies(graph: fx.Graph, chosen: Counter[str]) -> None:
    """Look tokens up, and put rows side by side, by kernels whose end the layer behind need not await."""
    for node in list(calls(graph, aten.embedding.default)):
        replace_by(node, EMBEDDING, node.args[:2], name="embedding")
        chosen["embedding"] += 1
    for node in list(calls(graph, aten.cat.default)):
        if _side_by_side(node):
            replace_by(node, CONCAT, node.args[:1], name="concat")
            chosen["concat"] += 1


def _side_by_side(cat: fx.Node) -> bool:
    """Whether rows ``[B, T, W]`` of one floating-point dtype are joined along the last dimension.

    Halves of heads, which lie apart in memory, are left to PyTorch.
    """
    value, parts = value_of(cat), cat.args[0]
    if value is None or value.dim() != 3 or not is_float(cat) or cat.args[1:] not in ((-1,), (2,)):
        return False
    return len({dtype_of(part) for part in parts}) == 1  # type: ignore[union-attr]


def _row_dependent(graph: fx.Graph) -> Iterator[fx.Node]:
    """The floating-point nodes whose rows may depend on the number of rows."""
    for node in graph.nodes:
        if node.op != "call_function" or not is_float(node) or _row_wise(node.target):
            continue
        if not all(map(_row_wise, dispatched(node))):
            yield node


def _row_wise(target: Any) -> bool:
    if not isinstance(target, OpOverload):
        return target is operator.getitem
    own = ops.find(target)
    if own is not None:
        return own.batch_invariant(PROMISED)
    pointwise = torch.Tag.pointwise in target.tags or target.is_view
    return pointwise or target._schema.name.split("::")[1] in ROW_WISE
