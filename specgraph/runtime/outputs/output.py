"""The results of ``generate``, of ``stream`` and of sessions."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from specgraph.errors import SpecgraphError
from specgraph.runtime.outputs.stats import Stats
from specgraph.runtime.outputs.trace import Trace


@dataclass(eq=False)
class GenerateOutput(tuple[Tensor, ...]):
    """The result of ``generate``.

    Its length, its items and ``shape`` are those of ``sequences``, so that a tokenizer's ``batch_decode``, and code
    that expects the tensor that transformers returns, take it as it is.

    Attributes:
        sequences: int64 ``[B, S]``, prompt and continuation, padded on the right with the pad id (and on the left as
            given, for left-padded prompts), on the device of the prompts.
        new_tokens: one 1-D int64 tensor per sequence: the continuation alone, up to and including an EOS.
        logprobs: one 1-D float32 tensor per sequence beside ``new_tokens``, or None if not asked for.
        stats: counts and times.
        finish_reasons: why each sequence ended: ``eos``, ``length`` (as asked), ``max_length`` (the decoder's, before
            what was asked), ``stop`` for a stop string or a stopping criterion, or ``error``.
        scores: for every new token float32 ``[B, V]``, what it was drawn from; None if not asked for.
        logits: for every new token float32 ``[B, V]``, the target's own; None if not asked for.
        prompts: one 1-D int64 tensor per sequence: its prompt without padding.
        trace: what happened to every draft; None if not asked for.
        errors: why each sequence failed; None for those that did not. ``generate`` raises the first of them, with this
            output as its ``output``, so it returns only outputs without errors.
    """

    sequences: Tensor
    new_tokens: list[Tensor]
    logprobs: list[Tensor] | None
    stats: Stats
    finish_reasons: list[str]
    scores: tuple[Tensor, ...] | None = field(repr=False)
    logits: tuple[Tensor, ...] | None = field(repr=False)
    prompts: list[Tensor] = field(repr=False)
    trace: Trace | None = field(repr=False)
    errors: list[SpecgraphError | None] = field(repr=False)

    def __new__(cls, sequences: Tensor, *_: Any) -> Self:
        return super().__new__(cls, sequences.unbind())

    def __getnewargs__(self) -> Any:
        """What a copy begins with: its other attributes are copied as those of any object."""
        return (self.sequences,)

    @property
    def shape(self) -> torch.Size:
        """``[B, S]``."""
        return self.sequences.shape

    def __getitem__(self, index: Any) -> Any:
        return self.sequences[index]


@dataclass(frozen=True)
class StreamChunk:
    """What one step emitted.

    Attributes:
        tokens: the new ids of every sequence, a possibly empty list.
        finished: whether it has ended.
        logprobs: one number beside each new id; None if not asked for.
        finish_reasons: as for ``generate``; None while a sequence goes on.
        prompt_tokens: the tokens of prompts that it ran.
    """

    tokens: list[list[int]]
    finished: list[bool]
    logprobs: list[list[float]] | None
    finish_reasons: list[str | None] = field(default_factory=list)
    prompt_tokens: int = 0


class Stream(Iterator[StreamChunk]):
    """What the steps of a ``stream`` call emit, one after the other.

    Attributes:
        stats: counts and times so far.
        trace: what happened to every draft so far; None if not asked for.
    """

    def __init__(self, chunks: Generator[StreamChunk, None, None], stats: Stats, trace: Trace | None = None) -> None:
        self.stats, self.trace = stats, trace
        self._chunks = chunks

    def __next__(self) -> StreamChunk:
        return next(self._chunks)

    def close(self) -> None:
        """End it before its time."""
        self._chunks.close()


@dataclass(frozen=True)
class Event:
    """What a step of a session emitted for one sequence.

    Attributes:
        id: what ``submit`` returned for it.
        tokens: its new token ids, a possibly empty list.
        logprobs: one number beside each of them; None if the session gives none.
        finish_reason: None while it goes on; else ``eos``, ``length`` (as asked), ``max_length`` (the decoder's, before
            what was asked), ``stop``, ``cancelled`` or ``error``. Nothing comes after it.
        error: what went wrong, for ``error``; the other sequences are not concerned.
        text: the text that can be shown now (see
            :class:`~specgraph.runtime.outputs.detokenizer.IncrementalDetokenizer`); None if the session gives none.
    """

    id: int
    tokens: list[int]
    logprobs: list[float] | None = None
    finish_reason: str | None = None
    error: SpecgraphError | None = None
    text: str | None = None
