"""Helpers that compile, decode and compare."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import specgraph
from specgraph import SpeculativeDecoder
from specgraph.frontend.recurrent import hooked_recurrence
from specgraph.runtime.schedule.num_drafts import Choice
from specgraph.runtime.schedule.recent_acceptance import RecentAcceptance

# A chunk shorter than the prompts, so that every test crosses a prefill border. Nothing is reused, so that what is run
# twice is compared with itself. The self-check, the reuse of prefixes and the checks after every pass, which take half
# the time of a compilation, have tests of their own (tests/drafters/test_matrix.py checks every drafter).
CONFIG: dict[str, Any] = {
    "cache": {"prefill_chunk": 7, "block_size": 4, "reuse_prefixes": False},
    "debug": {"self_check": False},
    "pipeline": {"verify": False},
}


def compiled(
    model: PreTrainedModel, kind: str = "ngram", k: int | dict[int, int] = 4, draft: PreTrainedModel | None = None,
    **extra: Any,
) -> SpeculativeDecoder:  # fmt: skip
    """A decoder with small chunks and pages; `extra` are further configuration groups."""
    config = {**CONFIG, "draft": {"kind": kind, "num_speculative_tokens": k}, **extra}
    return specgraph.compile_speculative(model, config, draft=draft)


def choose_at_random(seed: int = 0) -> Callable[..., Choice]:
    """A ``choose`` of :class:`~specgraph.runtime.schedule.recent_acceptance.RecentAcceptance` that throws dice: one
    number of drafts for all sequences, or one for each."""
    dice = random.Random(seed)

    def choose(worth: RecentAcceptance, kind: Any, sequences: Sequence[Any], drafts: Any) -> Choice:
        k = dice.choice([*worth.choices[:-1], None])
        if dice.random() < 0.4:
            return Choice(k)
        return Choice(k, [dice.randint(0, worth.choices[-1] if k is None else k) for _ in sequences])

    return choose


def in_a_stream_and_a_session(
    decoder: SpeculativeDecoder, prompts: Sequence[Tensor], **options: Any
) -> tuple[list[list[int]], list[list[int]], Any]:
    """The tokens of every prompt in one stream, those of a session that is stepped by hand, and its statistics."""
    streamed: list[list[int]] = [[] for _ in prompts]
    for chunk in decoder.stream(prompts, **options):
        for own, tokens in zip(streamed, chunk.tokens, strict=True):
            own += tokens
    with decoder.session() as session:
        names = [session.submit(prompt, **options) for prompt in prompts]
        found: dict[int, list[int]] = {name: [] for name in names}
        while not session._engine.idle:
            for event in session.step():
                found[event.id] += event.tokens
        return streamed, [found[name] for name in names], session.stats


def reference_greedy(model: PreTrainedModel, prompts: Sequence[Tensor], new_tokens: int) -> list[Tensor]:
    """transformers' own greedy continuation of every prompt, one at a time."""
    options: Mapping[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    rows = [model.generate(p.unsqueeze(0), **options)[0, p.numel() :] for p in prompts]  # type: ignore[operator]
    return list(rows)


@torch.no_grad()
def forward_greedy(model: PreTrainedModel, prompts: Sequence[Tensor], new_tokens: int) -> list[Tensor]:
    """The greedy continuations by the model's own forward, without a cache, and with recurrent functions in float64."""
    found = []
    with hooked_recurrence(model):
        for prompt in prompts:
            sequence = prompt
            for _ in range(new_tokens):
                logits = model(sequence.unsqueeze(0), use_cache=False).logits
                sequence = torch.cat([sequence, logits[0, -1:].argmax(-1)])
            found.append(sequence[len(prompt) :])
    return found


def assert_same_tokens(
    model: PreTrainedModel, prompts: Sequence[Tensor], actual: Sequence[Tensor], expected: Sequence[Tensor]
) -> None:
    """Equal token by token; a difference reports where it begins and how far apart the two top logits were there."""
    for index, (prompt, a, b) in enumerate(zip(prompts, actual, expected, strict=True)):
        if torch.equal(a, b):
            continue
        shared = min(a.numel(), b.numel())
        differing = (a[:shared] != b[:shared]).nonzero()
        at = int(differing[0]) if differing.numel() else shared
        with torch.no_grad():
            logits = model(torch.cat([prompt, b[:at]]).unsqueeze(0)).logits[0, -1]
        top = logits.topk(2).values
        raise AssertionError(f"sequence {index} differs from token {at}: {a.tolist()} and {b.tolist()}; "
                             f"the two top logits there are {float(top[0] - top[1]):.1e} apart")  # fmt: skip
