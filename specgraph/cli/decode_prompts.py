"""Runs a decoder over texts, with seeds, streaming and timing."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specgraph.bench.peers import transformers_generate
from specgraph.cli.config import GenerateConfig
from specgraph.config import Config
from specgraph.errors import ConfigError, InputError
from specgraph.progress import Progress
from specgraph.runtime.decoder import SpeculativeDecoder
from specgraph.runtime.outputs import Stats, Stream, StreamChunk
from specgraph.runtime.requests import hash_seed


class Prompt(NamedTuple):
    """A text and its token ids, 1-D int64."""

    text: str
    ids: Tensor


@dataclass
class Outcome:
    """The results of decoding a list of prompts.

    Attributes:
        config: the configuration of the decoder.
        tokens: the new token ids of every prompt.
        stats: the counts over all prompts.
        seconds: the time of decoding. It includes prefill, but neither tokenizing nor, unless texts are streamed,
            printing.
        seeds: the seed of every prompt.
    """

    config: Config
    tokens: list[list[int]]
    stats: Stats
    seconds: float
    seeds: list[int]


def decode_prompts(
    decoder: SpeculativeDecoder,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    options: GenerateConfig,
    seeds: Sequence[int] | None = None,
    *,
    show: bool = False,
) -> Outcome:
    """Continue every prompt, and print the texts if ``show`` is true, each as soon as it and those before it are done.

    As many are decoded together as the decoder allows. The seed of a sequence depends on its place in ``prompts``, so
    the texts do not depend on that number.
    """
    drawn = seeds or _seeds(options.seed, len(prompts))
    outcome = Outcome(decoder.config, [], Stats(0), 0.0, list(drawn))
    if options.compare:
        _warm_up(decoder, [prompt.ids for prompt in prompts[: decoder.config.max_batch_size]])
    with Progress("prompts", len(prompts), decoder.config.debug.progress) as progress:
        if not options.stream:
            _all(decoder, tokenizer, prompts, _sampling(options, drawn), outcome, progress, show=show)
            return outcome
        for prompt, seed in zip(prompts, drawn, strict=True):
            _one(decoder, tokenizer, prompt, _sampling(options, [seed]), outcome)
            progress.advance()
    return outcome


@dataclass
class PeerOutcome:
    """What transformers itself gave for the prompts, and the seconds that it took; ``name`` says how it decoded."""

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
    """The sampling options that are set, under transformers' names; 0 is no temperature there."""
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.temperature is None:
        return given
    greedy = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None, "min_p": None}
    return given | ({"do_sample": True} if options.temperature else greedy)


def check_batch_size(options: GenerateConfig, config: Config) -> int:
    """How many prompts are decoded together.

    Raises:
        ConfigError: the number is not from 1 to ``max_batch_size``.
    """
    size, most = options.batch_size, config.max_batch_size
    if size is not None and not 1 <= size <= most:
        raise ConfigError(f"batch_size must be 1 to max_batch_size ({most}), got {size}.")
    return most if size is None else size


def encode(tokenizer: Any, texts: Sequence[str]) -> list[Prompt]:
    """The prompts made of texts and their token ids.

    Raises:
        InputError: a text has no tokens.
    """
    prompts = [Prompt(text, torch.tensor(tokenizer(text)["input_ids"], dtype=torch.int64)) for text in texts]
    for prompt in prompts:
        if not prompt.ids.numel():
            raise InputError(f"The prompt {prompt.text!r} has no tokens; give it some text.")
    return prompts


def _warm_up(decoder: SpeculativeDecoder, ids: list[Tensor]) -> None:
    """Decode a few tokens that are not timed, so that no measurement includes compilation and first allocations."""
    decoder.generate(ids, max_new_tokens=8)


def _seeds(seed: int | None, count: int) -> list[int]:
    base = secrets.randbits(62) if seed is None else seed
    return [hash_seed(base, index) for index in range(count)]


def _sampling(options: GenerateConfig, seeds: Sequence[int]) -> dict[str, Any]:
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p")
    return {**{name: getattr(options, name) for name in names}, "seed": list(seeds)}


def _all(
    decoder: SpeculativeDecoder, tokenizer: Any, prompts: Sequence[Prompt], sampling: dict[str, Any],
    outcome: Outcome, progress: Progress, *, show: bool,
) -> None:  # fmt: skip
    """Decode all prompts, as many together as there is room for."""
    outcome.tokens = [[] for _ in prompts]
    stream = decoder.stream([prompt.ids for prompt in prompts], **sampling)
    outcome.stats, done, printed = stream.stats, 0, 0

    def print_ready(finished: Sequence[bool]) -> int:
        first = printed
        for ready in itertools.takewhile(lambda place: finished[place], range(printed, len(prompts))):
            print(_heading(prompts[ready].text, ready + 1))
            print(tokenizer.decode(outcome.tokens[ready], skip_special_tokens=True), flush=True)
            first = ready + 1
        return first

    for chunk in _timed(stream, outcome):
        for tokens, new in zip(outcome.tokens, chunk.tokens, strict=True):
            tokens += new
        progress.advance(sum(chunk.finished) - done, lambda: _speed(outcome))
        done, printed = sum(chunk.finished), print_ready(chunk.finished) if show else 0
    if show:  # what ended without a step
        print_ready([True] * len(prompts))


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


def _one(
    decoder: SpeculativeDecoder, tokenizer: Any, prompt: Prompt, sampling: dict[str, Any], outcome: Outcome
) -> None:
    """Decode one prompt, and print its text as it comes."""
    print(_heading(prompt.text, len(outcome.tokens) + 1))
    begin = time.perf_counter()
    tokens: list[int] = []
    shown = ""
    stream = decoder.stream([prompt.ids], **sampling)
    for chunk in stream:
        tokens += chunk.tokens[0]
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # if it does, the next token completes the character
            print(text[len(shown) :], end="", flush=True)
            shown = text
    print(tokenizer.decode(tokens, skip_special_tokens=True)[len(shown) :])
    outcome.seconds += time.perf_counter() - begin
    outcome.tokens.append(tokens)
    outcome.stats.num_speculative_tokens = stream.stats.num_speculative_tokens
    outcome.stats.emitted_per_step += stream.stats.emitted_per_step
    outcome.stats.confidence += stream.stats.confidence


def _heading(prompt: str, number: int) -> str:
    line = " ".join(prompt.split())
    return f"--- {number}: {line if len(line) <= 100 else line[:97] + '...'}"
