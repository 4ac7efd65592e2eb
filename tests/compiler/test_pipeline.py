"""Running passes: order, requirements, match counts, provenance, independence of copies, the size of the step.

The last is asserted for every drafter in full, which is why this file is long.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import fx, nn

from specgraph.compiler.numerics import compare_stages
from specgraph.config import load_config
from specgraph.config.drafters import NGramConfig
from specgraph.drafters.draft_model import draft_model
from specgraph.drafters.ngram import NGramDrafter
from specgraph.drafters.none import NoDrafter
from specgraph.dump import render
from specgraph.errors import NumericsError, PassError
from specgraph.frontend.first_program import first_program
from specgraph.frontend.tracing import TracedModel, trace
from specgraph.ir.graphs import calls, get_attribute, new_module, remove_dead_code
from specgraph.ir.model_info import ModelInfo
from specgraph.ir.program import FACTS, FIRST_FACTS, Program
from specgraph.kernels import step
from specgraph.kernels.state import Buffer
from specgraph.passes import PASSES
from specgraph.passes.base import NearMiss, Pass, PassResult
from specgraph.passes.compile_remainder import CompileRemainder
from specgraph.passes.expose_features import ExposeFeatures
from specgraph.passes.insert_draft import InsertDraft
from specgraph.passes.insert_kv_cache import InsertKVCache
from specgraph.passes.insert_processors import InsertProcessors
from specgraph.passes.insert_verify import InsertVerify
from specgraph.passes.pipeline import StageReport, run_passes
from specgraph.passes.share_weights import ShareWeights
from specgraph.specialise.index_rows import IndexRows
from specgraph.specialise.pack_rows import PackRows
from specgraph.specialise.pause_step import PauseStep
from specgraph.specialise.process_drafts import ProcessDrafts
from specgraph.specialise.score_rows import ScoreRows
from specgraph.specialise.specialise_step import SpecialiseStep
from specgraph.specialise.trace_step import TraceStep
from tests.models import make_model

aten = torch.ops.aten


@functools.cache
def traced(layers: int = 2) -> TracedModel:
    """A float64 llama; every caller gets the same one, and passes copy what they change."""
    return trace(make_model("llama", dtype=torch.float64, num_hidden_layers=layers))


def first(drafter: str = "none", k: int = 3, target: TracedModel | None = None) -> Program:
    """The stage ``trace`` of a small target; the draft model has one layer less."""
    made = {
        "none": NoDrafter,
        "ngram": lambda: NGramDrafter(k, options=NGramConfig(max_ngram=3)),
        "draft_model": lambda: draft_model(traced(1), k),
    }[drafter]()
    return first_program(target or traced(), made)


def every_pass(rule: str = "strict") -> list[Pass]:
    """The default order."""
    return [ExposeFeatures(), InsertKVCache(4), InsertDraft(rule), InsertVerify(rule), ShareWeights(),
            CompileRemainder()]  # fmt: skip


def last(program: Program, passes: Sequence[Pass]) -> Program:
    """The program after ``passes``."""
    return list(run_passes(program, passes)[0].values())[-1]


def body(program: Program, module: str = "step") -> list[str]:
    """The lines of ``forward``, without comments."""
    lines = render(program, module).partition("    ):\n")[2].splitlines()
    return [line.partition("  # ")[0].strip() for line in lines]


def text(lines: Iterable[str] | str) -> list[str]:
    """Words, so that expected code may be wrapped; brackets stand alone."""
    joined = lines if isinstance(lines, str) else "\n".join(lines)
    return joined.replace("(", "( ").replace(")", " )").split()


def everything(program: Program) -> dict[str, list[tuple[Any, ...]]]:
    """All nodes of all graphs, for comparing programs."""
    graphs = {"step": program.graph, **{name: m.graph for name, m in program.modules.items()}}
    return {
        name: [(n.name, n.op, str(n.target), str(n.args), str(n.kwargs), n.meta.get("pass_name")) for n in graph.nodes]
        for name, graph in graphs.items()
    }


def toy() -> Program:
    """``scale(x)``, one module with one weight."""
    root, graph = nn.Module(), fx.Graph()
    root.register_buffer("weight", torch.full((4,), 3.0))
    x = graph.placeholder("x")
    graph.output(graph.call_function(aten.mul.Tensor, (x, graph.get_attr("weight"))))
    info = ModelInfo("toy", 7, 1, 4, torch.float32, torch.device("cpu"), None)
    program = Program(fx.Graph(), {"scale": new_module(root, graph, "scale")}, {}, info, NoDrafter())
    program.set_output(program.call("scale", program.placeholder("x", Buffer(("B", 4), torch.float32))))
    return program


@dataclass(frozen=True)
class Negate(Pass):
    """Negates what the step returns."""

    matches: int = 1
    expected: int | None = 1
    raises: bool = False

    name: ClassVar[str] = "negate"
    ensures: ClassVar[frozenset[str]] = frozenset({"negated"})

    def apply(self, program: Program) -> PassResult:
        output = program.graph.output_node()
        with program.graph.inserting_before(output):
            output.args = (program.call(torch.neg, output.args[0]),)
        module = program.modules["scale"].graph
        with module.inserting_before(module.output_node()):
            module.call_function(torch.neg, module.output_node().args)
        program.inputs["new"] = Buffer(("B",))
        if self.raises:
            raise PassError("negate: no.")
        misses = (NearMiss("there", "too small"), NearMiss("here", "too big"))
        return PassResult(self.matches, self.expected, misses)


@dataclass(frozen=True)
class Needing(Pass):
    """Needs something."""

    name: ClassVar[str] = "needing"
    requires: ClassVar[frozenset[str]] = frozenset({"negated"})

    def apply(self, program: Program) -> PassResult:
        return PassResult(0)


# Order, names and reports


def test_stages_are_named_in_order_and_hold_the_program_after_each_pass():
    stages, reports = run_passes(first("draft_model"), every_pass())
    names = [p.name for p in every_pass()]
    assert list(stages) == ["trace", *names] and [r.name for r in reports] == names
    assert "insert_kv_cache" not in str(everything(stages["expose_features"]))
    assert stages["insert_draft"].facts == FIRST_FACTS - {"target_only"} | {"kv_cache", "draft"}
    assert stages["insert_verify"].facts == FIRST_FACTS - {"target_only"} | {"kv_cache", "verify"}
    for report, before, after in zip(reports, stages.values(), list(stages.values())[1:], strict=False):
        assert (report.before, report.after) == (before.num_nodes(), after.num_nodes())


def test_a_pass_that_runs_again_gets_a_number():
    stages, reports = run_passes(toy(), [Negate(), Negate(), Negate()])
    assert list(stages) == ["trace", "negate", "negate_2", "negate_3"]
    assert [len(list(calls(p.graph, torch.neg))) for p in stages.values()] == [0, 1, 2, 3]
    assert [r.name for r in reports] == ["negate"] * 3


def test_every_callback_sees_every_pass_with_the_programs_around_it():
    seen: list[tuple[str, Pass, Program, Program, StageReport]] = []
    callbacks = [lambda *given, tag=tag: seen.append((tag, *given)) for tag in "ab"]
    passes = [Negate(), Negate()]
    stages, reports = run_passes(toy(), passes, callbacks)
    chain = list(stages.values())
    wanted = [(tag, passes[i], chain[i], chain[i + 1], reports[i]) for i in range(2) for tag in "ab"]
    assert [(tag, *map(id, given)) for tag, *given, _ in seen] == [(tag, *map(id, given)) for tag, *given, _ in wanted]
    assert [report for *_, report in seen] == [report for *_, report in wanted]


def test_a_callback_that_raises_ends_the_pipeline():
    def refuse(*_: object) -> None:
        raise NumericsError("no")

    with pytest.raises(NumericsError, match="no"):
        run_passes(toy(), [Negate()], [refuse])


# Requirements and match counts


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        ([InsertDraft()], "insert_draft needs 'kv_cache', .*: put insert_kv_cache before it in pipeline.order."),
        ([InsertKVCache(), InsertVerify()], "insert_verify needs 'draft', .*: put insert_draft before it"),
        ([InsertKVCache(), InsertDraft(), InsertProcessors()], "processors needs 'verify', .*: put insert_verify"),
        ([Needing()], "needing needs 'negated', which does not hold yet: no known pass establishes it."),
    ],
)
def test_a_missing_requirement_names_the_pass_to_run_first(passes: list[Pass], message: str):
    with pytest.raises(PassError, match=message):
        run_passes(first(), passes)


def test_every_requirement_of_a_known_pass_can_be_met():
    facts = FIRST_FACTS.union(*(cls.ensures for cls in PASSES.values()))
    assert all(cls.requires <= facts for cls in PASSES.values())


def test_every_fact_is_required_by_a_pass_and_says_what_it_means():
    passes = [*PASSES.values(), IndexRows, ProcessDrafts, SpecialiseStep, TraceStep, ScoreRows, PackRows, PauseStep]
    required = set[str]().union(*(cls.requires for cls in passes))
    made = FIRST_FACTS.union(*(cls.ensures for cls in passes))
    assert required == made == FACTS.keys()
    assert all(cls.invalidates <= required for cls in passes)


ORDER = load_config().pipeline.order
TOO_LATE = [
    ("insert_kv_cache", "insert_draft"), ("insert_draft", "parallel_draft"), ("parallel_draft", "insert_verify"),
    ("lookup_first", "insert_verify"), ("insert_verify", "insert_processors"),
    ("share_weights", "merge_linears"), ("fuse_norm", "lower_kernels"), ("fuse_routing", "lower_kernels"),
    ("merge_linears", "lower_kernels"),
    ("fuse_rotary_cache", "lower_kernels"), ("fuse_rotary_cache", "fuse_pointwise"),
    ("lower_kernels", "fuse_pointwise"), ("lower_kernels", "few_rows"), ("expose_features", "insert_draft"),
    ("insert_recurrent_state", "insert_draft"),
    ("insert_verify", "compile_remainder"),
]  # fmt: skip
"""Passes, and those of the default order that must not come before them."""


@pytest.mark.parametrize(("late", "other"), TOO_LATE)
def test_a_reordered_pipeline_is_refused(late: str, other: str):
    order = [name for name in ORDER[: ORDER.index(other) + 1] if name != late]
    options: dict[str, Any] = {"lookup_first": {"first": "ngram"}, "compile_remainder": {"backend": "inductor"}}
    passes = [PASSES[name](**options.get(name, {})) for name in [*order, late]]
    with pytest.raises(PassError, match=r"put \w+ before (it|\w+) in pipeline\.order") as raised:
        run_passes(first("draft_model"), passes)
    assert late in str(raised.value)


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        ([IndexRows(), InsertProcessors()], "which index_rows has undone: put insert_processors before index_rows"),
        ([InsertProcessors(), SpecialiseStep(), ProcessDrafts()], "put process_drafts before specialise_step"),
        ([IndexRows(), PackRows(), SpecialiseStep()], "put specialise_step before pack_rows"),
        ([IndexRows(), PackRows(), TraceStep()], "put trace_step before pack_rows"),
        ([IndexRows(), IndexRows()], "which index_rows has undone: leave the second index_rows out of pipeline.order"),
    ],
)
def test_passes_for_one_kind_of_request_are_in_order_too(passes: list[Pass], message: str):
    with pytest.raises(PassError, match=message):
        run_passes(first("draft_model"), [*every_pass()[:4], *passes])


@pytest.mark.parametrize(
    ("matches", "expected", "fails"), [(0, 1, True), (2, 1, True), (1, 1, False), (0, None, False), (5, None, False)]
)
def test_an_unexpected_number_of_matches_is_loud_and_tells_why(matches: int, expected: int | None, fails: bool):
    passes = [Negate(matches, expected)]
    if not fails:
        assert run_passes(toy(), passes)[1][0].result.changed == (matches > 0)
        return
    with pytest.raises(PassError) as raised:
        run_passes(toy(), passes)
    assert str(raised.value) == (
        f"negate matched {matches} places, expected 1 (there: too small; here: too big). "
        "Fix the graph or take negate out of pipeline.order."
    )


# Independence


@pytest.mark.parametrize("pass_", [Negate(raises=True), Negate(matches=0)], ids=["raises", "wrong count"])
def test_a_pass_that_fails_leaves_the_program_as_it_was(pass_: Negate):
    program = toy()
    before = everything(program), dict(program.inputs), program.facts
    with pytest.raises(PassError):
        run_passes(program, [pass_])
    assert (everything(program), program.inputs, program.facts) == before
    assert program.step()(x=torch.ones(1, 4)).tolist() == [[3.0] * 4]


def test_no_stage_changes_when_later_passes_run():
    for drafter in ("none", "ngram", "draft_model"):
        kept = []
        program = first(drafter)
        for pass_ in every_pass("block"):
            kept.append((program, everything(program), dict(program.inputs)))
            program = last(program, [pass_])
        for earlier, nodes, inputs in kept:
            assert (everything(earlier), earlier.inputs) == (nodes, inputs)


def test_a_trace_serves_any_number_of_programs():
    one, two = (last(first("draft_model"), every_pass()) for _ in range(2))
    assert everything(one) == everything(two)


def test_a_copy_is_independent_and_shares_its_tensors():
    program = first("draft_model")
    before, inputs = everything(program), dict(program.inputs)
    copy = program.copy()
    assert everything(copy) == before
    for name, module in copy.modules.items():
        weights = [str(n.target) for n in module.graph.nodes if n.op == "get_attr"]
        assert weights and all(get_attribute(module, w) is get_attribute(program.modules[name], w) for w in weights)
        with module.graph.inserting_before(module.graph.output_node()):
            module.graph.call_function(torch.neg, (next(iter(module.graph.nodes)),))
        for node in module.graph.nodes:
            node.meta["pass_name"] = node.meta["role"] = "changed"
        setattr(module, "extra", nn.Parameter(torch.zeros(1)))  # noqa: B010
    for node in list(copy.graph.nodes):
        node.meta["role"] = "changed"
    copy.placeholder("more", Buffer(("B",)))
    copy.set_output(copy.input("start"))
    copy.modules["new"] = copy.modules.pop("lm_head")
    copy.facts = frozenset({"new"})
    assert everything(program) == before and program.inputs == inputs
    assert program.facts == FIRST_FACTS and "lm_head" in program.modules
    assert not any(hasattr(m, "extra") for m in program.modules.values())
    assert len(program.with_role("logits")) == 1


def test_an_input_cannot_be_two_things():
    program = toy()
    assert program.placeholder("x", Buffer(("B", 4), torch.float32)) is program.input("x")
    with pytest.raises(PassError, match=r"Input 'x' exists as Buffer\(.*float32.*not as Buffer\("):
        program.placeholder("x", Buffer(("B", 4)))
    with pytest.raises(PassError, match="The step graph has no input 'y'; it has x"):
        program.input("y")
    with pytest.raises(PassError, match="Expected one step node with role 'logits', found 0"):
        program.one("logits")


# Provenance


@pytest.mark.parametrize("drafter", ["none", "ngram", "draft_model"])
def test_every_node_names_the_pass_that_made_it(drafter: str):
    stages, _ = run_passes(first(drafter), every_pass("block"))
    known: dict[tuple[str, str], str] = {}
    for stage, program in stages.items():
        for graph, nodes in everything(program).items():
            for node in nodes:
                maker = node[-1]
                if graph in ("step", "target"):
                    # What was there keeps its name; the output node is made again with the values it returns.
                    assert maker == stage or node[1] == "output" or known[graph, node[0]] == maker
                    known[graph, node[0]] = maker
                assert maker in stages
    assert {maker for (graph, _), maker in known.items() if graph == "target"} == {"trace", "insert_kv_cache"}


# What the step looks like, and what must stay in it


def test_the_whole_step_with_a_draft_model_reads_as_a_page():
    program = last(first("draft_model", 3), every_pass())
    state = "block_table=block_table, max_length=max_length, caches=draft_caches"
    knobs = "temperature, seeds, top_k, top_p, min_p"
    rule = 'rule="strict", target_vocab_size=101'
    assert text(body(program)) == text(f"""
        positions, next_positions = step_positions_and_next(start, window)
        hidden = self.target(tokens=window, positions=positions, num_rows=num_rows, block_table=block_table,
            max_length=max_length, caches=target_caches)
        needed = needed_rows(hidden, num_forced, 4)
        logits = self.lm_head(needed)
        drafts = draft_tokens(window)
        verified_tokens, _, _, logprobs, bad = torch.ops.specgraph.verify.default(logits, drafts, None, temperature,
            seeds, next_positions, top_k, top_p, min_p, num_rows, num_forced, None, rule="strict",
            posterior_threshold=0.09, posterior_alpha=0.3, acceptance_rate=0.7, logprobs="none")
        emitted, num_emitted, drafter_tokens, accepted_positions, accepted_rows, _, length, chain =
            finalize_step(verified_tokens, window, start, num_forced, eos_ids, shifted=False, vocab_size=101, chain=3)
        draft_0 = self.draft({state}, tokens=drafter_tokens, positions=accepted_positions, num_rows=accepted_rows,
            row=num_emitted)
        token_1 = propose_(None, draft_0, length, num_emitted, {knobs}, row=0, {rule})
        position_1 = chain[1]
        draft_1 = self.draft({state}, tokens=token_1, positions=position_1, num_rows=num_emitted, row=num_emitted)
        token_2 = propose_(None, draft_1, length, num_emitted, {knobs}, row=1, {rule})
        position_2 = chain[2]
        draft_2 = self.draft({state}, tokens=token_2, positions=position_2, num_rows=num_emitted, row=num_emitted)
        token_3 = propose_(None, draft_2, length, num_emitted, {knobs}, row=2, {rule})
        advance_(next_window, start, num_rows, num_forced, emitted, num_emitted, [token_1, token_2, token_3],
            max_length, eos_ids)
        return emitted, num_emitted, logprobs, bad
    """)


@pytest.mark.parametrize("rule", ["strict", "block"])
def test_the_step_has_17_lines_at_three_drafts_and_3_more_per_draft(rule: str):
    lines = {k: len(body(last(first("draft_model", k), every_pass(rule)))) for k in range(1, 8)}
    assert lines == {k: 17 + 3 * (k - 3) for k in range(1, 8)}


def names(graph: fx.Graph) -> list[str]:
    return [node.name for node in graph.nodes]


@pytest.mark.parametrize("drafter", ["none", "ngram", "draft_model"])
def test_dead_code_elimination_keeps_the_whole_step(drafter: str):
    for program in list(run_passes(first(drafter), every_pass("block"))[0].values())[2:]:
        module = program.step()
        before = names(module.graph)
        remove_dead_code(module)
        assert names(module.graph) == before


def test_dead_code_elimination_keeps_draft_calls_and_writes_that_nothing_reads():
    program = last(first("draft_model", 1), every_pass("block")[:3])
    program.set_output(program.one("logits"))
    (proposal,) = calls(program.graph, step.propose_)
    module = program.step()
    remove_dead_code(module)
    assert proposal.name in names(module.graph) and "draft_0" in names(module.graph)
    program.graph.erase_node(proposal)
    for module in (program.step(), program.copy().step()):
        remove_dead_code(module)
        assert "draft_0" in names(module.graph) and "accepted_rows" in names(module.graph)


def test_dead_code_elimination_keeps_cache_writes_of_a_module():
    target = last(first(), [InsertKVCache(4)]).copy().modules["target"]
    (hidden,) = (n for n in target.graph.nodes if n.op == "placeholder" and n.name == "tokens")
    target.graph.output_node().args = (hidden,)
    remove_dead_code(target)
    assert len(list(calls(target.graph, torch.ops.specgraph.paged_attention.default))) == 2


# Numbers


@pytest.mark.parametrize("drafter", ["none", "ngram", "draft_model"])
def test_stages_agree_on_numbers(drafter: str):
    passes = [ExposeFeatures((0, 2)), *every_pass("block")[1:]]
    run_passes(first(drafter), passes, [compare_stages])


def test_a_pass_that_changes_numbers_is_named():
    @dataclass(frozen=True)
    class Nudge(Pass):
        name: ClassVar[str] = "nudge"
        requires: ClassVar[frozenset[str]] = frozenset({"verify"})

        def apply(self, program: Program) -> PassResult:
            emitted = program.one("emitted")
            with program.graph.inserting_after(emitted):
                capped = program.graph.call_function(torch.clamp, (emitted,), {"max": 50})
            emitted.replace_all_uses_with(capped, lambda user: user is not capped)
            capped.meta["role"] = emitted.meta.pop("role")
            return PassResult(1, expected=1)

    with pytest.raises(NumericsError, match=r"^nudge changed emitted 0 of step 1: 1 of 8 elements differ\.$"):
        run_passes(first("ngram"), [*every_pass()[:4], Nudge()], [compare_stages])
