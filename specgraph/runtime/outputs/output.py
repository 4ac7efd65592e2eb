"""The results of ``generate`` and ``stream``."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from specgraph.errors import SpecgraphError
from specgraph.runtime.outputs.stats import Stats
from specgraph.runtime.outputs.trace import Trace

_SHOWN = ("sequences", "new_tokens", "logprobs", "stats", "finish_reasons")
_HIDDEN = ("scores", "logits", "prompts", "trace", "errors")
"""What is too much for one line, in the order in which the class takes it, behind the others."""


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
    scores: tuple[Tensor, ...] | None
    logits: tuple[Tensor, ...] | None
    prompts: list[Tensor]
    trace: Trace | None
    errors: list[SpecgraphError | None]

    def __new__(
        cls, sequences: Tensor, new_tokens: list[Tensor], logprobs: list[Tensor] | None, stats: Stats,
        finish_reasons: Sequence[str] = (), scores: tuple[Tensor, ...] | None = None,
        logits: tuple[Tensor, ...] | None = None, prompts: Sequence[Tensor] = (),
        trace: Trace | None = None, errors: Sequence[SpecgraphError | None] = (),
    ) -> Self:  # fmt: skip
        self = super().__new__(cls, sequences.unbind())
        self.sequences, self.new_tokens, self.logprobs, self.stats = sequences, new_tokens, logprobs, stats
        self.finish_reasons, self.scores, self.logits = list(finish_reasons), scores, logits
        self.prompts, self.trace = list(prompts), trace
        self.errors = list(errors) or [None] * len(new_tokens)
        return self

    @property
    def shape(self) -> torch.Size:
        """``[B, S]``."""
        return self.sequences.shape

    def __getitem__(self, index: Any) -> Any:
        return self.sequences[index]

    def __repr__(self) -> str:
        return f"GenerateOutput({', '.join(f'{name}={getattr(self, name)!r}' for name in _SHOWN)})"

    def __reduce__(self) -> Any:
        return GenerateOutput, tuple(getattr(self, name) for name in (*_SHOWN, *_HIDDEN))


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
