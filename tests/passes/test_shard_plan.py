"""``shard`` splits all that transformers' plans of tensor parallelism split, and the list of attention layers is true.

The pass finds what it splits in the graph. A plan of transformers (``base_model_tp_plan``) names the modules of one
architecture, so that it is a second opinion, by other people and by other means.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING, PreTrainedModel

from specgraph.drafters.none import NoDrafter
from specgraph.frontend.first_program import first_program
from specgraph.frontend.tracing import trace
from specgraph.ir.graphs import DEVICE, calls
from specgraph.ir.program import Program
from specgraph.passes.base import PassResult
from specgraph.passes.common.device_parts import ATTENTION, RULES
from specgraph.passes.pipeline import run_passes
from specgraph.passes.shard import Shard
from tests.models import ARCHITECTURES, HYBRIDS, MORE, SHARED, WITHOUT_ATTENTION, double_model

ALL = (*ARCHITECTURES, *MORE, *SHARED, *(name for name in HYBRIDS if name not in WITHOUT_ATTENTION))
ATTENTION_LAYERS = {f"model.layers.*.self_attn.{name}_proj" for name in "qkvo"}


@functools.cache
def model(architecture: str) -> PreTrainedModel:
    several = architecture in (*HYBRIDS, *MORE, "qwen2_moe", "deepseek_v3", "glm4_moe")  # whose layers differ
    return double_model(architecture, 1, **({} if several else {"num_hidden_layers": 1, "layer_types": None}))


def split(architecture: str) -> tuple[Program, PassResult]:
    """The program for two devices, and what the pass says."""
    stages, reports = run_passes(first_program(trace(model(architecture)), NoDrafter()), [Shard(2)])
    return stages["shard"], reports[-1].result


known = functools.cache(split)


def any_layer(name: str) -> str:
    """A dotted name without the number of its layer, as plans and reports write it."""
    return re.sub(r"\.\d+\.", ".*.", name).removesuffix(".weight")


def planned(architecture: str) -> dict[str, str]:
    """The matrices that the plan of an architecture cuts, and how; nothing if it has no plan."""
    own = model(architecture)
    plan = {f"{own.base_model_prefix}.{n}": how for n, how in (own.config.base_model_tp_plan or {}).items()}
    names = {any_layer(name) for name, parameter in own.named_parameters() if parameter.dim() > 1}
    found = {name: plan[name] for name in names & plan.keys() if "wise" in plan[name]}
    assert bool(found) == bool(plan), "a plan that names nothing here would be compared in vain"
    return found


def lacking(plan: Mapping[str, str], result: PassResult) -> dict[str, str]:
    """What a plan cuts and the pass does not, or not in the same direction: by name, with the reason of the pass.

    A plan cuts the rows of a weight, which are outputs (``colwise``), or its columns, which are inputs (``rowwise``).
    Where it gathers the outputs, or cuts the inputs by itself, the direction is of no account.
    """
    own, missed = dict[str, str](), {any_layer(m.where.partition(".")[2]): m.reason for m in result.near_misses}
    for columns, rows in re.findall(r"(\S+): columns; (.*): rows", "\n".join(result.notes)):
        own |= {any_layer(columns): "rowwise", **dict.fromkeys(map(any_layer, rows.split(", ")), "colwise")}
    return {
        name: missed.get(name, f"cut {own.get(name)}")
        for name, how in plan.items()
        if name in missed or name not in own or not (own[name] in how or "gather" in how or "split" in how)
    }


@pytest.mark.parametrize("architecture", ALL)
def test_what_the_plan_of_transformers_splits_is_split(architecture: str) -> None:
    plan = planned(architecture)
    layers = {name: how for name, how in plan.items() if not how.startswith("embedding")}  # tables are whole
    assert not lacking(layers, known(architecture)[1])


def test_a_pass_that_does_not_know_attention_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("llama")
    turned = {name: {"rowwise": "colwise", "colwise": "rowwise"}[how] for name, how in plan.items()}
    assert lacking(turned, known("llama")[1]).keys() == plan.keys()
    monkeypatch.delitem(RULES, ATTENTION)
    assert lacking(plan, split("llama")[1]).keys() == ATTENTION_LAYERS


def test_the_list_of_the_documentation_says_whose_attention_is_split() -> None:
    for architecture in ALL:
        graph = known(architecture)[0].modules.unchanged["target"].graph
        assert {DEVICE in node.meta for node in calls(graph, ATTENTION)} == {True}, architecture
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    (names,) = re.findall(r"have their attention split between heads: (.*?)\.\n", text, re.DOTALL)
    assert {*names.replace("\n", " ").split(", ")} & {*CONFIG_MAPPING} == {*ALL}  # not all are in an older one
