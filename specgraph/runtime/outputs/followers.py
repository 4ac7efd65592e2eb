"""Gives the events of a session to the asyncio tasks that follow one sequence each, such as the clients of a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from specgraph.errors import InputError
from specgraph.runtime.outputs.output import Event


class Followers:
    """Hands the events of a session out by the ids of their sequences. All followers belong to one event loop.

    A task of its own iterates over the session from the first follower on, until the session is closed. Events of
    sequences that nobody follows are dropped.
    """

    def __init__(self, events: Callable[[], AsyncIterator[Event]], cancel: Callable[[int], None]) -> None:
        self._events, self._cancel = events, cancel
        self._queues: dict[int, asyncio.Queue[Event | BaseException]] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def count(self) -> int:
        """How many sequences are followed."""
        return len(self._queues)

    async def follow(self, submit: Callable[[], int]) -> AsyncGenerator[Event, None]:
        """Submit a sequence, and give its events up to the last. Whoever stops before that cancels the sequence.

        Raises:
            InputError: the session was closed before the sequence had ended, or another event loop has followers.
            BaseException: what ``submit`` raises, or the step that ended the session.
        """
        self._start()
        number = submit()  # nothing is awaited between this and the queue, so no event is lost
        queue = self._queues[number] = asyncio.Queue()
        ended = False
        try:
            while not ended:
                event = await queue.get()
                if isinstance(event, BaseException):
                    raise event
                ended = event.finish_reason is not None
                yield event
        finally:
            del self._queues[number]
            if not ended:
                self._cancel(number)

    def _start(self) -> None:
        """Let the task run that hands events out."""
        loop = asyncio.get_running_loop()
        if self._task is not None and self._task.get_loop() is not loop and self._queues:
            raise InputError("Sequences of this session are followed in another event loop; use one loop, or submit().")
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            self._task = loop.create_task(self._hand_out())

    async def _hand_out(self) -> None:
        end: BaseException = InputError("The session was closed before this sequence had ended.")
        try:
            async for event in self._events():
                queue = self._queues.get(event.id)
                if queue is not None:
                    queue.put_nowait(event)
        except BaseException as error:  # the session has closed itself; whoever follows a sequence has to know why
            end = error
        for queue in self._queues.values():
            queue.put_nowait(end)
