"""Puts what steps emit together into the results of ``generate`` and ``stream``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specgraph.errors import SpecgraphError
from specgraph.runtime.execution.steps import Step
from specgraph.runtime.outputs.output import GenerateOutput, StreamChunk
from specgraph.runtime.outputs.stats import Stats
from specgraph.runtime.outputs.trace import Trace
from specgraph.runtime.requests.parser import GenerateCall
from specgraph.runtime.requests.recorder import recorded_logits, recorded_scores


class Collector:
    """What the sequences of one call have emitted so far.

    Attributes:
        stats: counts and times.
        trace: what happened to drafts, if the call asks for it.
    """

    def __init__(self, call: GenerateCall, stats: Stats, about: dict[str, Any]) -> None:
        """``about`` says what the decoder is, for a trace."""
        self.stats = stats
        self.trace = Trace([request.prompt.tolist() for request in call.requests], about) if call.mode.traced else None
        self._call, count = call, len(call.requests)
        self._with_logprobs = call.mode.logprobs != "none"
        self._tokens: list[list[int]] = [[] for _ in range(count)]
        self._logprobs: list[list[float]] = [[] for _ in range(count)]
        self._reasons = [None if request.has_room else request.limit_reason for request in call.requests]
        self._errors: list[SpecgraphError | None] = [None] * count
        # The confidence in the drafts that each sequence verifies in its next step.
        self._thought: list[Sequence[float]] = [()] * count

    def add(self, step: Step) -> None:
        """Take note of a step."""
        self._count(step)
        for output in step.outputs:
            self._tokens[output.number] += output.tokens
            self._logprobs[output.number] += output.logprobs
            if output.finish_reason is not None:
                self._reasons[output.number], self._errors[output.number] = output.finish_reason, output.error

    def chunk(self, step: Step) -> StreamChunk:
        """Take note of a step; what it emitted."""
        begins = [*map(len, self._tokens)]
        self.add(step)
        tokens = [own[begin:] for own, begin in zip(self._tokens, begins, strict=True)]
        logprobs = [own[begin:] for own, begin in zip(self._logprobs, begins, strict=True)]
        finished, given = [reason is not None for reason in self._reasons], logprobs if self._with_logprobs else None
        return StreamChunk(tokens, finished, given, [*self._reasons], step.prompt_tokens)

    def output(self) -> GenerateOutput:
        """All of it."""
        new_tokens = _tensors(self._tokens, torch.int64)
        values = _tensors(self._logprobs, torch.float32) if self._with_logprobs else None
        reasons = [reason or "length" for reason in self._reasons]
        requests, wanted, lengths = self._call.requests, self._call.wanted, [*map(len, new_tokens)]
        scores = recorded_scores(requests, new_tokens, normalized=wanted.normalized) if wanted.scores else None
        logits = recorded_logits(requests, lengths) if wanted.logits else None
        sequences = _pad(self._call, new_tokens)
        prompts = [request.prompt for request in requests]
        return GenerateOutput(
            sequences, new_tokens, values, self.stats, reasons, scores, logits, prompts, self.trace, self._errors
        )

    def first_error(self) -> SpecgraphError | None:
        """Why the first of the sequences that failed did so; None if none has failed."""
        return next((error for error in self._errors if error is not None), None)

    def _count(self, step: Step) -> None:
        if self.trace is not None:
            self.trace.add(step)
        stats, thought = self.stats, self._thought
        stats.steps += step.ran
        stats.reused_tokens += step.reused_tokens
        if step.host_seconds is not None:
            stats.host_steps += 1
            stats.host_seconds += step.host_seconds
        if step.decoding:
            stats.steps_by_drafts[step.drafts] += 1
        if step.decoding and not step.prompt_tokens:
            stats.decode_seconds += step.seconds
        else:
            stats.prefill_seconds += step.seconds
        for output in step.outputs:
            number = output.number
            if output.decoding:
                stats.emitted_per_step[number].append(len(output.tokens))
                if stats.confidence:
                    stats.confidence[number].append([*thought[number][: output.drafts]])
            thought[number] = output.confidence


def _tensors(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> list[Tensor]:
    """A 1-D tensor for each row."""
    flat = torch.tensor([*itertools.chain.from_iterable(rows)], dtype=dtype, device="cpu")
    return [row.clone() for row in torch.split(flat, [*map(len, rows)])]


def _pad(call: GenerateCall, new_tokens: list[Tensor]) -> Tensor:
    """Prompt and continuation of every sequence in one tensor, with the padding that was in front of the prompt."""
    parts = [
        (request.padded_prompt[:left], request.prompt, new)
        for left, request, new in zip(call.left_padding, call.requests, new_tokens, strict=True)
    ]
    # One call each for all sequences: there may be thousands.
    flat = torch.cat([*itertools.chain.from_iterable(parts)])
    rows = [*torch.split(flat, [sum(map(len, part)) for part in parts])]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=call.pad_id)
    return padded.to(call.device)
