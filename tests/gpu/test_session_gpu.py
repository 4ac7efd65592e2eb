"""Sessions on a GPU: 0 tokens and 0 bits of a log-probability differ from each sequence alone."""

from __future__ import annotations

import gc
import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import specgraph
from specgraph import Session, SpeculativeDecoder
from specgraph.bench.models import random_head
from specgraph.config import CacheConfig, load_config
from specgraph.runtime.schedule.recent_acceptance import RecentAcceptance
from tests.decoding import CONFIG, choose_at_random
from tests.models import make_model, ragged_prompts

BEGIN = ragged_prompts((90,))[0]
TAILS = ragged_prompts((1, 40, 7, 130, 16, 3, 64, 25, 9, 200, 33, 5))
PROMPTS = [torch.cat([BEGIN[: (0, 16, 50, 90)[i % 4]], tail]) for i, tail in enumerate(TAILS)] * 2
OPTIONS: list[dict[str, Any]] = [
    {
        "max_new_tokens": 1 + 7 * (index % 6),
        "temperature": (0.0, 1.0, 0.7)[index % 3],
        "top_k": (0, 20)[index % 4 == 0],
        "top_p": (1.0, 0.9)[index % 5 == 0],
        "seed": 100 + index,
        "eos_token_id": ([], [7, 9, 11])[index % 2],
    }
    for index in range(len(PROMPTS))
]


class Result(NamedTuple):
    tokens: list[int]
    logprobs: list[float]
    reason: str


def made(kind: str, rule: str, k: Any = 3, **cache: Any) -> SpeculativeDecoder:
    model = make_model("llama", dtype=torch.bfloat16, max_position_embeddings=512).cuda()
    named = {"kind": "eagle3", "parallel": True} if kind == "peagle" else {"kind": kind}
    options = {**named, "num_speculative_tokens": k}
    config = load_config({"draft": options})
    draft = (
        make_model("llama", seed=1, dtype=torch.bfloat16, num_hidden_layers=1).cuda() if kind == "draft_model" else None
    )
    draft = draft if draft is not None else random_head(model, config.draft)
    own = {**CONFIG, "draft": options, "cache": {"prefill_chunk": 64, "reuse_prefixes": False, **cache}}
    own |= {"verify": {"rule": rule}, "max_batch_size": 6, "debug": {"self_check": False}}
    return specgraph.compile_speculative(model, own, draft=draft)


def by_itself(decoder: SpeculativeDecoder, index: int) -> Result:
    options = {**OPTIONS[index], "seed": [OPTIONS[index]["seed"]]}
    out = decoder.generate([PROMPTS[index]], return_logprobs=True, **options)
    assert out.logprobs is not None
    tokens, ends = out.new_tokens[0].tolist(), OPTIONS[index]["eos_token_id"]
    return Result(tokens, out.logprobs[0].tolist(), "eos" if tokens[-1] in ends else "length")


def random_session(session: Session, seed: int) -> dict[int, Result]:
    """What every sequence gets that is not cancelled, where they come and go at random."""
    dice, left = random.Random(seed), list(range(len(PROMPTS)))
    dice.shuffle(left)
    cancelled = {*dice.sample(left, 6)}
    names: dict[int, int] = {}
    found: dict[int, Result] = {}
    parts: dict[int, tuple[list[int], list[float]]] = {}
    while left or not session._engine.idle:
        for _ in range(min(len(left), dice.choice((0, 0, 1, 3)))):
            index = left.pop()
            names[session.submit(PROMPTS[index], **OPTIONS[index])] = index
        for number, index in names.items():
            if index in cancelled and dice.random() < 0.2:
                session.cancel(number)
        for event in session.step():
            tokens, logprobs = parts.setdefault(event.id, ([], []))
            tokens += event.tokens
            logprobs += event.logprobs or []
            if event.finish_reason not in (None, "cancelled"):
                found[names[event.id]] = Result(tokens, logprobs, event.finish_reason)
    return found


@pytest.mark.parametrize("rule", ["strict", "block"])
@pytest.mark.parametrize("kind", ["none", "ngram", "eagle3", "draft_model", "mtp", "dflash"])
def test_no_bit_differs_from_the_sequence_alone(kind: str, rule: str) -> None:
    decoder = made(kind, rule)
    alone = [by_itself(decoder, index) for index in range(len(PROMPTS))]
    for seed, chunk, reuse in ((0, 64, False), (1, 64, True), (2, 24, True), (3, 2048, True)):
        decoder._runners.cache = CacheConfig(reuse_prefixes=reuse, pool_tokens=1200)
        decoder._runners.idle = None
        decoder.config.cache.prefill_chunk = chunk
        with decoder.session(return_logprobs=True) as session:
            for again in range(2):
                found = random_session(session, seed + 10 * again)
                assert len(found) >= len(PROMPTS) - 6
                for index, result in found.items():
                    assert result == alone[index]
            assert (session.stats.prefix_hit_rate > 0.2) == reuse
            pages = session._engine.pages
            assert pages.num_free == pages.count


@pytest.mark.parametrize("kind", ["ngram", "eagle3", "mtp", "peagle", "dflash"])
def test_no_bit_differs_where_k_follows_the_load(kind: str) -> None:
    plain = made(kind, "strict")
    alone = [by_itself(plain, index) for index in range(len(PROMPTS))]
    decoder = made(kind, "strict", {1: 3, 3: 2, 5: 0})
    for seed in range(2):
        with decoder.session(return_logprobs=True) as session:
            found = random_session(session, seed)
        assert len(found) >= len(PROMPTS) - 6
        for index, result in found.items():
            assert result == alone[index]


@pytest.mark.parametrize("kind", ["ngram", "eagle3", "mtp", "peagle", "dflash", "dflash2"])
def test_no_bit_differs_whatever_k_is_chosen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what was accepted lately, and at random, for all sequences of a step or for each."""
    decoder = made(kind, "strict", "auto")
    expected = [by_itself(made("none", "strict"), index) for index in range(len(PROMPTS))]
    for seed in range(2):
        with decoder.session(return_logprobs=True) as session:
            found = random_session(session, seed)
        assert all(result == expected[index] for index, result in found.items())
        monkeypatch.setattr(RecentAcceptance, "choose", choose_at_random())
    assert len(session.stats.steps_by_drafts) > 2


def test_generate_over_many_prompts_is_bit_for_bit_the_same() -> None:
    decoder = made("eagle3", "strict")
    alone = [by_itself(decoder, index) for index in range(len(PROMPTS))]
    each = {name: [options[name] for options in OPTIONS] for name in OPTIONS[0]}
    out = decoder.generate(PROMPTS, return_logprobs=True, **each)
    assert out.logprobs is not None
    for tokens, values, expected in zip(out.new_tokens, out.logprobs, alone, strict=True):
        assert (tokens.tolist(), values.tolist()) == expected[:2]


def test_memory_does_not_grow_with_the_sequences() -> None:
    decoder = made("ngram", "strict", reuse_prefixes=True, pool_tokens=4000)
    used: list[int] = []
    with decoder.session() as session:
        for _ in range(4):
            random_session(session, 7)
            gc.collect()
            torch.cuda.synchronize()
            used.append(torch.cuda.memory_allocated())
    assert used[3] == used[1]


def test_admission_does_not_wait_for_the_device() -> None:
    decoder = made("eagle3", "strict")
    with decoder.session() as session:
        session.submit(PROMPTS[1], max_new_tokens=30, eos_token_id=[])
        for _ in range(6):
            session.step()
        entering: list[Tensor] = PROMPTS[2:5]
        torch.cuda.set_sync_debug_mode("error")
        try:
            for prompt in entering:
                session.submit(prompt, max_new_tokens=5, eos_token_id=[])
            session._engine._plan()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for _ in session:
            pass
