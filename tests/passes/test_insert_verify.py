from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specgraph.errors import PassError
from specgraph.ir.program import Program
from specgraph.ir.verifier import verify_program
from specgraph.kernels.sampling.sample import RULES
from specgraph.kernels.state import Buffer
from specgraph.passes.expose_features import ExposeFeatures
from specgraph.passes.insert_draft import InsertDraft
from specgraph.passes.insert_kv_cache import InsertKVCache
from specgraph.passes.insert_verify import InsertVerify
from tests.compiler.test_pipeline import body, everything, first, last, text
from tests.kernels.verify import definition

STATE = ("next_window", "start", "num_rows", "num_forced")


def verified(drafter: str, k: int = 2, **options: Any) -> Program:
    rule = options.get("rule", "strict")
    program = last(first(drafter, k), [InsertKVCache(4), InsertDraft(rule), InsertVerify(**options)])
    verify_program(program)
    return program


def test_verification_stands_between_the_logits_and_the_draft():
    program = verified("ngram", rule="typical", posterior_threshold=0.2, posterior_alpha=0.4)
    assert text(body(program)) == text("""
        positions, next_positions = step_positions_and_next(start, window)
        hidden = self.target(tokens=window, positions=positions, num_rows=num_rows, block_table=block_table,
            max_length=max_length, caches=target_caches)
        needed = needed_rows(hidden, num_forced, 3)
        logits = self.lm_head(needed)
        drafts = draft_tokens(window)
        verified_tokens, _, _, logprobs, bad = torch.ops.specgraph.verify.default(logits, drafts, None, temperature,
            seeds, next_positions, top_k, top_p, min_p, num_rows, num_forced, None, rule="typical",
            posterior_threshold=0.2, posterior_alpha=0.4, acceptance_rate=0.7, logprobs="none")
        emitted, num_emitted, drafter_tokens, accepted_positions, accepted_rows, _, length, _ =
            finalize_step(verified_tokens, window, start, num_forced, eos_ids, shifted=False, vocab_size=101)
        step_record_tokens_(history, rows, drafter_tokens, accepted_positions, accepted_rows)
        proposals = ngram_lookup(history, rows, length, num_speculative_tokens=2, max_ngram=3, min_ngram=1)
        advance_(next_window, start, num_rows, num_forced, emitted, num_emitted, [proposals], max_length, eos_ids)
        return emitted, num_emitted, logprobs, bad
    """)
    assert [program.one(r).name for r in ("emitted", "num_emitted", "logprobs", "bad")] == [
        "emitted", "num_emitted", "logprobs", "bad",
    ]  # fmt: skip


def test_verified_tokens_are_no_input_any_more():
    program = verified("draft_model", k=2, rule="block")
    assert "verified_tokens" not in program.inputs
    assert program.inputs["next_window"] == Buffer(("B", 3))
    assert program.inputs["eos_ids"] == Buffer(("B", "E"), fill=-1)
    assert text([line for line in body(program) if line.startswith("verified_tokens")]) == text("""
        verified_tokens, _, _, logprobs, bad = torch.ops.specgraph.verify.default(logits, drafts, draft_logits,
            temperature, seeds, next_positions, top_k, top_p, min_p, num_rows, num_forced, None, rule="block",
            posterior_threshold=0.09, posterior_alpha=0.3, acceptance_rate=0.7, draft_rows=rows, logprobs="none")
    """)


@pytest.mark.parametrize("rule", ["strict", "block"])
def test_the_draft_id_of_every_target_id_is_a_constant_where_distributions_are_compared(rule: str):
    given = first("draft_model", 2)
    to_target = torch.randperm(101, generator=torch.Generator().manual_seed(0))
    given.drafter = replace(given.drafter, draft_to_target=to_target)
    program = last(given, [InsertKVCache(4), InsertDraft(rule), InsertVerify(rule)])
    verify_program(program)
    compared = rule == "block"
    readers = [line for line in body(program) if ", num_forced, target_to_draft, rule" in line]
    assert len(readers) == compared
    assert ("target_to_draft" in program.modules) == compared
    if compared:
        found = program.modules["target_to_draft"]()
        assert found.dtype == torch.int32 and found[to_target].tolist() == list(range(101))


def test_without_a_drafter_the_step_has_one_row():
    program = verified("none")
    assert program.inputs["next_window"] == Buffer(("B", 1))
    assert "needed = needed_rows(hidden, num_forced, 1)" in body(program)
    assert any(line.startswith("advance_(") and ", [], max_length" in line for line in body(program))


def test_features_are_left_alone():
    program = last(first("ngram"), [ExposeFeatures((1,)), InsertKVCache(4), InsertDraft(), InsertVerify()])
    verify_program(program)
    assert "needed = needed_rows(hidden, num_forced, 4)" in body(program)


@pytest.mark.parametrize(
    ("passes", "missing", "first_pass"),
    [([], "draft", "insert_draft"), ([InsertKVCache()], "draft", "insert_draft")],
)
def test_what_must_run_first_is_named(passes: list[Any], missing: str, first_pass: str):
    with pytest.raises(PassError, match=f"insert_verify needs '{missing}', .*: put {first_pass} before it"):
        last(first(), [*passes, InsertVerify()])


def test_an_unknown_rule_is_refused_and_changes_nothing():
    program = last(first(), [InsertKVCache(), InsertDraft()])
    before = everything(program)
    with pytest.raises(ValueError, match=r"rule must be one of strict, .*; got 'strickt'"):
        last(program, [InsertVerify("strickt")])
    assert everything(program) == before


def state_of(program: Program, generator: torch.Generator) -> dict[str, Any]:
    """Four sequences: decoding, at the end of a prompt, inside one, and finished."""
    sizes = {"B": 4, "T": 5, "M": 4, "N": 16, "S": 16, "E": 2}
    state: dict[str, Any] = {
        name: tuple(b.allocate(sizes, "cpu") for b in spec) if isinstance(spec, tuple) else spec.allocate(sizes, "cpu")
        for name, spec in program.inputs.items()
    }
    state["block_table"] = torch.randperm(16, generator=generator).view(4, 4)
    state["window"] = torch.randint(3, 101, (4, 5), generator=generator)
    state["num_rows"], state["num_forced"] = torch.tensor([3, 4, 5, 0]), torch.tensor([0, 3, 4, 0])
    state["max_length"] = torch.full((4,), 16)
    state["temperature"], state["seeds"] = torch.tensor([0.0, 1.0, 0.5, 1.0]), torch.arange(4)
    state["eos_ids"] = torch.tensor([[2, -1]] * 4)
    if "draft_logits" in state:
        state["draft_logits"].copy_(torch.randn(state["draft_logits"].shape, generator=generator))
    return state


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafter", ["ngram", "draft_model"])
def test_the_step_emits_what_the_reference_says_about_a_dense_forward(rule: str, drafter: str):
    program = verified(drafter, rule=rule)
    state = state_of(program, torch.Generator().manual_seed(0))
    window: Tensor = state["window"]
    with torch.no_grad():
        logits = first().step()(window=window, start=torch.zeros(4, dtype=torch.int64))
        # The step has logits for the last K + 1 = 3 rows at most, from the first that is not forced.
        begin = state["num_forced"].clamp(max=2)
        needed = logits.gather(1, (begin.unsqueeze(1) + torch.arange(3)).unsqueeze(2).expand(-1, -1, 101))
        keep = state.get("draft_logits")
        expected = definition.verified(
            needed, window[:, 1:], None if keep is None else keep.clone(), temperature=state["temperature"],
            seeds=state["seeds"], positions=torch.arange(1, 6).expand(4, 5).contiguous(), rule=rule,
            num_rows=state["num_rows"].clone(), num_forced=state["num_forced"].clone(),
        )  # fmt: skip
        emitted, num_emitted, _, bad = program.step()(**state)
    assert not bool((expected[0] == 2).any())  # no EOS: nothing is cut
    assert torch.equal(emitted, expected[0]) and torch.equal(num_emitted, expected[1])
    assert not bool(bad.any()) and int(num_emitted[3]) == 0
    assert state["num_forced"].tolist() == [0] * 4 and state["start"].tolist() == num_emitted.tolist()
    moved = num_emitted > 0
    assert torch.equal(
        state["next_window"][moved, 0], emitted.gather(1, (num_emitted - 1).clamp_min(0)[:, None])[moved, 0]
    )
    assert int(state["num_rows"][3]) == 0 and bool((state["num_rows"][moved] >= 1).all())


def copied(value: Any) -> Any:
    return tuple(t.clone() for t in value) if isinstance(value, tuple) else value.clone()


def test_a_nan_that_a_sequence_really_reads_marks_it_alone():
    program = verified("ngram")
    state = state_of(program, torch.Generator().manual_seed(0))
    state["target_caches"][0].fill_(torch.nan)  # written over where rows are real, and masked elsewhere
    with torch.no_grad():
        assert program.step()(**dict(state))[3].tolist() == [0] * 4
    state = state_of(program, torch.Generator().manual_seed(0))
    state["start"] = torch.full((4,), 4)
    for cache in state["target_caches"]:
        cache[state["block_table"][1, 0]] = torch.nan
    with torch.no_grad():
        assert program.step()(**state)[3].tolist() == [0, -1, 0, 0]
