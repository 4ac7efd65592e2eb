"""``numerics: bitwise`` at the shapes of Llama-3-8B and Qwen3.5-9B, bf16, random weights: up to 576 rows, contexts of
several pieces and prompts of several chunks. The same with packed weights, also at the shape of gpt-oss-20b.

Random logits lie close together, so that any difference between two sums shows in the tokens soon. Random heads are
hardly ever right; n-gram drafts are, where a sequence repeats itself.
"""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import specgraph
from specgraph import SpeculativeDecoder
from specgraph.bench.models import random_head, random_target
from specgraph.config import load_config

SEQUENCES, NEW_TOKENS = 64, 96
Found = list[tuple[Tensor, Tensor]]


LLAMA, QWEN = "llama-3-8b-shape", "qwen3.5-9b-shape"
PACKED = (
    "llama-3-8b-shape packed int4", "llama-3-8b-shape packed fp8", "gpt-oss-20b-shape packed mxfp4",
    "qwen3.5-9b-shape packed fp8",
)  # fmt: skip
"""Shapes with packed weights, and their schemes."""


@functools.lru_cache(maxsize=1)
def target(shape: str) -> PreTrainedModel:
    name, _, scheme = shape.partition(" packed ")
    return random_target(name, torch.device("cuda"), torch.bfloat16, weights=scheme or None)


def prompts() -> list[Tensor]:
    """Of 3 to 570 tokens: a context is one piece for some, and three for others."""
    generator = torch.Generator().manual_seed(0)
    lengths = [3 + 9 * row for row in range(SEQUENCES)]
    return [torch.randint(0, 128256, (length,), generator=generator) for length in lengths]


@functools.lru_cache(maxsize=2)
def decoder(shape: str, kind: str, k: int = 1) -> SpeculativeDecoder:
    """The two last ones are kept: all their caches would not fit beside each other."""
    gc.collect()
    given = {"draft": {"kind": "mtp", "num_modules": 3 if shape == LLAMA else 1}} if kind == "mtp" else kind
    head = random_head(target(shape), load_config(given).draft) if kind in ("eagle3", "peagle", "mtp") else None
    draft: dict[str, Any] = {"num_speculative_tokens": k} | ({} if head else {"kind": kind})
    config = {"draft": draft, "debug": {"self_check": False}, "max_length": 1024}
    return specgraph.compile_speculative(target(shape), config, draft=head)


def run(compiled: SpeculativeDecoder, rows: list[int], temperature: float) -> Found:
    out = compiled.generate(
        [prompts()[row] for row in rows], max_new_tokens=NEW_TOKENS, temperature=temperature, seed=rows,
        return_logprobs=True,
    )  # fmt: skip
    assert out.logprobs is not None
    return list(zip(out.new_tokens, out.logprobs, strict=True))


@functools.cache
def plain(shape: str, temperature: float) -> Found:
    return run(decoder(shape, "none"), list(range(SEQUENCES)), temperature)


CASES = [
    ("none", 1, [5]), ("none", 1, list(range(40, 48))), ("eagle3", 3, [63]), ("eagle3", 3, list(range(32))),
    ("eagle3", 8, list(range(SEQUENCES))), ("peagle", 7, [1]), ("peagle", 7, list(range(SEQUENCES))),
    ("ngram", 4, list(range(SEQUENCES))), ("mtp", 3, list(range(SEQUENCES))), ("mtp", 7, list(range(24, 32))),
    ("mtp", 5, [62]),
    *(("eagle3", k, list(range(8 * k - 8, 8 * k))) for k in (1, 2, 4, 5, 6, 7)),
]  # fmt: skip
RECURRENT = [
    ("none", 1, [5]), ("none", 1, list(range(40, 48))), ("ngram", 4, list(range(SEQUENCES))), ("ngram", 7, [63]),
    ("eagle3", 1, list(range(SEQUENCES))), ("eagle3", 3, [62]), ("eagle3", 7, list(range(8, 24))),
    ("mtp", 3, list(range(SEQUENCES))), ("mtp", 7, [61]),
]  # fmt: skip
SOME = [
    ("none", 1, [5]), ("none", 1, list(range(40, 48))), ("ngram", 4, list(range(SEQUENCES))), ("ngram", 7, [63]),
    ("eagle3", 3, list(range(32))), ("eagle3", 7, list(range(SEQUENCES))),
]  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("shape", "kind", "k", "rows"),
    [
        *((LLAMA, *case) for case in CASES),
        *((QWEN, *case) for case in RECURRENT),
        *((shape, *case) for shape in PACKED for case in SOME),
    ],
    ids=lambda value: f"batch {len(value)}" if isinstance(value, list) else None,
)
def test_speculation_changes_no_bit(shape: str, kind: str, k: int, rows: list[int], temperature: float) -> None:
    found, expected = run(decoder(shape, kind, k), rows, temperature), plain(shape, temperature)
    tokens = [row for row, (a, _) in zip(rows, found, strict=True) if not torch.equal(a, expected[row][0])]
    values = [row for row, (_, a) in zip(rows, found, strict=True) if not torch.equal(a, expected[row][1])]
    assert not tokens and not values, f"tokens differ in {tokens}, log-probabilities in {values} of {len(rows)}"
    assert all(len(a) == NEW_TOKENS for a, _ in found)


@pytest.mark.parametrize("rows", [[5], list(range(40, 48))])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", [LLAMA, QWEN, *PACKED])
def test_given_tokens_are_scored_with_the_bits_that_they_were_drawn_with(
    shape: str, rows: list[int], temperature: float
) -> None:
    expected = [plain(shape, temperature)[row] for row in rows]
    given = [torch.cat([prompts()[row], tokens]) for row, (tokens, _) in zip(rows, expected, strict=True)]
    scored = decoder(shape, "ngram", 4).score(given, start=[len(prompts()[row]) for row in rows])
    assert all(torch.equal(a, b) for a, (_, b) in zip(scored.logprobs, expected, strict=True))


@pytest.mark.parametrize("shape", PACKED)
def test_no_bit_differs_in_a_session_whose_prompts_are_cut_otherwise(shape: str) -> None:
    """Sequences come one after another, and two begin as an earlier one does."""
    compiled, rows = decoder(shape, "ngram", 4), list(range(20, 44, 2))
    compiled.config.cache.prefill_chunk = 100
    compiled._runners.idle = None
    found: dict[int, tuple[list[int], list[float]]] = {}
    names: dict[int, int] = {}
    with compiled.session(return_logprobs=True) as session:
        left = [*rows, rows[3], rows[7]]
        while left or not session._engine.idle:
            if left:
                row = left.pop(0)
                options = {"temperature": float(row % 4 == 0), "seed": row}
                names[session.submit(prompts()[row], max_new_tokens=NEW_TOKENS, **options)] = row
            for event in session.step():
                tokens, logprobs = found.setdefault(event.id, ([], []))
                tokens += event.tokens
                logprobs += event.logprobs or []
    compiled.config.cache.prefill_chunk = 2048
    compiled._runners.idle = None
    assert len(found) == len(rows) + 2
    for name, result in found.items():
        tokens, logprobs = plain(shape, float(names[name] % 4 == 0))[names[name]]
        assert result == (tokens.tolist(), logprobs.tolist())
