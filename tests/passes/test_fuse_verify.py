from __future__ import annotations

import inspect
import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from specgraph.drafters.none import NoDrafter
from specgraph.errors import PassError
from specgraph.ir.graphs import calls
from specgraph.ir.model_info import ModelInfo
from specgraph.ir.program import Program
from specgraph.ir.verifier import verify_program
from specgraph.kernels import step, verify
from specgraph.kernels.sampling.sample import RULES, process_logits
from specgraph.kernels.state import Buffer, per_call
from specgraph.passes.base import NearMiss, PassResult
from specgraph.passes.fuse_verify import FuseVerify
from tests.compiler.test_pipeline import body, every_pass, everything, first, last, text

K, VOCAB, DRAFT_VOCAB, FLOAT = 3, 7, 5, torch.float32
INPUTS = {
    "logits": Buffer(("B", K + 1, VOCAB), FLOAT),
    "drafts": Buffer(("B", K)),
    "draft_logits": Buffer(("B", 2, DRAFT_VOCAB), FLOAT),
    "temperature": Buffer(("B",), FLOAT),
    "top_k": Buffer(("B",)),
    "seeds": Buffer(("B",)),
    "positions": Buffer(("B", K + 1)),
    "num_rows": Buffer(("B",)),
    "num_forced": Buffer(("B",)),
    "other_drafts": Buffer(("B", K)),
    "other_logits": Buffer(("B", K + 1, VOCAB), FLOAT),
    "draft_ids": per_call(VOCAB),
    "points": Buffer(("B",), torch.bool),
}


def visible(rule: str = "block", logprobs: str = "raw") -> Program:
    """Verification spelt out, and nothing else."""
    info = ModelInfo("toy", VOCAB, 1, 4, FLOAT, torch.device("cpu"), None)
    program = Program(fx.Graph(), {}, {}, info, NoDrafter(K), facts=frozenset({"verify"}))
    x = {name: program.placeholder(name, buffer) for name, buffer in INPUTS.items()}
    rows, shared = (x["num_rows"], x["num_forced"]), (x["drafts"], x["draft_logits"])
    options = {"posterior_threshold": 0.2, "posterior_alpha": 0.4, "acceptance_rate": 0.6}
    call = program.call
    processed = call(process_logits, x["logits"], x["temperature"], x["top_k"], name="processed")
    draw = (x["seeds"], x["positions"])
    count = call(verify.accept, processed, *shared, *draw, *rows, name="count", rule=rule, **options)
    weights = call(verify.residual, processed, *shared, count, *reversed(rows), name="weights", rule=rule)
    token = call(verify.sample_next, weights, *draw, count, x["num_forced"], name="token", rule=rule)
    pair = call(verify.emit, x["drafts"], count, token, *rows, name="pair")
    places = enumerate(("emitted", "number", "rows"))
    emitted, number, rows_kept = (call(operator.getitem, pair, i, name=n) for i, n in places)
    values = call(verify.token_logprobs, x["logits"], processed, emitted, x["num_forced"], name="values",
                  logprobs=logprobs)  # fmt: skip
    values.meta["role"] = "logprobs"
    program.set_output(emitted, number, values, rows_kept)
    return program


def node(program: Program, name: str) -> fx.Node:
    return next(n for n in program.graph.nodes if n.name == name)


def set_argument(program: Program, name: str, parameter: str, value: Any) -> None:
    """Give one argument of a node by its parameter's name."""
    piece = node(program, name)
    assert callable(piece.target)
    bound = inspect.signature(piece.target).bind(*piece.args, **piece.kwargs)
    bound.arguments[parameter] = value
    piece.args, piece.kwargs = bound.args, bound.kwargs


def test_the_pieces_become_one_op():
    program = last(visible(), [FuseVerify()])
    verify_program(program)
    assert text(body(program)) == text("""
        emitted, number, rows, values, _ = torch.ops.specgraph.verify.default(logits, drafts, draft_logits, temperature,
            seeds, positions, top_k, None, None, num_rows, num_forced, None, rule="block", posterior_threshold=0.2,
            posterior_alpha=0.4, acceptance_rate=0.6, logprobs="raw")
        return emitted, number, values, rows
    """)
    assert program.one("logprobs").name == "values"


def test_without_log_probabilities_there_is_one_node_less():
    program = visible()
    values = program.one("logprobs")
    program.set_output(node(program, "emitted"), node(program, "number"))
    program.graph.erase_node(values)
    after = last(program, [FuseVerify()])
    assert [n.name for n in after.graph.nodes][len(INPUTS) : -1] == ["verification", "emitted", "number", "rows"]
    assert node(after, "verification").kwargs["logprobs"] == "none"


def random_inputs(seed: int, rows: int) -> dict[str, Tensor]:
    """Six sequences: greedy and drawn, forced rows, padded rows, an inactive one, missing drafts."""
    generator = torch.Generator().manual_seed(seed)

    def integers(high: int, *shape: int, low: int = 0) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    start = integers(50, 6, 1)
    return {
        "logits": torch.randn(6, rows, VOCAB, generator=generator) * 2,
        "drafts": integers(VOCAB, 6, K, low=-1),
        "draft_logits": torch.randn(6, 2, DRAFT_VOCAB, generator=generator),
        "temperature": torch.tensor([0.0, 1.0, 0.7, 1.0, 2.0, 1.0]),
        "top_k": torch.tensor([0, 0, 3, 0, 5, 0]),
        "seeds": integers(1 << 40, 6),
        "positions": start + torch.arange(K + 1),
        "num_rows": torch.tensor([4, 4, 3, 0, 2, 4]),
        "num_forced": torch.tensor([0, 2, 1, 0, 2, 3]),
        "other_drafts": integers(VOCAB, 6, K),
        "other_logits": torch.randn(6, rows, VOCAB, generator=generator),
        "draft_ids": torch.tensor([4, 3, 2, -1, 1, -1, 0]),
        "points": torch.tensor([False, True, False, True, False, True]),
    }


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("logprobs", ["none", "raw", "processed"])
@pytest.mark.parametrize("rows", [2, K + 1])
def test_fused_and_visible_verification_give_equal_bits(rule: str, logprobs: str, rows: int):
    program = visible(rule, logprobs)
    before, after = program.step(), last(program, [FuseVerify()]).step()
    accepted = set()
    for seed in range(8):
        inputs = random_inputs(seed, rows)
        expected, actual = before(**inputs), after(**inputs)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(expected, actual, strict=True))
        assert expected[1][3] == 0 and bool((expected[0][3] == -1).all())
        accepted |= set((expected[1] - inputs["num_forced"]).tolist())
    assert len(accepted) >= 3


def own_residual(processed: Tensor, *rest: Any, **options: Any) -> Tensor:
    """A researcher's piece."""
    return processed[:, -1]


def refused(program: Program, reason: str) -> None:
    """The program stays as it is, and the pipeline says why."""
    before = everything(program)
    assert FuseVerify().apply(program.copy()) == PassResult(0, 1, (NearMiss("pair", reason),))
    with pytest.raises(PassError) as raised:
        last(program, [FuseVerify()])
    assert str(raised.value) == (
        f"fuse_verify matched 0 places, expected 1 (pair: {reason}). "
        "Fix the graph or take fuse_verify out of pipeline.order."
    )
    assert everything(program) == before


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("processed", "count reads own_residual, not process_logits"),
        ("count", "pair reads own_residual, not accept"),
        ("weights", "token reads own_residual, not residual"),
        ("token", "pair reads own_residual, not sample_next"),
    ],
)
def test_a_piece_of_ones_own_is_left_alone(name: str, reason: str):
    program = visible()
    node(program, name).target = own_residual
    refused(program, reason)


@pytest.mark.parametrize(
    ("name", "parameter", "value", "given"),
    [
        ("pair", "draft_tokens", "other_drafts", "drafts"),
        ("weights", "draft_tokens", "other_drafts", "drafts"),
        ("weights", "draft_logits", None, "draft_logits"),
        ("weights", "processed", "other_logits", "processed"),
        ("weights", "num_forced", "num_rows", "num_forced"),
        ("pair", "num_rows", "num_forced", "num_rows"),
        ("token", "seeds", "num_rows", "seeds"),
        ("token", "positions", "drafts", "positions"),
        ("weights", "num_accepted", "num_rows", "num_rows"),
        ("weights", "rule", "strict", "block"),
        ("token", "rule", "strict", "block"),
    ],
)
def test_a_piece_that_reads_something_else_than_its_neighbours_is_left_alone(
    name: str, parameter: str, value: str | None, given: str
):
    program = visible()
    set_argument(program, name, parameter, program.input(value) if value in INPUTS else value)
    if parameter == "num_accepted":
        name, value, given = "token", "count", "num_rows"
    refused(program, f"{name} reads {value} as {parameter}, where {given} was read before")


@pytest.mark.parametrize(("changed", "value"), [(None, None), ("num_rows", "num_forced"), ("window", "positions")])
def test_looking_for_nan_joins_the_op_if_it_looks_at_the_same_rows(changed: str | None, value: str | None):
    program = visible()
    window = program.placeholder("window", Buffer(("B", K + 1)))
    drafts = program.input("drafts")
    with program.graph.inserting_after(window):
        cut = program.graph.call_function(step.draft_tokens, (window,))
    drafts.replace_all_uses_with(cut)
    emitted, number, values = (node(program, name) for name in ("emitted", "number", "values"))
    rows = (program.input("num_rows"), program.input("num_forced"))
    bad = program.call(step.bad_rows, program.input("logits"), window, *rows, name="bad", role="bad")
    program.set_output(emitted, number, values, bad)
    if changed is not None and value is not None:
        set_argument(program, "bad", changed, program.input(value))
    before, after = program.step(), last(program, [FuseVerify()])
    assert (after.one("bad").target is step.bad_rows) == (changed is not None)
    inputs = random_inputs(1, K + 1)
    inputs["logits"][1, 3, 2] = inputs["logits"][2, 0, 0] = torch.nan
    inputs["window"] = torch.nn.functional.pad(inputs["drafts"], (1, 0))
    expected, actual = before(**inputs), after.step()(**inputs)
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))
    assert changed is not None or expected[3].any()


def test_accepting_from_raw_logits_is_left_alone():
    program = visible()
    set_argument(program, "count", "processed", program.input("logits"))
    refused(program, "count reads logits, not process_logits")


@pytest.mark.parametrize("name", ["processed", "count", "weights", "token"])
def test_a_piece_that_is_also_read_elsewhere_is_left_alone(name: str):
    program = visible()
    with program.graph.inserting_before(program.graph.output_node()):
        program.call(torch.sum, node(program, name), name="extra")
    refused(program, f"{name} is also read by extra")


def test_no_verification_at_all_is_loud():
    program = visible()
    node(program, "pair").target = own_residual
    with pytest.raises(PassError, match=r"fuse_verify matched 0 places, expected 1 \(nothing came close\)"):
        last(program, [FuseVerify()])


def unchanged_meaning(program: Program) -> None:
    """Fusing either gives the same numbers or refuses."""
    before = program.step()
    try:
        after = last(program, [FuseVerify()]).step()
    except PassError:
        return
    for seed in range(8):
        inputs = random_inputs(seed, K + 1)
        for a, b in zip(before(**inputs), after(**inputs), strict=True):
            torch.testing.assert_close(b, a, rtol=0, atol=0)


def test_a_draft_vocabulary_that_all_pieces_know_is_fused():
    program = visible()
    for name in ("count", "weights"):
        set_argument(program, name, "target_to_draft", program.input("draft_ids"))
    unchanged_meaning(program)
    assert last(program, [FuseVerify()]).input("draft_ids").users


def test_a_draft_vocabulary_that_one_piece_does_not_know():
    program = visible()
    set_argument(program, "count", "target_to_draft", program.input("draft_ids"))
    unchanged_meaning(program)


def test_point_masses_that_all_pieces_know_are_fused():
    program = visible()
    for name in ("count", "weights"):
        set_argument(program, name, "point_mass", program.input("points"))
    fused = last(program, [FuseVerify()])
    assert node(fused, "verification").kwargs["point_mass"] is fused.input("points")
    unchanged_meaning(program)


def test_point_masses_that_one_piece_does_not_know_are_left_alone():
    program = visible()
    set_argument(program, "weights", "point_mass", program.input("points"))
    refused(program, "weights reads points as point_mass, where None was read before")


def test_log_probabilities_of_other_logits():
    program = visible()
    set_argument(program, "values", "logits", program.input("other_logits"))
    unchanged_meaning(program)


def test_log_probabilities_of_other_tokens():
    program = visible()
    with program.graph.inserting_before(node(program, "values")):
        shifted = program.call(torch.clamp, node(program, "emitted"), max=3)
    set_argument(program, "values", "emitted", shifted)
    unchanged_meaning(program)


def test_two_kinds_of_log_probabilities():
    program = visible()
    with program.graph.inserting_before(program.graph.output_node()):
        second = program.graph.node_copy(node(program, "values"))
    set_argument(program, second.name, "logprobs", "processed")
    program.set_output(node(program, "emitted"), node(program, "number"), node(program, "values"), second)
    unchanged_meaning(program)


def test_the_pass_fuses_what_insert_verify_builds_for_every_rule_and_drafter():
    for drafter in ("none", "ngram", "draft_model"):
        for rule in RULES:
            program = last(first(drafter), every_pass(rule)[:5])
            (fused,) = calls(program.graph, torch.ops.specgraph.verify.default)
            assert fused.kwargs["rule"] == rule
