from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specgraph.drafters.step import SAMPLING
from specgraph.errors import PassError
from specgraph.ir.program import Program
from specgraph.ir.verifier import verify_program
from specgraph.kernels.state import Buffer, per_call
from specgraph.passes.insert_draft import InsertDraft
from specgraph.passes.insert_kv_cache import InsertKVCache
from specgraph.passes.pipeline import run_passes
from tests.compiler.test_pipeline import body, everything, first, last, text, traced

BEFORE = """
    positions = row_positions(start, window)
    hidden = self.target(tokens=window, positions=positions, num_rows=num_rows, block_table=block_table,
        max_length=max_length, caches=target_caches)
    logits = self.lm_head(hidden)
"""
VERIFIED = "verified_tokens, window, start, num_forced, eos_ids, shifted=False, vocab_size=101"
STATE = "block_table=block_table, max_length=max_length, caches=draft_caches"


def drafted(drafter: str, k: int = 2, rule: str = "strict") -> Program:
    program = last(first(drafter, k), [InsertKVCache(4), InsertDraft(rule)])
    verify_program(program)
    return program


def test_none_adds_nothing():
    program = drafted("none")
    assert text(body(program)) == text(BEFORE + "return logits")
    assert "verified_tokens" not in program.inputs


def test_history_drafters_record_what_was_emitted_and_are_called_once():
    program = drafted("ngram")
    assert text(body(program)) == text(BEFORE + f"""
        _, _, drafter_tokens, accepted_positions, accepted_rows, _, length, _ = finalize_step({VERIFIED})
        step_record_tokens_(history, rows, drafter_tokens, accepted_positions, accepted_rows)
        proposals = ngram_lookup(history, rows, length, num_speculative_tokens=2, max_ngram=3, min_ngram=1)
        return logits, proposals
    """)  # fmt: skip
    assert program.inputs["history"] == Buffer(("B", "S"), indexed=True, tokens=True)
    assert program.inputs["verified_tokens"] == per_call("B", "T", fill=-1)
    assert not SAMPLING.keys() & program.inputs.keys()


@pytest.mark.parametrize(("rule", "kept"), [("strict", "None"), ("typical", "None"), ("block", "draft_logits")])
def test_a_draft_model_catches_up_and_is_called_once_per_further_draft(rule: str, kept: str):
    program = drafted("draft_model", rule=rule)
    draw = "length, num_emitted, temperature, seeds, top_k, top_p, min_p"
    end = f'rule="{rule}", target_vocab_size=101' + ("" if kept == "None" else ", rows=rows")
    assert text(body(program)) == text(BEFORE + f"""
        _, num_emitted, drafter_tokens, accepted_positions, accepted_rows, _, length, chain =
            finalize_step({VERIFIED}, chain=2)
        draft_0 = self.draft({STATE}, tokens=drafter_tokens, positions=accepted_positions, num_rows=accepted_rows,
            row=num_emitted)
        token_1 = propose_({kept}, draft_0, {draw}, row=0, {end})
        position_1 = chain[1]
        draft_1 = self.draft({STATE}, tokens=token_1, positions=position_1, num_rows=num_emitted, row=num_emitted)
        token_2 = propose_({kept}, draft_1, {draw}, row=1, {end})
        return logits, token_1, token_2
    """)  # fmt: skip
    assert [n.name for n in program.with_role("drafts")] == ["token_1", "token_2"]
    assert ("draft_logits" in program.inputs) == (kept != "None")
    if kept != "None":
        assert program.inputs["draft_logits"] == Buffer(("B", 2, 101), torch.float64, indexed=True)


def test_body_and_head_become_one_module_with_logits_for_one_row():
    program = drafted("draft_model")
    assert list(program.modules) == ["target", "lm_head", "draft"]
    lines = body(program, "draft")
    (taken,) = [line for line in lines if line.startswith("take_rows = ")]
    assert taken.endswith(", row, 1)")
    heads = [line for line in lines if "self.lm_head.weight" in line]
    assert len(heads) == 1 and lines.index(taken) < lines.index(heads[0])
    names = [n.name for n in program.modules["draft"].graph.nodes if n.op == "placeholder"]
    assert names == ["tokens", "positions", "num_rows", "block_table", "max_length", "caches", "row"]
    own = {id(p) for module in (traced(1).body, traced(1).head) for p in module.parameters()}
    assert {id(p) for p in program.modules["draft"].parameters()} == own


def test_the_row_taken_gives_the_logits_of_body_and_head():
    program = drafted("draft_model")
    before = last(first("draft_model", 2), [InsertKVCache(4)])
    tokens = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    state = {
        "tokens": tokens, "positions": torch.arange(4).expand(2, 4), "num_rows": torch.tensor([4, 2]),
        "block_table": torch.tensor([[0], [1]]), "max_length": torch.tensor([4, 4]),
    }  # fmt: skip
    fresh = [tuple(b.allocate({"N": 2}, "cpu") for b in program.inputs["draft_caches"]) for _ in range(2)]
    with torch.no_grad():
        every = before.modules["draft_head"](before.modules["draft_body"](**state, caches=fresh[0]))
        taken = program.modules["draft"](**state, caches=fresh[1], row=torch.tensor([3, 1]))
    torch.testing.assert_close(taken[:, 0], every[[0, 1], [3, 1]], rtol=1e-12, atol=1e-12)


def test_it_needs_the_cache_first():
    with pytest.raises(PassError, match=r"insert_draft needs 'kv_cache', .*: put insert_kv_cache before it in"):
        run_passes(first("draft_model"), [InsertDraft()])


@pytest.mark.parametrize("count", [0, -1])
def test_a_draft_model_without_drafts_is_refused(count: int):
    program = last(first("draft_model"), [InsertKVCache()])
    program.drafter = replace(program.drafter, num_speculative_tokens=count)
    before = everything(program)
    with pytest.raises(PassError, match=f"insert_draft: draft_model needs num_speculative_tokens >= 1, got {count}"):
        last(program, [InsertDraft()])
    assert everything(program) == before


def test_proposals_do_not_depend_on_rejected_tokens():
    program = drafted("draft_model", k=2)
    step, outputs = program.step(), []
    for rejected in (3, 77):
        sizes = {"B": 1, "T": 4, "M": 3, "N": 3, "E": 1}
        state = {
            name: tuple(b.allocate(sizes, "cpu") for b in spec)
            if isinstance(spec, tuple)
            else spec.allocate(sizes, "cpu")
            for name, spec in program.inputs.items()
        }
        state |= {"block_table": torch.tensor([[2, 0, 1]]), "max_length": torch.tensor([12])}
        state |= {"num_rows": torch.tensor([4])}
        state["window"] = torch.tensor([[5, 6, rejected, rejected]])
        state["verified_tokens"] = torch.tensor([[6, 9, -1, -1]])
        with torch.no_grad():
            outputs.append([t.item() for t in step(**state)[1:]])
    assert outputs[0] == outputs[1]
