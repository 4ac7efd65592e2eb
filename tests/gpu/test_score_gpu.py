"""``decoder.score`` in bf16: the bits that ``generate`` reported for its tokens, whatever the batch and the chunks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import specgraph
from specgraph import GenerateOutput, SpeculativeDecoder
from tests.gpu.test_bitwise_gpu import decoder, prompts
from tests.models import make_model, ragged_prompts

COUNT, NEW_TOKENS = 32, 200
PROCESSED: dict[str, Any] = {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.01}


@functools.cache
def made(kind: str, k: int, chunk: int = 512) -> SpeculativeDecoder:
    return decoder(kind, k, cache={"prefill_chunk": chunk})


def generated(compiled: SpeculativeDecoder, given: list[Tensor], logprobs: str = "raw", **options: Any) -> Any:
    """The sequences, their prompts' lengths and the log-probabilities that ``generate`` reports."""
    out: GenerateOutput = compiled.generate(
        given, max_new_tokens=NEW_TOKENS, eos_token_id=[], seed=3, return_logprobs=logprobs, **options
    )
    joined = [torch.cat([prompt.cpu(), new.cpu()]) for prompt, new in zip(given, out.new_tokens, strict=True)]
    return joined, [len(prompt) for prompt in given], out.logprobs


@functools.cache
def rollout(temperature: float) -> Any:
    return generated(made("eagle3", 3), prompts()[:COUNT], temperature=temperature)


def assert_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    differing = [row for row, (a, b) in enumerate(zip(found, expected, strict=True)) if not torch.equal(a, b)]
    apart = [float((found[row] - expected[row]).abs().max()) for row in differing]
    assert not differing, f"log-probabilities differ in {differing} of {len(found)}, by up to {max(apart):.1e}"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("kind", "k"), [("none", 1), ("ngram", 4), ("eagle3", 3), ("draft", 6), ("peagle", 5)])
def test_a_rollout_and_its_scores_agree(kind: str, k: int, temperature: float) -> None:
    given, starts, expected = rollout(temperature)
    scored = made(kind, k).score(given, start=starts)
    assert_bits(scored.logprobs, expected)
    if temperature == 0:
        assert all(row.all() for row in scored.is_greedy)


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 8, 16])
def test_the_batch_changes_no_bit(batch: int) -> None:
    given, starts, expected = rollout(1.0)
    for begin in range(0, 16, batch):
        part = slice(begin, min(begin + batch, 16))
        assert_bits(made("ngram", 4).score(given[part], start=starts[part]).logprobs, expected[part])


@pytest.mark.parametrize("chunk", [2, 16, 37, 64])
def test_chunks_change_no_bit(chunk: int) -> None:
    given, starts, expected = rollout(1.0)
    assert_bits(made("ngram", 4, chunk).score(given[:8], start=starts[:8]).logprobs, expected[:8])


def test_whole_sequences_have_the_bits_of_their_parts() -> None:
    given, starts, expected = rollout(1.0)
    whole = made("none", 1).score(given).logprobs
    assert_bits([row[start - 1 :] for row, start in zip(whole, starts, strict=True)], expected)


@pytest.mark.parametrize("options", [{"temperature": 0.7}, PROCESSED])
def test_processed_log_probabilities_agree_too(options: dict[str, Any]) -> None:
    given, starts, expected = generated(made("eagle3", 3), prompts()[:8], "processed", **options)
    scored = made("ngram", 4).score(given, start=starts, logprobs="processed", **options)
    assert_bits(scored.logprobs, expected)


def test_a_prefix_that_generate_has_left_changes_no_bit() -> None:
    """The second call begins with pages that the first has filled, and generation afterwards finds its own."""
    compiled = decoder("eagle3", 3)
    given, starts, expected = generated(compiled, prompts()[:8], temperature=1.0)
    assert_bits(compiled.score(given, start=starts).logprobs, expected)
    again, _, values = generated(compiled, prompts()[:8], temperature=1.0)
    assert_bits(values, expected)
    assert all(torch.equal(a, b) for a, b in zip(again, given, strict=True))


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_random_models_agree(architecture: str, temperature: float) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "max_position_embeddings": 512}
    model = make_model(architecture, dtype=torch.bfloat16, vocab_size=5003, **sizes).cuda()
    config = {"draft": {"kind": "ngram", "num_speculative_tokens": 4}, "debug": {"self_check": False}}
    compiled = specgraph.compile_speculative(model, config)
    given, starts, expected = generated(compiled, ragged_prompts((1, 9, 33, 70), vocab=5003), temperature=temperature)
    assert_bits(compiled.score(given, start=starts).logprobs, expected)
    assert_bits(compiled.score(given[:1], start=starts[:1]).logprobs, expected[:1])


def test_contexts_that_are_shared_change_no_bit() -> None:
    """Several answers to each question, whose rows are run once, or once for each of them."""
    answers = [torch.tensor(ids) for ids in ([5], [7, 11, 13], [17] * 40)]
    given = [torch.cat([prompt, answer]) for prompt in prompts()[:8] for answer in answers]
    starts = [len(prompt) for prompt in prompts()[:8] for _ in answers]
    alone = decoder("ngram", 4, cache={"reuse_prefixes": False}).score(given, start=starts)
    assert_bits(made("ngram", 4).score(given, start=starts).logprobs, alone.logprobs)
