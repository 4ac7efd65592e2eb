"""Drafts from the target's first layers: the detectors of ``tests.detectors``, one shared cache, refusals.

Each planted bug, and what catches it (``test_planted_bugs_are_caught`` asserts the hits; tokens would stay equal):

=============================  ===========  ======  ======
bug                            fresh start  oracle  slots
=============================  ===========  ======  ======
noise off by one position      missed       caught  missed
chained position off by one    missed       caught  caught
chained rows not written       missed       caught  caught
the token before the newest    missed       caught  missed
=============================  ===========  ======  ======

The drafter keeps nothing of its own, so drafts that are wrong are so whatever came before.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import specgraph
from specgraph.errors import ConfigError
from specgraph.ir.program import Program
from specgraph.kernels import step
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
    monkeypatch.setattr(RecentAcceptance, "choose", lambda *_: Choice(0))
    tested.generate(prompts, **options)
    graphs: list[Any] = [own for mode, own in tested._step_cache.steps.items() if mode.drafts == 0]
    assert graphs and not any(own.graph.find_nodes(op="call_module", target="draft") for own in graphs)


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


def test_a_cache_that_devices_share_is_refused() -> None:
    config = {
        **CONFIG,
        "draft": {"kind": "early_exit", "exit_layer": 1},
        "parallel": {"tensor": 2, "devices": ["cpu"] * 2},
    }
    with pytest.raises(ConfigError, match="early_exit reads the target's KV cache"):
        specgraph.compile_speculative(make_model("llama"), config)
