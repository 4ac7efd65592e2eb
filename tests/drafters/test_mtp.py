"""MTP: history, the definition, the slots that are written, planted bugs, equal tokens.

Each planted bug, and what caught it here (``test_planted_bugs_are_caught`` asserts the hits;
tokens would stay equal):

===================================  ===========  ======  ======
bug                                  fresh start  oracle  slots
===================================  ===========  ======  ======
provisional rows stay                caught       caught  caught
kept one row early                   caught       caught  caught
same tokens for every module         missed       caught  missed
modules do not see drafts            caught       caught  missed
window instead of emitted            missed       caught  missed
chained position off by one          caught       caught  caught
noise off by one position            missed       caught  missed
proposals from the row before        missed       caught  missed
===================================  ===========  ======  ======
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

import specgraph
from specgraph.bench.models import random_head
from specgraph.drafters import mtp_graphs
from specgraph.drafters.base import DraftHead
from specgraph.drafters.mtp import MtpDraftConfig
from specgraph.drafters.mtp_layers import make_block
from specgraph.drafters.mtp_module import MtpModule, MtpOptions
from specgraph.frontend.tracing import trace
from specgraph.ir.graphs import get_attribute
from specgraph.ir.program import Program
from tests.decoding import CONFIG, compiled
from tests.detectors import NextLogits, caught_by
from tests.drafters.contract import CachedDraftContract, Case, by_rule, planted
from tests.drafters.mtp_formula import CHAINED, FED, MIMO_V2, OTHER, STEP, definition, modules, target
from tests.harness import drafting_config, drafting_stage, forced_run
from tests.models import WINDOW, make_model, ragged_prompts
from tests.passes.test_lower_kernels import ROTARY, targets

HEADS: dict[str, tuple[int, MtpOptions]] = {
    "1": (1, CHAINED), "2": (2, CHAINED), "3": (3, CHAINED), "2 fed": (2, FED), "3 fed": (3, FED),
    "3 other": (3, OTHER),
}  # fmt: skip
"""How many modules, and how they are wired. Behind a comma stands what follows the last one's draft."""
IN_TURN = [Case(f"{name}, turns", 5) for name in ("1", "2", "3 fed")]


class TestDrafts(CachedDraftContract):
    KIND = "mtp"
    target = staticmethod(target)
    CASES = (
        Case("1", 3), Case("2", 1), Case("2 fed", 2), Case("2", 7, "probabilistic"),
        Case("3 fed", 3, "probabilistic"), Case("3 fed", 7), Case("3", 5), Case("3 other", 5),
        *IN_TURN,
    )  # fmt: skip
    REAL = by_rule("3", 4)
    SEEDED = (Case("3", 3), Case("2", 1), Case("2 fed", 2), Case("3 fed", 7), *IN_TURN)
    POISONED = (Case("3", 5), Case("3 fed", 7))
    POISONED_SEED = 3
    BUGS: ClassVar = planted(Case("3", 5), {
        "provisional rows stay": {"fresh start", "oracle", "slots"},
        "kept one row early": {"fresh start", "oracle", "slots"},
        "same tokens for every module": {"oracle"},
        "modules do not see drafts": {"fresh start", "oracle"},
        "window instead of emitted, shifted": {"oracle"},
        "chained position off by one": {"fresh start", "oracle", "slots"},
        "noise off by one position": {"oracle"},
        "proposals from the row before": {"oracle"},
    }) + planted(Case("2, turns", 5), {"chained position off by one": {"oracle", "slots"}})  # fmt: skip
    PROMPTS = ragged_prompts((3, 9, 2))
    STEPS, FRESH_STARTS = 18, 9
    REAL_PROMPTS = ragged_prompts((1, 17, 2))
    """Shorter than the number of modules, and longer than a chunk."""

    @classmethod
    def draft(cls, name: str) -> DraftHead:
        count, options = HEADS[name.partition(",")[0]]
        return modules("llama", count, options)

    @classmethod
    @functools.cache
    def oracle(cls, name: str) -> NextLogits:
        return definition("llama", cls.draft(name), cls.keys(name)["beyond"])

    @classmethod
    def keys(cls, name: str) -> dict[str, Any]:
        return {"beyond": "turns" if name.endswith("turns") else "continue"}

    def check_program(self, case: Case, program: Program) -> None:
        """Every draft is one call, and modules are not copied."""
        count, turns = HEADS[case.name.partition(",")[0]][0], case.name.endswith("turns")
        called = [node.target for node in program.with_role("draft")]
        assert called[:count] == [f"mtp_{index}" for index in range(count)][: len(called)]
        assert called[count:] == [f"mtp_{(count + i) % count if turns else count - 1}" for i in range(case.k - count)]
        assert len(program.with_role("drafts")) == case.k
        held = [*self.draft(case.name).module.parameters(), *target().parameters()]
        known = {id(parameter) for parameter in held}
        assert all(id(p) in known for name in {*called} for p in program.modules[name].parameters())


def test_modules_that_take_turns_run_with_every_pass() -> None:
    config = {**CONFIG, "draft": {"kind": "mtp", "num_speculative_tokens": 5, "beyond": "turns"},
              "lowering": {"name": "inductor", "remainder": "eager"}}  # fmt: skip
    tested = specgraph.compile_speculative(target("llama"), config, draft=modules("llama", 2, CHAINED))
    assert TestDrafts.tokens_of(tested) == TestDrafts.plain_tokens()


@pytest.mark.parametrize(("architecture", "options"), [("mimo_v2_flash", MIMO_V2), ("step_text", STEP)])
def test_layers_of_another_kind_than_the_targets_last(architecture: str, options: MtpOptions) -> None:
    """The target's last layer attends to everything; those of its modules have a window, and other heads."""
    model, head = target(architecture), modules(architecture, 3, options)
    config = drafting_config({"kind": "mtp", "num_speculative_tokens": 4})
    tested = specgraph.compile_speculative(model, config, draft=head)
    run = forced_run(drafting_stage(tested), TestDrafts.PROMPTS, TestDrafts.LIMITS, seed=0, steps=10)
    assert caught_by(run, definition(architecture, head), "strict") == set()
    assert TestDrafts.tokens_of(tested) == TestDrafts.tokens_of(compiled(model, "none", 1))
    last, module = target(architecture).base_model.layers[-1], head.module[2]
    own = module.block.layers[0]
    assert (last.self_attn.sliding_window, own.self_attn.sliding_window) == (None, WINDOW)
    assert sum(p.numel() for p in own.parameters()) > sum(p.numel() for p in last.parameters())


def test_lowered_modules_give_the_same_tokens() -> None:
    """Through the kernels; a module becomes a pair of norms, six products with norms, and one attention."""
    model = make_model("llama", dtype=torch.float64)
    head = random_head(model, MtpDraftConfig(num_modules=3))
    eager, lowered = (compiled(model, "mtp", 5, head, lowering={"name": name}) for name in ("eager", "gpu"))
    plain = compiled(model, "none", 1)
    assert TestDrafts.tokens_of(eager) == TestDrafts.tokens_of(lowered) == TestDrafts.tokens_of(plain)
    counts = targets(lowered.stages["lower_kernels"], "mtp_1")
    assert counts["specgraph.rms_norm_pair"] == counts[ROTARY] == 1
    assert counts["specgraph.linear"] + counts["specgraph.linear_norm"] == 6 and not counts["aten.linear"]


# The graphs


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss", "deepseek_v3"])
def test_a_module_that_differs_in_its_tensors_alone_is_not_exported_again(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(architecture, dtype=torch.float64)
    traced, head = trace(model), random_head(model, MtpDraftConfig(num_modules=2)).module
    first = mtp_graphs.export(head[0], model, traced, "mtp_0")
    monkeypatch.setattr(torch.export, "export", None)
    second = mtp_graphs.export(head[1], model, traced, "mtp_1")
    monkeypatch.undo()
    own = dict(head[1].named_parameters(remove_duplicate=False))
    for (name, graph), other in zip(second.items(), first.values(), strict=True):
        assert graph.code == other.code
        held = [str(node.target) for node in graph.graph.find_nodes(op="get_attr")]
        assert name.endswith("_head") or all(get_attribute(graph, n) is own[n] for n in held if n in own)


def test_modules_with_other_graphs_are_exported() -> None:
    traced = trace(target())

    def found(change: Callable[[Any], None], options: MtpOptions = CHAINED) -> bool:
        first, other = (MtpModule(target(), make_block(target(), "cpu", options), options, index) for index in range(2))
        change(other)
        codes = [mtp_graphs.export(each, target(), traced, "mtp")["mtp"].code for each in (first, other)]
        return codes[0] == codes[1]

    assert found(lambda module: None)
    assert not found(lambda module: None, replace(CHAINED, rotary_position="token"))
    assert not found(lambda module: setattr(module, "options", replace(CHAINED, order="hidden")))
    assert not found(lambda module: setattr(module, "hidden_norm", torch.nn.Identity()))
