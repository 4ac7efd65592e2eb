"""The program: the graphs of all levels and the facts about them. It can be executed after every pass."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from specgraph.errors import PassError
from specgraph.ir.compiling import compile_module
from specgraph.ir.drafter import BoundDrafter
from specgraph.ir.graphs import copy_graph, new_module
from specgraph.ir.model_info import ModelInfo
from specgraph.ir.modules import Modules
from specgraph.ir.source import render
from specgraph.ir.state import block_sizes
from specgraph.ir.views import ProgramView
from specgraph.kernels.state import Input

FIRST_LAYERS = "first_layers"
"""The module of the target's first layers, where a drafter runs these alone (:attr:`BoundDrafter.exit_layer`)."""
TARGET_MODULES = (FIRST_LAYERS, "target", "lm_head")
"""The modules of the target; all others are the drafter's."""
FACTS: dict[str, str] = {
    "traced": "modules hold the ATen nodes that tracing gave them; none has been lowered",
    "target_only": "the step runs the target and calls no drafter yet",
    "own_weights": "every layer reads weight tensors of its own",
    "ungathered": "the step reads its inputs directly, not yet by the row index",
    "grid": "modules run all places of a window [b, T]",
    "kv_cache": "attention reads and writes page pools",
    "draft": "the step makes drafts that nothing reads yet",
    "verify": "the step verifies drafts and moves its state",
    "processors": "every processor stands between the logits of the target and their verification",
    "row_index": "the row index says which sequences a call runs",
}
"""The meaning of each fact about a program, by the name under which passes require it."""
FIRST_FACTS = frozenset({"traced", "target_only", "own_weights", "ungathered", "grid"})
"""The facts that hold before any pass."""


@dataclass
class Program(ProgramView):
    """A step graph, the modules that it calls, and the facts that passes have established about them.

    ``graph`` is the graph of the step level. Its placeholders are the window and the state, which ``inputs`` describes.
    Its other nodes call functions of ``specgraph.kernels`` or ``modules``, which are graphs of the tensor level such as
    ``target``, ``lm_head`` and ``draft``. Copies of a program share modules: ``modules[name]`` gives one that may be
    changed, and ``modules.unchanged[name]`` gives it for reading.
    """

    drafter: BoundDrafter
    facts: frozenset[str] = frozenset()
    undone: Mapping[str, str] = field(default_factory=dict)
    """The facts that held once, and the pass that has invalidated each."""
    compiled: frozenset[str] = frozenset()
    """The modules that Inductor compiles."""
    captured: bool = False
    """Whether the step runs as a CUDA graph."""

    def __post_init__(self) -> None:
        if not isinstance(self.modules, Modules):
            self.modules = Modules(self.modules)

    def copy(self) -> Program:
        """A copy that can be rewritten freely. It shares its tensors with the original."""
        return replace(self, graph=copy_graph(self.graph), modules=self.modules.copy(), inputs=dict(self.inputs))

    def step(self) -> fx.GraphModule:
        """The step graph as a module that can be called with the state as keyword arguments."""
        return self._module(self.modules.unchanged)

    def tensors(self) -> Iterator[Tensor]:
        """The weights of all modules, and their constants."""
        return itertools.chain.from_iterable((*m.parameters(), *m.buffers()) for m in self.modules.unchanged.values())

    def compile_modules(self, known: Mapping[str, torch.nn.Module] | None = None) -> dict[str, torch.nn.Module]:
        """The modules of :attr:`compiled` by name, compiled by Inductor; those that are ``known`` stay as they are.

        On a CPU, a prompt runs through the modules as they are. Its many rows hardly gain from compiled code, which
        would have to be made for them as well.
        """
        known = known or {}
        new = sorted(self.compiled - known.keys())
        compiled: dict[str, Any] = {name: compile_module(self.modules.unchanged[name]) for name in new}
        if self.target.device.type != "cpu":
            return {**known, **compiled}
        most = 2 * (self.drafter.num_speculative_tokens + 1)  # of a draft call that catches up, with its mask rows
        plain = self.modules.unchanged
        return {**known, **{name: CompiledFor(most, plain[name], own) for name, own in compiled.items()}}

    def executable(self, compiled: Mapping[str, torch.nn.Module] | None = None) -> fx.GraphModule:
        """The step as it runs: like :meth:`step`, but Inductor compiles the modules of :attr:`compiled`.

        ``compiled`` is an earlier result of :meth:`compile_modules` for the same modules, which is then used again.
        """
        own = self.compile_modules() if compiled is None else compiled
        return self._module({**self.modules.unchanged, **own})

    def _module(self, modules: Mapping[str, torch.nn.Module]) -> fx.GraphModule:
        root = torch.nn.Module()
        for name, module in modules.items():
            root.add_module(name, module)
        return new_module(root, self.graph, "step")

    # Building the step graph

    def placeholder(self, name: str, buffer: Input) -> fx.Node:
        """The placeholder of the state input ``name``. It is added after the existing ones unless it exists already."""
        if name in self.inputs:
            if self.inputs[name] != buffer:
                raise PassError(f"Input {name!r} exists as {self.inputs[name]}, not as {buffer}.")
            return self.input(name)
        last = [*self.placeholders()]
        first = next(iter(self.graph.nodes), None)
        with self.graph.inserting_after(last[-1]) if last else self.graph.inserting_before(first):
            node = self.graph.placeholder(name)
        self.inputs[name] = buffer
        return node

    def placeholders(self) -> Iterator[fx.Node]:
        """The placeholders of the state inputs, in order."""
        return (node for node in self.graph.nodes if node.op == "placeholder")

    def input(self, name: str) -> fx.Node:
        """The placeholder of an existing state input."""
        for node in self.placeholders():
            if node.name == name:
                return node
        raise PassError(f"The step graph has no input {name!r}; it has {', '.join(self.inputs)}.")

    def inputs_of(self, module: str) -> list[str]:
        """The names of the inputs of a module, in order."""
        return [node.name for node in self.modules.unchanged[module].graph.find_nodes(op="placeholder")]

    def bind(self, module: str, owner: str) -> dict[str, fx.Node]:
        """Make the state inputs of ``module`` inputs of the step, and return these by the names of the module's inputs.

        A pass that gives a module state describes it in ``meta["state"]`` of the module's placeholders. State that all
        modules share (``meta["shared"]``) becomes one input of the step, under its own name. State that belongs to the
        module becomes an input named ``<owner>_<name>``.
        """
        bound: dict[str, fx.Node] = {}
        for node in self.modules.unchanged[module].graph.find_nodes(op="placeholder"):
            if "state" in node.meta:
                name = node.name if node.meta.get("shared") else f"{owner}_{node.name}"
                bound[node.name] = self.placeholder(name, node.meta["state"])
        return bound

    def call(self, target: Callable[..., Any] | str, /, *args: Any, name: str | None = None, role: str | None = None,
             **kwargs: Any) -> fx.Node:  # fmt: skip
        """Append a call of a function, or of a module by its name. Later passes find the node by its ``role``."""
        if isinstance(target, str):
            node = self.graph.create_node("call_module", target, args, kwargs, name=name or target)
        else:
            node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        if role is not None:
            node.meta["role"] = role
        return node

    def with_role(self, role: str) -> list[fx.Node]:
        """The step nodes that carry a role, in order."""
        return [node for node in self.graph.nodes if node.meta.get("role") == role]

    def one(self, role: str) -> fx.Node:
        """The node with a role, if there is exactly one.

        Raises:
            PassError: no node has the role, or several have it.
        """
        nodes = self.with_role(role)
        if len(nodes) != 1:
            raise PassError(f"Expected one step node with role {role!r}, found {len(nodes)}.")
        return nodes[0]

    def set_output(self, *values: fx.Node) -> None:
        """Let the step return ``values``: the node itself if there is one, else a tuple."""
        for node in self.graph.find_nodes(op="output"):
            self.graph.erase_node(node)
        self.graph.output(values[0] if len(values) == 1 else values)

    def mark_provenance(self, name: str) -> None:
        """Note ``name``, the pass that made it, on every node that has no such note yet."""
        changed = self.modules.where(lambda graph: any("pass_name" not in node.meta for node in graph.nodes))
        for graph in (self.graph, *(module.graph for _, module in changed)):
            for node in graph.nodes:
                node.meta.setdefault("pass_name", name)

    def drop_input(self, name: str) -> None:
        """Remove a state input that no node reads."""
        self.graph.erase_node(self.input(name))
        del self.inputs[name]

    # Reading

    @property
    def block_size(self) -> int:
        """The number of tokens per page of the page pools.

        Raises:
            PassError: there are no page pools, or their pages have several sizes.
        """
        sizes = block_sizes(self)
        if len(sizes) != 1:
            raise PassError(f"The step has pages of the sizes {sorted(map(str, sizes))}; insert_kv_cache gives one.")
        return int(sizes.pop())

    def models(self) -> dict[str, ModelInfo]:
        """Facts about every module that has attention, by its name: the target and the drafter's modules."""
        return {"target": self.target, **self.drafter.models}

    def num_nodes(self) -> dict[str, int]:
        """The number of nodes of the step graph (``step``) and of every module."""
        counts = {name: len(module.graph.nodes) for name, module in self.modules.unchanged.items()}
        return {"step": len(self.graph.nodes), **counts}

    def print_readable(self, module: str = "step") -> str:
        """Print and return the Python of the step graph, or of one module, with shapes and dtypes."""
        text = render(self, module)
        print(text)
        return text


class CompiledFor(torch.nn.Module):
    """A module whose compiled form runs calls of at most ``most`` rows per sequence."""

    _is_impure = True  # it may write a cache, as the module does, so dead-code elimination keeps its calls

    def __init__(self, most: int, module: torch.nn.Module, compiled: torch.nn.Module) -> None:
        super().__init__()
        self.most, self.module, self.compiled = most, module, compiled

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The rows are the second dimension of the first tensor that has one; a module may also take none."""
        given = (*args, *kwargs.values())
        rows = next((value.shape[1] for value in given if isinstance(value, torch.Tensor) and value.dim() > 1), 0)
        return (self.compiled if rows <= self.most else self.module)(*args, **kwargs)
