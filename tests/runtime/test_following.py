"""Tasks that follow one sequence each: every event arrives, and whoever stops listening cancels the sequence."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import pytest

from specgraph import BusyError, InputError, Session, SpeculativeDecoder
from tests.runtime.test_session import OPTIONS, PROMPTS, alone, decoder, made

__all__ = ["alone", "decoder"]
ENDLESS = {"max_new_tokens": 60, "eos_token_id": []}


async def settled(session: Session) -> None:
    """Wait until nothing runs any more."""
    while session.capacity.free_rows < session.capacity.rows or session.capacity.waiting:
        await asyncio.sleep(0.01)


def test_every_follower_gets_the_events_of_its_sequence(decoder: SpeculativeDecoder, alone: list[list[int]]) -> None:
    async def follow(session: Session, index: int) -> list[int]:
        events = [event async for event in session.follow(PROMPTS[index], **OPTIONS[index])]
        assert [event.finish_reason is not None for event in events] == [*[False] * (len(events) - 1), True]
        return [token for event in events for token in event.tokens]

    async def run() -> list[list[int]]:
        with decoder.session() as session:
            found = await asyncio.gather(*(follow(session, index) for index in range(len(PROMPTS))))
            assert session.capacity.followed == 0
        return found

    for _ in range(2):  # the second time in another event loop
        assert asyncio.run(asyncio.wait_for(run(), 120)) == alone


def test_who_stops_listening_cancels_the_sequence(decoder: SpeculativeDecoder, alone: list[list[int]]) -> None:
    async def leave(session: Session, how: str) -> None:
        events = session.follow(PROMPTS[0], **ENDLESS)
        if how == "never began":
            return
        await anext(events)
        if how == "closed":
            await events.aclose()
        elif how == "task cancelled":
            task = asyncio.ensure_future(anext(events))
            await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        # else it is dropped, and the event loop closes it

    async def run() -> None:
        with decoder.session() as session:
            for how in ("never began", "closed", "task cancelled", "dropped"):
                await leave(session, how)
                await asyncio.sleep(0)
                await settled(session)
                assert session.capacity.followed == 0
            assert dict(session.stats.ended) == {"cancelled": 3}
            assert [e.tokens async for e in session.follow(PROMPTS[1], **OPTIONS[1])][-1][-1] == alone[1][-1]

    asyncio.run(asyncio.wait_for(run(), 120))


def test_followers_are_told_why_there_is_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = made("none")

    async def run(end: str) -> None:
        with decoder.session(max_waiting=0) as session:
            events = session.follow(PROMPTS[0], **ENDLESS)
            await anext(events)
            if end == "closed":
                session.close()
                with pytest.raises(InputError, match="The session was closed before this sequence had ended"):
                    [event async for event in events]
            else:
                monkeypatch.setattr(session._engine, "_read", lambda under_way: (_ for _ in ()).throw(OSError("gone")))
                with pytest.raises(OSError, match="gone"):
                    [event async for event in events]
            assert session._followers.count == 0
            with pytest.raises(InputError, match="The session is closed"):
                await anext(session.follow(PROMPTS[0]))

    for end in ("closed", "failed"):
        asyncio.run(asyncio.wait_for(run(end), 60))


def test_what_submit_refuses_the_first_event_refuses(decoder: SpeculativeDecoder) -> None:
    async def run() -> None:
        with decoder.session(max_waiting=0) as session:
            with pytest.raises(InputError, match="temperature must be 0 or more"):
                await anext(session.follow(PROMPTS[0], temperature=-1))
            kept = [session.submit(PROMPTS[0], **ENDLESS) for _ in range(session.capacity.rows)]
            with pytest.raises(BusyError, match="lets 0 wait for a row"):
                await anext(session.follow(PROMPTS[0]))
            for number in kept:
                session.cancel(number)
            await settled(session)
            assert session.capacity.followed == 0

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_slow_preparation_keeps_nobody_waiting(
    decoder: SpeculativeDecoder, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one sequence reads its stop strings, another one decodes to its end."""
    ended, order = threading.Event(), list[str]()

    def read(strings: list[str], tokenizer: object, seconds: object) -> list[object]:
        if strings:
            assert ended.wait(60), "the event loop was held up"
        return []

    monkeypatch.setattr("specgraph.runtime.requests.parser.stop_criteria", read)

    async def follow(session: Session, name: str, **options: Any) -> list[int]:
        events = [event async for event in session.follow(PROMPTS[0], **OPTIONS[0], **options)]
        order.append(name)
        return [token for event in events for token in event.tokens]

    async def run() -> list[list[int]]:
        with decoder.session() as session:
            slow = asyncio.ensure_future(follow(session, "slow", stop_strings=["a"]))
            quick = await follow(session, "quick")
            ended.set()
            return [quick, await slow]

    assert asyncio.run(asyncio.wait_for(run(), 120)) == [alone[0], alone[0]]
    assert order == ["quick", "slow"]


def test_a_session_that_closes_during_the_preparation_says_so(
    decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, closed = threading.Event(), threading.Event()

    def read(*_: object) -> list[object]:
        begun.set()
        assert closed.wait(60)
        return []

    monkeypatch.setattr("specgraph.runtime.requests.parser.stop_criteria", read)

    async def run() -> None:
        session = decoder.session()
        first = asyncio.ensure_future(anext(session.follow(PROMPTS[0], stop_strings=["a"])))
        await asyncio.to_thread(begun.wait, 60)
        session.close()
        closed.set()
        with pytest.raises(InputError, match="The session is closed"):
            await first

    asyncio.run(asyncio.wait_for(run(), 120))
