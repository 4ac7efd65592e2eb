"""A session: sequences come and go while others decode."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from torch import Tensor

from specgraph.errors import InputError, SpecgraphError
from specgraph.runtime.engine import Engine
from specgraph.runtime.outputs import Room, SessionStats
from specgraph.runtime.reading import Reader
from specgraph.runtime.requests import EosIds
from specgraph.runtime.steps import Output, Step

_PATIENCE = 0.1
"""Seconds after which a thread that waits for sequences looks whether anybody still waits for it."""


@dataclass(frozen=True)
class Event:
    """What a step emitted for one sequence.

    Attributes:
        id: what ``submit`` returned for it.
        tokens: its new token ids, a possibly empty list.
        logprobs: one number beside each of them; None if the session gives none.
        finish_reason: None while it goes on; else ``eos``, ``length`` (as asked), ``max_length`` (the decoder's, before
            what was asked), ``cancelled`` or ``error``. Nothing comes after it.
        error: what went wrong, for ``error``; the other sequences are not concerned.
    """

    id: int
    tokens: list[int]
    logprobs: list[float] | None = None
    finish_reason: str | None = None
    error: SpecgraphError | None = None


class Session:
    """Decodes sequences that are submitted at any time, at most ``max_batch_size`` of them together.

    Made by :meth:`SpeculativeDecoder.session`. Each sequence gets the tokens that it would get alone. It waits until a
    row and pages of the KV cache are free for its whole length; both are free again as soon as it ends. ::

        with decoder.session() as session:
            first = session.submit(prompt, max_new_tokens=100)
            for event in session:          # until every sequence has ended
                print(event.id, event.tokens)

    With asyncio, ``async for event in session`` also waits for sequences that are yet to be submitted, until
    :meth:`close`; steps run in a thread of their own meanwhile. ``submit`` and ``cancel`` may be called from any
    thread.

    Attributes:
        stats: counts since the session began.
    """

    def __init__(
        self, engine: Engine, reader: Reader, step: Callable[[Engine], Step | None],
        release: Callable[[], None], *, logprobs: bool,
    ) -> None:  # fmt: skip
        self.stats = SessionStats()
        self._engine, self._reader, self._run, self._release = engine, reader, step, release
        self._logprobs = logprobs
        self._numbers = 0
        self._stepping = threading.RLock()
        self._news = threading.Condition()
        self._closed = False

    def submit(
        self,
        prompt: Tensor | Sequence[int],
        *,
        max_new_tokens: int | None = None,
        eos_token_id: EosIds = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        **processing: Any,
    ) -> int:
        """Add a sequence, and return its id, by which events name it.

        Args:
            prompt: 1-D int tensor, or a list of token ids.
            max_new_tokens: as for ``generate``, like the next five.
            eos_token_id: one id or several.
            temperature: 0 is greedy.
            top_k: 0 is off.
            top_p: 1 is off.
            min_p: 0 is off.
            seed: is used as it is, like an entry of the list that ``generate`` takes.
            processing: what changes logits on the device, as for ``generate``, or ``json_schema``, ``regex`` or
                ``grammar``, for which every step waits for the host, also for the sequences beside this one.

        Raises:
            InputError: an argument is out of range, the sequence is too large for this session even alone, or the
                session is closed.
        """
        self._check_open()
        request = self._reader.one(
            prompt, max_new_tokens=max_new_tokens, eos_token_id=eos_token_id, temperature=temperature, top_k=top_k,
            top_p=top_p, min_p=min_p, seed=seed, processing=processing,
        )  # fmt: skip
        with self._news:
            number, self._numbers = self._numbers, self._numbers + 1
        self._engine.submit(number, request)
        self._wake()
        return number

    def cancel(self, number: int) -> None:
        """End the sequence with this id; its last event says ``cancelled``. One that has ended is left alone.

        Raises:
            InputError: no sequence ever had this id.
        """
        if not isinstance(number, int) or not 0 <= number < self._numbers:
            raise InputError(f"There is no sequence {number!r} in this session; cancel takes what submit has returned.")
        self._engine.cancel(number)
        self._wake()

    def forget_prefixes(self) -> None:
        """Share no page any more that was filled before now.

        To be called when weights were changed in a way that leaves no mark, such as through ``.data``. What an
        optimiser or ``copy_`` writes is noticed.
        """
        with self._stepping:
            self._engine.pages.forget()

    @property
    def room(self) -> Room:
        """The rows and pages that are free, for whoever decides how much more to submit.

        Raises:
            InputError: the session is closed.
        """
        self._check_open()
        engine = self._engine
        return Room(engine.num_free_rows, engine.num_rows, engine.pages.num_free, engine.pages.count)

    def step(self) -> list[Event]:
        """Run one step, and return what it emitted; an empty list if there is nothing to do.

        Raises:
            InputError: the session is closed.
        """
        with self._stepping:
            self._check_open()
            try:
                while (step := self._run(self._engine)) is not None:
                    self.stats.add(step)
                    if step.outputs:
                        return [self._event(output) for output in step.outputs]
            except BaseException:
                self.close()  # nobody knows what the step has done
                raise
            return []

    def __iter__(self) -> Iterator[Event]:
        """Events until no sequence is left; more may be submitted then, and iterated over again."""
        while events := self.step():
            yield from events

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Events until the session is closed, whether or not there are sequences."""
        while not self._closed:
            for event in await asyncio.to_thread(self._wait_and_step):
                yield event

    def close(self) -> None:
        """Free the state; sequences that have not ended are dropped. Closing twice does nothing."""
        with self._stepping:
            if not self._closed:
                self._closed = True
                self._release()
        self._wake()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise InputError("A session cannot be pickled or copied: it holds memory of its device; open it where it runs.")

    def _wait_and_step(self) -> list[Event]:
        """One step, after waiting for a while if there is nothing to do."""
        with self._news:
            if not self._closed and self._engine.idle:
                self._news.wait(_PATIENCE)
        with self._stepping:
            return [] if self._closed else self.step()

    def _wake(self) -> None:
        with self._news:
            self._news.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise InputError("The session is closed; open another one with decoder.session().")

    def _event(self, output: Output) -> Event:
        logprobs = [*output.logprobs] if self._logprobs else None
        return Event(output.number, [*output.tokens], logprobs, output.finish_reason, output.error)
