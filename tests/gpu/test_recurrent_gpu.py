"""Recurrent and hybrid targets in bf16, through kernels and CUDA graphs: no draft, batch or cut changes a bit."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import specgraph
from specgraph import Session, SpeculativeDecoder
from specgraph.kernels.recurrent import delta_rule_triton
from specgraph.kernels.recurrent.arguments import GatedDeltaRule
from specgraph.kernels.recurrent.delta_rule import CACHED_DELTA_RULE, gated_delta_rule_reference
from specgraph.kernels.state import RECURRENT
from tests.decoding import CONFIG
from tests.kernels.recurrent.histories import DEVICE, Memory, assert_near, history
from tests.kernels.recurrent.histories import run as run_history
from tests.models import HYBRIDS, make_head, make_model, ragged_prompts

_PREPARES_ALONE = delta_rule_triton._prepares_alone
PROMPTS = ragged_prompts((1, 40, 17, 100, 2))
NEW_TOKENS = 64
OPTIONS: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "eos_token_id": [], "return_logprobs": True}
Rows = list[tuple[Tensor, Tensor]]


@functools.cache
def model_of(architecture: str) -> PreTrainedModel:
    return make_model(architecture, dtype=torch.bfloat16).cuda()


def decoder_of(
    architecture: str, kind: str, k: int, chunk: int = 64, rule: str = "strict", draft: str | None = None
) -> SpeculativeDecoder:
    """``draft`` is the architecture of a draft model."""
    model = model_of(architecture)
    config = {**CONFIG, "cache": {"prefill_chunk": chunk}, "draft": {"kind": kind, "num_speculative_tokens": k},
              "lowering": {"name": "gpu"}, "numerics": "bitwise", "max_batch_size": 5,
              "verify": {"rule": rule, "acceptance_rate": 0.7}}  # fmt: skip
    if draft is not None:
        return specgraph.compile_speculative(model, config, draft=model_of(draft))
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


@pytest.mark.parametrize("architecture", ["lfm2", "olmo_hybrid", "qwen3_next", "kimi_linear", "mamba2", "mamba"])
def test_whatever_was_accepted_the_bits_are_those_of_a_fresh_start(architecture: str) -> None:
    """Drafts are accepted by lot, so that histories are mixed; scoring runs the tokens that came out as a prompt."""
    decoder = decoder_of(architecture, "eagle3", 3, rule="synthetic")
    out = decoder.generate(PROMPTS, **OPTIONS)
    assert {1, 2, 3, 4} == {count for row in out.stats.emitted_per_step for count in row}
    scored = decoder.score(out).logprobs
    wrong = [row for row, (a, b) in enumerate(zip(out.logprobs or [], scored, strict=True)) if not torch.equal(a, b)]
    assert not wrong, f"log-probabilities differ in {wrong}"


def kimi_rows(length: int, seed: int, heads: int) -> tuple[Tensor, ...]:
    """Queries, keys, values, gates per channel and rates of a sequence, with heads as Kimi-Linear has them.

    Queries and keys are bfloat16; values are float32, so that the result is not rounded. Gates are from weak to strong.
    """
    generator, size = torch.Generator().manual_seed(seed), 128
    q, k, v, gate = (torch.randn(length, heads, size, generator=generator) for _ in range(4))
    strengths = torch.logspace(-4, 2, size)
    rate = torch.rand(length, heads, generator=generator)
    rows = q.bfloat16(), k.bfloat16(), v, -torch.nn.functional.softplus(gate) * strengths, rate.bfloat16()
    return tuple(x.to(DEVICE) for x in rows)


def decode(inputs: list[tuple[Tensor, ...]], prompt: int, k: int, accept: str, seed: int) -> list[Tensor]:
    """What the sequences emit if their prompts are cut at random, and ``k`` rows are drafted behind them."""
    plans = [[*history(len(rows[0]), prompt + n, k, accept, seed + n)] for n, rows in enumerate(inputs)]
    form = RECURRENT[torch.ops.specgraph.gated_delta_rule.default]
    buffers = [buffer.allocate({"B": 4}, DEVICE) for buffer in form.buffers([x[None] for x in inputs[0]], k)]

    def call(*given: Tensor) -> Tensor:
        q, keys, v, gate, rate, span = given
        op, options = CACHED_DELTA_RULE.form("triton"), {"scale": q.shape[-1] ** -0.5, "normalise": True}
        out: Tensor = op(q, keys, v, gate, *buffers, span.to(DEVICE), rate, **options)
        return out

    return run_history(inputs, plans, Memory([2, 0, 3][: len(inputs)]), call, 0)


@pytest.mark.parametrize("heads", [32])
def test_gates_per_channel_at_the_shapes_of_kimi_linear(heads: int) -> None:
    inputs = [kimi_rows(length, seed, heads) for seed, length in enumerate((100, 67, 90))]
    wanted = decode(inputs, 60, 7, "all", 0)
    for rows, out in zip(inputs, wanted, strict=True):
        given = GatedDeltaRule(*(x[None].double() for x in rows), scale=128**-0.5, normalise=True)
        assert_near(out, gated_delta_rule_reference(given)[0].cpu(), 1e-5)
    for seed, (k, accept) in enumerate([(0, "all"), (1, "none"), (3, "mixed"), (7, "mixed")]):
        for prompt in (2, 60):
            found = decode(inputs, prompt, k, accept, 10 * seed + prompt)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), f"K {k}, prompt {prompt}"


SHARED, *TAILS = ragged_prompts((100, 3, 20, 40, 1, 33))
WITH_PREFIX = [torch.cat([SHARED[: 100 - 17 * (index % 3)], tail]) for index, tail in enumerate(TAILS)] + [SHARED[:48]]


def poison_unused(session: Session) -> None:
    """Write NaN to all rows of recurrent state, which no sequence has now, and to all snapshots that nobody finds."""
    runner = session._engine._runner
    assert runner.memory.snapshots is not None and runner.pages.snapshots is not None
    used = {*runner.pages.snapshots._known.values()}
    for there, kept in (pair for pairs in runner.memory.snapshots._pairs.values() for pair in pairs):
        if there.is_floating_point():
            there.fill_(torch.nan)
            kept[[snapshot for snapshot in range(len(kept)) if snapshot not in used]] = torch.nan


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("lfm2", "none"), ("olmo_hybrid", "eagle3"), ("qwen3_next", "ngram"), ("mamba2", "ngram"), ("mamba", "none")],
)
def test_a_state_that_is_shared_changes_no_bit(architecture: str, kind: str) -> None:
    """Copies run between replays of captured steps, in calls that share a workspace and in a session."""
    decoder = decoder_of(architecture, kind, 3)
    seeds = [*range(len(WITH_PREFIX))]
    options: dict[str, Any] = {**OPTIONS, "temperature": 1.0}
    decoder._runners.cache = replace(decoder._runners.cache, reuse_prefixes=False)
    alone = decoder.generate(WITH_PREFIX, seed=seeds, **options)
    assert alone.stats.reused_tokens == 0
    decoder._runners.idle, decoder._runners.cache = None, replace(decoder._runners.cache, reuse_prefixes=True)
    for order in ([*seeds], [*reversed(seeds)], seeds[1:] + seeds[:1]):
        out = decoder.generate([WITH_PREFIX[index] for index in order], seed=order, **options)
        wanted = [(alone.new_tokens[index], (alone.logprobs or [])[index]) for index in order]
        assert not any(differing([*zip(out.new_tokens, out.logprobs or [], strict=True)], wanted))
    assert out.stats.reused_tokens
    same: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "eos_token_id": [], "temperature": 1.0}
    with decoder.session() as session:
        for _ in range(2):
            poison_unused(session)
            numbers = {session.submit(WITH_PREFIX[index], seed=index, **same): index for index in seeds}
            found: dict[int, list[int]] = {index: [] for index in seeds}
            for event in session:
                found[numbers[event.id]] += event.tokens
            assert [found[index] for index in seeds] == [tokens.tolist() for tokens in alone.new_tokens]
        assert session.stats.reused_tokens > 0


@pytest.mark.parametrize(
    ("architecture", "draft", "k"),
    [("llama", "lfm2", 4), ("llama", "mamba", 7), ("qwen3_next", "mamba2", 3), ("mamba2", "qwen3_5_text", 7)],
)
def test_recurrent_draft_models_change_no_bit(architecture: str, draft: str, k: int) -> None:
    plain, drafted = decoder_of(architecture, "none", 1), decoder_of(architecture, "draft_model", k, draft=draft)
    for temperature in (0.0, 1.0):
        wanted = run(plain, 5, temperature)
        for batch in (1, 3, 5):
            wrong = differing(run(drafted, batch, temperature), wanted)
            assert not any(wrong), f"batch {batch}, temperature {temperature}: {wrong}"


@pytest.mark.parametrize(("architecture", "k"), [("lfm2", 7), ("qwen3_next", 3), ("mamba2", 7), ("mamba", 3)])
def test_every_draft_of_the_target_itself_is_accepted(architecture: str, k: int) -> None:
    """Prompts of all lengths and 64 tokens, so that chains begin, end and cross boundaries at every place."""
    out = decoder_of(architecture, "draft_model", k, draft=architecture).generate(PROMPTS, **OPTIONS)
    assert all({*row[:-1]} == {k + 1} for row in out.stats.emitted_per_step), out.stats.emitted_per_step


@pytest.mark.parametrize("apart", [0, 1, 2])
@pytest.mark.parametrize("size", [32, 40, 48, 64, 72, 100, 128, 200, 256])
def test_one_warp_prepares_a_prompt_with_the_bits_of_two(
    size: int, apart: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``apart`` is how many elements lie between two rows, on which the width of loads depends."""
    generator, length = torch.Generator("cuda").manual_seed(size), 77
    shape = (2, length, 2, size + apart)
    q, k = (torch.randn(shape, device="cuda", generator=generator).bfloat16()[..., :size] for _ in range(2))
    v = torch.randn(2, length, 4, 32, device="cuda", generator=generator)
    gate, rate = -torch.rand(2, length, 4, device="cuda", generator=generator), v[..., 0].sigmoid()
    state = RECURRENT[torch.ops.specgraph.gated_delta_rule.default].buffers(
        [x[:1, :1] for x in (q, k, v, gate, rate)], 3
    )
    span = torch.tensor([[0, 0, 0, length, length], [1, 0, 0, 50, 50]], device="cuda")
    found = []
    for alone in (True, False):
        monkeypatch.setattr(delta_rule_triton, "_prepares_alone", lambda q, alone=alone: alone and _PREPARES_ALONE(q))
        buffers = [buffer.allocate({"B": 2}, "cuda") for buffer in state]
        run = CACHED_DELTA_RULE.form("triton")
        found.append([run(q, k, v, gate, *buffers, span, rate, scale=size**-0.5, normalise=True), *buffers])
    assert all(map(torch.equal, *found))
