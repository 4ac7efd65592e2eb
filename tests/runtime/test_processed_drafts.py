"""Drafts are drawn from logits that are changed as the target's are: acceptance, every drafter, every rule."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from specgraph import SpeculativeDecoder
from tests.decoding import compiled
from tests.drafters.test_matrix import DRAFTERS, PROMPTS, decoder, heads_exported_once
from tests.models import make_head, ragged_prompts, shared_model
from tests.runtime import test_processing
from tests.runtime.test_processing import GREEDY, NEW

__all__ = ["heads_exported_once"]
DRAWING = [name for name in DRAFTERS if name not in ("ngram", "suffix")]
OPTIONS = [{"temperature": (0.0, 1.0)[n % 2], "seed": 30 + n} for n in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def model() -> Any:
    return shared_model("llama", dtype=torch.float64)


@pytest.fixture(scope="module")
def sure(model: Any) -> SpeculativeDecoder:
    """The target drafts for itself."""
    return compiled(model, "draft_model", draft=model, max_length=96)


@pytest.mark.parametrize("name", GREEDY)
def test_a_draft_with_the_targets_distribution_is_always_accepted(sure: SpeculativeDecoder, name: str) -> None:
    """Every prompt greedily, and at temperature 1."""
    prompts = test_processing.PROMPTS
    temperature = [0.0] * len(prompts) + [1.0] * len(prompts)
    given = {"max_new_tokens": NEW, "temperature": temperature, "seed": 3, "eos_token_id": [], **GREEDY[name]}
    out = sure.generate([*prompts, *prompts], **given)
    full = sure.config.draft.num_speculative_tokens + 1
    for emitted in out.stats.emitted_per_step:
        assert len(emitted) > 3 and {*emitted[:-1]} == {full}


def drafted(tested: SpeculativeDecoder, prompts: list[Any], **options: Any) -> list[tuple[list[int], list[int]]]:
    """The tokens of a sequence and its drafts, whenever there are any, with the last prompts' sequences still going."""
    found = []
    with tested.session() as session:
        for prompt, own in zip(prompts, OPTIONS, strict=False):
            session.submit(prompt, **own, **options)
        for _ in session:
            state = session._engine._runner.state
            for row, count in enumerate(state["num_rows"].tolist()):
                start, window = int(state["start"][row]), state["next_window"][row].tolist()
                if count > 1:
                    tokens = [*state["history"][row, :start].tolist(), window[0]]
                    found.append((tokens, [token for token in window[1:count] if token >= 0]))
    return found


def kept_logits(tested: SpeculativeDecoder, prompts: list[Any], **options: Any) -> list[Tensor]:
    """What the drafts of a sequence at temperature 1 were drawn from, whenever there are any."""
    found = []
    with tested.session() as session:
        session.submit(prompts[0], temperature=1.0, seed=1, max_new_tokens=12, **options)
        for _ in session:
            state = session._engine._runner.state
            if int(state["num_rows"][0]) == state["next_window"].shape[1]:
                found.append(state["draft_logits"][0].clone())
    assert len(found) > 3
    return found


def repeats(tokens: list[int], drafts: list[int]) -> list[tuple[int, int]]:
    """Pairs that end in a draft and stand before it, too."""
    whole = [*tokens, *drafts]
    every = [*pairwise(whole)]
    return [pair for place, pair in enumerate(every) if place >= len(tokens) - 1 and pair in every[:place]]


@pytest.mark.parametrize(
    ("name", "rule"),
    [(name, ("strict", "probabilistic", "strict", "block")[place % 4]) for place, name in enumerate(DRAWING)],
)
def test_no_drafter_drafts_what_the_context_forbids(name: str, rule: str) -> None:
    """Each draft is part of the context of the next one, also where one call makes all.

    Drafts are drawn in one way for ``strict``, and in another for both of the other rules: each way meets chains of
    calls and single calls.
    """
    found = drafted(decoder(name, None, "llama", rule, 3, max_length=64), PROMPTS, max_new_tokens=20,
                    no_repeat_ngram_size=2, eos_token_id=[])  # fmt: skip
    assert len(found) > 20 and sum(len(drafts) for _, drafts in found) > 60
    assert not any(repeats(*one) for one in found)


@pytest.mark.parametrize(("rule", "parallel"), [("strict", True), ("probabilistic", False)])
def test_a_smaller_vocabulary_is_changed_by_target_ids(model: Any, rule: str, parallel: bool) -> None:
    """Ids of the draft are other ones than those of the target. What is kept of a draft is what it was drawn from."""
    head = make_head(model, vocab=60)
    ids = head.module.draft_to_target
    tested = compiled(model, "eagle3", draft=head, max_length=96, verify={"rule": rule},
                      **{"draft.parallel": parallel})  # fmt: skip
    forbidden = ids[::2].tolist()
    prompts = ragged_prompts((3, 17, 8))
    found = drafted(tested, prompts, max_new_tokens=20, suppress_tokens=forbidden, no_repeat_ngram_size=1)
    assert len(found) > 10
    for tokens, drafts in found:
        assert {*drafts} <= {*ids.tolist()} - {*forbidden} - {*tokens} and len({*drafts}) == len(drafts)
    if rule == "probabilistic":
        for kept in kept_logits(tested, prompts, suppress_tokens=forbidden):
            assert (kept[:, ::2] == -torch.inf).all() and (kept[:, 1::2] > -torch.inf).all()
    free = drafted(tested, prompts, max_new_tokens=20)
    assert any({*drafts} & {*forbidden} for _, drafts in free)


@pytest.mark.parametrize("name", ["draft_model", "mtp, 3 chained", "dspark"])
def test_fewer_drafts_are_drawn_in_the_same_way(name: str) -> None:
    options: dict[str, Any] = {"max_new_tokens": 20, "no_repeat_ngram_size": 2, "eos_token_id": []}
    each = {key: [own[key] for own in OPTIONS] for key in OPTIONS[0]}
    plain = decoder("ngram", None, "llama", "strict", 3, max_length=64).generate(PROMPTS, **each, **options)
    tested = decoder(name, None, "llama", "strict", {1: 3, 3: 1, 5: 0}, max_length=64)
    out = tested.generate(PROMPTS, **each, **options)
    assert [row.tolist() for row in out.new_tokens] == [row.tolist() for row in plain.new_tokens]
    found = drafted(tested, PROMPTS, **options)
    assert {len(drafts) for _, drafts in found} >= {1, 3}
    assert not any(repeats(*one) for one in found)


def test_a_lookup_stands_in_front_of_processed_drafts(model: Any) -> None:
    tested = compiled(model, "draft_model", draft=model, max_length=96, **{"draft.first": "ngram"})
    for temperature in (0.0, 1.0):
        given = {"max_new_tokens": NEW, "temperature": temperature, "seed": 3, "repetition_penalty": 1.3}
        plain = compiled(model, "none", max_length=96).generate(test_processing.PROMPTS, **given)
        out = tested.generate(test_processing.PROMPTS, **given)
        assert [row.tolist() for row in out.new_tokens] == [row.tolist() for row in plain.new_tokens]
