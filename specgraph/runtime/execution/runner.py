"""Runs a compiled step over a state: call by call, or as a CUDA graph that is replayed.

Every step runs a subset of the sequences whose state is kept, which its row index names. On a GPU every step is a
graph (:mod:`specgraph.runtime.execution.workspace`), captured when a session first needs its shape, because launching
the kernels one by one takes the host several times as long as they run. While a step is warmed up and captured, its row
index names no sequence, so that nothing changes. A graph that has more entries than there are sequences runs the others
as inactive, and tokens behind the real rows of a window are padding. The host enqueues a step before it has read the
one before: results travel to pinned memory, and an event tells when they are there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from specgraph.errors import NumericsError
from specgraph.kernels.launch import counts_arrivals_in, own_counters
from specgraph.kernels.state import CONFIDENCE, ROWS
from specgraph.kernels.step import gather_state, scatter_state_
from specgraph.kernels.step.results import pack_results
from specgraph.runtime.execution.inputs import load_chunk
from specgraph.runtime.execution.pause import Pause
from specgraph.runtime.execution.results import Results
from specgraph.runtime.memory.state_memory import Reached, StateMemory
from specgraph.runtime.memory.state_rows import Admission, stop, uploaded
from specgraph.runtime.schedule.prefill import Chunk
from specgraph.specialise.end_chains import StepModule
from specgraph.specialise.mode import Mode
from specgraph.specialise.pack_rows import CAPACITY
from specgraph.specialise.pause_step import PausedStep
from specgraph.specialise.score_rows import ScoreRows


class Runner:
    """Runs the step call by call, and reads every result before the next one.

    Attributes:
        memory: of all sequences.
        state: the tensors that the step reads and writes.
        pages: those of its KV cache.
        lag: how many steps are enqueued before the first is read.
    """

    lag = 0

    def __init__(self, memory: StateMemory, least: int = 1) -> None:
        """``least`` is the smallest number of sequences in a call; inactive ones make up for what is missing."""
        self._step: StepModule | None = None
        self._mode = Mode()
        self._least = least
        self.memory, self.state, self.pages = memory, memory.state, memory.pages
        device = self.state["start"].device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    @property
    def num_captured(self) -> int:
        """How many graphs have been captured over its state."""
        return 0

    def active(self) -> contextlib.AbstractContextManager[None]:
        """To be entered for whatever touches the state: it stays on the stream where the session began.

        Where it is entered already, nothing is done, since to find that out from PyTorch takes as long as a small step.
        """
        counters = self.memory.counters
        inside = counters is None or counts_arrivals_in(counters)
        return contextlib.nullcontext() if inside else self._entered()

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        with own_counters(self.memory.counters), torch.cuda.stream(self._stream):
            yield

    def admit(self, entering: Sequence[Admission]) -> None:
        """Begin sequences, each in its row."""
        with self.active():
            self.memory.admit(entering)

    def stop(self, rows: Sequence[int]) -> None:
        """The sequences in ``rows`` are inactive from now on."""
        with self.active():
            stop(self.state, rows)

    def use(self, mode: Mode, step: StepModule) -> None:
        """Run ``step`` from now on, the variant of ``mode``."""
        self._step, self._mode = step, mode
        if mode.drafts is not None and not mode.ahead:
            # The last steps may have made more drafts. Those beyond its window are not verified.
            with self.active():
                self.state["num_rows"].clamp_(max=self.width)

    @property
    def width(self) -> int:
        """Rows of a decode step: K + 1, with the K of the mode in use."""
        drafts = self._mode.drafts
        return int(self.state["next_window"].shape[1]) if drafts is None else drafts + 1

    def wide(self, chunk: Chunk, pause: Pause | None = None) -> Results:
        """A step over a window of prompt tokens. A step that pauses is given what the host does meanwhile."""
        return self.send(self._call(*self.load(chunk), pause, chunk.num_rows))

    def load(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Set the row counts of a chunk's sequences, and give its row index and its windows, both on the device."""
        return load_chunk(self.state, chunk, self._least)

    def score(self, pass_: ScoreRows, step: fx.GraphModule, chunk: Chunk, begins: Sequence[int]) -> tuple[Tensor, ...]:
        """What the step ``step`` of ``pass_`` says of a chunk's sequences, whose windows begin at ``begins``: see
        :class:`~specgraph.kernels.verify.score.Scored`. It is run as it is, whatever is captured.
        """
        rows, window = self.load(chunk)
        given = torch.tensor([*begins, *[0] * (len(rows) - len(begins))], dtype=torch.int64, device="cpu")
        return self.scored(step, rows, window, uploaded(given, rows.device))

    def scored(self, step: fx.GraphModule, rows: Tensor, window: Tensor, begins: Tensor) -> tuple[Tensor, ...]:
        """The results of :meth:`score`, where everything is on the device."""
        scatter_state_(rows, [self.state["start"]], [begins.to(self.state["start"].dtype)])
        results: tuple[Tensor, ...] = step(**self._given(rows, window))
        return results

    def _given(self, rows: Tensor, window: Tensor, capacity: int | None = None) -> dict[str, Any]:
        """All inputs of a step."""
        given = {"window": window, **self.state, ROWS: rows}
        return given if capacity is None else given | {CAPACITY: window.new_empty(capacity)}

    def decode(self, rows: Sequence[int], pause: Pause | None = None) -> Results:
        """A step of the sequences ``rows``, over the windows that their last steps have laid out."""
        index = self._upload(rows, max(len(rows), self._least))
        return self.send(self._call(index, self._window(index), pause))

    def drafts(self, rows: Sequence[int]) -> list[list[int]]:
        """What the next decode step verifies of the sequences ``rows``. Waits for the steps before it."""
        index = self._upload(rows, len(rows))
        return self.state["next_window"][index, 1 : self.width].tolist()

    def real_drafts(self, rows: Sequence[int]) -> list[list[int]]:
        """The drafts that the last steps of the sequences ``rows`` have found. Waits for these steps."""
        index = self._upload(rows, len(rows))
        windows, counts = self.state["next_window"][index].tolist(), self.state["num_rows"][index].tolist()
        return [window[1:count] for window, count in zip(windows, counts, strict=True)]

    def keep_states(self, reached: Iterable[Reached], *, target_only: bool = False) -> dict[int, int]:
        """As :meth:`StateMemory.keep_states`."""
        return self.memory.keep_states(reached, target_only=target_only)

    def keep_drafts(self, rows: Sequence[int], count: int) -> None:
        """Let the next step verify no more than ``count`` drafts of each of the sequences ``rows``."""
        index, num_rows = self._upload(rows, len(rows)), self.state["num_rows"]
        num_rows[index] = num_rows[index].clamp(max=count + 1)

    def not_a_number(self, number: int, unless: str = "") -> NumericsError:
        """The error of sequence ``number``, whose logits are not numbers. ``unless`` names another cause."""
        return NumericsError(
            f"The target's logits are NaN in sequence {number}{unless}. Check the weights and the dtype; the decoder "
            "itself is still usable."
        )

    def close(self) -> None:
        """Wait for what is under way; the state is free then.

        Its memory goes at once, since a closed session may be held for long.
        """
        self.state.clear()

    def _upload(self, rows: Sequence[int], count: int) -> Tensor:
        """The row index of a call of ``count`` sequences, int64 ``[count]``."""
        device = self.state["num_rows"].device
        index = torch.tensor([*rows, *[-1] * (count - len(rows))], dtype=torch.int64, device="cpu")
        return uploaded(index, device)

    def _window(self, rows: Tensor) -> Tensor:
        """The windows that their last steps have laid out for sequences."""
        (window,) = gather_state(rows, [self.state["next_window"]], [0])
        return window[:, : self.width].contiguous()

    def _call(self, rows: Tensor, window: Tensor, pause: Pause | None = None, capacity: int | None = None) -> Tensor:
        """Run the step, and pack what it returns. ``capacity`` is the number of packed rows, if it runs these."""
        assert self._step is not None, "Runner.use comes first"
        given = self._given(rows, window, capacity)
        if not isinstance(self._step, PausedStep):
            return self._pack(self._step(**given), rows)
        values = self._step.before(made={}, **given)
        if pause is not None:
            pause.prepare()
            pause.apply(values["for_host"], values["logits"], window.shape[1])
        return self._pack(self._step.after(made=values, **given), rows)

    def _pack(self, results: tuple[Tensor, ...], rows: Tensor) -> Tensor:
        """What a step returns with the number of rows of the next one, which is 0 at the end."""
        emitted, num_emitted, logprobs, bad, *traced = results
        left, confidence = self.state["num_rows"], self.state.get(CONFIDENCE)
        return pack_results(emitted, num_emitted, logprobs, bad, left, self.width, rows, confidence, *traced)

    def send(self, packed: Tensor) -> Results:
        """Let results travel to the host."""
        return Results(packed.cpu(), self.width, traced=self._mode.traced)
