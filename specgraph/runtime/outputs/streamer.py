"""Gives what steps emit to one of transformers' streamers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from specgraph.runtime.execution.steps import Step
from specgraph.runtime.requests.parser import GenerateCall


class StreamerAdapter:
    """A batch's tokens for a streamer, as transformers gives them: the prompts, then one token of every sequence.

    A column is given when every sequence has its token, or has ended; those that have ended are padded.
    """

    def __init__(self, call: GenerateCall) -> None:
        self._streamer, self._call = call.streamer, call
        self._rows: list[list[int]] = [[] for _ in call.requests]
        self._going = {number for number, request in enumerate(call.requests) if request.has_room}
        self._shown = 0

    def watch(self, steps: Iterator[Step]) -> Iterator[Step]:
        """The steps, after the streamer has got what they emitted. It is told when there are no more."""
        pad, given = self._call.pad_id, [request.given for request in self._call.requests]
        self._streamer.put(torch.nn.utils.rnn.pad_sequence(given, batch_first=True, padding_value=pad))
        try:
            for step in steps:
                self._add(step)
                yield step
        finally:
            self._streamer.end()

    def _add(self, step: Step) -> None:
        for output in step.outputs:
            self._rows[output.number] += output.tokens
            if output.finish_reason is not None:
                self._going.discard(output.number)
        lengths = [len(self._rows[number]) for number in self._going]
        ready = min(lengths) if lengths else max(map(len, self._rows))
        for column in range(self._shown, ready):
            tokens = [row[column] if column < len(row) else self._call.pad_id for row in self._rows]
            self._streamer.put(torch.tensor(tokens, device="cpu"))
        self._shown = max(self._shown, ready)
