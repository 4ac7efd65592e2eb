"""Compares stages: runs each on the same small input and names the first pass whose output differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specgraph.errors import NumericsError
from specgraph.ir.program import Program
from specgraph.ir.state import State, allocate
from specgraph.passes.base import Pass
from specgraph.passes.pipeline import StageReport

ROUNDING = 64
"""How many units in the last place a pass that is not exact may move the norm of an output."""


class NumericsCallback:
    """Compares the program before and after every pass on what both compute.

    Passes that are exact must agree bit for bit; others within rounding of the output's norm.
    """

    def __call__(self, pass_: Pass, before: Program, after: Program, report: StageReport) -> None:
        """Raise ``NumericsError`` naming the pass, the output and the difference."""
        expected, actual = observe(before), observe(after)
        for name, value in expected.items():
            if name in actual and not (pass_.redrafts and name.startswith("drafts")):
                compare(pass_, name, value, actual[name])


def observe(program: Program, width: int | None = None, steps: int = 2) -> dict[str, Tensor]:
    """What a program computes for a fixed random input, by name.

    Logits of ``width`` rows (K + 1 if None) at position 0 for every stage, the drafts proposed for them by stages that
    draft, and the tokens emitted over ``steps`` steps by stages that verify.
    """
    rows = width or program.drafter.num_speculative_tokens + 1
    generator = torch.Generator().manual_seed(0)
    window = torch.randint(program.target.vocab_size, (2, rows), generator=generator).to(program.target.device)
    return _observe(program, window, steps)


def _observe(program: Program, window: Tensor, steps: int) -> dict[str, Tensor]:
    probe = program.copy()
    names = _watch(probe)
    state = example_state(probe, window.shape[1])
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
    """Make the copy return its logits, drafts and emitted tokens, whichever it has."""
    nodes = {role: probe.with_role(role) for role in ("logits", "drafts", "emitted", "num_emitted")}
    drafts = "drafts"
    if "verify" not in probe.facts:
        # Before verification the emitted tokens are an input, and the drafts are those that follow it.
        nodes["emitted"] = nodes["num_emitted"] = []
        drafts = "drafts for given tokens"
    labels = {"drafts": drafts}
    named = [(f"{labels.get(role, role)} {i}", n) for role, ns in nodes.items() for i, n in enumerate(ns)]
    probe.set_output(*(node for _, node in named))
    return [name for name, _ in named]


def example_state(program: Program, rows: int) -> State:
    """A state for two sequences in which ``rows`` rows are real and nothing is forced, with room for some steps."""
    length = 8 * rows + 8
    block_size = program.block_size if "kv_cache" in program.facts else length
    blocks = -(-length // block_size)
    sizes: Mapping[str, int] = {"B": 2, "T": rows, "M": blocks, "N": 2 * blocks, "S": length, "E": 1}
    state = allocate(program, sizes, program.target.device)
    fills: dict[str, Any] = {"num_rows": rows, "num_emitted": rows, "max_length": length, "temperature": 1.0}
    for name, value in fills.items():
        if name in state:
            state[name].fill_(value)
    if "block_table" in state:
        state["block_table"].copy_(torch.arange(2 * blocks).view(2, blocks))
    if "emitted" in state:
        state["emitted"].copy_(torch.arange(2 * rows).view(2, rows) % program.target.vocab_size)
    if "seeds" in state:
        state["seeds"].copy_(torch.arange(2))
    return state


def compare(pass_: Pass, name: str, expected: Tensor, actual: Tensor) -> None:
    """Bits for an exact pass and for integers; else the relative error of the whole tensor."""
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
