"""Runs a decoder over texts, with batches, seeds, streaming and timing."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
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
from specgraph.runtime.outputs import Stats
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
    """Continue every prompt, ``options.batch_size`` at a time, and print the texts if ``show`` is true.

    The seed of a sequence depends on its place in ``prompts``, so the texts do not depend on the batch size.
    """
    size = 1 if options.stream else check_batch_size(options, decoder.config)
    drawn = seeds or _seeds(options.seed, len(prompts))
    outcome = Outcome(decoder.config, [], Stats(0), 0.0, list(drawn))
    decode = _stream if options.stream else _generate
    if options.compare:
        _warm_up(decoder, [prompt.ids for prompt in prompts[:size]])
    with Progress("prompts", len(prompts), decoder.config.debug.progress) as progress:
        for at in range(0, len(prompts), size):
            part = slice(at, at + size)
            decode(decoder, tokenizer, prompts[part], _sampling(options, drawn[part]), outcome, show)
            progress.advance(len(prompts[part]))
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


def _generate(
    decoder: SpeculativeDecoder, tokenizer: Any, prompts: Sequence[Prompt], sampling: dict[str, Any],
    outcome: Outcome, show: bool,
) -> None:  # fmt: skip
    begin = time.perf_counter()
    out = decoder.generate([prompt.ids for prompt in prompts], **sampling)
    outcome.seconds += time.perf_counter() - begin
    outcome.stats.num_speculative_tokens = out.stats.num_speculative_tokens
    outcome.stats.emitted_per_step += out.stats.emitted_per_step
    outcome.stats.confidence += out.stats.confidence
    for prompt, new in zip(prompts, out.new_tokens, strict=True):
        outcome.tokens.append(new.tolist())
        if show:
            print(_heading(prompt.text, len(outcome.tokens)))
            print(tokenizer.decode(outcome.tokens[-1], skip_special_tokens=True))


def _stream(
    decoder: SpeculativeDecoder, tokenizer: Any, prompts: Sequence[Prompt], sampling: dict[str, Any],
    outcome: Outcome, show: bool,
) -> None:  # fmt: skip
    print(_heading(prompts[0].text, len(outcome.tokens) + 1))
    begin = time.perf_counter()
    tokens: list[int] = []
    steps: list[int] = []
    shown = ""
    for chunk in decoder.stream([prompts[0].ids], **sampling):
        new = chunk.tokens[0]
        tokens += new
        steps += [len(new)] if new else []
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # if it does, the next token completes the character
            print(text[len(shown) :], end="", flush=True)
            shown = text
    print(tokenizer.decode(tokens, skip_special_tokens=True)[len(shown) :])
    outcome.seconds += time.perf_counter() - begin
    outcome.tokens.append(tokens)
    drafts = 0 if decoder.config.draft.kind == "none" else decoder.config.draft.num_speculative_tokens
    outcome.stats.num_speculative_tokens = drafts
    outcome.stats.emitted_per_step.append(steps[1:])  # the first comes with the prompt


def _heading(prompt: str, number: int) -> str:
    line = " ".join(prompt.split())
    return f"--- {number}: {line if len(line) <= 100 else line[:97] + '...'}"
