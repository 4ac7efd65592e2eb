"""The functions between the model calls in few launches: what is replaced, what is left, and that nothing changes."""

from __future__ import annotations

import pytest
import torch

import specgraph
from specgraph.compiler.numerics import compare, observe
from specgraph.ir.program import Program
from specgraph.ir.verifier import verify_program
from specgraph.kernels import step
from specgraph.passes.fuse_step import FuseStep
from specgraph.passes.fuse_verify import FuseVerify
from specgraph.passes.insert_draft import InsertDraft
from specgraph.passes.insert_kv_cache import InsertKVCache
from specgraph.passes.insert_verify import InsertVerify
from specgraph.passes.parallel_draft import ParallelDraft
from tests.compiler.test_pipeline import body, first, last, text
from tests.decoding import CONFIG
from tests.models import make_head, make_model, ragged_prompts

STATE = "block_table=block_table, max_length=max_length, caches=draft_caches"
KNOBS = "temperature, seeds, top_k, top_p, min_p"


def before(drafter: str, rule: str = "strict") -> Program:
    passes = [InsertKVCache(4), InsertDraft(rule), ParallelDraft(False), InsertVerify(rule), FuseVerify()]
    return last(first(drafter, 2), passes)


def lines(program: Program) -> list[str]:
    """The step from the verified tokens on."""
    body_lines = body(program)
    start = next(i for i, line in enumerate(body_lines) if "settle(" in line)
    return body_lines[start:]


def test_a_plain_step_settles_in_one_call():
    program = last(before("none"), [FuseStep()])
    verify_program(program)
    assert any("positions, next_positions = step_positions_and_next(start, window)" in s for s in body(program))
    assert text(lines(program)) == text("""
        emitted, num_emitted, _, _, _, _, _, _, _ = settle(verified_tokens, window, start, num_forced, eos_ids,
            shifted=True, chain=0)
        advance_(next_window, start, num_rows, num_forced, emitted, num_emitted, [], max_length, eos_ids)
        return emitted, num_emitted, logprobs, bad
    """)


def test_a_chain_of_drafts_reads_what_was_settled():
    program = last(before("draft_model"), [FuseStep()])
    verify_program(program)
    rest = 'rule="strict", target_vocab_size=101'
    assert text(lines(program)) == text(f"""
        emitted, num_emitted, _, drafter_tokens, accepted_positions, accepted_rows, _, length, chain =
            settle(verified_tokens, window, start, num_forced, eos_ids, shifted=False, chain=2, vocab_size=101)
        position_1 = chain[1]
        draft_0 = self.draft({STATE}, tokens=drafter_tokens, positions=accepted_positions, num_rows=accepted_rows,
            row=num_emitted)
        token_1 = propose_at_(None, draft_0, length, num_emitted, {KNOBS}, row=0, {rest})
        draft_1 = self.draft({STATE}, tokens=token_1, positions=position_1, num_rows=num_emitted, row=num_emitted)
        token_2 = propose_at_(None, draft_1, length, num_emitted, {KNOBS}, row=1, {rest})
        advance_(next_window, start, num_rows, num_forced, emitted, num_emitted, [token_1, token_2], max_length,
            eos_ids)
        return emitted, num_emitted, logprobs, bad
    """)
    assert [n.name for n in program.with_role("drafts")] == ["token_1", "token_2"]
    assert program.one("emitted").name == "emitted" and program.one("num_emitted").name == "num_emitted"


@pytest.mark.parametrize(("drafter", "rule"), [("none", "strict"), ("ngram", "strict"), ("draft_model", "strict"),
                                               ("draft_model", "block")])  # fmt: skip
def test_every_output_stays_as_it_was(drafter: str, rule: str):
    program, pass_ = before(drafter, rule), FuseStep()
    expected, actual = observe(program), observe(last(program, [pass_]))
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        compare(pass_, name, value, actual[name])


def test_a_function_of_ones_own_is_left_alone():
    program = before("draft_model")
    (node,) = (n for n in program.graph.nodes if n.target is step.catch_up_rows)
    node.target = lambda num_emitted: num_emitted
    (taken,) = (n for n in program.graph.nodes if n.target is step.draft_inputs)
    taken.target = torch.add
    taken.kwargs = {}
    after = last(program, [FuseStep()])
    left = [n.name for n in after.graph.nodes if n.target in (node.target, taken.target)]
    assert left == ["drafter_tokens", "accepted_rows"]


def test_rows_that_are_not_known_where_the_tokens_are_cut_are_left_alone():
    program = before("none")
    emitted = program.one("emitted")
    with program.graph.inserting_after(emitted):
        late = program.graph.call_function(torch.neg, (emitted,))
    with program.graph.inserting_after(late):
        program.graph.call_function(step.cut_rows, (late, emitted)).name = "rows"
    result = FuseStep().apply(program)
    assert result.near_misses[0].reason == "rows cut rows that emitted does not know"


def test_without_the_count_nothing_is_settled():
    program = before("none")
    (node,) = (n for n in program.graph.nodes if n.target is step.count_emitted)
    node.target = torch.count_nonzero
    result = FuseStep().apply(program)
    assert result.matches == 2 and "1 calls of cut_at_eos and 0 of count_emitted" in result.near_misses[0].reason


@pytest.mark.parametrize("parallel", [False, True])
def test_a_head_drafts_with_few_launches(parallel: bool):
    model = make_model("llama", dtype=torch.float64)
    draft = {"kind": "eagle3", "num_speculative_tokens": 3, "parallel": parallel}
    configs = [{**CONFIG, "draft": draft, "lowering": {"name": name}} for name in ("eager", "gpu")]
    decoders = [specgraph.compile_speculative(model, config, draft=make_head(model)) for config in configs]
    prompts = ragged_prompts((3, 9))
    outs = [d.generate(prompts, max_new_tokens=12, temperature=1.0, seed=1) for d in decoders]
    assert all(map(torch.equal, outs[0].new_tokens, outs[1].new_tokens))
    assert outs[0].stats.acceptance_length == outs[1].stats.acceptance_length
    program = decoders[1].stages["lower_kernels"]
    counts = [
        str(n.target).removesuffix(".default") for n in program.modules["draft"].graph.nodes if n.op[:4] == "call"
    ]
    assert counts.count("specgraph.rms_norm_pair") == counts.count("specgraph.rotary_angles") == 1
    assert not {"aten.cat", "aten.add.Tensor", "aten.embedding", "aten.cos", "specgraph.rms_norm"} & set(counts)
