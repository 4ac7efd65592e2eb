"""Drafts from the target's first layers: the detectors of ``tests.detectors``, completed rows, refusals.

Each planted bug of drafting, and what catches it (``test_planted_bugs_are_caught`` asserts the hits):

=============================  ===========  ======  ======
bug                            fresh start  oracle  slots
=============================  ===========  ======  ======
noise off by one position      missed       caught  missed
chained position off by one    missed       caught  caught
chained rows not written       missed       caught  caught
the token before the newest    missed       caught  missed
=============================  ===========  ======  ======

The drafter has no cache of its own, so drafts that are wrong are so whatever came before. Rows that drafting has run
are the target's, though, so bugs of what is kept of them change tokens or log-probabilities
(``test_planted_bugs_of_kept_rows_change_tokens``).
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import specgraph
from specgraph import SpeculativeDecoder
from specgraph.errors import ConfigError
from specgraph.ir.program import Program
from specgraph.kernels import step
from specgraph.kernels.attention import attention
from specgraph.kernels.step import complete_rows, keep_hidden_, newest_row
from specgraph.runtime.schedule.num_drafts import Choice
from specgraph.runtime.schedule.recent_acceptance import RecentAcceptance
from tests.capturing import captured
from tests.decoding import CONFIG, choose_at_random
from tests.detectors import NextLogits, _slots
from tests.drafters.contract import Case, DraftContract, by_rule, planted
from tests.drafters.test_draft_model import oracle
from tests.harness import BUGS, PlantBug, Run, _replace
from tests.models import double_model, make_model, ragged_prompts

LAYERS = 3


@functools.cache
def target() -> PreTrainedModel:
    return double_model("llama", 0, num_hidden_layers=LAYERS)


def exits(name: str) -> int:
    return int(name.removeprefix("layer "))


@functools.cache
def by_hand(count: int) -> PreTrainedModel:
    """The target with its first layers alone, as transformers runs it."""
    model = copy.deepcopy(target())
    model.model.layers = model.model.layers[:count]
    model.config.num_hidden_layers = count
    return model


def _token_before(window: Tensor, emitted: Tensor, num_emitted: Tensor) -> Tensor:
    return step.last_accepted(window, emitted, (num_emitted - 1).clamp_min(0))


class OwnBugs(PlantBug):
    """Those of :class:`PlantBug` and one of this drafter."""

    bugs: ClassVar[dict[str, Any]] = {
        **BUGS, "the token before the newest": lambda p: _replace(p, step.last_accepted, _token_before),
    }  # fmt: skip


class TestDrafts(DraftContract):
    KIND, TOKENS_TOO, BUG_PASS = "early_exit", False, OwnBugs
    target = staticmethod(target)
    CASES = (*by_rule("layer 1", 4), Case("layer 2", 1), Case("layer 2", 7, "probabilistic"))
    REAL = (Case("layer 2", 4), Case("layer 1", 4, "probabilistic"), Case("layer 2", 7, "block"))
    SEEDED = (Case("layer 1", 4), Case("layer 2", 1), Case("layer 2", 7))
    BUGS = planted(Case("layer 1", 4), {
        "noise off by one position": {"oracle"},
        "chained position off by one": {"oracle", "slots"},
        "chained rows not written": {"oracle", "slots"},
        "the token before the newest": {"oracle"},
    }) + planted(Case("layer 1", 4, "probabilistic"), {"raw logits kept": {"oracle"}})  # fmt: skip

    @classmethod
    def draft(cls, name: str) -> None:
        return None

    @classmethod
    def keys(cls, name: str) -> dict[str, Any]:
        return {"exit_layer": exits(name)}

    @classmethod
    def oracle(cls, name: str) -> NextLogits:
        return oracle(by_hand(exits(name)))

    def check_program(self, case: Case, program: Program) -> None:
        """The first layers have the target's caches of these layers, and there are no others."""
        names = ("first_layers_caches", "target_caches")
        assert [name for name in program.inputs if name.endswith("caches")] == [*names]
        assert [len(program.inputs[name]) // 2 for name in names] == [exits(case.name), LAYERS - exits(case.name)]  # type: ignore[arg-type]

    @classmethod
    def check_slots(cls, run: Run) -> None:
        """The target writes its real rows in all layers, then each draft its own row in the first ones."""
        first = 2 * run.program.drafter.model.attention_layers  # type: ignore[attr-defined]
        for one in run.steps:
            block = [range(s, s + n) for s, n in zip(one.start, one.num_rows, strict=True)]
            window = _slots(run, block, one.width)
            drafts = []
            for offset in range(run.k):
                rows = [(s + n + offset, n > 0) for s, n in zip(one.start, one.num_emitted, strict=True)]
                drafts += [_slots(run, [range(row, row + real) for row, real in rows], 1)] * first
            assert [slots.tolist() for slots in one.slots["draft"]] == [window] * first + drafts
            assert [slots.tolist() for slots in one.slots["target"]] == [window] * (2 * LAYERS - first)
            assert one.slots["other"] == []


def test_steps_without_drafts_are_plain_decoding_and_numbers_for_each_change_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RecentAcceptance, "choose", choose_at_random())
    drafting = {"kind": "early_exit", "exit_layer": 1, "num_speculative_tokens": 3, "adaptive": True}
    tested = captured(specgraph.compile_speculative(target(), {**CONFIG, "draft": drafting}))
    options: dict[str, Any] = {
        "max_new_tokens": 20,
        "eos_token_id": [],
        "temperature": [0.0, 0.8, 1.0],
        "seed": [1, 2, 3],
    }
    prompts = ragged_prompts((3, 9, 5))
    out = tested.generate(prompts, return_logprobs=True, **options)
    expected = TestDrafts.plain().generate(prompts, return_logprobs=True, **options)
    assert [tokens.tolist() for tokens in out.new_tokens] == [tokens.tolist() for tokens in expected.new_tokens]
    assert all(map(torch.equal, out.logprobs, expected.logprobs))
    assert len(out.stats.steps_by_drafts) == 4
    packed = [_called(own) for mode, own in tested._step_cache.steps.items() if mode.packed and mode.completed]
    assert packed and all(names[:2] == ["first_layers", "target_packed"] for names in packed), "completed, and packed"
    monkeypatch.setattr(RecentAcceptance, "choose", lambda *_: Choice(0))
    tested.generate(prompts, **options)
    plain = [_called(own) for mode, own in tested._step_cache.steps.items() if mode.drafts == 0 and not mode.packed]
    assert plain and all(names == ["first_layers", "target", "lm_head"] for names in plain)


def _called(whole: Any) -> list[str]:
    """The modules that a step calls, in order."""
    return [str(node.target) for node in whole.graph.find_nodes(op="call_module")]


REFUSED: list[tuple[str, dict[str, Any], Sequence[str]]] = [
    ("llama", {}, ("draft.exit_layer is None", "the first 1 to 1")),
    ("llama", {"exit_layer": 2}, ("draft.exit_layer is 2", "the first 1 to 1")),
    ("llama", {"exit_layer": 0}, ("draft.exit_layer", "at least 1")),
    ("qwen3_5_text", {"exit_layer": 1}, ("early_exit", "recurrent")),
]


@pytest.mark.parametrize(("architecture", "keys", "words"), REFUSED)
def test_what_has_no_such_drafts_is_refused(architecture: str, keys: dict[str, Any], words: Sequence[str]) -> None:
    with pytest.raises(ConfigError) as error:
        specgraph.compile_speculative(make_model(architecture), {**CONFIG, "draft": {"kind": "early_exit", **keys}})
    assert all(word in str(error.value) for word in words)


# Completed rows

EACH: dict[str, Any] = {
    "max_new_tokens": 20, "eos_token_id": [], "temperature": [0.0, 0.8, 1.0, 0.0], "seed": [1, 2, 3, 4],
    "return_logprobs": True,
}  # fmt: skip
PROMPTS = ragged_prompts((3, 9, 5, 1))


def early(layer: int = 2, **options: Any) -> SpeculativeDecoder:
    draft = {"kind": "early_exit", "exit_layer": layer, "num_speculative_tokens": 3, **options.pop("draft", {})}
    return specgraph.compile_speculative(target(), {**CONFIG, "draft": draft, **options})


def told(decoder: SpeculativeDecoder, **options: Any) -> list[tuple[list[int], list[float]]]:
    """The tokens and log-probabilities of every sequence."""
    out = decoder.generate(PROMPTS, **EACH, **options)
    return [(own.tolist(), said.tolist()) for own, said in zip(out.new_tokens, out.logprobs or (), strict=True)]


def in_circles(ids: Tensor, scores: Tensor) -> Tensor:
    """What is looked up then is right, and what the first layers draft, which no processor of the host sees, is not."""
    return scores + 60.0 * (torch.arange(scores.shape[-1]) == (ids[:, -1:] + 1) % 4)


FIRST: dict[str, Any] = {"first": "ngram", "first_match": 1}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "a penalty": {"repetition_penalty": 1.3}, "the host": {"logits_processor": [in_circles]},
    "a trace": {"trace": True},
}  # fmt: skip


@functools.cache
def of_plain_decoding(options: str) -> list[tuple[list[int], list[float]]]:
    return told(TestDrafts.plain(), **OPTIONS[options])


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("draft", [{}, FIRST, {"max_context": 14}, {**FIRST, "max_context": 14}], ids=str)
def test_every_kind_of_step_gives_the_bits_of_plain_decoding(draft: dict[str, Any], options: str) -> None:
    assert told(early(draft=draft), **OPTIONS[options]) == of_plain_decoding(options)


def test_sequences_that_come_and_go_have_the_bits_of_plain_decoding() -> None:
    """Where prompts run, all rows do; a sequence takes the state row of one that was cancelled."""
    heard = []
    for decoder in (
        early(max_batch_size=2),
        specgraph.compile_speculative(target(), {**CONFIG, "draft": {"kind": "none"}, "max_batch_size": 2}),
    ):
        said: dict[int, list[Any]] = {}
        with decoder.session(return_logprobs=True) as session:
            numbers = [session.submit(prompt, max_new_tokens=15, eos_token_id=[]) for prompt in PROMPTS]
            for count, event in enumerate(session):
                said.setdefault(event.id, []).extend(zip(event.tokens, event.logprobs or (), strict=True))
                if count == 3:
                    session.cancel(numbers[0])
        heard.append([said[number] for number in numbers[1:]])
    assert heard[0] == heard[1]


def test_every_row_runs_through_every_layer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step that decodes, the first layers run K drafts and the last row of the window, and no window."""
    decoder, widths = early(draft={"num_speculative_tokens": 4}), Counter[int]()
    original = attention.write_cache

    def record(cache: Tensor, values: Tensor, slots: Tensor) -> None:
        widths[slots.shape[1]] += 1
        original(cache, values, slots)

    monkeypatch.setattr(attention, "write_cache", record)
    out = decoder.generate([PROMPTS[0]], max_new_tokens=20, eos_token_id=[])
    steps, both = out.stats.steps_by_drafts[4], 2  # keys and values
    # The first layers are two of three. One step more runs the prompt, all of it at once, and then drafts.
    assert steps == out.stats.steps - 1
    assert widths == {1: both * 2 * (5 * steps + 4), 5: both * steps, 3: both * LAYERS}


@step.writes("kept")
def _kept_elsewhere(kept: Tensor, hidden: Tensor, rows: Tensor, num_emitted: Tensor, *, row: int) -> None:
    keep_hidden_(kept, hidden, rows, num_emitted, row=(row + 1) % kept.shape[1])


def _of_another_sequence(kept: Tensor, newest: Tensor, rows: Tensor, *rest: Tensor) -> Tensor:
    return complete_rows(kept, newest, rows.roll(1), *rest)


def _one_row_too_many(kept: Tensor, newest: Tensor, rows: Tensor, num_rows: Tensor, window: Tensor) -> Tensor:
    return complete_rows(kept, newest, rows, num_rows + 1, window)


def _row_before_the_newest(window: Tensor, positions: Tensor, num_rows: Tensor) -> tuple[Tensor, ...]:
    return (*newest_row(window, positions, num_rows - 1)[:2], num_rows.clamp(max=1))


def _newest_not_written(window: Tensor, positions: Tensor, num_rows: Tensor) -> tuple[Tensor, ...]:
    return (*newest_row(window, positions, num_rows)[:2], num_rows * 0)


KEPT_BUGS: dict[Callable[..., Any], str] = {
    _kept_elsewhere: "keep_hidden_", _of_another_sequence: "complete_rows", _one_row_too_many: "complete_rows",
    _row_before_the_newest: "newest_row", _newest_not_written: "newest_row",
}  # fmt: skip
"""Each planted bug of what is kept, and the function of the step whose place it takes."""


@pytest.mark.parametrize("wrong", KEPT_BUGS, ids=lambda wrong: wrong.__name__.strip("_"))
def test_planted_bugs_of_kept_rows_change_tokens(wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, KEPT_BUGS[wrong], wrong)
    assert told(early()) != of_plain_decoding("plain")


def test_drafts_of_another_kind_are_not_completed() -> None:
    """What is looked up is not what the first layers have run."""
    decoder = early(draft={"first": "ngram", "first_match": 1})
    told(decoder)
    (report,) = [own for own in decoder._reports if own.name == "complete_rows"]
    assert not report.result.matches and "may be others" in report.result.near_misses[0].reason


def test_devices_that_share_the_target_run_the_first_layers_whole() -> None:
    shared = {"parallel": {"tensor": 2, "devices": ["cpu"] * 2}}
    plain = specgraph.compile_speculative(target(), {**CONFIG, "draft": {"kind": "none"}, **shared})
    assert told(early(**shared)) == told(plain)


@pytest.mark.parametrize("lowering", ["eager", "gpu"])
@pytest.mark.parametrize("architecture", ["gpt2", "opt"])
def test_a_model_whose_final_norm_has_another_name(architecture: str, lowering: str) -> None:
    """GPT-2 reads the sizes of its tokens behind this norm."""
    model, each = double_model(architecture, 0), []
    for draft in ({"kind": "none"}, {"kind": "early_exit", "exit_layer": 1}):
        each.append(told(specgraph.compile_speculative(model, {**CONFIG, "draft": draft, "lowering": lowering})))
    assert each[0] == each[1]
