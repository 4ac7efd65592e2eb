"""The host's part of a step that pauses between its two halves.

The host knows the tokens of every sequence and the drafts that a step verifies before the step begins. So it prepares
masks while the device computes logits, and all masks of a step travel to the device together. Python processors run
when that is done. A step of sequences with :class:`~specgraph.runtime.requests.host_processors.HostProcessor` objects
is not enqueued before the one in front of it was read; sequences beside them wait with them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specgraph.errors import SpecgraphError
from specgraph.runtime.requests.host_processors import Rows
from specgraph.runtime.requests.request import Request
from specgraph.runtime.requests.structure import WORD


@dataclass(frozen=True)
class Paused:
    """A sequence in a step.

    Attributes:
        entry: its place in the step.
        request: with its prompt and its processors.
        new_tokens: what it has emitted.
        drafts: what the step verifies of it.
        forced: how many of its next tokens the step is given.
    """

    entry: int
    request: Request
    new_tokens: Sequence[int]
    drafts: Sequence[int]
    forced: int = 0


@dataclass
class HostTime:
    """What the pauses of a decoder have cost so far.

    Attributes:
        steps: how many steps have waited for the host.
        seconds: how long the host was at work in them. The device computed logits in a part of that time.
    """

    steps: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """A step has waited for so long."""
        self.steps += 1
        self.seconds += seconds

    def describe(self) -> list[str]:
        """A line for the report, if there was any."""
        if not self.steps:
            return []
        each = 1e3 * self.seconds / self.steps
        return [
            f"{self.steps} steps waited for the host, which was at work for {each:.2f} ms in each (processors, "
            "structure or scores of a request); requests that ran beside these waited with them"
        ]


@dataclass
class Pause:
    """The host's part of one step.

    Attributes:
        sequences: those that have processors.
        seconds: how long the host was at work.
        errors: what a processor has refused, by the entry of the sequence and the row. It is about that sequence alone,
            and only if a token comes out of that row, so the step goes on.
    """

    sequences: Sequence[Paused]
    seconds: float = 0.0
    errors: dict[int, dict[int, SpecgraphError]] = field(default_factory=dict)
    _masks: list[tuple[Paused, np.ndarray[Any, Any]]] = field(default_factory=list)
    _begin: float = 0.0

    def prepare(self) -> None:
        """What needs no logits; the device may be computing them meanwhile."""
        self._begin = time.perf_counter()
        for sequence in self.sequences:
            with self._noting_errors(sequence):
                for processor in sequence.request.host:
                    masks = processor.masks(sequence.new_tokens, sequence.drafts)
                    if masks is not None:
                        self._masks.append((sequence, masks))

    def apply(self, logits: Tensor, raw: Tensor, width: int) -> None:
        """Change logits float32 ``[b, R, V]`` in place. ``raw`` are the target's own, of a step of ``width`` rows."""
        count = logits.shape[1]
        if self._masks:
            _mask(logits, self._masks, width)
        for sequence in self.sequences:
            first = _first_row(sequence, width, count)
            own, request = (sequence.entry, slice(first, first + 1 + len(sequence.drafts))), sequence.request
            refused: dict[int, SpecgraphError] = {}
            rows = Rows(request.padded_prompt, sequence.new_tokens, sequence.drafts, logits[own], raw[own], refused)
            with self._noting_errors(sequence):
                for processor in request.host:
                    processor.change(rows)
            for row, error in refused.items():
                self.errors.setdefault(sequence.entry, {}).setdefault(row, error)
        self.seconds = time.perf_counter() - self._begin

    @contextlib.contextmanager
    def _noting_errors(self, sequence: Paused) -> Iterator[None]:
        try:
            yield
        except SpecgraphError as error:
            self.errors.setdefault(sequence.entry, {}).setdefault(0, error)


def _first_row(sequence: Paused, width: int, count: int) -> int:
    """Where the first row whose next token is unknown lies among ``count`` rows (see ``needed_rows``)."""
    return sequence.forced - min(sequence.forced, width - count)


def _mask(logits: Tensor, masks: Sequence[tuple[Paused, np.ndarray[Any, Any]]], width: int) -> None:
    """Let the tokens that a mask does not allow have no probability; all masks are taken to the device together."""
    batch, count, vocab = logits.shape
    words = np.full((batch, count, -(-vocab // WORD)), -1, dtype=np.int32)
    for sequence, mask in masks:
        first = _first_row(sequence, width, count)
        words[sequence.entry, first : first + len(mask), : mask.shape[1]] &= mask[: count - first]
        words[sequence.entry, first : first + len(mask), mask.shape[1] :] = 0
    host = torch.from_numpy(words)
    there = (host.pin_memory() if logits.is_cuda else host).to(logits.device, non_blocking=True)
    places = torch.arange(vocab, device=logits.device)
    forbidden = (there[:, :, places // WORD] >> (places % WORD)) & 1 == 0
    logits.masked_fill_(forbidden, -torch.inf)
