"""Runs a decoder over texts, with seeds and timing."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from specgraph.bench.peers import transformers_generate
from specgraph.cli.check_options import decoder_options
from specgraph.cli.generation import given_options
from specgraph.cli.keys import GenerateConfig
from specgraph.cli.prompts import Conversation, Messages
from specgraph.cli.writers import Answer, Writer
from specgraph.config import Config
from specgraph.errors import ConfigError, InputError
from specgraph.progress import Progress
from specgraph.runtime.decoder import SpeculativeDecoder
from specgraph.runtime.outputs.output import Stream, StreamChunk
from specgraph.runtime.outputs.stats import Stats
from specgraph.runtime.outputs.trace import Trace
from specgraph.runtime.requests.chats import encode_chats
from specgraph.runtime.requests.sampling import hash_seed
from specgraph.runtime.requests.text import encode_texts


class Prompt(NamedTuple):
    """A text or a conversation, and its token ids, 1-D int64."""

    source: str | Messages
    ids: Tensor


@dataclass
class Outcome:
    """The results of decoding a list of prompts.

    Attributes:
        config: the configuration of the decoder.
        tokens: the new token ids of every prompt.
        stats: the counts over all prompts.
        seconds: the time of decoding. It includes prefill, but neither tokenizing nor printing.
        seeds: the seed of every prompt.
        besides: what else than decoding ``seconds`` include, in words; empty after a warm-up.
        trace: what happened to every draft, if that was asked for.
    """

    config: Config
    tokens: list[list[int]]
    stats: Stats
    seconds: float
    seeds: list[int]
    besides: str = ""
    trace: Trace | None = None


def decode_prompts(
    decoder: SpeculativeDecoder,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    options: GenerateConfig,
    seeds: Sequence[int] | None = None,
    write: Writer | None = None,
) -> Outcome:
    """Continue every prompt, and pass the answers to ``write`` in their order, as they grow and when they are done.

    As many are decoded together as the decoder allows. The seed of a sequence depends on its place in ``prompts``, so
    the texts do not depend on that number.
    """
    drawn = list(seeds or draw_seeds(options.seed, len(prompts)))
    given = decoder_options(options, tokenizer) | {"seed": drawn if reads_seeds(options, decoder) else None}
    ids = [prompt.ids for prompt in prompts]
    if options.compare:
        # Nothing that is timed includes compilation then. It takes as many tokens as will be timed, since a sequence of
        # more pages may be compiled again.
        first = slice(decoder.config.max_batch_size)
        decoder.generate(ids[first], **given | {"seed": given["seed"] and drawn[first]})
    stream = decoder.stream(ids, trace=options.trace is not None, **given)
    besides = "" if options.compare else "compiling"  # what the first step of its kind waits for
    outcome = Outcome(decoder.config, [[] for _ in prompts], stream.stats, 0.0, drawn, besides, stream.trace)
    ready, done = InOrder(outcome, prompts, write), 0
    # What has no room for a token ends without a step.
    reasons: list[str | None] = ["max_length" if len(own) >= decoder.max_length else "length" for own in ids]
    with Progress("prompts", len(prompts), decoder.config.debug.progress) as progress:
        for chunk in _timed(stream, outcome):
            for tokens, new in zip(outcome.tokens, chunk.tokens, strict=True):
                tokens += new
            progress.advance(sum(chunk.finished) - done, lambda: _speed(outcome))
            done, reasons = sum(chunk.finished), chunk.finish_reasons
            ready(reasons)
        ready(reasons)
    return outcome


@dataclass
class PeerOutcome:
    """The new tokens of every prompt by transformers, and the seconds that took. ``name`` is the method of decoding."""

    name: str
    tokens: list[list[int]]
    seconds: float


def decode_with_transformers(
    model: PreTrainedModel, prompts: Sequence[Prompt], options: GenerateConfig, size: int,
    assistant: PreTrainedModel | None = None,
) -> PeerOutcome:  # fmt: skip
    """Continue every prompt by transformers' ``generate``, ``size`` at a time.

    With an ``assistant``, this is its assisted generation, which takes one prompt at a time. Sampled tokens differ from
    ours, because the noise does.
    """
    name, size = ("generate", size) if assistant is None else ("assisted", 1)
    given = _for_transformers(options)
    ids = [prompt.ids for prompt in prompts]
    transformers_generate(model, ids[:size], assistant, **given | {"max_new_tokens": 8})  # warms up, as we do
    begin, tokens = time.perf_counter(), list[list[int]]()
    for at in range(0, len(ids), size):
        tokens += [new.tolist() for new in transformers_generate(model, ids[at : at + size], assistant, **given)]
    return PeerOutcome(name, tokens, time.perf_counter() - begin)


def _for_transformers(options: GenerateConfig) -> dict[str, Any]:
    """The options that are set and that transformers has, in its terms; 0 is no temperature there."""
    known = vars(GenerationConfig())
    given = {name: value for name, value in given_options(options).items() if name in known}
    if options.do_sample is False or options.temperature == 0:
        return given | {"do_sample": False, "temperature": None, "top_k": None, "top_p": None, "min_p": None}
    return given if options.temperature is None else given | {"do_sample": True}


def check_batch_size(options: GenerateConfig, config: Config) -> int:
    """How many prompts are decoded together.

    Raises:
        ConfigError: the number is not from 1 to ``max_batch_size``.
    """
    size, most = options.batch_size, config.max_batch_size
    if size is not None and not 1 <= size <= most:
        raise ConfigError(f"batch_size must be 1 to max_batch_size ({most}), got {size}.")
    return most if size is None else size


def encode(tokenizer: Any, sources: Sequence[str | Conversation]) -> list[Prompt]:
    """The prompts made of texts, and of conversations in the tokenizer's chat template.

    Raises:
        InputError: a prompt has no tokens, or there is no chat template that takes a conversation.
    """
    texts = [source for source in sources if isinstance(source, str)]
    rows = iter(encode_texts(tokenizer, texts))
    return [
        Prompt(source, _ids(next(rows))) if isinstance(source, str) else _answering(tokenizer, source)
        for source in sources
    ]


def _answering(tokenizer: Any, chat: Conversation) -> Prompt:
    if getattr(tokenizer, "chat_template", None) is None:
        raise InputError("messages need a chat template, which the model's tokenizer lacks; give the texts as prompts.")
    (row,) = encode_chats(tokenizer, [chat.messages], **chat.options)
    if not row:
        raise InputError(f"The chat template makes no token of {chat.messages!r:.80}; give it some text.")
    return Prompt(chat.messages, _ids(row))


def _ids(row: Sequence[int]) -> Tensor:
    return torch.tensor(row, dtype=torch.int64)


def reads_seeds(options: GenerateConfig, decoder: SpeculativeDecoder) -> bool:
    """Whether the decoder is given seeds: where it samples, or where the user has given a seed.

    Elsewhere the decoder would warn that it ignores seeds, which the user has never given.
    """
    sampled = options.temperature is not None or options.do_sample is not None
    return options.seed is not None or sampled or bool(getattr(decoder.model.generation_config, "do_sample", False))


def draw_seeds(seed: int | None, count: int) -> list[int]:
    """A seed for each of so many prompts, by its place; ``seed`` None draws them."""
    base = secrets.randbits(62) if seed is None else seed
    return [hash_seed(base, index) for index in range(count)]


class InOrder:
    """Writes the answers that are complete, in the order of the prompts, and as much as there is of the next one."""

    def __init__(self, outcome: Outcome, prompts: Sequence[Prompt], write: Writer | None) -> None:
        self._outcome, self._prompts, self._write = outcome, prompts, write
        self._next = 0

    def __call__(self, reasons: Sequence[str | None]) -> None:
        """``reasons``: why each prompt has ended, None while it goes on."""
        while self._next < len(self._prompts):
            reason = reasons[self._next]
            if self._write is not None:
                self._write(self._answer(self._next, reason))
            if reason is None:
                return
            self._next += 1

    def _answer(self, place: int, reason: str | None) -> Answer:
        prompt, steps = self._prompts[place], self._outcome.stats.emitted_per_step[place]
        return Answer(place, prompt.source, len(prompt.ids), self._outcome.tokens[place], reason, steps)


def _timed(stream: Stream, outcome: Outcome) -> Iterator[StreamChunk]:
    """The chunks of a stream; the time that they take, and not that of printing, is added to ``outcome``."""
    while True:
        begin = time.perf_counter()
        chunk = next(stream, None)
        outcome.seconds += time.perf_counter() - begin
        if chunk is None:
            return
        yield chunk


def _speed(outcome: Outcome) -> str:
    speed = sum(map(len, outcome.tokens)) / outcome.seconds
    return f"{speed:,.0f} tokens/s, {outcome.stats.acceptance_length:.2f} per step"
