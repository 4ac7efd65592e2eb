"""What token equality cannot see: a drafter's state, its proposals and the slots it writes (DESIGN section 10).

Speculation is lossless even when the drafter is broken. Three detectors look at the drafter itself:

* fresh start: after any accept/reject history, its cache and its proposals equal those of a new start on the accepted
  tokens;
* oracle: its proposals equal those that the plain transformers model gives without any cache;
* slots: it writes exactly the slots of accepted tokens and of the chained drafts behind them.

Each planted bug, and what caught it here (``test_planted_bugs_are_caught`` asserts the hits):

=============================  ============  ===========  ======  ======
bug                            equal tokens  fresh start  oracle  slots
=============================  ============  ===========  ======  ======
noise off by one position      missed        missed       caught  missed
chained position off by one    missed        caught       caught  caught
catch-up skips the last row    missed        caught       caught  caught
chained rows not written       missed        missed       caught  caught
rejected rows written          missed        missed       missed  caught
inactive rows written          missed        caught       missed  caught
window instead of emitted      missed        caught       caught  missed
proposals from the row before  missed        missed       caught  missed
raw logits kept (drawn rules)  (biased)      missed       caught  missed
=============================  ============  ===========  ======  ======

Chained rows that are not written see nothing either, whatever came before them, and the catch-up runs every accepted
token again, so here the fresh start misses them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specgraph import SpeculativeDecoder
from specgraph.runtime.outputs.output import GenerateOutput
from tests.decoding import compiled
from tests.detectors import NextLogits, caught_by
from tests.drafters.contract import CachedDraftContract, Case, planted
from tests.harness import Run, real_run
from tests.models import VOCAB, double_model, ragged_prompts
from tests.once import once
from tests.pairwise import cover, product

PROMPTS = ragged_prompts((3, 9, 5))
NEW_TOKENS = 24


@functools.cache
def target() -> PreTrainedModel:
    return double_model("llama", 0)


def _near() -> PreTrainedModel:
    """The target, moved a little: some of its drafts are accepted and some are not."""
    model = double_model("llama", 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.03 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "near": _near,
    "qwen3": lambda: double_model("qwen3", 3, num_hidden_layers=1),
    "sliding window": lambda: double_model("mistral", 4),
    "learned positions": lambda: double_model("gpt2", 5),
    "padded vocabulary": lambda: double_model("llama", 6, num_hidden_layers=1, vocab_size=VOCAB + 11),
    "smaller vocabulary": lambda: double_model("llama", 7, num_hidden_layers=1, vocab_size=VOCAB - 6),
}


@functools.cache
def draft(name: str) -> PreTrainedModel:
    return target() if name == "itself" else MODELS[name]()


@once
def decoder(name: str, k: int, *, max_length: int | None = None, block_size: int = 4) -> SpeculativeDecoder:
    """A decoder by the name of its draft: a key of ``MODELS``, ``itself``, ``ngram`` or ``none``."""
    order = ["insert_kv_cache", "insert_draft", "insert_verify"]
    extra: dict[str, Any] = {"pipeline": {"order": order, "verify": False}, "max_length": max_length,
                             "cache": {"prefill_chunk": 7, "block_size": block_size}}  # fmt: skip
    if name in ("ngram", "none"):
        return compiled(target(), name, k, **extra)
    return compiled(target(), "draft_model", k, draft(name), **extra)


# The oracle


def oracle(model: PreTrainedModel) -> NextLogits:
    """Logits by the plain model without a cache, -inf for ids the target does not have.

    Padding on the right is not seen by a causal model. Tokens that the draft does not have become its last one.
    """
    vocab = model.config.vocab_size

    @torch.no_grad()
    def next_logits(accepted: Sequence[list[int]], drafted: Sequence[list[int]]) -> Tensor:
        sequences = [[*a, *d] for a, d in zip(accepted, drafted, strict=True)]
        width = max(map(len, sequences))
        ids = torch.tensor([[min(t, vocab - 1) for t in s] + [3] * (width - len(s)) for s in sequences])
        last = torch.tensor([len(s) - 1 for s in sequences])
        logits = model(input_ids=ids, use_cache=False).logits[torch.arange(len(sequences)), last]
        return logits.masked_fill(torch.arange(vocab) >= VOCAB, -torch.inf)

    return next_logits


# History independence, the oracle and the slots, over forced histories

AXES = {"name": (*MODELS,), "k": (1, 4), "rule": ("strict", "probabilistic")}


class TestDrafts(CachedDraftContract):
    KIND, TOKENS_TOO = "draft_model", True
    target = staticmethod(target)
    draft = staticmethod(draft)
    CASES = tuple(dict.fromkeys((
        *(Case(*case) for case in cover(product(AXES), (0, 1))), Case("near", 4), Case("near", 4, "probabilistic"),
    )))  # fmt: skip
    REAL = (Case("near", 4), Case("near", 4, "probabilistic"), Case("sliding window", 4, "block"),
            Case("qwen3", 7, "probabilistic"))  # fmt: skip
    SEEDED = (Case("near", 4), Case("near", 1), Case("near", 7))
    POISONED = tuple({case.name: case for case in sorted(CASES)}.values())
    """Of every draft the case with the most drafts."""
    BUGS = planted(Case("near", 4), {
        "noise off by one position": {"oracle"},
        "chained position off by one": {"fresh start", "oracle", "slots"},
        "catch-up skips the last row": {"fresh start", "oracle", "slots"},
        "chained rows not written": {"oracle", "slots"},
        "rejected rows written": {"slots"},
        "inactive rows written": {"fresh start", "slots"},
        "window instead of emitted": {"fresh start", "oracle"},
        "proposals from the row before": {"oracle"},
    }) + planted(Case("near", 4, "probabilistic"), {
        "noise off by one position": {"oracle"}, "raw logits kept": {"oracle"},
    })  # fmt: skip

    @classmethod
    def oracle(cls, name: str) -> NextLogits:
        return oracle(draft(name))

    def check_history(self, case: Case, run: Run) -> None:
        super().check_history(case, run)
        assert any(0 in step.num_emitted and any(step.num_emitted) for step in run.steps)
        assert len({step.width for step in run.steps}) > 2

    def check_real(self, case: Case, run: Run) -> None:
        assert case.name != "near" or len(set(run.accept_counts)) > 3


# Edge cases, through the public API


def same_tokens(tested: SpeculativeDecoder, prompts: Sequence[Tensor], **options: Any) -> GenerateOutput:
    """Decode with and without drafts and compare token by token; returns the former."""
    out = tested.generate(prompts, **options)
    assert _lists(out) == _lists(plain(tested).generate(prompts, **options))
    return out


def plain(tested: SpeculativeDecoder) -> SpeculativeDecoder:
    """The decoder without drafts of the same longest sequence."""
    return decoder("none", 1, max_length=tested.config.max_length)


def _lists(out: GenerateOutput) -> list[list[int]]:
    return [tokens.tolist() for tokens in out.new_tokens]


def _options(rows: int) -> dict[str, Any]:
    return {"temperature": [0.0, 0.8, 1.3][-rows:], "seed": [11, -5, 7][-rows:]}


@pytest.mark.parametrize(("lengths", "k"), [((1,), 1), ((9,), 7), ((1, 1, 1), 4), ((1, 12, 2), 7)], ids=str)
def test_batches_of_one_and_prompts_of_one_token(lengths: tuple[int, ...], k: int) -> None:
    prompts = ragged_prompts(lengths)
    same_tokens(decoder("near", k), prompts, max_new_tokens=10, eos_token_id=[], **_options(len(prompts)))


@pytest.mark.parametrize("k", [1, 7])
def test_prompts_up_to_the_longest_sequence(k: int) -> None:
    lengths = (23, 24, 21)
    out = same_tokens(decoder("near", k, max_length=24), ragged_prompts(lengths), max_new_tokens=10, eos_token_id=[],
                      **_options(3))  # fmt: skip
    assert [len(tokens) for tokens in out.new_tokens] == [24 - n for n in lengths]


@pytest.mark.parametrize("room", [1, 2, 3, 6])
def test_more_drafts_than_room(room: int) -> None:
    out = same_tokens(decoder("near", 7), PROMPTS, max_new_tokens=room, eos_token_id=[], **_options(3))
    assert [len(tokens) for tokens in out.new_tokens] == [room] * 3


@pytest.mark.parametrize("name", ["near", "ngram", "sliding window"])
def test_a_sequence_that_ends_leaves_the_others_alone(name: str) -> None:
    free = _lists(decoder("none", 1).generate(PROMPTS, max_new_tokens=NEW_TOKENS, eos_token_id=[], **_options(3)))
    ends = [free[0][4], free[2][9]]
    out = same_tokens(decoder(name, 4), PROMPTS, max_new_tokens=NEW_TOKENS, eos_token_id=ends, **_options(3))
    assert len({len(tokens) for tokens in out.new_tokens}) > 1
    for tokens, all_tokens in zip(_lists(out), free, strict=True):
        assert tokens == all_tokens[: len(tokens)]


def test_eos_inside_an_accepted_prefix() -> None:
    greedy = _lists(decoder("none", 1).generate(PROMPTS[:1], max_new_tokens=12, eos_token_id=[]))[0]
    at = next(i for i in range(2, 5) if greedy[i] not in greedy[:i])
    out = same_tokens(decoder("itself", 7), PROMPTS[:1], max_new_tokens=12, eos_token_id=greedy[at])
    assert _lists(out) == [greedy[: at + 1]]
    assert out.stats.emitted_per_step == [[at]]


def test_seeds_differ_per_sequence() -> None:
    prompts = [PROMPTS[1]] * 3
    out = same_tokens(decoder("near", 4), prompts, max_new_tokens=NEW_TOKENS, eos_token_id=[], temperature=1.0,
                      seed=[1, 2, 1])  # fmt: skip
    tokens = _lists(out)
    assert tokens[0] == tokens[2] != tokens[1]


@pytest.mark.parametrize(("k", "temperature"), [(1, 1.0), (4, 0.0), (4, 1.0)])
def test_a_draft_that_is_the_target_is_always_accepted(k: int, temperature: float) -> None:
    """At temperature 1, too: ``strict`` draws drafts with the target's noise."""
    out = same_tokens(decoder("itself", k), PROMPTS, max_new_tokens=NEW_TOKENS, eos_token_id=[], seed=[1, 2, 3],
                      temperature=temperature)  # fmt: skip
    for counts in out.stats.emitted_per_step:
        assert set(counts[:-1]) == {k + 1}
        assert 1 + sum(counts) == NEW_TOKENS


@pytest.mark.parametrize("block_size", [1, 16])
def test_pages_are_crossed_and_ends_are_kept(block_size: int) -> None:
    prompts, limits = ragged_prompts((4, 13, 8)), (5, 31, 12)
    run = real_run(decoder("near", 7, block_size=block_size), prompts, limits)
    assert [len(tokens) for tokens in run.steps[-1].accepted] == list(limits)
    assert caught_by(run, oracle(draft("near")), "strict") == set()
    options = {"temperature": run.options.temperature, "top_k": run.options.top_k, "seed": run.options.seeds}
    expected = decoder("none", 1).generate(prompts, max_new_tokens=27, eos_token_id=[], **options)
    for tokens, limit, prompt, new in zip(run.steps[-1].accepted, limits, prompts, _lists(expected), strict=True):
        assert tokens == [*prompt.tolist(), *new][:limit]
