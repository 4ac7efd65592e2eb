"""Every architecture in bf16, through kernels and CUDA graphs: speculation changes no bit of its output."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specgraph import SpeculativeDecoder
from specgraph.frontend.tracing import trace
from specgraph.passes.insert_kv_cache import InsertKVCache
from tests.compiler.test_pipeline import first, last
from tests.decoding import compiled
from tests.models import ARCHITECTURES, MORE, make_model, ragged_prompts
from tests.passes.test_insert_kv_cache import run_window
from tests.passes.test_lower_kernels import LOWERING

PROMPTS = ragged_prompts((3, 17, 8, 1, 11))
NEW_TOKENS = 24


@torch.no_grad()
def disturbed(model: PreTrainedModel, by: float = 0.05) -> PreTrainedModel:
    """A draft that ``model`` often agrees with, as it never would with an unrelated random one.

    Numbers of fewer than 16 bits stay as they are.
    """
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(5)
    for parameter in draft.parameters():
        if not parameter.is_floating_point() or parameter.itemsize < 2:
            continue
        factor = 1 + by * torch.randn(parameter.shape, generator=generator)
        parameter.mul_(factor.to(parameter))
    return draft


def decoders(model: PreTrainedModel) -> dict[str, SpeculativeDecoder]:
    """By the kind of their drafts; all run the same target."""
    draft = disturbed(model)
    options: dict[str, Any] = {"lowering": {"name": "gpu"}, "numerics": "bitwise"}
    return {
        "none": compiled(model, "none", **options),
        "ngram": compiled(model, "ngram", 4, **options),
        "draft_model": compiled(model, "draft_model", 3, draft, **options),
    }


def outputs(decoder: SpeculativeDecoder, batch: int, temperature: float) -> tuple[list[Tensor], list[Tensor], float]:
    """Tokens and log-probabilities of all prompts, ``batch`` at a time, and the tokens per step."""
    tokens, logprobs, steps = [], [], 0
    for begin in range(0, len(PROMPTS), batch):
        rows = range(begin, min(begin + batch, len(PROMPTS)))
        out = decoder.generate(
            [PROMPTS[row] for row in rows], max_new_tokens=NEW_TOKENS, eos_token_id=[], temperature=temperature,
            seed=list(rows), return_logprobs=True,
        )  # fmt: skip
        assert out.logprobs is not None
        tokens += out.new_tokens
        logprobs += out.logprobs
        steps += sum(map(len, out.stats.emitted_per_step))
    return tokens, logprobs, sum(map(len, tokens)) / steps


def differences(found: list[Tensor], expected: list[Tensor]) -> list[int]:
    """The sequences that are not the same, bit for bit."""
    return [row for row, (a, b) in enumerate(zip(found, expected, strict=True)) if not torch.equal(a, b)]


def compare(model: PreTrainedModel) -> tuple[list[str], float]:
    """What differs from plain decoding of five sequences, and the tokens per step of the draft model."""
    made, found, lengths = decoders(model), [], []
    for temperature in (0.0, 1.0):
        tokens, logprobs, _ = outputs(made["none"], 5, temperature)
        for kind, batch in (("none", 1), ("ngram", 1), ("ngram", 5), ("draft_model", 1), ("draft_model", 5)):
            own_tokens, own_logprobs, length = outputs(made[kind], batch, temperature)
            wrong = differences(own_tokens, tokens), differences(own_logprobs, logprobs)
            if any(wrong):
                found.append(f"{kind}, batch {batch}, temperature {temperature}: tokens of {wrong[0]}, "
                             f"log-probabilities of {wrong[1]}")  # fmt: skip
            lengths += [length] if kind == "draft_model" else []
    return found, min(lengths)


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *MORE])
def test_speculation_changes_no_bit(architecture: str) -> None:
    found, length = compare(make_model(architecture, dtype=torch.bfloat16).cuda())
    assert not found, "\n".join(found)
    # Most n-gram drafts are rejected; without these, hardly a step would emit several tokens.
    assert length > 1.2


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "opt", "qwen2_moe"])
def test_rows_before_the_first_position_change_no_bit(architecture: str) -> None:
    model = make_model(architecture, dtype=torch.bfloat16).to("cuda")
    program = last(first(target=trace(model)), [InsertKVCache(16), *LOWERING])
    tokens = torch.stack(ragged_prompts((20, 20)))
    expected, before = run_window(program, tokens, 0)
    for lead in (1, 4):
        found, caches = run_window(program, tokens, lead)
        assert torch.equal(found, expected)
        for cache, other in zip(caches, before, strict=True):
            assert torch.equal(cache.nan_to_num(9.0), other.nan_to_num(9.0))
