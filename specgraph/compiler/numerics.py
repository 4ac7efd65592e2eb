"""Compares the stages of a compilation: runs each on the same small input, and names the first pass that differs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specgraph.compat import pytree
from specgraph.errors import NumericsError
from specgraph.ir.program import TARGET_MODULES, Program
from specgraph.ir.state import State, example_state, random_window
from specgraph.passes.base import Pass
from specgraph.passes.pipeline import StageReport

ROUNDING = 64
"""The largest error of a pass that is not exact, in units in the last place of the norm of the output."""


def compare_stages(pass_: Pass, before: Program, after: Program, report: StageReport) -> None:
    """Compare the outputs of the program before and after a pass, as far as both have them.

    After a pass that is exact, outputs must be equal bit for bit. After others, their difference must be explained by
    rounding, measured by the norm of the output.

    Raises:
        NumericsError: outputs differ; names the pass, the output and the difference.
    """
    expected, actual = observe(before), observe(after)
    for name, value in expected.items():
        if name in actual and not (pass_.redrafts and name.startswith("drafts")):
            compare(pass_, name, value, actual[name])


def check_drafts(program: Program) -> None:
    """Refuse a draft that computes NaN, of which no draft would ever be accepted. It is run on random tokens.

    ``program`` makes drafts, and nothing in it verifies them yet.

    Raises:
        NumericsError: names the module of the draft that gives NaN first.
    """
    probe = program.copy()
    own = [n for n in probe.graph.nodes if n.op == "call_module" and n.target not in TARGET_MODULES]
    if not own:
        return
    probe.set_output(*own)
    window, state = example(probe)
    with torch.no_grad():
        results = probe.executable()(window=window, **state)
    for node, result in zip(own, results if isinstance(results, tuple) else (results,), strict=True):
        tensors = [value for value in pytree.tree_leaves(result) if isinstance(value, Tensor)]
        if any(tensor.is_floating_point() and bool(tensor.isnan().any()) for tensor in tensors):
            raise NumericsError(
                f"The draft computes NaN from random tokens: its module {node.target} gives it, and no weight holds "
                f"it. So none of its drafts would be accepted; load it in another dtype than {program.target.dtype}, "
                "or use another draft."
            )


def observe(program: Program, width: int | None = None, steps: int = 2) -> dict[str, Tensor]:
    """The outputs of a program for a fixed random input, by name.

    Every stage gives the logits of ``width`` rows (K + 1 if None) from position 0 on. Stages that draft also give the
    drafts that they propose, and stages that verify the tokens that they emit in ``steps`` steps.
    """
    probe = program.copy()
    names = _watch(probe)
    window, state = example(probe, width)
    step = probe.executable()
    seen: dict[str, Tensor] = {}
    with torch.no_grad():
        for index in range(steps if "verify" in probe.facts else 1):
            block = window if index == 0 else state["next_window"]
            values = step(window=block, **state)
            values = values if isinstance(values, tuple) else (values,)
            for name, value in zip(names, values, strict=True):
                if index == 0 or name.startswith(("emitted", "num_emitted")):
                    seen[f"{name} of step {index + 1}"] = value.clone()
    return seen


def _watch(probe: Program) -> list[str]:
    """Let the copy return its logits, drafts and emitted tokens, as far as it has them; gives their names."""
    nodes = {role: probe.with_role(role) for role in ("logits", "drafts", "emitted", "num_emitted")}
    drafts = "drafts"
    if "verify" not in probe.facts:
        # As long as nothing verifies, the verified tokens are an input, and the drafts follow from that input.
        nodes["emitted"] = nodes["num_emitted"] = []
        drafts = "drafts for given tokens"
    labels = {"drafts": drafts}
    named = [(f"{labels.get(role, role)} {i}", n) for role, ns in nodes.items() for i, n in enumerate(ns)]
    probe.set_output(*(node for _, node in named))
    return [name for name, _ in named]


def example(program: Program, width: int | None = None) -> tuple[Tensor, State]:
    """A random window of ``width`` rows (K + 1 if None), and a state for it."""
    rows = width or program.drafter.num_speculative_tokens + 1
    given: dict[str, Any] = {"vocab_size": program.target.vocab_size, "device": program.target.device}
    return random_window(rows, **given), example_state(program, rows, **given)


def compare(pass_: Pass, name: str, expected: Tensor, actual: Tensor) -> None:
    """Compare bits for exact passes and for integers, and otherwise the relative error of the whole tensor."""
    exact = pass_.exact or not expected.is_floating_point()
    if exact:
        same = torch.equal(expected, actual)
        detail = f"{int((expected != actual).sum())} of {expected.numel()} elements differ" if not same else ""
    else:
        error = float((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))
        allowed = ROUNDING * torch.finfo(expected.dtype).eps
        same, detail = error <= allowed, f"relative error {error:.1e}, rounding allows {allowed:.1e}"
    if not same:
        raise NumericsError(f"{pass_.name} changed {name}: {detail}.")
