"""Emitted tokens of the whole decoder against the target's exact joint distribution, by chi-square.

The rules by themselves, with biased variants that must fail, are in ``kernels/verify/test_verify_distribution.py``;
here the noise keys, the draft cache and the state updates of real step graphs take part.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import specgraph
from specgraph import SpeculativeDecoder
from specgraph.drafters import draft_model
from specgraph.kernels import step
from specgraph.runtime.execution.engine import Engine
from specgraph.runtime.outputs.stats import Stats
from specgraph.runtime.schedule.num_drafts import Choice
from specgraph.runtime.schedule.recent_acceptance import RecentAcceptance
from specgraph.runtime.schedule.sequences import ActiveSequence
from tests.capturing import captured
from tests.decoding import CONFIG, choose_at_random, compiled
from tests.models import make_model

VOCAB, LENGTH, BATCH = 3, 4, 8192
RUNS = 5
"""A relative deviation of 4.2% of every probability is found with a probability of 0.9, and one of 3.1% with top-k,
which leaves fewer continuations: 16 and not 81. More tokens would need more sequences for that."""
PROMPT = torch.tensor([2, 0, 1])
FEWER, UP = {1: 3, 4000: 1, 5500: 2}, {1: 3, 5000: 1, 6500: 2}
"""K by load, which changes while sequences enter and while they end. Behind their prompts, steps decode about 2730,
5300, 7060, 4310 and 1610 of them for a draft that is unlike the target.
"""
ENDS = "ends"
"""Chains of at most three drafts, which end where the draft is not sure."""
EACH = "each"
"""A number of drafts for each sequence and step, by dice."""
SMALL: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
                         "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 16}  # fmt: skip


@functools.cache
def model(seed: int) -> PreTrainedModel:
    made = make_model("llama", seed=seed, **SMALL)
    made.generation_config.eos_token_id = None
    made.config.eos_token_id = None
    return made


@functools.cache
def opposite() -> PreTrainedModel:
    """A draft whose logits are minus the target's."""
    made = make_model("llama", seed=0, **SMALL)
    made.config.eos_token_id = None
    with torch.no_grad():
        made.lm_head.weight.neg_()
    return made


def exact_joint(temperature: float, top_k: int) -> Tensor:
    """Probability of every continuation of LENGTH tokens, from full forwards: ``[VOCAB ** LENGTH]``."""
    paths = torch.tensor(list(itertools.product(range(VOCAB), repeat=LENGTH)))
    tokens = torch.cat([PROMPT.expand(len(paths), -1), paths], dim=1)
    with torch.no_grad():
        logits = model(0)(tokens, use_cache=False).logits[:, PROMPT.numel() - 1 : -1].double() / temperature
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -torch.inf)
    return logits.softmax(-1).gather(-1, paths.unsqueeze(-1)).prod(1)[:, 0]


def p_value(counts: Tensor, probabilities: Tensor) -> float:
    """Of the chi-square test, cells pooled in order of probability until each expects 5 or more."""
    expected = probabilities * counts.sum()
    assert counts[expected == 0].sum() == 0
    order = expected.argsort()
    observed, wanted = [], []
    o = w = 0.0
    for cell in order.tolist():
        o, w = o + float(counts[cell]), w + float(expected[cell])
        if w >= 5:
            observed.append(o)
            wanted.append(w)
            o = w = 0.0
    observed[-1] += o
    wanted[-1] += w
    a, b = torch.tensor(observed, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64)
    statistic = ((a - b) ** 2 / b).sum()
    return float(torch.special.gammaincc(torch.tensor((len(a) - 1) / 2, dtype=torch.float64), statistic / 2))


@pytest.mark.parametrize(
    ("rule", "kind", "draft", "k", "temperature", "top_k"),
    [
        ("strict", "draft_model", 1, 2, 1.0, 0),
        ("probabilistic", "ngram", None, 2, 1.0, 0),
        ("probabilistic", "draft_model", -1, FEWER, 0.7, 2),
        ("block", "draft_model", -1, UP, 0.7, 2),
        ("probabilistic", "draft_model", 1, ENDS, 1.0, 0),
        ("block", "draft_model", 1, ENDS, 1.0, 0),
        ("probabilistic", "draft_model", -1, EACH, 0.7, 2),
        ("block", "draft_model", -1, EACH, 0.7, 2),
    ],
    ids=["strict, drawn", "probabilistic, point masses", "probabilistic, K by load", "block, K by load",
         "probabilistic, chains end", "block, chains end", "probabilistic, parallel for each", "block, K for each"],
)  # fmt: skip
def test_joint_distribution_over_several_steps(
    rule: str, kind: str, draft: int | None, k: int | dict[int, int] | str, temperature: float, top_k: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(draft_model, "least_survival", lambda *models: 0.3)  # the models are hardly sure of anything
    loaded = None if draft is None else opposite() if draft < 0 else model(draft)
    extra: dict[str, Any] = {"verify": {"rule": rule}, "max_batch_size": BATCH}
    if k == EACH:
        monkeypatch.setattr(RecentAcceptance, "choose", choose_at_random())
        parallel = {"parallel": True, "mask_token_id": 0} if rule == "probabilistic" else {}
        decoder = replayed(rule, loaded, **parallel)
    else:
        decoder = compiled(model(0), kind, k, loaded, **extra) if k != ENDS else ending(rule)  # type: ignore[arg-type]
    counts, last = sampled(decoder, RUNS, temperature, top_k)
    assert counts.sum() >= 40_000
    if k in (ENDS, EACH):
        assert len(last.steps_by_drafts) > 1
    if k == ENDS:
        assert decoder._program.drafter.least_survival == 0.3
    assert not isinstance(k, dict) or {mode.drafts for mode in decoder._step_cache.steps} == {2, 1, None}
    p = p_value(counts, exact_joint(temperature, top_k))
    print(f"p = {p:.3g}")
    assert p > 1e-3


@pytest.mark.parametrize("rule", ["probabilistic", "block"])
def test_a_draft_that_is_left_out_because_of_its_own_value_is_found(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs are enough, since the counts are far off."""
    right = step.where_surviving

    def biased(token: Tensor, before: Tensor) -> Tensor:
        return right(torch.where(token < 1, -1, token), before)

    monkeypatch.setattr(draft_model, "least_survival", lambda *models: 0.3)
    monkeypatch.setattr(step, "where_surviving", biased)
    counts, _ = sampled(ending(rule), 2, 1.0, 0)
    print(f"p = {p_value(counts, exact_joint(1.0, 0)):.3g}")
    assert p_value(counts, exact_joint(1.0, 0)) < 1e-9


@pytest.mark.parametrize("rule", ["probabilistic", "block"])
def test_numbers_of_drafts_that_follow_from_the_drafts_themselves_are_found(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def biased(engine: Engine, decoding: Sequence[ActiveSequence]) -> Choice:
        drafts = engine._runner.real_drafts([sequence.state_row for sequence in decoding])
        return Choice(None, [next((n for n, token in enumerate(own) if token < 1), len(own)) for own in drafts])

    monkeypatch.setattr(Engine, "_worthwhile_drafts", biased)
    counts, _ = sampled(replayed(rule, model(1)), 2, 1.0, 0)
    print(f"p = {p_value(counts, exact_joint(1.0, 0)):.3g}")
    assert p_value(counts, exact_joint(1.0, 0)) < 1e-9


def replayed(rule: str, draft: PreTrainedModel | None, **parallel: Any) -> SpeculativeDecoder:
    """A decoder that chooses K without a look at the drafts, as on a GPU."""
    drafting = {"kind": "draft_model", "num_speculative_tokens": 3, "adaptive": True, **parallel}
    config = {**CONFIG, "draft": drafting, "verify": {"rule": rule}, "max_batch_size": BATCH}
    return captured(specgraph.compile_speculative(model(0), config, draft=draft))


def ending(rule: str) -> SpeculativeDecoder:
    """A decoder whose draft model makes up to three drafts and ends its chains itself."""
    drafting = {"draft.kind": "draft_model", "draft.num_speculative_tokens": 3, "draft.adaptive": True}
    config = {**CONFIG, **drafting, "verify": {"rule": rule}, "max_batch_size": BATCH}
    return specgraph.compile_speculative(model(0), config, draft=model(1))


def sampled(decoder: SpeculativeDecoder, runs: int, temperature: float, top_k: int) -> tuple[Tensor, Stats]:
    """How often each continuation occurred in ``runs`` calls, and what the last one counted."""
    counts, steps = torch.zeros(VOCAB**LENGTH, dtype=torch.float64), 0
    weights = torch.tensor([VOCAB ** (LENGTH - 1 - i) for i in range(LENGTH)])
    prompts = PROMPT.expand(BATCH, -1)
    for run in range(runs):
        out = decoder.generate(prompts, max_new_tokens=LENGTH, temperature=temperature, top_k=top_k, seed=run,
                               eos_token_id=[])  # fmt: skip
        counts += torch.bincount((torch.stack(out.new_tokens) * weights).sum(1), minlength=VOCAB**LENGTH)
        steps = max(steps, *map(len, out.stats.emitted_per_step))
    assert steps >= 2
    return counts, out.stats
