"""Verification: what each rule accepts and emits, which rows count, and what is refused.

The rules are tested side by side on the same problems, so the file is longer than others.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from specgraph.kernels.sampling.constants import STREAM_ACCEPT, STREAM_RESIDUAL
from specgraph.kernels.sampling.draft import sample_draft
from specgraph.kernels.sampling.sample import (
    RULES,
    process_logits,
    sample,
    uniform,
)
from specgraph.kernels.step import bad_rows, needed_rows
from specgraph.kernels.verify import (
    LOSSLESS_RULES,
    accept,
    emit,
    invert_vocabulary,
    residual,
    sample_next,
    token_logprobs,
)
from tests.kernels.verify.definition import acceptance_chances, verified


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def problem(batch: int = 64, drafts: int = 4, vocab: int = 7, own: int | None = None) -> dict[str, Any]:
    """Arguments of ``verified``: drafts really drawn from their logits, a third of the batch greedy."""
    target_logits = noise(batch, drafts + 1, vocab, seed=1)
    draft_logits = noise(batch, drafts, own or vocab, seed=2)
    to_target = None if own is None else torch.randperm(vocab, generator=torch.Generator().manual_seed(3))[:own]
    temperature = torch.tensor([1.0, 0.0, 0.7]).repeat(batch)[:batch]
    seeds, start = torch.arange(batch) * 7919 + 5, integers(1000, batch, seed=4)
    processed, tokens = [], []
    for row in range(drafts):
        token, weights = sample_draft(
            draft_logits[:, row : row + 1], temperature, seeds, start + 1, None, None, None, to_target, row, "block"
        )  # fmt: skip
        tokens.append(token)
        processed.append(weights)
    return {
        "logits": target_logits,
        "draft_tokens": torch.cat(tokens, 1) if drafts else torch.empty(batch, 0, dtype=torch.int64),
        "draft_logits": torch.cat(processed, 1) if drafts else None,
        "temperature": temperature,
        "seeds": seeds,
        "positions": start.unsqueeze(1) + 1 + torch.arange(drafts + 1),
        "target_to_draft": None if to_target is None else invert_vocabulary(to_target, vocab),
    }


def lists(emitted: Tensor, num_emitted: Tensor) -> list[list[int]]:
    """Emitted tokens of every sequence; what follows them must be -1."""
    assert ((emitted >= 0) == (torch.arange(emitted.shape[1]) < num_emitted.unsqueeze(1))).all()
    return [row[:count].tolist() for row, count in zip(emitted, num_emitted.tolist(), strict=True)]


# strict


@pytest.mark.parametrize(
    ("drafts", "quality"),
    [(0, "random"), (1, "good"), (1, "missing"), (3, "random"), (3, "good"), (3, "out of range"), (6, "good"),
     (6, "missing"), (6, "out of range")],
)  # fmt: skip
def test_strict_decodes_what_plain_sampling_decodes(drafts: int, quality: str) -> None:
    batch, vocab, length = 32, 11, 20
    target = noise(vocab, vocab, seed=5) * 2
    seeds, temperature = torch.arange(batch) + 100, torch.tensor([0.0, 1.0]).repeat(batch // 2)
    plain = torch.zeros(batch, length + 1, dtype=torch.int64)
    for place in range(length):
        logits = process_logits(target[plain[:, place]].unsqueeze(1), temperature)
        plain[:, place + 1] = sample(logits, seeds, torch.full((batch, 1), place + 1)).squeeze(1)
    found, start = torch.full((batch, length + drafts + 1), -1), torch.zeros(batch, dtype=torch.int64)
    found[:, 0], steps = 0, 0
    while int(start.min()) < length:
        positions = (start.unsqueeze(1) + torch.arange(drafts + 1)).clamp(max=length - 1)
        guesses = integers(vocab, batch, drafts, seed=steps)
        if quality == "good":
            guesses = plain.gather(1, positions[:, 1:])
        elif quality == "missing":
            guesses = guesses.masked_fill(guesses % 3 == 0, -1)
        elif quality == "out of range":
            guesses = guesses + vocab // 2
        window = torch.cat([found.gather(1, positions[:, :1]), guesses], 1).clamp(0, vocab - 1)
        emitted, count, *_ = verified(
            target[window], guesses, None, temperature=temperature, seeds=seeds, positions=positions + 1,
            num_rows=(length - start).clamp(0, drafts + 1),
        )  # fmt: skip
        for index, tokens in enumerate(lists(emitted, count)):
            found[index, start[index] + 1 : start[index] + 1 + len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        start, steps = start + count, steps + 1
    assert torch.equal(found[:, : length + 1], plain)
    if quality == "good":
        assert steps == -(-length // (drafts + 1))


def test_strict_does_not_look_at_draft_logits() -> None:
    given = problem()
    assert torch.equal(verified(**given)[0], verified(**{**given, "draft_logits": None})[0])


# rows, forced rows, rows without logits


@pytest.mark.parametrize("rule", RULES)
def test_forced_tokens_are_accepted_and_the_rest_has_the_chances_it_has_alone(rule: str) -> None:
    given, forced = problem(drafts=5), 2
    count = torch.full_like(given["seeds"], forced)
    emitted, num_emitted, *_ = verified(**given, rule=rule, num_forced=count, acceptance_rate=0.5)
    assert (num_emitted > forced).all()
    assert torch.equal(emitted[:, :forced], given["draft_tokens"][:, :forced])
    rows = torch.full_like(count, 6)
    processed = process_logits(given["logits"], given["temperature"])
    if rule != "strict":
        chances = acceptance_chances(
            processed, given["draft_tokens"], given["draft_logits"], rows, count, rule=rule, acceptance_rate=0.5
        )
        shorter = acceptance_chances(
            processed[:, forced:], given["draft_tokens"][:, forced:], given["draft_logits"][:, forced:], rows - forced,
            torch.zeros_like(count), rule=rule, acceptance_rate=0.5,
        )  # fmt: skip
        assert torch.equal(chances[:, forced:], shorter)
        assert (chances[:, :forced] == 0).all()


@pytest.mark.parametrize("rule", RULES)
def test_rows_and_forced_rows_bound_what_is_emitted(rule: str) -> None:
    given, drafts = problem(batch=28 * 8, drafts=6), 6
    pairs = [(rows, forced) for rows in range(8) for forced in range(min(rows, drafts) + 1)]
    rows, forced = (torch.tensor(column).repeat(7)[: 28 * 8] for column in zip(*pairs, strict=True))
    emitted, num_emitted, *_ = verified(**given, rule=rule, num_rows=rows, num_forced=forced, acceptance_rate=0.9)
    for index, tokens in enumerate(lists(emitted, num_emitted)):
        known, real = int(forced[index]), int(rows[index])
        drafted = given["draft_tokens"][index].tolist()
        assert tokens[:known] == drafted[:known]
        if known == real:
            assert len(tokens) == known
        else:
            assert known < len(tokens) <= real
            assert tokens[:-1] == drafted[: len(tokens) - 1]


@pytest.mark.parametrize("rule", RULES)
def test_padding_rows_change_nothing(rule: str) -> None:
    given = problem(drafts=5)
    rows = torch.full_like(given["seeds"], 3)
    wide = verified(**given, rule=rule, num_rows=rows, logprobs="raw")
    junk = {**given, "logits": given["logits"].clone(), "draft_logits": given["draft_logits"].clone()}
    junk["logits"][:, 3:] = torch.nan
    junk["draft_logits"][:, 2:] = torch.nan
    junk["draft_tokens"] = torch.cat([given["draft_tokens"][:, :2], torch.full((64, 3), -1)], 1)
    narrow = {**given, "logits": given["logits"][:, :3], "draft_tokens": given["draft_tokens"][:, :2]}
    narrow |= {"draft_logits": given["draft_logits"][:, :2], "positions": given["positions"][:, :3]}
    for other in (
        verified(**junk, rule=rule, num_rows=rows, logprobs="raw"),
        verified(**narrow, rule=rule, logprobs="raw"),
    ):
        assert torch.equal(wide[0][:, :3], other[0][:, :3])
        assert torch.equal(wide[1], other[1])
        assert torch.equal(wide.logprobs[:, :3], other.logprobs[:, :3])


@pytest.mark.parametrize("rule", RULES)
def test_an_inactive_sequence_emits_nothing_whatever_its_state(rule: str) -> None:
    given = problem(batch=6)
    rows, forced = torch.tensor([0, 5, 0, 0, 1, 0]), torch.tensor([0, 0, 3, 4, 0, 1])
    emitted, num_emitted, *_ = verified(**given, rule=rule, num_rows=rows, num_forced=forced)
    assert (num_emitted[rows == 0] == 0).all()
    assert (emitted[rows == 0] == -1).all()
    assert num_emitted[4] == 1


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("count", [1, 3, 5, 9])
def test_logits_of_the_needed_rows_are_enough(rule: str, count: int) -> None:
    """Blocks of a prompt chunk and decoding blocks side by side, through the row selection that step graphs use."""
    drafts, drawn = 8, 2
    given = problem(batch=9 * 8, drafts=drafts)
    forced = torch.arange(9).repeat(8)
    rows = torch.minimum(forced + integers(count + 1, 72, seed=6), torch.tensor(drafts + 1))
    given["draft_logits"] = given["draft_logits"][:, :drawn]
    full = verified(**given, rule=rule, num_rows=rows, num_forced=forced, logprobs="raw")
    given["logits"] = needed_rows(given["logits"], forced, count)
    found = verified(**given, rule=rule, num_rows=rows, num_forced=forced, logprobs="raw")
    for one, other in zip(full, found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("rule", RULES)
def test_drafts_beyond_the_given_logits_are_not_accepted(rule: str) -> None:
    given = problem(drafts=6)
    given["logits"] = given["logits"][:, :3]
    _, num_emitted, *_ = verified(**given, rule=rule, acceptance_rate=1.0)
    assert (num_emitted <= 3).all()
    if rule == "synthetic":
        assert (num_emitted == 3).all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", [-1, 7, 10**6])
def test_a_missing_draft_ends_the_prefix(rule: str, bad: int) -> None:
    given = problem()
    given["draft_tokens"] = given["draft_tokens"].clone()
    given["draft_tokens"][:, 2] = bad
    emitted, num_emitted, *_ = verified(**given, rule=rule, acceptance_rate=1.0)
    assert (num_emitted <= 3).all()
    assert emitted.max() < 7
    rows = torch.full_like(given["seeds"], 3)
    shorter = verified(**given, rule=rule, acceptance_rate=1.0, num_rows=rows)
    assert torch.equal(emitted, shorter[0])


# the draft's distribution


@pytest.mark.parametrize("rule", ["probabilistic", "block"])
def test_point_masses_are_draft_logits_with_one_token(rule: str) -> None:
    given = problem()
    points = torch.full_like(given["draft_logits"], -torch.inf).scatter(2, given["draft_tokens"].unsqueeze(2), 0.0)
    without = verified(**{**given, "draft_logits": None}, rule=rule)
    assert torch.equal(without[0], verified(**{**given, "draft_logits": points}, rule=rule)[0])


@pytest.mark.parametrize("rule", ["probabilistic", "block"])
def test_drafts_without_logits_are_point_masses_beside_drawn_ones(rule: str) -> None:
    given = problem()
    points = torch.full_like(given["draft_logits"], -torch.inf).scatter(2, given["draft_tokens"].unsqueeze(2), 0.0)
    points[:, :2] = given["draft_logits"][:, :2]
    found = verified(**{**given, "draft_logits": given["draft_logits"][:, :2]}, rule=rule)
    assert torch.equal(found[0], verified(**{**given, "draft_logits": points}, rule=rule)[0])


@pytest.mark.parametrize("rule", ["probabilistic", "block"])
def test_draft_ids_outside_the_target_take_no_mass_from_others(rule: str) -> None:
    """Even when such an id could have been drawn, it must not count for the target's last token."""
    given = problem()
    given["target_to_draft"] = invert_vocabulary(torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 900]), 7)
    given["draft_logits"] = torch.cat([given["draft_logits"], torch.zeros(64, 4, 2)], 2)
    mapped = verified(**given, rule=rule)
    assert torch.equal(mapped[0], verified(**{**given, "target_to_draft": None}, rule=rule)[0])


def test_a_map_of_draft_ids_is_inverted_and_names_no_target_twice() -> None:
    assert invert_vocabulary(torch.tensor([4, 0, 9, 7]), 6).tolist() == [1, -1, -1, -1, 0, -1]
    with pytest.raises(ValueError, match="names 2 target ids twice; every draft id needs its own"):
        invert_vocabulary(torch.tensor([4, 0, 4, 3, 0]), 6)


@pytest.mark.parametrize("rule", RULES)
def test_a_reduced_draft_vocabulary_is_a_full_one_with_zeros(rule: str) -> None:
    given = problem(vocab=9, own=4)
    wide = torch.full((64, 4, 9), -torch.inf)
    own = given["target_to_draft"]
    wide[..., own >= 0] = given["draft_logits"][..., own[own >= 0]]
    found = verified(**given, rule=rule)
    full = verified(**{**given, "draft_logits": wide, "target_to_draft": None}, rule=rule)
    assert torch.equal(found[0], full[0])


@pytest.mark.parametrize("rule", ["probabilistic", "block"])
@pytest.mark.parametrize("own", [5, 7, 12])
def test_padded_vocabularies_need_no_map(rule: str, own: int) -> None:
    """The draft's vocabulary may be shorter or longer than the target's when ids mean the same."""
    given = problem()
    fill = torch.full((64, 4, 5), -torch.inf)
    given["draft_logits"] = torch.cat([given["draft_logits"], fill], 2)[..., :own]
    emitted, *_ = verified(**given, rule=rule)
    mapped = verified(**{**given, "target_to_draft": invert_vocabulary(torch.arange(own), 7)}, rule=rule)
    assert torch.equal(emitted, mapped[0])


@pytest.mark.parametrize("rule", ["probabilistic", "block"])
def test_equal_distributions_accept_every_draft(rule: str) -> None:
    given = problem()
    given["draft_logits"] = process_logits(given["logits"][:, :4], given["temperature"])
    given["draft_tokens"] = sample(given["draft_logits"], given["seeds"], given["positions"][:, :4], stream=1)
    assert (verified(**given, rule=rule)[1] == 5).all()


@pytest.mark.parametrize("rule", LOSSLESS_RULES)
def test_greedy_emits_the_argmax(rule: str) -> None:
    given = problem()
    given["temperature"] = torch.zeros(64)
    best = given["logits"].argmax(-1)
    given["draft_tokens"] = torch.where(noise(64, 4, seed=8) < 1, best[:, :4], given["draft_tokens"])
    given["draft_logits"] = torch.full((64, 4, 7), -torch.inf).scatter(2, given["draft_tokens"].unsqueeze(2), 0.0)
    emitted, num_emitted, *_ = verified(**given, rule=rule)
    right = (given["draft_tokens"] == best[:, :4]).long().cumprod(1).sum(1)
    assert torch.equal(num_emitted, right + 1)
    assert torch.equal(emitted, best.masked_fill(torch.arange(5) > right.unsqueeze(1), -1))


@pytest.mark.parametrize("rule", ["strict", "probabilistic", "block", "typical"])
def test_greedy_needs_no_seeds(rule: str) -> None:
    given = problem()
    given["temperature"] = torch.zeros(64)
    given["draft_tokens"] = torch.where(noise(64, 4, seed=8) < 1, given["logits"].argmax(-1)[:, :4], 3)
    given["draft_logits"] = None
    for one, other in zip(verified(**given, rule=rule), verified(**{**given, "seeds": None}, rule=rule), strict=True):
        assert torch.equal(one, other)


def test_residual_is_the_normalised_positive_part() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.7, 0.1])
    one, zero = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    target, draft = p.log().expand(1, 2, 3), q.log().expand(1, 1, 3)
    arguments = (target, torch.tensor([[1]]), draft)
    weights = residual(*arguments, zero, zero, one * 2, rule="probabilistic")
    torch.testing.assert_close(weights.softmax(-1), torch.tensor([[0.75, 0.0, 0.25]]))
    chance = acceptance_chances(*arguments, one * 2, zero, rule="probabilistic")
    torch.testing.assert_close(chance, torch.tensor([[0.3 / 0.7, 0.0]]))
    assert torch.equal(residual(*arguments, one, zero, one * 2, rule="probabilistic"), target[:, 1])


@pytest.mark.parametrize("rule", ["probabilistic", "block"])
def test_an_empty_residual_is_the_targets_own_distribution(rule: str) -> None:
    same = noise(3, 1, 5, seed=9).expand(3, 2, 5)
    zero = torch.zeros(3, dtype=torch.int64)
    weights = residual(same, torch.ones(3, 1, dtype=torch.int64), same[:, :1], zero, zero, zero + 2, rule=rule)
    assert torch.equal(weights, same[:, 0])


# lossy rules


def test_typical_accepts_by_entropy() -> None:
    """Medusa's bound, min(0.09, 0.3 exp(-H)), written out for every row."""
    given = problem(batch=300)
    rows, zero = torch.full((300,), 5), torch.zeros(300, dtype=torch.int64)
    processed = process_logits(given["logits"] * 3, given["temperature"])
    chances = acceptance_chances(processed, given["draft_tokens"], None, rows, zero, rule="typical")
    probs = processed.double().softmax(-1)
    entropy = -(probs * probs.clamp_min(1e-300).log()).sum(-1)
    own = probs[:, :4].gather(2, given["draft_tokens"].unsqueeze(2)).squeeze(2)
    wanted = own > torch.minimum(torch.tensor(0.09), 0.3 * torch.exp(-entropy))[:, :4]
    assert torch.equal(chances[:, :4].bool(), wanted)
    assert 0.1 < float(wanted.float().mean()) < 0.9


def test_synthetic_accepts_at_its_rate() -> None:
    given = problem(batch=20_000, drafts=3)
    for rate, least, most in ((0.0, 1.0, 1.0), (1.0, 4.0, 4.0), (0.6, 2.15, 2.202)):
        mean = float(verified(**given, rule="synthetic", acceptance_rate=rate)[1].double().mean())
        assert least <= mean <= most  # 1 + 0.6 + 0.36 + 0.216 = 2.176
    odd = given["seeds"] % 2 == 1
    counts = verified(**given, rule="synthetic", acceptance_rate=0.0, odd_acceptance_rate=1.0)[1]
    assert torch.equal(counts, torch.where(odd, 4, 1)) and 0.4 < float(odd.float().mean()) < 0.6


# noise


@pytest.mark.parametrize("forced", [0, 1, 3])
def test_acceptance_noise_is_keyed_by_the_first_row_that_is_not_forced(forced: int) -> None:
    given = problem(batch=2000)
    rows, count = torch.full((2000,), 5), torch.full((2000,), forced)
    processed = process_logits(given["logits"], given["temperature"])
    arguments = (processed, given["draft_tokens"], given["draft_logits"])
    chances = acceptance_chances(*arguments, rows, count, rule="probabilistic")[:, forced:]
    key = given["positions"][:, forced : forced + 1].expand_as(chances)
    taken = uniform(given["seeds"], STREAM_ACCEPT, key, torch.arange(5 - forced).expand_as(key)) < chances
    found = accept(*arguments, given["seeds"], given["positions"], rows, count, rule="probabilistic")
    assert torch.equal(found, forced + taken.long().cumprod(1).sum(1))


@pytest.mark.parametrize("rule", RULES)
def test_the_next_tokens_noise_is_the_targets_or_the_steps(rule: str) -> None:
    count = torch.arange(200) % 5
    forced = torch.minimum(torch.arange(200) // 5 % 4, count)
    weights, seeds, positions = noise(200, 9), torch.arange(200), torch.arange(5) + torch.arange(200).unsqueeze(1) * 3
    found = sample_next(weights, seeds, positions, count, forced, rule=rule)
    row, first = count.unsqueeze(1), forced.unsqueeze(1)
    by_position = sample(weights.unsqueeze(1), seeds, positions.gather(1, row))
    by_step = sample(weights.unsqueeze(1), seeds, positions.gather(1, first), row - first, STREAM_RESIDUAL)
    wanted = by_step if rule in ("probabilistic", "block") else by_position
    assert torch.equal(found, wanted.squeeze(1))


@pytest.mark.parametrize("rule", RULES)
def test_a_sequence_does_not_depend_on_its_batch(rule: str) -> None:
    given = problem()
    whole = verified(**given, rule=rule, logprobs="raw")
    order = torch.randperm(64, generator=torch.Generator().manual_seed(7))[:10]
    part = {name: value if value is None else value[order] for name, value in given.items()}
    for one, other in zip(whole, verified(**part, rule=rule, logprobs="raw"), strict=True):
        assert torch.equal(one[order], other)


# sampling options, log-probabilities, strange input


@pytest.mark.parametrize("rule", RULES)
def test_options_that_are_off_are_the_same_as_none(rule: str) -> None:
    given = problem()
    off = {"top_k": torch.zeros(64, dtype=torch.int64), "top_p": torch.ones(64), "min_p": torch.zeros(64)}
    assert torch.equal(verified(**given, rule=rule)[0], verified(**given, **off, rule=rule)[0])


@pytest.mark.parametrize("rule", LOSSLESS_RULES)
def test_options_cut_what_may_be_emitted(rule: str) -> None:
    given = problem(vocab=12)
    emitted, *_ = verified(**given, rule=rule, top_k=torch.full((64,), 2))
    best = given["logits"].topk(2).indices
    assert ((emitted.unsqueeze(2) == best).any(2) | (emitted < 0)).all()


@pytest.mark.parametrize("rule", RULES)
def test_logprobs_are_of_the_raw_or_the_processed_logits(rule: str) -> None:
    given = problem()
    options = {"rule": rule, "top_k": torch.full((64,), 3), "num_forced": torch.arange(64) % 3}
    raw = verified(**given, **options, logprobs="raw")
    emitted = raw[0]
    wanted = (emitted >= 0) & (torch.arange(5) >= options["num_forced"].unsqueeze(1))
    sources = {"raw": given["logits"]}
    sources["processed"] = process_logits(given["logits"], given["temperature"], options["top_k"])
    for kind, source in sources.items():
        out = verified(**given, **options, logprobs=kind)
        own = source.log_softmax(-1).gather(2, emitted.clamp_min(0).unsqueeze(2)).squeeze(2)
        assert out.logprobs.dtype == torch.float32
        torch.testing.assert_close(out.logprobs, own.masked_fill(~wanted, 0.0), rtol=0, atol=1e-6)
        assert torch.equal(out[0], emitted)
    assert torch.equal(raw.logprobs, verified(**given, **options, logprobs="raw").logprobs)


def test_logprobs_of_half_precision_logits_are_computed_in_float32() -> None:
    given = problem()
    given["logits"] = given["logits"].bfloat16()
    out = verified(**given, logprobs="raw")
    emitted, found = out.emitted, out.logprobs
    own = given["logits"].float().log_softmax(-1).gather(2, emitted.clamp_min(0).unsqueeze(2)).squeeze(2)
    assert torch.equal(found, own.masked_fill(emitted < 0, 0.0))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_strange_logits_keep_ids_in_range(rule: str, value: float, share: float) -> None:
    given = problem(batch=200)
    hit = torch.rand(200, 5, 7, generator=torch.Generator().manual_seed(10)) < share
    given["logits"] = given["logits"].masked_fill(hit, value)
    out = verified(**given, rule=rule, logprobs="raw")
    tokens = lists(out.emitted, out.num_emitted)
    assert all(0 <= token < 7 for row in tokens for token in row)
    assert all(len(row) >= 1 for row in tokens)
    assert not out.logprobs.isnan().any()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("batch", "drafts", "vocab"), [(1, 0, 5), (1, 3, 1), (3, 0, 1), (1, 1, 2)])
def test_small_shapes(rule: str, batch: int, drafts: int, vocab: int) -> None:
    given = problem(batch, drafts, vocab)
    emitted, num_emitted, *_ = verified(**given, rule=rule)
    assert emitted.shape == (batch, drafts + 1)
    lists(emitted, num_emitted)
    if vocab == 1:
        assert (num_emitted >= 1).all()
        assert (num_emitted == drafts + 1).all() or rule == "synthetic"


def test_float64_stays_float64_and_integers_may_be_int32() -> None:
    given = problem()
    exact = {**given, "logits": given["logits"].double(), "draft_tokens": given["draft_tokens"].int()}
    emitted, num_emitted, *_ = verified(**exact, rule="block")
    assert emitted.dtype == num_emitted.dtype == torch.int64
    assert torch.equal(emitted, verified(**given, rule="block")[0])


# the pieces and the op


def composed(given: dict[str, Any], rule: str) -> tuple[Tensor, ...]:
    """The step graph's own spelling."""
    rows, forced = torch.full_like(given["seeds"], 4), torch.full_like(given["seeds"], 1)
    processed = process_logits(given["logits"], given["temperature"])
    drafted = (given["draft_tokens"], given["draft_logits"])
    place = (given["seeds"], given["positions"])
    count = accept(processed, *drafted, *place, rows, forced, rule=rule)
    weights = residual(processed, *drafted, count, forced, rows, rule=rule)
    emitted, num_emitted, accepted_rows = emit(
        given["draft_tokens"], count, sample_next(weights, *place, count, forced, rule=rule), rows, forced
    )
    return (
        emitted,
        num_emitted,
        accepted_rows,
        token_logprobs(given["logits"], processed, emitted, forced, logprobs="processed"),
        bad_rows(given["logits"], given["positions"], rows, forced),
    )


def op_arguments(given: dict[str, Any], rule: str, logprobs: str, cuts: bool = False) -> tuple[Any, ...]:
    batch = len(given["seeds"])
    options = (torch.full((batch,), 3), torch.full((batch,), 0.9), torch.full((batch,), 0.1))
    return (
        given["logits"], given["draft_tokens"], given["draft_logits"], given["temperature"], given["seeds"],
        given["positions"], *(options if cuts else (None, None, None)), torch.full_like(given["seeds"], 4),
        torch.full_like(given["seeds"], 1), given["target_to_draft"], None, rule, logprobs, 0.09, 0.3, 0.7,
    )  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_the_op_is_the_composition_of_its_pieces(rule: str) -> None:
    given = problem()
    given["logits"][3, 2, 1] = given["logits"][5, 0, 1] = torch.nan  # the second one is forced
    found = torch.ops.specgraph.verify(*op_arguments(given, rule, "processed"))
    for one, other in zip(found, composed(given, rule), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("rule", "kind"),
    [("strict", "raw"), ("strict", "none"), ("probabilistic", "processed"), ("block", "none"), ("typical", "raw"),
     ("synthetic", "processed")],
)  # fmt: skip
def test_the_op_passes_torchs_own_checks(rule: str, kind: str) -> None:
    given = problem(batch=3, vocab=9, own=4)
    arguments = op_arguments(given, rule, kind, cuts=kind == "processed")
    torch.library.opcheck(torch.ops.specgraph.verify.default, arguments)


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("kind", ["none", "raw"])
def test_fake_outputs_match_real_ones(drafts: int, kind: str) -> None:
    given = problem(batch=2, drafts=drafts)
    arguments = op_arguments(given, "strict", kind)
    real = torch.ops.specgraph.verify(*arguments)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(value) if isinstance(value, Tensor) else value for value in arguments]
        fake = torch.ops.specgraph.verify(*fakes)
    assert [(tuple(x.shape), x.dtype) for x in fake] == [(tuple(x.shape), x.dtype) for x in real]


def test_the_ops_defaults_are_strict_without_logprobs() -> None:
    given = problem(batch=3)
    emitted, _, _, logprobs, _ = torch.ops.specgraph.verify(*op_arguments(given, "strict", "none")[:12])
    assert torch.equal(emitted, composed(given, "strict")[0])
    assert logprobs.shape == (3, 0)


BAD = [
    ({"rule": "greedy"}, "rule must be one of strict, probabilistic, block, typical, synthetic; got 'greedy'."),
    ({"logprobs": "all"}, "logprobs must be one of none, raw, processed; got 'all'."),
    ({"logits": torch.zeros(3, 7)}, "logits must be [B, R, V], not [3, 7]"),
    (
        {"logits": torch.zeros(3, 6, 7)},
        "logits must have 1 to K + 1 = 5 rows for K = 4 drafts, got 6.",
    ),
    (
        {"logits": torch.zeros(3, 5, 7, dtype=torch.int64)},
        "logits must be floating point, got torch.int64.",
    ),
    (
        {"draft_tokens": torch.zeros(2, 4, dtype=torch.int64)},
        "draft_tokens must be [B, K] = [3, K], not [2, 4]",
    ),
    ({"draft_tokens": torch.zeros(3, 4)}, "draft_tokens must be integers, got torch.float32."),
    (
        {"draft_logits": torch.zeros(2, 4, 7)},
        "draft_logits must be [B, Kd, Vd] = [3, Kd, Vd], not [2, 4, 7]",
    ),
    (
        {"target_to_draft": torch.arange(6)},
        "target_to_draft must be [V] = [7], not [6]",
    ),
    (
        {"positions": torch.zeros(3, 4, dtype=torch.int64)},
        "positions must be [B, K + 1] = [3, 5], one per row, got [3, 4].",
    ),
    ({"positions": torch.zeros(3, 5)}, "positions must be int64, got torch.float32."),
    ({"temperature": torch.ones(1)}, "temperature must be [B] = [3], not [1]"),
    ({"seeds": torch.zeros(3)}, "seeds must be int64, got torch.float32."),
    ({"top_p": torch.ones(3, 1)}, "top_p must be [B] = [3], not [3, 1]"),
    ({"num_rows": torch.ones(3)}, "num_rows must be int64, got torch.float32."),
    ({"acceptance_rate": 1.5}, "acceptance_rate must be in [0, 1]; got 1.5."),
    ({"posterior_alpha": -1.0}, "posterior_threshold and posterior_alpha must not be negative; got 0.09 and -1.0."),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_bad_arguments_get_one_clear_sentence(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        verified(**{**problem(batch=3), **change})
    assert str(caught.value) == message


def test_fake_tensors_get_the_same_sentence() -> None:
    with FakeTensorMode(), pytest.raises(ValueError, match=r"logits must have 1 to K \+ 1 = 2 rows"):
        ids = torch.zeros(2, dtype=torch.int64)
        torch.ops.specgraph.verify(
            torch.empty(2, 3, 5), ids[:, None], None, torch.ones(2), ids, ids[:, None].expand(2, 2), None, None, None,
            ids, ids, None,
        )  # fmt: skip
