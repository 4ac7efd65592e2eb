"""Gives what steps emit to one of transformers' streamers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from specgraph.runtime.execution.steps import Step
from specgraph.runtime.requests.parser import GenerateCall


def streamed(call: GenerateCall, steps: Iterator[Step]) -> Iterator[Step]:
    """The steps of a call, after its streamer has got what they emitted. It is told when there are no more.

    A streamer gets a batch's tokens as transformers gives them: the prompts, then one token of every sequence. A column
    is given when every sequence has its token, or has ended; those that have ended are padded.
    """
    streamer, pad, shown = call.streamer, call.pad_id, 0
    given, rows = [request.padded_prompt for request in call.requests], [list[int]() for _ in call.requests]
    going = {number for number, request in enumerate(call.requests) if request.has_room}
    streamer.put(torch.nn.utils.rnn.pad_sequence(given, batch_first=True, padding_value=pad))
    try:
        for step in steps:
            for output in step.outputs:
                rows[output.number] += output.tokens
                if output.finish_reason is not None:
                    going.discard(output.number)
            ready = min([len(rows[number]) for number in going] or [max(map(len, rows))])
            for column in range(shown, ready):
                streamer.put(torch.tensor([row[column] if column < len(row) else pad for row in rows], device="cpu"))
            shown = max(shown, ready)
            yield step
    finally:
        streamer.end()
