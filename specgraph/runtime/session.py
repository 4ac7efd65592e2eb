"""A session: sequences come and go while others decode."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from specgraph.errors import InputError, SpecgraphError
from specgraph.runtime.execution.engine import Engine
from specgraph.runtime.execution.steps import Output, Step
from specgraph.runtime.execution.stopping import Stopping
from specgraph.runtime.outputs.detokenizer import IncrementalDetokenizer
from specgraph.runtime.outputs.followers import Followers
from specgraph.runtime.outputs.output import Event
from specgraph.runtime.outputs.stats import Capacity, SessionStats
from specgraph.runtime.requests.arguments import STRUCTURE
from specgraph.runtime.requests.parser import GenerateCall, RequestParser

_SLOW = STRUCTURE | {"stop_strings"}
"""Arguments of which the reading can take a second: a grammar is compiled, or a vocabulary read."""
_PATIENCE = 0.1
"""Seconds after which a thread that waits for sequences looks whether anybody still waits for it."""


class Session(contextlib.AbstractContextManager["Session"]):
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
        self, engine: Engine, reader: RequestParser, step: Callable[[Engine], Step | None],
        release: Callable[[], None], *, logprobs: bool, texts: bool, tokenizer: Any, max_waiting: int | None,
    ) -> None:  # fmt: skip
        """``logprobs`` and ``texts`` say whether events have them.

        ``tokenizer`` is what makes texts, and reads stop strings; None if a sequence with any has to bring one.
        ``max_waiting`` is the most sequences that wait for a row; None is any number.
        """
        self.stats = SessionStats()
        self._engine, self._reader, self._run, self._release = engine, reader, step, release
        self._with_logprobs, self._with_texts = logprobs, texts
        self._tokenizer, self._max_waiting, self._stopping = tokenizer, max_waiting, Stopping(engine)
        self._texts: dict[int, IncrementalDetokenizer] = {}
        self._followers = Followers(self.__aiter__, self.cancel)
        self._numbers = 0
        self._stepping = threading.RLock()
        self._news = threading.Condition()
        self._closed = False

    def submit(self, prompt: Tensor | Sequence[int], **options: Any) -> int:
        """Add a sequence, and return its id, by which events name it.

        Args:
            prompt: 1-D int tensor, or a list of token ids.
            options: as for ``generate``, with one value each: ``max_new_tokens``, ``eos_token_id`` (one id or several),
                ``temperature`` (0 is greedy), ``top_k``, ``top_p``, ``min_p``, and a ``seed``, which is used as it is,
                like an entry of the list that ``generate`` takes; what changes logits on the device; ``stop_strings``,
                with their ``tokenizer`` unless the session has one, and ``max_time``; or ``json_schema``, ``regex`` or
                ``grammar``, from the beginning or behind ``structure_after``, for which every step waits for the host,
                also for the sequences beside this one.

        Raises:
            InputError: an argument is out of range, the sequence is too large for this session even alone, or the
                session is closed.
            BusyError: as many sequences wait for a row as the session lets wait.
        """
        return self._add(self._read(prompt, **options))

    async def follow(self, prompt: Tensor | Sequence[int], **options: Any) -> AsyncGenerator[Event, None]:
        """Submit a sequence, and give its events up to the last. Whoever stops before that cancels the sequence. ::

            async for event in session.follow(prompt, max_new_tokens=100):
                ...

        Any number of tasks of one event loop may do this side by side. Steps run in a thread of their own as long as
        the session is open, so nobody else iterates over it then.

        Args:
            prompt: as for :meth:`submit`.
            options: as for :meth:`submit`. The sequence is submitted when the first event is asked for. Stop strings
                and structure are prepared in a thread, since that can take as long as many steps.

        Raises:
            InputError: as for :meth:`submit`, or the session was closed before the sequence had ended.
            BusyError: as for :meth:`submit`.
        """
        if _SLOW & options.keys():
            call = await asyncio.to_thread(self._read, prompt, **options)
        else:
            call = self._read(prompt, **options)
        async with contextlib.aclosing(self._followers.follow(lambda: self._add(call))) as events:
            async for event in events:
                yield event

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
    def capacity(self) -> Capacity:
        """The rows and pages that are free, for whoever decides how much more to submit.

        Raises:
            InputError: the session is closed.
        """
        self._check_open()
        engine, memory, pages = self._engine, self._engine.memory, self._engine.pages
        followed = self._followers.count
        counts = engine.num_free_rows, memory.sizes.rows, pages.num_free, pages.count, engine.num_waiting, followed
        snapshots = pages.snapshots
        copies = (0, 0, 0) if snapshots is None else (snapshots.num_known, snapshots.count, snapshots.num_bytes)
        return Capacity(*counts, *copies, memory.used_bytes, memory.num_bytes)

    @property
    def room(self) -> Capacity:
        """The old name of :attr:`capacity`, which goes with version 0.3."""
        warnings.warn("Session.room is called capacity now; use that name.", DeprecationWarning, stacklevel=2)
        return self.capacity

    def step(self) -> list[Event]:
        """Run one step, and return what it emitted; an empty list if there is nothing to do.

        Raises:
            InputError: the session is closed.
        """
        with self._stepping:
            self._check_open()
            try:
                while (step := self._run(self._engine)) is not None:
                    step = self._stopping.cut(step)
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

    def __exit__(self, *_: object) -> None:
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

    def _read(self, prompt: Tensor | Sequence[int], **options: Any) -> GenerateCall:
        """Check what :meth:`submit` was given, and prepare what follows the sequence. May run in any thread."""
        self._check_open()
        if options.get("tokenizer") is None:
            options["tokenizer"] = self._tokenizer
        return self._reader.one(prompt, options)

    def _add(self, call: GenerateCall) -> int:
        """Give a sequence to the engine, and return its id."""
        self._check_open()
        with self._news:
            number, self._numbers = self._numbers, self._numbers + 1
        # What its events need is there before the first of them can be.
        (request,) = call.requests
        self._stopping.add(number, request, call.criteria)
        if self._with_texts:
            self._texts[number] = IncrementalDetokenizer(self._tokenizer, call.stop_strings)
        try:
            self._engine.submit(number, request, self._max_waiting)
        except SpecgraphError:
            self._stopping.drop(number)
            self._texts.pop(number, None)
            raise
        self._wake()
        return number

    def _event(self, output: Output) -> Event:
        logprobs = [*output.logprobs] if self._with_logprobs else None
        text = self._text(output)
        return Event(output.number, [*output.tokens], logprobs, output.finish_reason, output.error, text)

    def _text(self, output: Output) -> str | None:
        last = output.finish_reason is not None
        pieces = self._texts.pop(output.number, None) if last else self._texts.get(output.number)
        return None if pieces is None else pieces.add(output.tokens, last=last)
