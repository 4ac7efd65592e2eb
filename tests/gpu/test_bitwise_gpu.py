"""``numerics: bitwise``: tokens and log-probabilities of speculation are those of plain decoding, bit for bit.

The trained tiny-math models in bf16, through the default pipeline of a GPU: kernels, one CUDA graph per bucket, results
read one step behind.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import specgraph
from benchmarks.share_of_tokens import other_family
from specgraph import GenerateOutput, SpeculativeDecoder
from specgraph.runtime.execution.workspace import Workspace
from tests.gpu.capture import no_synchronisation

ROOT = Path(__file__).parents[2] / "examples"
MODELS = ROOT / "models" / "tiny-math"
PROMPTS, NEW_TOKENS = 100, 512


@functools.cache
def prompts() -> list[Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
    lines = (ROOT / "data" / "gsm8k_test_200.jsonl").read_text().splitlines()[:PROMPTS]
    texts = [f"Question: {json.loads(line)['question']}\nAnswer:" for line in lines]
    return [tokenizer(text, return_tensors="pt").input_ids[0] for text in texts]


def decoder(
    kind: str, k: int | str = 1, *, first: str | None = None, drafting: dict[str, Any] | None = None, **extra: Any
) -> SpeculativeDecoder:
    target = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.bfloat16).cuda()
    loaded = kind not in ("none", "ngram", "suffix", "early_exit")
    draft: dict[str, Any] = {"num_speculative_tokens": k, "first": first, **(drafting or {})}
    draft |= {} if loaded else {"kind": kind}
    config = {"draft": draft, "debug": {"self_check": False}, **extra}
    return specgraph.compile_speculative(target, config, draft=MODELS / kind if loaded else None)


def run(compiled: SpeculativeDecoder, count: int, batch: int, temperature: float) -> list[tuple[Tensor, Tensor]]:
    """Tokens and log-probabilities of the first ``count`` prompts, ``batch`` at a time, to the last token asked for."""
    found = []
    for begin in range(0, count, batch):
        rows = range(begin, min(begin + batch, count))
        out: GenerateOutput = compiled.generate(
            [prompts()[row] for row in rows], max_new_tokens=NEW_TOKENS, eos_token_id=[], temperature=temperature,
            seed=list(rows), return_logprobs=True,
        )  # fmt: skip
        assert out.logprobs is not None
        found += list(zip(out.new_tokens, out.logprobs, strict=True))
    return found


def decode_graphs(space: Workspace) -> int:
    return sum(shape.width is None for shape in space.shapes)


@functools.cache
def plain(temperature: float) -> list[tuple[Tensor, Tensor]]:
    return run(decoder("none"), PROMPTS, 50, temperature)


def assert_same(found: list[tuple[Tensor, Tensor]], expected: list[tuple[Tensor, Tensor]]) -> None:
    tokens = [row for row, (a, b) in enumerate(zip(found, expected, strict=False)) if not torch.equal(a[0], b[0])]
    values = [row for row, (a, b) in enumerate(zip(found, expected, strict=False)) if not torch.equal(a[1], b[1])]
    assert not tokens and not values, f"tokens differ in {tokens}, log-probabilities in {values} of {len(found)}"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("kind", "k", "count", "batch"),
    [
        ("none", 1, 24, 8), ("none", 1, 3, 1), ("eagle3", 3, 100, 50), ("eagle3", 8, 64, 64), ("eagle3", 1, 16, 16),
        ("eagle3", 7, 3, 1), ("peagle", 5, 100, 64), ("peagle", 2, 16, 5), ("ngram", 4, 100, 50), ("draft", 6, 33, 33),
        ("eagle", 5, 50, 50), ("medusa", 5, 33, 33), ("mtp", 5, 100, 50), ("mtp", 3, 64, 64), ("mtp", 2, 3, 1),
        ("suffix", 8, 50, 50), ("suffix", 3, 3, 1),
    ],
)  # fmt: skip
def test_speculation_changes_no_bit(kind: str, k: int, count: int, batch: int, temperature: float) -> None:
    assert_same(run(decoder(kind, k), count, batch, temperature), plain(temperature))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("first", "kind", "k", "count", "batch"),
    [("ngram", "eagle3", 3, 50, 50), ("suffix", "peagle", 5, 33, 33), ("ngram", "medusa", 4, 5, 1),
     ("ngram", "draft", 7, 16, 16)],
)  # fmt: skip
def test_a_lookup_first_changes_no_bit(
    first: str, kind: str, k: int, count: int, batch: int, temperature: float
) -> None:
    compiled = decoder(kind, k, first=first)
    assert f"{first} first" in compiled.report()
    assert_same(run(compiled, count, batch, temperature), plain(temperature))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("kind", "k", "extra", "count", "batch"),
    [
        ("eagle3", 5, {"window": 48}, 50, 50), ("dflash", 7, {"window": 48}, 16, 16), ("mtp", 3, {"window": 48}, 9, 3),
        ("eagle3", 3, {"max_context": 200}, 50, 50), ("draft", 6, {"max_context": 150}, 16, 16),
        ("peagle", 3, {}, 50, 50), ("peagle", "auto", {}, 50, 50), ("peagle", "auto", {"max_context": 150}, 16, 16),
        ("dspark", 5, {"max_context": 150, "window": 48}, 5, 1), ("eagle3", "auto", {"max_context": 300}, 33, 33),
        ("mtp", "auto", {"window": 48}, 33, 33), ("early_exit", 3, {"exit_layer": 6}, 50, 50),
        ("early_exit", 5, {"exit_layer": 4}, 5, 1), ("early_exit", "auto", {"exit_layer": 7}, 33, 33),
        ("suffix", 6, {"max_cached_tokens": 4096}, 33, 33), ("ngram", 5, {"max_cached_tokens": 1000}, 16, 4),
        ("eagle3", 3, {"max_context": 150, "first": "ngram", "first_match": 2}, 33, 33),
        ("dspark", "auto", {"max_context": 150, "first": "suffix", "first_match": 2}, 16, 16),
    ],
)  # fmt: skip
def test_options_of_drafting_change_no_bit(
    kind: str, k: int | str, extra: dict[str, Any], count: int, batch: int, temperature: float
) -> None:
    """Twice, since the second time the outputs of the first are known, and estimates of what is accepted."""
    compiled = decoder(kind, k, drafting=extra)
    for _ in range(2):
        assert_same(run(compiled, count, batch, temperature), plain(temperature))


@pytest.mark.parametrize("missing", [0, 400])
def test_a_draft_of_another_family_changes_no_bit(missing: int, tmp_path: Path) -> None:
    """Its ids are permuted, and the target does not know the last tokens of its tokenizer."""
    target = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.bfloat16).cuda()
    draft = other_family(MODELS / "draft", tmp_path / "draft", missing)
    compiled = specgraph.compile_speculative(
        target, {"draft": {"num_speculative_tokens": 5}, "debug": {"self_check": False}}, draft=draft
    )
    for temperature in (0.0, 1.0):
        assert_same(run(compiled, 33, 33, temperature), plain(temperature))


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("chunk", [16, 37, 64, 512])
def test_chunks_of_a_prompt_change_no_bit(chunk: int, captured: bool) -> None:
    """Neither do the shapes that captured prompt steps are rounded up to, nor that they are captured at all."""
    cut = decoder("ngram", 4, cache={"prefill_chunk": chunk}, lowering={"cuda_graph": captured})
    assert_same(run(cut, 16, 16, 0.0), plain(0.0))


@pytest.mark.parametrize("first", [None, "ngram", "suffix"])
def test_the_steady_loop_waits_for_nothing_but_its_results(first: str | None) -> None:
    """No call of the loop synchronises: replays, a copy to pinned memory, and an event that the host waits for.

    Nor does any before it: the state is set, and the prompts are run, without waiting.
    """
    compiled = decoder("eagle3", 3, first=first, cache={"prefill_chunk": 64})
    some = prompts()[:4]
    expected = compiled.generate(some, max_new_tokens=32, eos_token_id=[]).new_tokens
    with no_synchronisation():
        found = compiled.generate(some, max_new_tokens=32, eos_token_id=[]).new_tokens
        steps = compiled.stream(some, max_new_tokens=200, eos_token_id=[])
        count = sum(1 for _ in zip(range(20), steps, strict=False))
        steps.close()
    assert count == 20 and all(map(torch.equal, found, expected))


def test_captures_serve_every_request_that_fits_in() -> None:
    compiled = decoder("eagle3", 3)
    first = compiled.generate(prompts()[:7], max_new_tokens=40, eos_token_id=[])
    space = compiled._runners.idle
    again = compiled.generate(prompts()[:7], max_new_tokens=40, eos_token_id=[])
    fewer = compiled.generate(prompts()[:6], max_new_tokens=20, eos_token_id=[])
    assert space is not None and compiled._runners.idle is space and decode_graphs(space) <= 4  # 8, 4, 2, 1 are left
    assert all(map(torch.equal, first.new_tokens, again.new_tokens))
    assert all(torch.equal(a[:20], b) for a, b in zip(first.new_tokens, fewer.new_tokens, strict=False))
    third = compiled.generate(prompts()[:3], max_new_tokens=20, eos_token_id=[])
    assert compiled._runners.idle is space and decode_graphs(space) <= 4
    assert all(torch.equal(a[:20], b) for a, b in zip(first.new_tokens, third.new_tokens, strict=False))


def test_two_streams_side_by_side_do_not_disturb_each_other() -> None:
    compiled = decoder("eagle3", 3)
    expected = compiled.generate(prompts()[:2], max_new_tokens=60, eos_token_id=[]).new_tokens
    streams = [compiled.stream([prompts()[row]], max_new_tokens=60, eos_token_id=[]) for row in range(2)]
    found: list[list[int]] = [[], []]
    for chunks in zip(*streams, strict=False):
        for row, chunk in enumerate(chunks):
            found[row] += chunk.tokens[0]
    assert all(len(f) > 20 and f == e.tolist()[: len(f)] for f, e in zip(found, expected, strict=True))


def test_a_sequence_that_ends_early_changes_nothing_for_the_others() -> None:
    compiled = decoder("eagle3", 3)
    alone = [compiled.generate([p], max_new_tokens=120).new_tokens[0] for p in prompts()[:5]]
    together = compiled.generate(prompts()[:5], max_new_tokens=120)
    assert all(map(torch.equal, together.new_tokens, alone))
    assert together.stats.steps == sum(1 for _ in compiled.stream(prompts()[:5], max_new_tokens=120))
