"""Sequences that begin with the same tokens share pages, and nothing that they emit tells."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from specgraph import Session, SpeculativeDecoder
from specgraph.config import CacheConfig
from specgraph.config.draft import LOOKUPS
from specgraph.runtime.memory.pages import PagePool, Reservation
from tests.decoding import CONFIG, compiled
from tests.drafters import test_matrix
from tests.models import make_model, ragged_prompts, shared_model
from tests.runtime.test_decoder import noisy_copy
from tests.runtime.test_session import replayed

SHARED, OTHER = ragged_prompts((26, 13))
TAILS = ragged_prompts((1, 5, 9, 2, 14, 3))
PROMPTS = [torch.cat([SHARED[: 26 - 5 * (i % 3)], tail]) for i, tail in enumerate(TAILS)]
PROMPTS += [SHARED, SHARED[:9], torch.cat([SHARED[:16], OTHER]), OTHER, PROMPTS[0]]
REUSING = {**CONFIG["cache"], "reuse_prefixes": True}


def tokens_of(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def made(kind: str, rule: str, reuse: bool = True, **extra: Any) -> SpeculativeDecoder:
    draft = noisy_copy() if kind == "draft_model" else None
    cache = {**CONFIG["cache"], "reuse_prefixes": reuse, "pool_tokens": 200}
    extra = {"max_batch_size": 3, "max_length": 64, "verify": {"rule": rule}, "cache": cache, **extra}
    return compiled(shared_model("llama", dtype=torch.float64), kind, draft=draft, **extra)


def options(index: int) -> dict[str, Any]:
    return {"max_new_tokens": 6 + index, "temperature": float(index % 3 > 0), "seed": index, "eos_token_id": []}


def steps_of(session: Session, prompts: list[Tensor], seed: int) -> list[list[list[int]]]:
    """What each step of every sequence emits, where they arrive at random."""
    dice, left = random.Random(seed), list(range(len(prompts)))
    dice.shuffle(left)
    names: dict[int, int] = {}
    steps: list[list[list[int]]] = [[] for _ in prompts]
    while left or not session._engine.idle:
        for _ in range(min(len(left), dice.choice((0, 1, 1, 3)))):
            index = left.pop()
            names[session.submit(prompts[index], **options(index))] = index
        for event in session.step():
            if event.tokens:
                steps[names[event.id]].append(event.tokens)
    return steps


@pytest.mark.parametrize(
    ("kind", "rule"),
    [("none", "strict"), ("ngram", "probabilistic"), ("suffix", "block"), ("draft_model", "strict"),
     ("draft_model", "block")],
)  # fmt: skip
def test_every_step_emits_what_it_does_without_reuse(kind: str, rule: str) -> None:
    """Equal numbers of accepted drafts mean equal drafts: what drafters keep is right, too."""
    with made(kind, rule, reuse=False).session() as session:
        expected = steps_of(session, PROMPTS, seed=0)
        assert session.stats.reused_tokens == 0
    decoder = made(kind, rule)
    for seed in (1, 2):
        with decoder.session() as session:
            assert steps_of(session, PROMPTS, seed) == expected
            again = session.stats.prompt_tokens
            assert 0.3 < session.stats.prefix_hit_rate < 0.8
            assert steps_of(session, PROMPTS, seed + 2) == expected  # what has ended serves those that come later
            assert session.stats.prompt_tokens - again < again
            assert session._engine.pages.num_free == session._engine.pages.count


def drafts_of(session: Session, prompt: Tensor) -> Tensor:
    """What the first drafts behind a prompt were drawn from, or these drafts where they are drawn from nothing."""
    number = session.submit(prompt, max_new_tokens=8, temperature=1.0, seed=5, eos_token_id=[])
    while not any(event.tokens for event in session.step()):
        pass
    engine, state = session._engine, session._engine._runner.state
    (row,) = (row for row, sequence in engine._running.items() if sequence.number == number)
    kept = state["draft_logits" if "draft_logits" in state else "next_window"][row].double().clone()
    session.cancel(number)
    session.step()
    return kept


@pytest.mark.parametrize("drafter", [name for name in test_matrix.DRAFTERS if name not in LOOKUPS])
def test_what_heads_keep_of_a_shared_prefix_is_right(drafter: str) -> None:
    prompts = [PROMPTS[index] % test_matrix.VOCAB for index in (0, 4, 6, 8)]  # share 16 to 24 tokens
    extra = {"max_batch_size": 3, "max_length": 64, "cache": CONFIG["cache"]}
    decoder = test_matrix.decoder(drafter, None, "llama", "probabilistic", 3, **extra)
    with decoder.session() as session:
        expected = steps_of(session, prompts, seed=0)
        logits = [drafts_of(session, prompt) for prompt in prompts]
    decoder._runners.cache = CacheConfig(**REUSING)
    with decoder.session() as session:
        for prompt, own in zip(prompts, logits, strict=True):
            torch.testing.assert_close(drafts_of(session, prompt), own, rtol=0, atol=1e-9)
        assert session.stats.prefix_hit_rate > 0.3
    with decoder.session() as session:
        assert steps_of(session, prompts, seed=1) == expected


def test_states_that_are_kept_keep_what_their_pages_hold() -> None:
    decoder = replayed(cache=REUSING)
    expected = replayed().generate(PROMPTS, max_new_tokens=9)
    assert expected.stats.reused_tokens == 0
    for _ in range(2):
        found = decoder.generate(PROMPTS, max_new_tokens=9)
        assert all(map(torch.equal, found.new_tokens, expected.new_tokens))
    for _ in range(2):
        stats = decoder.generate(PROMPTS[4:6], max_new_tokens=9).stats
    assert stats.reused_tokens == sum((len(prompt) - 1) // 4 * 4 for prompt in PROMPTS[4:6])
    decoder.forget_prefixes()
    assert decoder.generate(PROMPTS[8:9], max_new_tokens=9).stats.reused_tokens == 0


def test_a_stream_closed_half_way_gives_its_pages_back() -> None:
    decoder = replayed(cache=REUSING)
    stream = decoder.stream(PROMPTS, max_new_tokens=20)
    for _ in range(5):
        next(stream)
    stream.close()
    space = decoder._runners.idle
    assert space is not None and space.pages.num_free == space.pages.count
    expected = replayed().generate(PROMPTS, max_new_tokens=9).new_tokens
    assert all(map(torch.equal, decoder.generate(PROMPTS, max_new_tokens=9).new_tokens, expected))


def test_other_weights_find_nothing() -> None:
    model = make_model("llama", dtype=torch.float64)
    decoder = compiled(model, "none", cache=REUSING, max_length=64)
    with decoder.session() as session:

        def tokens() -> list[int]:
            session.submit(SHARED, max_new_tokens=9, eos_token_id=[])
            return [token for event in session for token in event.tokens]

        before, weight = tokens(), model.get_input_embeddings().weight
        assert tokens() == before and session.stats.reused_tokens == 24
        with torch.no_grad():
            weight.mul_(-1)  # PyTorch counts what is written in place
        changed = tokens()
        assert changed != before and session.stats.reused_tokens == 24
        weight.data.mul_(-1)  # but not this
        session.forget_prefixes()
        assert tokens() == before and session.stats.reused_tokens == 24
        session.submit(SHARED, max_new_tokens=30, eos_token_id=[])
        for _ in range(7):
            session.step()
        session.forget_prefixes()  # what is running now was begun with the weights of before
        for _ in session:
            pass
        assert tokens() == before and session.stats.reused_tokens == 24 + 24


def test_a_nan_is_not_handed_on() -> None:
    model = make_model("llama", dtype=torch.float64)
    decoder = compiled(model, "none", cache=REUSING, max_length=64)
    weight = model.get_output_embeddings().weight
    with decoder.session() as session:
        good = weight.detach().clone()
        weight.data[5] = torch.nan
        session.submit(SHARED, max_new_tokens=9)
        assert [event.finish_reason for event in session][-1] == "error"
        weight.data.copy_(good)
        session.submit(SHARED, max_new_tokens=9)
        assert [event.finish_reason for event in session][-1] == "length"
        assert session.stats.reused_tokens == 0


# The pool by itself: pages of 2 tokens, whose rows depend on one token more


def filled(pool: PagePool, *tokens: int, length: int = 0) -> Reservation:
    reserved = pool.reserve(tokens_of(*tokens), max(length, len(tokens)))
    assert reserved is not None
    pool.offer(reserved, tokens_of(*tokens))
    return reserved


def test_a_page_is_shared_if_its_tokens_and_those_its_rows_depend_on_are_the_same() -> None:
    pool = PagePool(20, 2)
    first = filled(pool, 1, 2, 3, 4, 5)
    assert first.num_shared == 0 and len(first.pages) == 3
    same = filled(pool, 1, 2, 3, 4, 5, 6, 7)
    assert same.num_shared == 2 and same.pages[:2] == first.pages[:2]
    assert filled(pool, 1, 2, 3, 4).num_shared == 1  # the last token must be run
    assert filled(pool, 1, 2, 3, 9, 5).num_shared == 1
    assert filled(pool, 1, 2, 9, 4, 5).num_shared == 0  # a drafter's row 1 depends on the 9
    assert filled(pool, 9, 2, 3, 4, 5).num_shared == 0
    assert PagePool(20, 2, 3).filled(tokens_of(1, 2, 3, 4)) == []
    assert filled(PagePool(20, 2, reuse=False), 1, 2, 3).num_shared == 0


def test_a_pool_gives_each_page_once_and_forgets_what_was_not_used_for_long() -> None:
    pool = PagePool(5, 2)
    first, second = filled(pool, 1, 2, 3), filled(pool, 4, 5, 6, 7, 8)
    assert sorted([*first.pages, *second.pages]) == list(range(5)) and pool.num_free == 0
    assert pool.reserve(tokens_of(9), 1) is None
    pool.give_back(first)
    pool.give_back(second)
    assert pool.num_free == 5
    again = filled(pool, 1, 2, 3)
    assert again.num_shared == 1
    assert pool.reserve(tokens_of(4, 5, 6, 7, 8), 12) is None  # needs 6
    large = filled(pool, 9, 9, 9, 9, 9, 9)  # takes what held 4, 5, 6, 7
    assert large.num_shared == 0 and not {*large.pages} & {*again.pages}
    pool.give_back(large)
    assert filled(pool, 4, 5, 6, 7, 8).num_shared == 0


def test_the_pages_of_a_match_are_not_taken_from_under_it() -> None:
    pool = PagePool(3, 2)
    pool.give_back(filled(pool, 1, 2, 3, 4, 5))
    reserved = pool.reserve(tokens_of(1, 2, 3, 4, 5), 6)
    assert reserved is not None and reserved.num_shared == 2 and len({*reserved.pages}) == 3
    pool.give_back(reserved)
    assert pool.reserve(tokens_of(1, 2, 3, 4, 5), 8) is None and pool.num_free == 3


@pytest.mark.parametrize("seed", range(5))
def test_random_reservations_leave_nothing_behind(seed: int) -> None:
    dice = random.Random(seed)
    pool, held = PagePool(12, 2), []
    for _ in range(400):
        if held and dice.random() < 0.5:
            pool.give_back(held.pop(dice.randrange(len(held))))
        else:
            prompt = tokens_of(*(dice.randrange(2) for _ in range(dice.randrange(1, 12))))
            reserved = pool.reserve(prompt, len(prompt) + dice.randrange(4))
            if reserved is not None:
                held.append(reserved)
                pool.offer(reserved, prompt)
        used = {page for reserved in held for page in reserved.pages}
        assert pool.num_free == 12 - len(used)
        own = [page for reserved in held for page in reserved.pages[reserved.num_shared :]]
        assert len(own) == len({*own})  # nobody writes what is another's
        assert {*pool._known.values()} == {*pool._names} and len(pool._known) == len(pool._names)
        if dice.random() < 0.02:
            pool.forget()
    for reserved in held:
        pool.give_back(reserved)
    assert pool.num_free == 12
