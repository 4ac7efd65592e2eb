"""Renders a graph as Python source."""

from __future__ import annotations

import keyword
import math
import operator
import re
import sys
import textwrap
from typing import Any

import torch
from torch import fx

from specgraph.compat import HigherOrderOperator, OpOverload, OpOverloadPacket, qualified_name
from specgraph.errors import ConfigError, VerificationError
from specgraph.ir.graphs import DEVICE
from specgraph.ir.origins import model_line
from specgraph.ir.shapes import LAYOUT, called, describe_bytes, items_of, propagate, shape_of
from specgraph.ir.views import ProgramView

WIDTH = 120

_OPERATORS: dict[object, str] = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/", operator.floordiv: "//",
    operator.mod: "%", operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=", operator.eq: "==",
    operator.ne: "!=", operator.and_: "&", operator.or_: "|",
}  # fmt: skip


def render(program: ProgramView, module: str = "step") -> str:
    """The Python source of the step graph, or of one module: a class with a ``forward``, and one line for each node.

    A comment at the end of each line gives the shape of the value, the pass that made the node, and the device that it
    runs on if it does not run on every one of several. Weights are written
    as attributes (``self.model.layers[0].mlp.up_proj.weight``), functions by their imported names, and modules as
    ``self.target(...)``.

    Raises:
        ConfigError: the program has no such module.
    """
    return _Source(_graph(program, module)).text(module)


def listing(program: ProgramView, module: str = "step") -> list[dict[str, Any]]:
    """The nodes of the step graph, or of one module, as plain values that JSON can hold.

    Each has its ``name``, its kind (``op``), what it ``calls``, the names of its ``inputs``, its ``code`` in the file
    that :func:`render` writes, the ``shape`` and the ``bytes`` of its value, the shapes of its ``items`` if that is a
    tuple, the ``pass`` that made it, the ``line`` of the model's source that it comes from, and the ``device`` that it
    runs on if it does not run on every one of several.

    Raises:
        ConfigError: the program has no such module.
    """
    graph = _graph(program, module)
    source = _Source(graph)
    return [
        {
            "name": node.name,
            "op": node.op,
            "calls": called(node),
            "inputs": [read.name for read in node.all_input_nodes],
            "code": source.expression(node),
            "shape": shape_of(node),
            "items": items_of(node),
            "bytes": describe_bytes(node.meta[LAYOUT]) if LAYOUT in node.meta else None,
            "pass": node.meta.get("pass_name"),
            "line": model_line(node.meta),
            **({DEVICE: node.meta[DEVICE]} if DEVICE in node.meta else {}),
        }
        for node in graph.nodes
    ]


def _graph(program: ProgramView, module: str) -> fx.Graph:
    """The step graph, or that of one module, in which shapes are known."""
    if module != "step" and module not in program.modules:
        names = ", ".join(["step", *program.modules])
        raise ConfigError(f"The program has no module {module!r}; it has {names}.")
    _ensure_shapes(program)
    return program.graph if module == "step" else program.modules.unchanged[module].graph


def _ensure_shapes(program: ProgramView) -> None:
    """Propagate shapes, unless every node of the step and of the modules that it calls has one already."""
    called = [program.modules.unchanged[str(n.target)] for n in program.graph.nodes if n.op == "call_module"]
    nodes = [n for graph in (program.graph, *(m.graph for m in called)) for n in graph.nodes]
    if any(LAYOUT not in node.meta for node in nodes):
        try:
            propagate(program)
        except VerificationError:
            return  # One may want to read a wrong graph, too. The shapes that are known are shown.


class _Source:
    """Writes the source of one graph. It names variables before imports, so that neither hides the other."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        spelled = {operator.getitem, *_OPERATORS}
        functions = [n.target for n in graph.nodes if n.op == "call_function" and (n.target not in spelled or n.kwargs)]
        self._roots = {"torch"} | {r for r in map(_root, functions) if r}
        self._taken = {"self", "slice", *self._roots}
        self._variables: dict[fx.Node, str] = {}
        for node in sorted(graph.nodes, key=lambda n: n.op != "placeholder"):
            if node.op not in ("get_attr", "output"):
                self._variables[node] = self._unique(str(node.target) if node.op == "placeholder" else node.name)
        self._functions: dict[object, str] = {}
        self._imports: dict[str, list[str]] = {"specgraph.dump": ["Module"]}
        self._missing: list[str] = []
        for function in dict.fromkeys(functions):
            self._functions[function] = self._import(function)

    def text(self, name: str) -> str:
        """The text of the whole file."""
        lines = [f"import {root}" for root in sorted(self._roots)] + [""]
        lines += [_import_line(module, sorted(names)) for module, names in sorted(self._imports.items())]
        undefined = "was defined inside a function and cannot be imported: define it here."
        lines += [f"# {missing} {undefined}" for missing in self._missing]
        unpacked = {item for node in self.graph.nodes for item in self._items(node)}
        shown = [n for n in self.graph.nodes if n.op not in ("placeholder", "get_attr") and n not in unpacked]
        body = [self._line(n) for n in shown]
        inputs = [self._input(n) for n in self.graph.nodes if n.op == "placeholder"]
        subject = "The step graph" if name == "step" else f"The module ``{name}``"
        lines = [f'"""{subject}, {len(body)} lines beside its inputs and weights."""', "", *lines, "", ""]
        lines += [f"class {class_name(name)}(Module):", "    def forward(", "        self,", *inputs, "    ):"]
        return "\n".join([*lines, *(f"        {line}" for line in body)]) + "\n"

    def expression(self, node: fx.Node) -> str:
        """The expression for a node in the file, without the variable that it is assigned to."""
        if node.op == "placeholder":
            return self._variables[node]
        if node.op in ("get_attr", "output"):
            return self._value(node if node.op == "get_attr" else node.args[0])
        return self._call(node)

    def _unique(self, name: str) -> str:
        """A variable name that is not in use, as close to ``name`` as possible."""
        name = re.sub(r"\W", "_", name)
        if not name.isidentifier() or keyword.iskeyword(name):
            name = f"{name}_" if keyword.iskeyword(name) else f"_{name}"
        candidate, count = name, 0
        while candidate in self._taken:
            count += 1
            candidate = f"{name}_{count}"
        self._taken.add(candidate)
        return candidate

    def _import(self, function: Any) -> str:
        """The expression that names a function; an import is added if it needs one."""
        if isinstance(function, HigherOrderOperator):
            return f"torch.ops.higher_order.{function}"
        if isinstance(function, OpOverload | OpOverloadPacket):
            return f"torch.ops.{function}"
        if _root(function):
            return qualified_name(function).removeprefix("_")
        module, name = _home(function), function.__qualname__
        if not name.isidentifier():
            self._missing.append(self._unique(function.__name__))
            return self._missing[-1]
        if name not in self._taken:
            self._taken.add(name)
            self._imports.setdefault(module, []).append(name)
            return str(name)
        alias = self._unique(f"{module.rpartition('.')[2]}_{name}")
        self._imports.setdefault(module, []).append(f"{name} as {alias}")
        return alias

    def _input(self, node: fx.Node) -> str:
        default = f"={self._value(node.args[0])}" if node.args else ""
        return f"        {self._variables[node]}{default},{_comment(node)}"

    def _line(self, node: fx.Node) -> str:
        if node.op == "output":
            (value,) = node.args
            several = isinstance(value, tuple) and len(value) > 1
            return f"return {self._value(value)[1:-1] if several else self._value(value)}{_comment(node)}"
        items = self._items(node)
        if items:
            names = {item.args[1]: self._variables[item] for item in items}
            targets = ", ".join(names.get(index, "_") for index in range(len(node.meta[LAYOUT])))
            return f"{targets} = {self._call(node)}{_comment(node)}"
        nothing = not node.users and node.meta.get(LAYOUT) is None
        target = "" if nothing else f"{self._variables[node]} = "
        return f"{target}{self._call(node)}{_comment(node)}"

    def _items(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that unpack a tuple, if nothing else reads it: they can be written in the tuple's own line."""
        items, following = list(node.users), node.next
        # If the tuple is itself an item that another line unpacks, its own items need separate lines.
        if node.op in ("placeholder", "get_attr") or node.target is operator.getitem or items_of(node) is None:
            return []
        for _ in items:
            if following not in items or following.target is not operator.getitem:
                return []
            following = following.next
        indices = [item.args[1] for item in items]
        usual = all(isinstance(i, int) and 0 <= i < len(node.meta[LAYOUT]) for i in indices)
        return items if usual and len(set(indices)) == len(items) else []

    def _call(self, node: fx.Node) -> str:
        args = [self._value(a) for a in node.args]
        if node.target is operator.getitem and not node.kwargs:
            return f"{args[0]}[{self._index(node.args[1])}]"
        if node.target in _OPERATORS and not node.kwargs:
            return f"{args[0]} {_OPERATORS[node.target]} {args[1]}"
        arguments = [*args, *(f"{name}={self._value(value)}" for name, value in node.kwargs.items())]
        if node.op == "call_method":
            return f"{args[0]}.{node.target}({', '.join(arguments[1:])})"
        name = _attribute(str(node.target)) if node.op == "call_module" else self._functions[node.target]
        return f"{name}({', '.join(arguments)})"

    def _index(self, value: Any) -> str:
        """The text of a subscript; slices are written with colons."""
        if isinstance(value, tuple) and value:
            return ", ".join(map(self._index, value)) + ("," if len(value) == 1 else "")
        if isinstance(value, slice):
            ends = [self._value(v) if v is not None else "" for v in (value.start, value.stop, value.step)]
            return ":".join(ends if ends[2] else ends[:2])
        return self._value(value)

    def _value(self, value: Any) -> str:
        """An argument as an expression."""
        return repr(fx.node.map_aggregate(value, lambda part: _Expression(self._part(part))))

    def _part(self, value: Any) -> str:
        """A node or a constant as an expression."""
        if isinstance(value, fx.Node):
            return _attribute(str(value.target)) if value.op == "get_attr" else self._variables[value]
        return _literal(value)


class _Expression(str):
    """A text that stands without quotes in the ``repr`` of a list or a tuple."""

    __slots__ = ()
    __repr__ = str.__str__


def _import_line(module: str, names: list[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= WIDTH:
        return line
    listed = textwrap.fill(", ".join(names), WIDTH, initial_indent="    ", subsequent_indent="    ")
    return f"from {module} import (\n{listed},\n)"


def _literal(value: Any) -> str:
    """A constant as an expression."""
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: "torch.inf", -math.inf: "-torch.inf"}.get(value, "torch.nan")
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    text = repr(value)
    return f'"{text[1:-1]}"' if isinstance(value, str) and text[0] == "'" and '"' not in text else text


def _attribute(name: str) -> str:
    """A dotted name as an expression on ``self``. Numbers become indices, other parts that are no identifiers keys."""
    text = "self"
    for part in name.split("."):
        if part.isdecimal() and str(int(part)) == part:
            text += f"[{part}]"
        elif part.isidentifier() and not keyword.iskeyword(part) and not part.startswith("__"):
            text += f".{part}"
        else:
            text += f"[{part!r}]"
    return text


def _comment(node: fx.Node) -> str:
    device = f"device {node.meta[DEVICE]}" if DEVICE in node.meta else None
    parts = [shape_of(node), node.meta.get("pass_name"), device]
    known = [part for part in parts if part not in (None, "None")]
    return f"  # {', '.join(known)}" if known else ""


def _home(function: Any) -> str:
    """The module from which a function is imported: its package, if the package has it under the same name."""
    module: str = function.__module__
    package = module.rpartition(".")[0]
    return package if getattr(sys.modules.get(package), function.__name__, None) is function else module


def _root(function: Any) -> str:
    """The package before a function's name, as in ``math.floor``; empty if the function itself is imported."""
    if isinstance(function, OpOverload | OpOverloadPacket | HigherOrderOperator):
        return "torch"
    module = getattr(function, "__module__", None) or "torch"
    root = module.partition(".")[0]
    return {"_operator": "operator"}.get(root, root) if root in ("torch", "math", "operator", "_operator") else ""


def class_name(module: str) -> str:
    """The name of the class that a module's file defines: ``lm_head`` gives ``LmHead``."""
    return "".join(part[:1].upper() + part[1:] for part in re.split(r"\W|_", module))
