"""Checks that a program is well formed. It runs after every pass unless ``pipeline.verify`` is false."""

from __future__ import annotations

from torch import fx

from specgraph.errors import VerificationError
from specgraph.ir.graphs import DEVICE, calls, written_by
from specgraph.ir.program import Program
from specgraph.ir.shapes import propagate
from specgraph.kernels.linear.all_reduce import ALL_REDUCE
from specgraph.kernels.ops import find
from specgraph.kernels.step import FINAL_WRITES, scatter_state_


def verify_program(program: Program) -> None:
    """Lint every graph, check calls and the order of state writes, and run the program on fake tensors for its shapes.

    Raises:
        VerificationError: names the graph and the node.
    """
    lint(program)
    check_calls(program)
    check_levels(program)
    check_write_order(program)
    check_devices(program)
    propagate(program)


def lint(program: Program) -> None:
    """FX's own structural checks."""
    for name, graph in {"step": program.graph, **{n: m.graph for n, m in program.modules.unchanged.items()}}.items():
        try:
            graph.lint()
        except (RuntimeError, AttributeError) as error:
            raise VerificationError(f"{name}: {error}") from error


def check_calls(program: Program) -> None:
    """Check that every module call names an existing module and passes exactly its inputs."""
    for node in program.graph.nodes:
        if node.op != "call_module":
            continue
        module = program.modules.unchanged.get(str(node.target))
        if module is None:
            raise VerificationError(f"step: {node.name} calls {node.target!r}, which is not a module of the program.")
        wanted = [n.name for n in module.graph.nodes if n.op == "placeholder"]
        surplus = [f"argument {i}" for i in range(len(wanted), len(node.args))]
        given = wanted[: len(node.args)] + surplus + list(node.kwargs)
        if sorted(given) != sorted(wanted):
            raise VerificationError(f"step: {node.name} passes {given} to {node.target!r}, which takes {wanted}.")


def check_levels(program: Program) -> None:
    """Check that the step graph holds no tensors, that its inputs are described, and that modules call no modules."""
    names = [node.name for node in program.placeholders()]
    if sorted(names) != sorted(program.inputs):
        raise VerificationError(f"step: its inputs are {names}, but {list(program.inputs)} are described.")
    for node in program.graph.nodes:
        if node.op in ("get_attr", "call_method"):
            raise VerificationError(f"step: {node.name} is a {node.op}; state and weights enter as inputs and modules.")
    for name, module in program.modules.unchanged.items():
        for node in module.graph.nodes:
            if node.op == "call_module":
                raise VerificationError(f"{name}: {node.name} calls a module; tensor-level graphs are flat.")


def check_write_order(program: Program) -> None:
    """Check that nothing reads a state input after its last write, because FX itself keeps no order between the two."""
    for function in FINAL_WRITES:
        for node in calls(program.graph, function):
            for written in _written(program, node):
                late = [u for u in written.users if u > node and written not in _written(program, u)]
                # What a call has gathered and changed is scattered at its end.
                late = [u for u in late if u.target is not scatter_state_]
                if late:
                    raise VerificationError(
                        f"step: {late[0].name} reads {written.name} after {node.name} has written it; move it up, or "
                        "mark the function with @writes(..., final=False) if its new values may be read in this step."
                    )


def check_devices(program: Program) -> None:
    """Check that devices which share modules read each other's values in ``all_reduce`` alone, one of each device."""
    for name, module in program.modules.unchanged.items():
        devices = {node.meta[DEVICE] for node in module.graph.nodes if DEVICE in node.meta}
        for node in module.graph.nodes if devices else ():
            read = [value.meta.get(DEVICE) for value in node.all_input_nodes]
            if find(node.target) is ALL_REDUCE:
                if read != sorted(devices):
                    raise VerificationError(f"{name}: {node.name} sums values of the devices {read}, not one of each.")
            elif {*read} - {None, node.meta.get(DEVICE)}:
                where = f"of device {node.meta[DEVICE]}" if DEVICE in node.meta else "of every device"
                raise VerificationError(f"{name}: {node.name} {where} reads a value of another device: {read}.")


def _written(program: Program, node: fx.Node) -> list[fx.Node]:
    """The state inputs that a node writes. While decoding, ``window`` is the same tensor as ``next_window``."""
    written = written_by(node, FINAL_WRITES)
    if any(node.name == "next_window" for node in written):
        written += [node for node in program.placeholders() if node.name == "window"]
    return written
