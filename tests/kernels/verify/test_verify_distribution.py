"""Lossless rules leave the target's distribution as it is: across decoder steps, not only within one.

A small Markov model stands in for the target, another one for the draft, and the decoder's loop runs for a hundred
thousand sequences at once. The joint distribution of the first four tokens is compared with the exact one. Three
verifiers with a bug that a one-step test may not see have to fail the same comparison.

Most of it is the exact enumeration and the biased variants that must fail against it, which read together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from specgraph.kernels.sampling.constants import STREAM_ACCEPT, STREAM_DRAFT, STREAM_RESIDUAL
from specgraph.kernels.sampling.draft import sample_draft as draw_draft
from specgraph.kernels.sampling.sample import (
    process_logits,
    sample,
    uniform,
)
from specgraph.kernels.verify import accept, emit, invert_vocabulary, residual
from tests.kernels.verify.definition import acceptance_chances, verified

TOKENS = 4
DRAWS = 100_000
CHUNK = 25_000
LEAST_P = 1e-4
BIASED_P = 1e-12

Group = tuple[float, int, float, float]
"""Temperature, top_k, top_p, min_p of one part of the batch."""


@dataclass(frozen=True)
class Case:
    """A target, a draft, and the sampling options that the batch mixes.

    Attributes:
        target: ``[P, V, V]`` logits of the next token, by position modulo P and previous token.
        draft: ``[P, V, Vd]`` the same for the draft, or ``[P, V]`` int64 proposals without a distribution.
        drafts: K.
        groups: sequence b uses group ``b % len(groups)``.
        to_target: target id of every draft id.
        draws: sequences. A deviation of 3 to 7% of every cell's probability is found with a probability of 0.9.
    """

    target: Tensor
    draft: Tensor
    drafts: int
    groups: tuple[Group, ...] = ((1.0, 0, 1.0, 0.0),)
    to_target: Tensor | None = None
    draws: int = DRAWS


@dataclass
class Batch:
    """Sequences in flight: their options and where they are."""

    seeds: Tensor
    options: list[Tensor | None]
    start: Tensor
    last: Tensor
    drafts: Tensor = field(default_factory=lambda: torch.empty(0))
    logits: Tensor | None = None

    def keep(self, rows: Tensor) -> None:
        self.seeds, self.start, self.last = self.seeds[rows], self.start[rows], self.last[rows]
        self.options = [None if option is None else option[rows] for option in self.options]


Draw = Callable[..., tuple[Tensor, Tensor]]
Verify = Callable[[Tensor, Batch, Tensor, str, Tensor | None], tuple[Tensor, Tensor]]


def truth(logits: Tensor, group: Group) -> Tensor:
    """Exact next-token probabilities in float64, by the plainest code: ``[..., V]`` to ``[..., V]``."""
    out = torch.zeros_like(logits, dtype=torch.float64).reshape(-1, logits.shape[-1])
    for row, source in zip(out, logits.double().reshape(-1, logits.shape[-1]), strict=True):
        row.copy_(_truth_row(source, *group))
    return out.reshape(logits.shape)


def _truth_row(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    order = logits.argsort(descending=True).tolist()
    if temperature == 0:
        return torch.nn.functional.one_hot(torch.tensor(order[0]), len(order)).double()
    kept = order[: top_k or None]
    probs = (logits / temperature)[kept].softmax(0)
    if top_p < 1:
        kept = [token for token, before in zip(kept, probs.cumsum(0) - probs, strict=True) if before < top_p]
        probs = (logits / temperature)[kept].softmax(0)
    probs = torch.where(probs >= min_p * probs.max(), probs, 0.0)
    return torch.zeros_like(logits).index_put((torch.tensor(kept),), probs / probs.sum())


def joint(case: Case, group: Group) -> Tensor:
    """Exact probabilities of the first four tokens, ``[V ** 4]``."""
    probs = truth(case.target, group)
    period, vocab, _ = probs.shape
    total = probs[0, 0]
    for place in range(1, TOKENS):
        total = (total.reshape(-1, vocab, 1) * probs[place % period]).reshape(-1)
    return total


def verify(logits: Tensor, batch: Batch, positions: Tensor, rule: str, to_target: Tensor | None) -> tuple[Tensor, ...]:
    temperature, top_k, top_p, min_p = batch.options
    own = None if to_target is None else invert_vocabulary(to_target, logits.shape[-1])
    return verified(
        logits, batch.drafts, batch.logits, temperature=temperature, seeds=batch.seeds, positions=positions, rule=rule,
        top_k=top_k, top_p=top_p, min_p=min_p, target_to_draft=own,
    )  # fmt: skip


def propose(case: Case, batch: Batch, rule: str, draw: Draw) -> None:
    tokens, logits, previous = [], [], batch.last
    temperature, *cuts = batch.options
    for row in range(case.drafts):
        source = case.draft[(batch.start + row) % len(case.draft), previous]
        if source.dim() == 1:
            previous = source
        else:
            token, processed = draw(
                source.unsqueeze(1), temperature, batch.seeds, batch.start + 1, *cuts, row=row, rule=rule,
                draft_to_target=case.to_target,
            )  # fmt: skip
            previous = token.squeeze(1)
            logits.append(processed)
        tokens.append(previous)
    batch.drafts, batch.logits = torch.stack(tokens, 1), torch.cat(logits, 1) if logits else None


def fresh_batch(case: Case, seeds: Tensor) -> Batch:
    """Every sequence at position 0 after token 0. Options that no group uses are None, which skips their sorts."""
    groups = torch.tensor([case.groups[index % len(case.groups)] for index in range(len(seeds))])
    top_k, top_p, min_p = groups[:, 1].long(), groups[:, 2], groups[:, 3]
    cuts = [top_k if top_k.any() else None, top_p if (top_p < 1).any() else None, min_p if min_p.any() else None]
    zeros = torch.zeros_like(seeds)
    return Batch(seeds, [groups[:, 0], *cuts], zeros, zeros)


def run_chunk(case: Case, rule: str, seeds: Tensor, verify_step: Verify, draw: Draw) -> tuple[Tensor, list[float]]:
    """The first tokens ``[N, 4]`` of every sequence, and the mean number of tokens emitted in each step."""
    count = len(seeds)
    batch = fresh_batch(case, seeds)
    out = torch.full((count, TOKENS + case.drafts), -1)
    open_rows, lengths = torch.arange(count), []
    while len(open_rows):
        propose(case, batch, rule, draw)
        row = torch.arange(case.drafts + 1)
        positions = batch.start.unsqueeze(1) + row
        logits = case.target[positions % len(case.target), torch.cat([batch.last.unsqueeze(1), batch.drafts], 1)]
        emitted, num_emitted, *_ = verify_step(logits, batch, positions + 1, rule, case.to_target)
        out[open_rows.unsqueeze(1), positions] = emitted
        lengths.append(num_emitted.double().mean().item())
        batch.last = emitted.gather(1, num_emitted.unsqueeze(1) - 1).squeeze(1)
        batch.start = batch.start + num_emitted
        unfinished = batch.start < TOKENS
        batch.keep(unfinished)
        open_rows = open_rows[unfinished]
    return out[:, :TOKENS], lengths


def simulate(case: Case, rule: str, verify_step: Verify = verify, draw: Draw = draw_draft) -> Tensor:
    """Tokens ``[draws, 4]``, in chunks that bound the memory and hold every group equally often."""
    size = CHUNK // len(case.groups) * len(case.groups)
    parts = []
    for first in range(0, case.draws, size):
        seeds = (torch.arange(first, min(first + size, case.draws)) + 1) * 0x1F3D5B79A7C3E5F1
        tokens, lengths = run_chunk(case, rule, seeds, verify_step, draw)
        assert len(lengths) >= 2, "the draws must cross a border between decoder steps"
        parts.append(tokens)
    return torch.cat(parts)


def pooled(observed: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the cells whose expectation is below 5, smallest first, until every cell reaches it."""
    order = expected.argsort()
    observed, expected = observed[order], expected[order]
    cells = int((expected.cumsum(0) < 5).sum()) + 1
    while cells < len(expected) and expected[cells] < 5:
        cells += 1
    head_seen, head = observed[:cells].sum().view(1), expected[:cells].sum().view(1)
    return torch.cat([head_seen, observed[cells:]]), torch.cat([head, expected[cells:]])


def chi_square(counts: Tensor, probs: Tensor) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; a token that cannot be is a failure of its own."""
    assert counts[probs == 0].sum() == 0, "a token of probability 0 was emitted"
    observed, expected = pooled(counts[probs > 0].double(), probs[probs > 0] * counts.sum())
    return float(((observed - expected) ** 2 / expected).sum()), len(observed) - 1


def p_value(statistic: float, freedom: int) -> float:
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return 1.0 if freedom == 0 else float(torch.special.gammaincc(half[0], half[1]))


def joint_p(case: Case, tokens: Tensor) -> float:
    """p-value of the joint counts, summed over the groups of the batch."""
    vocab = case.target.shape[-1]
    weights = vocab ** torch.arange(TOKENS - 1, -1, -1)
    total, freedom = 0.0, 0
    for index, group in enumerate(case.groups):
        cells = (tokens[index :: len(case.groups)] * weights).sum(1)
        statistic, cell_freedom = chi_square(cells.bincount(minlength=vocab**TOKENS), joint(case, group))
        total, freedom = total + statistic, freedom + cell_freedom
    return p_value(total, freedom)


def table(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


MIXED: tuple[Group, ...] = (
    (1.0, 0, 1.0, 0.0),
    (0.0, 0, 1.0, 0.0),
    (0.7, 3, 1.0, 0.0),
    (1.3, 0, 0.8, 0.0),
    (1.0, 4, 0.9, 0.2),
)


def case_opposite() -> Case:
    target = table(2, 3, 3, seed=1)
    return Case(target, -target, drafts=2)


def case_drawn() -> Case:
    target = table(2, 5, 5, seed=2, scale=1.5)
    return Case(target, 0.7 * target + table(2, 5, 5, seed=3, scale=0.7), drafts=2, groups=MIXED)


def case_point() -> Case:
    target = table(2, 5, 5, seed=4)
    return Case(target, target.argmax(-1), drafts=2, groups=MIXED[:3])


def case_reduced() -> Case:
    target, to_target = table(2, 7, 7, seed=5, scale=1.5), torch.tensor([5, 0, 3])
    draft = target[..., to_target] + table(2, 7, 3, seed=6, scale=0.5)
    return Case(target, draft, drafts=3, to_target=to_target)


def case_opposite_wide() -> Case:
    target = table(1, 6, 6, seed=7)
    return Case(target, -target, drafts=2, groups=(MIXED[0], MIXED[3]), draws=DRAWS // 2)


CASES = [
    *((rule, build) for rule in ("probabilistic", "block")
      for build in (case_opposite, case_drawn, case_point, case_reduced)),
    ("block", case_opposite_wide), ("strict", case_drawn), ("strict", case_reduced),
]  # fmt: skip
"""``strict`` draws what the target alone would, whatever the draft says."""


@pytest.mark.parametrize(("rule", "build"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_joint_distribution(rule: str, build: Callable[[], Case]) -> None:
    case = build()
    p = joint_p(case, simulate(case, rule))
    print(f"p = {p:.3g}")
    assert p > LEAST_P


# Verifiers with one bug each.


def with_draft_noise(
    logits: Tensor, batch: Batch, positions: Tensor, rule: str, to_target: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The residual is drawn with the noise that drew the rejected draft."""
    return _verify_with(logits, batch, positions, rule, residual_stream=STREAM_DRAFT)


def with_target_residual(
    logits: Tensor, batch: Batch, positions: Tensor, rule: str, to_target: Tensor | None
) -> tuple[Tensor, Tensor]:
    """After a rejection the next token comes from the target itself instead of ``max(p - q, 0)``."""
    return _verify_with(logits, batch, positions, rule, residual_rule="strict")


def _verify_with(
    logits: Tensor, batch: Batch, positions: Tensor, rule: str,
    residual_stream: int = STREAM_RESIDUAL, residual_rule: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows, forced = torch.full_like(batch.seeds, positions.shape[1]), torch.zeros_like(batch.seeds)
    processed = process_logits(logits, *batch.options)
    count = accept(processed, batch.drafts, batch.logits, batch.seeds, positions, rows, forced, rule=rule)
    weights = residual(processed, batch.drafts, batch.logits, count, forced, rows, rule=residual_rule or rule)
    row = count.unsqueeze(1)
    token = sample(weights.unsqueeze(1), batch.seeds, positions[:, :1], row, residual_stream).squeeze(1)
    return emit(batch.drafts, count, token, rows, forced)


def draw_by_position(
    logits: Tensor, temperature: Tensor, seeds: Tensor, key: Tensor, *cuts: Tensor | None, row: int, **_: object
) -> tuple[Tensor, Tensor]:
    processed = process_logits(logits, temperature, *cuts)
    return sample(processed, seeds, key.unsqueeze(1) + row, None, STREAM_DRAFT), processed


def verify_by_position(
    logits: Tensor, batch: Batch, positions: Tensor, rule: str, to_target: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Every stream is keyed by the token's position, so noise of discarded rows comes back in the next step."""
    rows, forced = torch.full_like(batch.seeds, positions.shape[1]), torch.zeros_like(batch.seeds)
    processed = process_logits(logits, *batch.options)
    chances = acceptance_chances(processed, batch.drafts, batch.logits, rows, forced, rule="block")
    taken = uniform(batch.seeds, STREAM_ACCEPT, positions) < chances
    count = torch.where(taken, torch.arange(1, positions.shape[1] + 1), 0).amax(1)
    weights = residual(processed, batch.drafts, batch.logits, count, forced, rows, rule="block")
    key = positions.gather(1, count.unsqueeze(1))
    token = sample(weights.unsqueeze(1), batch.seeds, key, None, STREAM_RESIDUAL).squeeze(1)
    return emit(batch.drafts, count, token, rows, forced)


BIASED = [
    ("probabilistic", with_draft_noise, draw_draft),
    ("block", with_draft_noise, draw_draft),
    ("block", verify_by_position, draw_by_position),
    ("probabilistic", with_target_residual, draw_draft),
    ("block", with_target_residual, draw_draft),
]


@pytest.mark.parametrize(("rule", "verify_step", "draw"), BIASED, ids=lambda value: getattr(value, "__name__", value))
def test_biased_verifiers_fail(rule: str, verify_step: Verify, draw: Draw) -> None:
    case = replace(case_opposite(), draws=DRAWS // 2)
    p = joint_p(case, simulate(case, rule, verify_step=verify_step, draw=draw))
    print(f"p = {p:.3g}")
    assert p < BIASED_P


def test_the_biased_harness_is_sound_without_the_bug() -> None:
    """The verifier that the biased ones are made of passes, so it is their bug that fails."""
    case = case_opposite()

    def unbiased(
        logits: Tensor, batch: Batch, positions: Tensor, rule: str, to_target: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return _verify_with(logits, batch, positions, rule)

    assert joint_p(case, simulate(case, "block", verify_step=unbiased)) > LEAST_P


@pytest.mark.parametrize("rule", ["probabilistic", "block"])
def test_marginals_of_a_large_vocabulary(rule: str) -> None:
    """1,024 tokens, four positions, 6,000 sequences: every position has its own distribution and its own counts."""
    vocab, draws, chunk = 1024, 6_000, 160
    base = table(1, 1, vocab, seed=8, scale=2.0)
    target = base + table(TOKENS, 1, vocab, seed=9, scale=0.5)
    # The draft knows the 256 ids that are likely at every position, in an order of its own.
    to_target = base.flatten().topk(256).indices
    draft = target[..., to_target] + table(TOKENS, 1, 256, seed=10, scale=0.5)
    # One previous token stands for all: the tables depend on the position alone.
    case = Case(target.expand(-1, vocab, -1), draft.expand(-1, vocab, -1), drafts=2, to_target=to_target)
    counts = torch.zeros(TOKENS, vocab)
    for first in range(0, draws, chunk):
        tokens, _ = run_chunk(case, rule, torch.arange(first, first + chunk), verify, draw_draft)
        counts += torch.stack([column.bincount(minlength=vocab) for column in tokens.unbind(1)])
    assert counts.sum() >= 24_000
    parts = [chi_square(counts[place], truth(target[place, 0], case.groups[0])) for place in range(TOKENS)]
    p = p_value(sum(part[0] for part in parts), sum(part[1] for part in parts))
    print(f"p = {p:.3g}")
    assert p > LEAST_P


def exact_outcome(target: Tensor, draft: Tensor, rule: str, to_target: Tensor | None) -> tuple[Tensor, float]:
    """Distribution ``[V ** (K + 1)]`` of the next K + 1 tokens after one verified block, and the mean accepted length.

    All blocks of drafts are one batch, weighted by their probability; after the block the target goes on alone.
    Tables are ``[K + 1, V, V]`` and ``[K, V, Vd]`` in float64, so this is a proof up to rounding, not a sample.
    """
    drafts, vocab, own = draft.shape[0], target.shape[-1], draft.shape[-1]
    ids = torch.arange(own) if to_target is None else to_target
    known = None if to_target is None else invert_vocabulary(to_target, vocab)
    blocks = torch.tensor(list(itertools.product(range(own), repeat=drafts)))
    tokens = ids[blocks]
    window = torch.nn.functional.pad(tokens, (1, 0))
    logits = target[torch.arange(drafts + 1), window]
    draft_logits = draft[torch.arange(drafts), window[:, :-1]]
    drawn = draft_logits.softmax(-1).gather(-1, blocks.unsqueeze(-1)).squeeze(-1).prod(1)
    rows, forced = torch.full((len(blocks),), drafts + 1), torch.zeros(len(blocks), dtype=torch.int64)
    chances = acceptance_chances(logits, tokens, draft_logits, rows, forced, rule=rule, target_to_draft=known)
    total, mean = torch.zeros((vocab,) * (drafts + 1), dtype=torch.float64), 0.0
    for length, chance in enumerate(_length_chances(chances[:, :drafts], rule)):
        count = torch.full_like(rows, length)
        weights = residual(logits, tokens, draft_logits, count, forced, rows, rule=rule, target_to_draft=known)
        after = (drawn * chance).unsqueeze(1) * weights.softmax(-1)
        mean += length * float((drawn * chance).sum())
        for prefix, row in zip(tokens[:, :length].tolist(), after, strict=True):
            total[tuple(prefix)] += _continue(row, target[length + 1 :])
    return total.reshape(-1), mean


def _length_chances(chances: Tensor, rule: str) -> list[Tensor]:
    """Probability of every accepted length, 0 to K."""
    one, drafts = torch.ones_like(chances[:, 0]), chances.shape[1]
    taken = torch.cat([one.unsqueeze(1), chances], 1)
    refused = torch.cat([1 - chances, one.unsqueeze(1)], 1)
    if rule == "block":
        return [taken[:, i] * refused[:, i:drafts].prod(1) for i in range(drafts + 1)]
    return [taken[:, : i + 1].prod(1) * refused[:, i] for i in range(drafts + 1)]


def _continue(first: Tensor, target: Tensor) -> Tensor:
    for following in target.softmax(-1):
        first = first.unsqueeze(-1) * following.expand(*first.shape, -1)
    return first


@pytest.mark.parametrize("rule", ["probabilistic", "block"])
@pytest.mark.parametrize(("vocab", "own", "drafts"), [(2, 2, 4), (3, 3, 3), (4, 3, 2), (3, 3, 1)])
def test_one_block_is_exact(rule: str, vocab: int, own: int, drafts: int) -> None:
    target = table(drafts + 1, vocab, vocab, seed=11, scale=2.0).double()
    draft = table(drafts, vocab, own, seed=12, scale=2.0).double()
    to_target = None if own == vocab else torch.tensor([3, 0, 2])
    found, _ = exact_outcome(target, draft, rule, to_target)
    wanted = _continue(target[0, 0].softmax(-1), target[1:]).reshape(-1)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-14)


def test_block_accepts_more_than_probabilistic_on_the_example_of_the_paper() -> None:
    """Two tokens, no context, p = (1/3, 2/3), q = (2/3, 1/3), two drafts: 10/9 tokens against 11/9."""
    target = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64).log().expand(3, 2, 2)
    draft = torch.tensor([2 / 3, 1 / 3], dtype=torch.float64).log().expand(2, 2, 2)
    assert exact_outcome(target, draft, "probabilistic", None)[1] == pytest.approx(10 / 9, abs=1e-12)
    assert exact_outcome(target, draft, "block", None)[1] == pytest.approx(11 / 9, abs=1e-12)


@pytest.mark.parametrize(("build", "least"), [(case_opposite, 3), (case_drawn, 3), (case_reduced, -3)])
def test_block_accepts_at_least_as_much_on_the_same_prefixes(build: Callable[[], Case], least: float) -> None:
    case, draws = build(), 20_000
    case = Case(case.target, case.draft, 4, case.groups[:1], case.to_target)
    lengths = {}
    for rule in ("probabilistic", "block"):
        batch = fresh_batch(case, torch.arange(draws))
        propose(case, batch, rule, draw_draft)
        window = torch.nn.functional.pad(batch.drafts, (1, 0))
        positions = torch.arange(case.drafts + 1).expand(draws, -1)
        logits = case.target[positions % len(case.target), window]
        _, emitted, *_ = verify(logits, batch, positions + 1, rule, case.to_target)
        lengths[rule] = emitted.double()
    gain = lengths["block"] - lengths["probabilistic"]
    error = float(gain.std()) / draws**0.5
    print(f"gain = {float(gain.mean()):.4f} +- {error:.4f}")
    assert float(gain.mean()) > least * error
