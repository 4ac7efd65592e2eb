"""Sessions: sequences that come and go get what they would get alone, rows and pages are free when they end."""

from __future__ import annotations

import asyncio
import math
import random
import threading
from collections.abc import Iterable
from typing import Any

import pytest
import torch

import specgraph
from specgraph import Capacity, Event, InputError, NumericsError, Session, SpeculativeDecoder
from specgraph.runtime.memory import sizing as memory
from specgraph.runtime.memory.pages import PagePool
from tests.decoding import CONFIG, compiled
from tests.models import ragged_prompts, shared_model
from tests.runtime.test_decoder import noisy_copy
from tests.runtime.test_runner import replaying

PROMPTS = ragged_prompts((3, 17, 8, 1, 30, 5, 11, 2, 9, 4, 21, 6))
OPTIONS: list[dict[str, Any]] = [
    {
        "max_new_tokens": 3 + 5 * (index % 4),
        "temperature": (0.0, 1.0)[index % 2],
        "top_k": (0, 20)[index % 3 == 0],
        "top_p": (1.0, 0.9)[index % 5 == 0],
        "seed": 100 + index,
        "eos_token_id": ([], [7, 9, 11])[index % 2],
    }
    for index in range(len(PROMPTS))
]
ROWS = 3


def made(kind: str = "ngram", rule: str = "strict", **extra: Any) -> SpeculativeDecoder:
    draft = noisy_copy() if kind == "draft_model" else None
    extra = {"max_batch_size": ROWS, "max_length": 64, "verify": {"rule": rule}, **extra}
    return compiled(shared_model("llama", dtype=torch.float64), kind, draft=draft, **extra)


def replayed(kind: str = "ngram", **extra: Any) -> SpeculativeDecoder:
    return replaying(kind, max_batch_size=ROWS, max_length=64, **extra)


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return made("draft_model")


@pytest.fixture(scope="module")
def alone(decoder: SpeculativeDecoder) -> list[list[int]]:
    """What each of the sequences gives by itself."""
    return [by_itself(decoder, index).new_tokens[0].tolist() for index in range(len(PROMPTS))]


def by_itself(decoder: SpeculativeDecoder, index: int, **extra: Any) -> Any:
    options = OPTIONS[index]
    return decoder.generate([PROMPTS[index]], **{**options, "seed": [options["seed"]]}, **extra)


def gathered(events: Iterable[Event]) -> dict[int, list[int]]:
    """The tokens of every sequence; checks that each ends once, and that nothing comes after it."""
    tokens: dict[int, list[int]] = {}
    ended: set[int] = set()
    for event in events:
        assert event.id not in ended
        tokens.setdefault(event.id, []).extend(event.tokens)
        if event.finish_reason is not None:
            ended.add(event.id)
    assert ended == {*tokens}
    return tokens


def pages_of(session: Session) -> PagePool:
    return session._engine.pages


def test_generate_takes_any_number_of_prompts(decoder: SpeculativeDecoder, alone: list[list[int]]) -> None:
    each = {name: [options[name] for options in OPTIONS] for name in OPTIONS[0]}
    for prompts_decoder in (decoder, made("none"), replayed()):
        out = prompts_decoder.generate(PROMPTS, **each)
        assert [tokens.tolist() for tokens in out.new_tokens] == alone
        counted = [sum(steps) for steps in out.stats.emitted_per_step]
        assert [len(tokens) - 1 for tokens in alone] == counted
    streamed: list[list[int]] = [[] for _ in PROMPTS]
    for chunk in decoder.stream(PROMPTS, **each):
        for row, new in enumerate(chunk.tokens):
            streamed[row] += new
    assert streamed == alone and all(chunk.finished)


@pytest.mark.parametrize(
    ("rule", "captured"), [("strict", False), ("strict", True), ("probabilistic", True), ("block", False)]
)
def test_sequences_that_come_and_go_get_what_they_would_get_alone(rule: str, captured: bool) -> None:
    """Random arrivals, with rows and pages for a few at a time."""
    options: dict[str, Any] = {"verify": {"rule": rule}, "cache": {**CONFIG["cache"], "pool_tokens": 100}}
    decoder = replayed(**options) if captured else made(**options)
    expected = [by_itself(decoder, index).new_tokens[0].tolist() for index in range(len(PROMPTS))]
    dice = random.Random(3)
    with decoder.session() as session:
        left, names, events = list(range(len(PROMPTS))), {}, []
        dice.shuffle(left)
        while left or not session._engine.idle:
            for _ in range(min(len(left), dice.choice((0, 0, 1, 2)))):
                index = left.pop()
                names[session.submit(PROMPTS[index], **OPTIONS[index])] = index
            events += session.step()
        found = {names[number]: tokens for number, tokens in gathered(events).items()}
        assert [found[index] for index in range(len(PROMPTS))] == expected
        assert pages_of(session).num_free == pages_of(session).count == 25
        assert session.stats.new_tokens == sum(map(len, expected))
        assert sum(session.stats.ended.values()) == len(PROMPTS)


def test_a_cancelled_sequence_leaves_its_row_and_pages_to_others(
    decoder: SpeculativeDecoder, alone: list[list[int]]
) -> None:
    for kind in (decoder, replayed()):
        with kind.session() as session:
            numbers = [session.submit(prompt, max_new_tokens=40, eos_token_id=[]) for prompt in PROMPTS[: ROWS + 2]]
            for _ in range(5):
                session.step()
            running = pages_of(session).num_free
            for number in numbers:
                session.cancel(number)
            assert running < pages_of(session).count
            ended = {event.id: event.finish_reason for event in session}
            assert ended == dict.fromkeys(numbers, "cancelled")
            assert pages_of(session).num_free == pages_of(session).count
            names = [session.submit(PROMPTS[index], **OPTIONS[index]) for index in range(len(PROMPTS))]
            found = gathered(session)
            assert [found[number] for number in names] == alone


def test_a_prompt_is_cancelled_between_its_chunks(decoder: SpeculativeDecoder, alone: list[list[int]]) -> None:
    with decoder.session() as session:
        number = session.submit(PROMPTS[4], **OPTIONS[4])
        session.step()
        session.cancel(number)
        other = session.submit(PROMPTS[1], **OPTIONS[1])
        assert gathered(session) == {number: [], other: alone[1]}


def test_decoding_goes_on_beside_a_long_prompt() -> None:
    decoder = made("none")
    with decoder.session() as session:
        first = session.submit(PROMPTS[0], max_new_tokens=40, eos_token_id=[])
        session.step()
        second = session.submit(PROMPTS[4], max_new_tokens=1, eos_token_id=[])
        events = [session.step() for _ in range(8)]
    # Each step runs a part of the prompt, and the first sequence gains a token in it.
    assert all([event.id for event in step] in ([first], [second, first]) and step[-1].tokens for step in events)
    assert [len(step) for step in events].count(2) == -(-len(PROMPTS[4]) // 6) and events[-1][0].id == first


def test_a_sequence_waits_for_pages_and_those_behind_it_wait_with_it() -> None:
    decoder = made("none", cache={**CONFIG["cache"], "pool_tokens": 64})
    with decoder.session() as session:
        large = [session.submit(PROMPTS[4], max_new_tokens=20, eos_token_id=[]) for _ in range(2)]
        small = session.submit(PROMPTS[0], max_new_tokens=1, eos_token_id=[])
        ends = [event.id for event in session if event.finish_reason]
    assert ends == [large[0], small, large[1]]


def test_what_cannot_fit_alone_is_refused_and_disturbs_nobody() -> None:
    decoder = made("none", cache={**CONFIG["cache"], "pool_tokens": 20})
    with decoder.session() as session:
        number = session.submit(PROMPTS[0], max_new_tokens=4, eos_token_id=[])
        with pytest.raises(InputError, match=r"of 37 tokens needs 10 pages of the KV cache, and there are 5; ask for"):
            session.submit(PROMPTS[1], max_new_tokens=20)
        with pytest.raises(InputError, match="has 9 EOS ids, and there is room for 8"):
            session.submit(PROMPTS[0], max_new_tokens=1, eos_token_id=list(range(9)))
        assert len(gathered(session)[number]) == 4
    with pytest.raises(InputError, match="needs 10 pages"):
        decoder.generate(PROMPTS[1:2], max_new_tokens=20)


def test_every_sequence_ends_with_its_reason(decoder: SpeculativeDecoder) -> None:
    free = decoder.generate(PROMPTS[:1], max_new_tokens=9, eos_token_id=[]).new_tokens[0].tolist()
    with decoder.session(return_logprobs=True) as session:
        ids = [
            session.submit(PROMPTS[0].tolist(), max_new_tokens=9, eos_token_id=free[3]),
            session.submit(PROMPTS[0], max_new_tokens=2, eos_token_id=[]),
            session.submit(PROMPTS[0], max_new_tokens=0),
            session.submit(torch.full((60,), 5), max_new_tokens=50, eos_token_id=[]),
        ]
        events = list(session)
    assert {event.id: event.finish_reason for event in events if event.finish_reason} == dict(
        zip(ids, ("eos", "length", "length", "max_length"), strict=True)
    )
    assert [len(gathered(events)[number]) for number in ids] == [free.index(free[3]) + 1, 2, 0, 4]
    assert all(event.logprobs is not None and len(event.logprobs) == len(event.tokens) for event in events)


def test_nan_ends_one_sequence_and_says_so(alone: list[list[int]]) -> None:
    decoder = made("none")
    weight = shared_model("llama", dtype=torch.float64).get_input_embeddings().weight
    before = weight.detach().clone()
    known = {token for tokens in (*alone, *(prompt.tolist() for prompt in PROMPTS)) for token in tokens}
    token = next(token for token in range(len(weight)) if token not in known)
    try:
        with torch.no_grad():
            weight[token] = torch.nan
        with decoder.session() as session:
            broken = session.submit([token, 3], max_new_tokens=9)
            good = session.submit(PROMPTS[1], **OPTIONS[1])
            events = list(session)
    finally:
        with torch.no_grad():
            weight.copy_(before)
    (error,) = (event for event in events if event.id == broken)
    assert error.finish_reason == "error" and isinstance(error.error, NumericsError)
    assert f"NaN in sequence {broken}" in str(error.error)
    assert gathered(events)[good] == alone[1]


def test_a_closed_session_says_so_and_frees_its_state() -> None:
    decoder = replayed()
    session = decoder.session()
    session.submit(PROMPTS[0])
    session.step()
    assert decoder._runners.idle is None
    session.close()
    session.close()
    assert decoder._runners.idle is not None
    with pytest.raises(InputError, match=r"closed; open another one with decoder.session\(\)"):
        session.submit(PROMPTS[0])
    with pytest.raises(InputError, match="closed"):
        session.step()


def test_an_interrupted_step_closes_the_session(decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    session = decoder.session()
    session.submit(PROMPTS[0])
    monkeypatch.setattr(session._engine, "_read", lambda under_way: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        session.step()
    with pytest.raises(InputError, match="closed"):
        session.step()


def test_asyncio_clients_submit_while_others_decode(decoder: SpeculativeDecoder, alone: list[list[int]]) -> None:
    async def run() -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        waiting: dict[int, asyncio.Future[None]] = {}
        session = decoder.session()

        async def client(index: int) -> None:
            await asyncio.sleep(0.02 * (index % 5))
            number = session.submit(PROMPTS[index], **OPTIONS[index])
            names[number] = index
            waiting[number] = asyncio.get_running_loop().create_future()
            await waiting[number]

        async def pump() -> None:
            async for event in session:
                found.setdefault(event.id, []).extend(event.tokens)
                if event.finish_reason:
                    waiting[event.id].set_result(None)

        names: dict[int, int] = {}
        pumping = asyncio.create_task(pump())
        await asyncio.gather(*(client(index) for index in range(len(PROMPTS))))
        session.close()
        await pumping
        return {names[number]: tokens for number, tokens in found.items()}

    found = asyncio.run(asyncio.wait_for(run(), 120))
    assert [found[index] for index in range(len(PROMPTS))] == alone


def test_threads_submit_while_one_steps(decoder: SpeculativeDecoder, alone: list[list[int]]) -> None:
    names: dict[int, int] = {}
    with decoder.session() as session:

        def submit(part: int) -> None:
            for index in range(part, len(PROMPTS), 3):
                names[session.submit(PROMPTS[index], **OPTIONS[index])] = index

        threads = [threading.Thread(target=submit, args=(part,)) for part in range(3)]
        for thread in threads:
            thread.start()
        events: list[Event] = []
        while any(thread.is_alive() for thread in threads) or not session._engine.idle:
            events += session.step()
        found = gathered(events)
    assert {names[number]: tokens for number, tokens in found.items()} == dict(enumerate(alone))


def test_sessions_and_calls_side_by_side_have_a_state_each(alone: list[list[int]]) -> None:
    decoder = replayed()
    with decoder.session() as first, decoder.session() as second:
        ids = [session.submit(PROMPTS[1], **OPTIONS[1]) for session in (first, second)]
        first.step()
        assert by_itself(decoder, 2).new_tokens[0].tolist() == alone[2]
        for session, number in zip((first, second), ids, strict=True):
            assert gathered(session)[number] == alone[1]


def test_logprobs_are_those_of_the_sequence_alone(decoder: SpeculativeDecoder) -> None:
    expected = [by_itself(decoder, index, return_logprobs=True).logprobs[0] for index in range(len(PROMPTS))]
    with decoder.session(return_logprobs=True) as session:
        names = [session.submit(PROMPTS[index], **OPTIONS[index]) for index in range(len(PROMPTS))]
        found: dict[int, list[float]] = {number: [] for number in names}
        for event in session:
            found[event.id] += event.logprobs or []
    for number, values in zip(names, expected, strict=True):
        torch.testing.assert_close(torch.tensor(found[number]), values, rtol=0, atol=1e-6)


def test_the_pool_takes_no_more_than_its_share_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = made("none", cache={**CONFIG["cache"], "memory_share": 0.9})
    size = memory.page_bytes(decoder._program)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 20 * size)
    with decoder.session() as session:
        assert pages_of(session).count == 18
    monkeypatch.setattr(memory, "free_bytes", lambda device: size)
    with pytest.raises(InputError, match=r"no memory for the KV cache: a page takes \d+ bytes, and \d+ are free"):
        decoder.session()
    monkeypatch.setattr(memory, "free_bytes", lambda device: math.inf)
    with decoder.session() as session:
        assert pages_of(session).count == ROWS * 16


def test_a_session_says_how_much_room_it_has() -> None:
    decoder = made("none", cache={**CONFIG["cache"], "pool_tokens": 64})
    with decoder.session() as session:
        most, page = session.capacity.most_bytes, memory.page_bytes(decoder._program)
        assert session.capacity == Capacity(ROWS, ROWS, 16, 16, used_bytes=most - 16 * page, most_bytes=most)
        session.submit(PROMPTS[0], max_new_tokens=4, eos_token_id=[])
        session.step()
        assert session.capacity == Capacity(ROWS - 1, ROWS, 14, 16, used_bytes=most - 14 * page, most_bytes=most)
        list(session)
        assert session.capacity == Capacity(ROWS, ROWS, 16, 16, used_bytes=most - 14 * page, most_bytes=most)
        with pytest.warns(DeprecationWarning, match="Session.room is called capacity"):
            assert session.room == session.capacity
    with pytest.warns(DeprecationWarning, match="Room is called Capacity"):
        assert specgraph.Room is Capacity
