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
from pathlib import Path
from typing import Any

import pytest
import torch

import specgraph
from specgraph import SpeculativeDecoder
from specgraph.bench.models import random_head
from specgraph.drafters import mtp_graphs
from specgraph.drafters.mtp import MtpDraftConfig
from specgraph.drafters.mtp_layers import make_block
from specgraph.drafters.mtp_module import MtpModule, MtpOptions
from specgraph.frontend.tracing import trace
from specgraph.ir.graphs import get_attribute
from tests.decoding import CONFIG, assert_same_tokens, compiled, reference_greedy
from tests.detectors import caught_by, check_fresh_start, check_oracle, check_slots
from tests.drafters.mtp_formula import CHAINED, FED, MIMO_V2, OTHER, STEP, definition, modules, target
from tests.dump.test_dump import assert_runs_alike
from tests.harness import Run, drafting_stage, forced_run, real_run
from tests.models import WINDOW, make_model, ragged_prompts
from tests.passes.test_lower_kernels import ROTARY, targets

QUICK: dict[str, Any] = {"pipeline": {"verify": False}}
PROMPTS = ragged_prompts((3, 9, 2))
LIMITS = (48, 41, 23)


@functools.cache
def decoder(
    count: int, k: int, options: MtpOptions = CHAINED, rule: str = "strict", bug: str | None = None,
    architecture: str = "llama", beyond: str = "continue",
) -> SpeculativeDecoder:  # fmt: skip
    planted = ["plant_bug"] * (bug is not None)
    order = ["expose_features", "insert_kv_cache", "insert_draft", *planted, "insert_verify"]
    config = {
        **CONFIG,
        "draft": {"kind": "mtp", "num_speculative_tokens": k, "beyond": beyond},
        "verify": {"rule": rule},
        "pipeline": {"order": order, "verify": False},
        "passes": {"plant_bug": {"_target_": "tests.harness.PlantBug", "bug": bug}} if bug else {},
    }
    return specgraph.compile_speculative(target(architecture), config, draft=modules(architecture, count, options))


@functools.cache
def forced(count: int, k: int, options: MtpOptions = CHAINED, rule: str = "strict", bug: str | None = None) -> Run:
    return forced_run(drafting_stage(decoder(count, k, options, rule, bug)), PROMPTS, LIMITS, seed=0, steps=18)


cases = pytest.mark.parametrize(
    ("count", "k", "options", "rule"),
    [(1, 1, CHAINED, "strict"), (1, 3, CHAINED, "strict"), (2, 1, CHAINED, "strict"), (2, 2, FED, "strict"),
     (2, 7, CHAINED, "probabilistic"), (3, 3, CHAINED, "strict"), (3, 3, FED, "probabilistic"), (3, 7, FED, "strict"),
     (3, 7, CHAINED, "strict"), (3, 5, OTHER, "strict")],
)  # fmt: skip


@cases
def test_drafts_do_not_depend_on_history(count: int, k: int, options: MtpOptions, rule: str) -> None:
    check_fresh_start(forced(count, k, options, rule), times=9)


@cases
def test_drafts_are_those_of_the_definition(count: int, k: int, options: MtpOptions, rule: str) -> None:
    head = modules("llama", count, options)
    check_oracle(forced(count, k, options, rule), definition("llama", head), rule)


@cases
def test_only_own_and_real_slots_are_written(count: int, k: int, options: MtpOptions, rule: str) -> None:
    check_slots(forced(count, k, options, rule))


@pytest.mark.parametrize(
    ("count", "options", "bug", "caught"),
    [(1, CHAINED, None, set()), (2, CHAINED, None, set()), (3, FED, None, set()),
     (2, CHAINED, "chained position off by one", {"oracle", "slots"})],
)  # fmt: skip
def test_modules_that_take_turns_leave_nothing_behind(
    count: int, options: MtpOptions, bug: str | None, caught: set[str]
) -> None:
    tested = decoder(count, 5, options, bug=bug, beyond="turns")
    called = [node.target for node in tested.stages["insert_draft"].with_role("draft")]
    assert called == [f"mtp_{index % count}" for index in range(5)]
    run = forced_run(drafting_stage(tested), PROMPTS, LIMITS, seed=0, steps=18)
    assert caught_by(run, definition("llama", modules("llama", count, options), "turns"), "strict") == caught
    assert tokens_of(tested) == plain_tokens()


def test_modules_that_take_turns_run_with_every_pass() -> None:
    config = {**CONFIG, "draft": {"kind": "mtp", "num_speculative_tokens": 5, "beyond": "turns"},
              "lowering": {"name": "inductor", "remainder": "eager"}}  # fmt: skip
    tested = specgraph.compile_speculative(target("llama"), config, draft=modules("llama", 2, CHAINED))
    assert tokens_of(tested) == plain_tokens()


@pytest.mark.parametrize(("architecture", "options"), [("mimo_v2_flash", MIMO_V2), ("step_text", STEP)])
def test_layers_of_another_kind_than_the_targets_last(architecture: str, options: MtpOptions) -> None:
    """The target's last layer attends to everything; those of its modules have a window, and other heads."""
    tested = decoder(3, 4, options, architecture=architecture)
    run = forced_run(drafting_stage(tested), PROMPTS, LIMITS, seed=0, steps=10)
    assert caught_by(run, definition(architecture, modules(architecture, 3, options)), "strict") == set()
    assert tokens_of(tested) == plain_tokens(architecture)
    last, module = target(architecture).base_model.layers[-1], modules(architecture, 3, options).module[2]
    own = module.block.layers[0]
    assert (last.self_attn.sliding_window, own.self_attn.sliding_window) == (None, WINDOW)
    assert sum(p.numel() for p in own.parameters()) > sum(p.numel() for p in last.parameters())


@pytest.mark.parametrize(("count", "k"), [(1, 3), (3, 3), (3, 7)])
def test_histories_accept_none_and_all_and_reach_the_end(count: int, k: int) -> None:
    run = forced(count, k)
    assert {0, k} <= set(run.accept_counts)
    assert len(run.steps[-1].accepted[2]) == LIMITS[2]


@pytest.mark.parametrize("options", [CHAINED, FED])
def test_rejected_rows_are_never_read(options: MtpOptions) -> None:
    run = forced_run(drafting_stage(decoder(3, 5, options)), PROMPTS, LIMITS, seed=3, poison=True)
    check_oracle(run, definition("llama", modules("llama", 3, options)), "strict")


@pytest.mark.parametrize("rule", ["strict", "probabilistic", "block"])
def test_real_decoding_passes_every_detector(rule: str) -> None:
    """Prompts shorter than the number of modules, and longer than a chunk."""
    run = real_run(decoder(3, 4, CHAINED, rule), ragged_prompts((1, 17, 2)), (30, 41, 23))
    assert [len(tokens) for tokens in run.steps[-1].accepted] == [30, 41, 23]
    assert caught_by(run, definition("llama", modules("llama", 3)), rule) == set()


BUGS: dict[str, set[str]] = {
    "provisional rows stay": {"fresh start", "oracle", "slots"},
    "kept one row early": {"fresh start", "oracle", "slots"},
    "same tokens for every module": {"oracle"},
    "modules do not see drafts": {"fresh start", "oracle"},
    "window instead of emitted, shifted": {"oracle"},
    "chained position off by one": {"fresh start", "oracle", "slots"},
    "noise off by one position": {"oracle"},
    "proposals from the row before": {"oracle"},
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug: str) -> None:
    oracle = definition("llama", modules("llama", 3))
    assert caught_by(forced(3, 5, bug=bug), oracle, "strict") >= BUGS[bug]


def tokens_of(tested: SpeculativeDecoder, **changed: Any) -> list[list[int]]:
    options: dict[str, Any] = {"temperature": [0.0, 0.8, 1.3], "seed": [11, -5, 7], **changed}
    out = tested.generate(PROMPTS, max_new_tokens=18, eos_token_id=[], **options)
    return [tokens.tolist() for tokens in out.new_tokens]


@functools.cache
def plain_tokens(architecture: str = "llama") -> list[list[int]]:
    return tokens_of(compiled(target(architecture), "none", 1, **QUICK))


# Equal tokens


def test_greedy_tokens_are_those_of_transformers() -> None:
    found = decoder(3, 3).generate(PROMPTS, max_new_tokens=18)
    assert_same_tokens(target(), PROMPTS, found.new_tokens, reference_greedy(target(), PROMPTS, 18))


@pytest.mark.parametrize(("count", "k", "options"), [(1, 7, CHAINED), (2, 3, FED), (3, 1, CHAINED)])
def test_seeded_tokens_are_those_without_drafts(count: int, k: int, options: MtpOptions) -> None:
    assert tokens_of(decoder(count, k, options)) == plain_tokens()


def test_lowered_modules_give_the_same_tokens() -> None:
    """Through the kernels; a module becomes a pair of norms, six products with norms, and one attention."""
    model = make_model("llama", dtype=torch.float64)
    head = random_head(model, MtpDraftConfig(num_modules=3))
    eager, lowered = (compiled(model, "mtp", 5, head, lowering={"name": name}) for name in ("eager", "gpu"))
    assert tokens_of(eager) == tokens_of(lowered) == tokens_of(compiled(model, "none", 1, **QUICK))
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


# What a user sees of it


def test_every_draft_is_one_call_and_modules_are_not_copied() -> None:
    program = decoder(3, 7).stages["insert_draft"]
    called = [node.target for node in program.with_role("draft")]
    assert called == ["mtp_0", "mtp_1", *["mtp_2"] * 5] and len(program.with_role("drafts")) == 7
    weights = {id(p) for p in modules("llama", 3, CHAINED).module.parameters()} | {id(p) for p in target().parameters()}
    assert all(id(p) in weights for name in set(called) for p in program.modules[name].parameters())


def test_a_dump_runs_bit_for_bit_as_the_decoder(tmp_path: Path) -> None:
    tested = decoder(2, 3, CHAINED, "probabilistic")
    folder = tested.dump(tmp_path / "graphs")
    for index, (name, program) in enumerate(tested.stages.items()):
        if name in ("insert_draft", "insert_verify"):
            assert_runs_alike(specgraph.load_dump(folder / f"{index:02d}_{name}"), program)
