"""Recurrent and hybrid targets in bf16, through kernels and CUDA graphs: no draft, batch or cut changes a bit."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import specgraph
from specgraph import SpeculativeDecoder
from tests.decoding import CONFIG
from tests.models import HYBRIDS, make_head, make_model, ragged_prompts

PROMPTS = ragged_prompts((1, 40, 17, 100, 2))
NEW_TOKENS = 64
OPTIONS: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "eos_token_id": [], "return_logprobs": True}
Rows = list[tuple[Tensor, Tensor]]


@functools.cache
def model_of(architecture: str) -> PreTrainedModel:
    return make_model(architecture, dtype=torch.bfloat16).cuda()


def decoder_of(architecture: str, kind: str, k: int, chunk: int = 64, rule: str = "strict") -> SpeculativeDecoder:
    model = model_of(architecture)
    config = {**CONFIG, "cache": {"prefill_chunk": chunk}, "draft": {"kind": kind, "num_speculative_tokens": k},
              "lowering": {"name": "gpu"}, "numerics": "bitwise", "max_batch_size": 5,
              "verify": {"rule": rule, "acceptance_rate": 0.7}}  # fmt: skip
    head = make_head(model) if kind == "eagle3" else None
    if head is not None:
        head.module.cuda()
    return specgraph.compile_speculative(model, config, draft=head)


def run(decoder: SpeculativeDecoder, batch: int, temperature: float) -> Rows:
    """Tokens and log-probabilities of all prompts, ``batch`` at a time."""
    found: Rows = []
    for begin in range(0, len(PROMPTS), batch):
        rows = range(begin, min(begin + batch, len(PROMPTS)))
        out = decoder.generate([PROMPTS[row] for row in rows], temperature=temperature, seed=[*rows], **OPTIONS)
        found += zip(out.new_tokens, out.logprobs or [], strict=True)
    return found


def differing(found: Rows, wanted: Rows) -> tuple[list[int], list[int]]:
    """The sequences whose tokens, and whose log-probabilities, are not the same bit for bit."""
    pairs = list(enumerate(zip(found, wanted, strict=True)))
    return tuple([row for row, (a, b) in pairs if not torch.equal(a[i], b[i])] for i in range(2))  # type: ignore[return-value]


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_speculation_changes_no_bit(architecture: str) -> None:
    plain = decoder_of(architecture, "none", 1)
    others = {k: decoder_of(architecture, "ngram", k, chunk) for k, chunk in ((1, 7), (4, 64), (7, 16))}
    for temperature in (0.0, 1.0):
        wanted = run(plain, 5, temperature)
        assert not any(differing(run(plain, 1, temperature), wanted))
        for k, decoder in others.items():
            for batch in (1, 3, 5):
                wrong = differing(run(decoder, batch, temperature), wanted)
                assert not any(wrong), f"K {k}, batch {batch}, temperature {temperature}: {wrong}"


@pytest.mark.parametrize("architecture", ["lfm2", "olmo_hybrid", "qwen3_next", "mamba2", "mamba"])
def test_whatever_was_accepted_the_bits_are_those_of_a_fresh_start(architecture: str) -> None:
    """Drafts are accepted by lot, so that histories are mixed; scoring runs the tokens that came out as a prompt."""
    decoder = decoder_of(architecture, "eagle3", 3, rule="synthetic")
    out = decoder.generate(PROMPTS, **OPTIONS)
    assert {1, 2, 3, 4} == {count for row in out.stats.emitted_per_step for count in row}
    scored = decoder.score(out).logprobs
    wrong = [row for row, (a, b) in enumerate(zip(out.logprobs or [], scored, strict=True)) if not torch.equal(a, b)]
    assert not wrong, f"log-probabilities differ in {wrong}"
