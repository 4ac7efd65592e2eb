"""Counter-based noise, processing of logits, and drawing tokens."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specgraph.kernels.sampling import sample as module
from specgraph.kernels.sampling.constants import STREAM_ACCEPT, STREAM_DRAFT, STREAM_RESIDUAL, STREAM_TARGET
from specgraph.kernels.sampling.draft import sample_draft
from specgraph.kernels.sampling.sample import (
    exponentials,
    gumbel,
    process_logits,
    sample,
    uniform,
)

ONE = torch.ones(1)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# The vectors of philox4x32 in kat_vectors, published with Random123 (Salmon et al. 2011): rounds, counter, key, result.
_ZEROS, _ONES = " ".join(["00000000"] * 6), " ".join(["ffffffff"] * 6)
_PI = "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0"
KNOWN_ANSWERS = [
    (7, _ZEROS, "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (7, _ONES, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (7, _PI, "4dfccaba 190a87f0 c47362ba b6b5242a"),
    (10, _ZEROS, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (10, _ONES, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (10, _PI, "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("rounds", "given", "result"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(rounds: int, given: str, result: str) -> None:
    words = [torch.tensor([int(word, 16)]) for word in given.split()]
    found = module.philox((words[0], words[1], words[2], words[3]), (words[4], words[5]), rounds)
    assert " ".join(f"{word.item():08x}" for word in found) == result


def test_noise_takes_seven_rounds() -> None:
    assert module.PHILOX_ROUNDS == 7


@pytest.mark.parametrize("token", [0, 11, 1030, 4099, 128255])
def test_the_counter_is_laid_out_as_documented(token: int) -> None:
    """Token 11 is word 3 of block 2; the position's high word shares a counter word with the stream."""
    key = (3 << 32) + 17
    counter = tuple(torch.tensor([value]) for value in (token // 4, key & 0xFFFFFFFF, 6, STREAM_DRAFT + (3 << 8)))
    words = module.philox(counter, (torch.tensor([-5 & 0xFFFFFFFF]), torch.tensor([0xFFFFFFFF])))  # type: ignore[arg-type]
    u = (int(words[token % 4]) + 0.5) / 2**32
    found = gumbel(torch.tensor([-5]), STREAM_DRAFT, torch.tensor([[key]]), torch.tensor([[6]]), token + 1)
    assert found[0, 0, token].item() == pytest.approx(-math.log(-math.log1p(-u)), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("word", "value", "exponential"),
    [(0, 2.0**-24, 2.0**-33), (0xFFFFFFFF, 1 - 2.0**-24, 24 * math.log(2))],
)
def test_noise_is_exact_at_both_ends(
    monkeypatch: pytest.MonkeyPatch, word: int, value: float, exponential: float
) -> None:
    monkeypatch.setattr(module, "philox", lambda *_: (torch.full((1, 1, 1), word),) * 4)
    seeds, key = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
    assert uniform(seeds, STREAM_ACCEPT, key).item() == value
    assert exponentials(seeds, STREAM_ACCEPT, key, None, 1).item() == pytest.approx(exponential)
    assert gumbel(seeds, STREAM_ACCEPT, key, None, 4).isfinite().all()


def test_noise_has_the_moments_of_its_distribution() -> None:
    seeds, key = torch.arange(200), torch.arange(5).expand(200, 5)
    drawn = gumbel(seeds, STREAM_TARGET, key, None, 200).double()
    error = math.pi / math.sqrt(6 * drawn.numel())
    assert abs(float(drawn.mean()) - 0.5772156649) < 4 * error
    assert abs(float(drawn.var()) - math.pi**2 / 6) < 0.02
    u = uniform(torch.arange(100_000), STREAM_ACCEPT, torch.zeros(100_000, 1, dtype=torch.int64))
    assert abs(float(u.mean()) - 0.5) < 4 * math.sqrt(1 / 12 / 100_000)


def chi_square(counts: Tensor) -> float:
    """Of equally likely cells, in standard deviations from its mean."""
    counts = counts.double().flatten()
    statistic = float(((counts - counts.mean()) ** 2).sum() / counts.mean())
    freedom = counts.numel() - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def test_the_exponentials_of_neighbours_are_independent() -> None:
    """Joint cells of equal chance are equally likely.

    The tokens of a cell are those of one block of Philox, of two, and of four blocks far apart.
    """
    e = exponentials(torch.arange(48) * 7919, STREAM_TARGET, torch.arange(8).expand(48, 8), None, 4096).double()
    cell = (torch.expm1(-e) * -4).long().clamp(max=3)
    eight = (cell // 2).unflatten(-1, (-1, 8)).flatten(0, -2)
    assert abs(chi_square(torch.bincount((eight << torch.arange(8)).sum(-1), minlength=256))) < 4
    half = cell.unflatten(-1, (-1, 2, 4)).flatten(0, -3)
    apart = cell.unflatten(-1, (4, 1024)).transpose(-1, -2).flatten(0, -2)
    for joint in (half[:, 0], half[:, 1], half[:, :, :2].flatten(1), apart):
        assert abs(chi_square(torch.bincount((joint << torch.arange(0, 8, 2)).sum(-1), minlength=256))) < 4
    least = e.unflatten(-1, (-1, 8)).min(-1)
    assert abs(chi_square(torch.bincount(least.indices.flatten(), minlength=8))) < 4
    # The smallest of eight is an exponential of rate 8, the tail included.
    rank = torch.expm1(-8 * least.values).neg().flatten()
    assert abs(chi_square(torch.histc(rank, 1000, 0.0, 1.0))) < 4
    assert abs(chi_square(torch.histc(rank[rank < 1e-2], 20, 0.0, 1e-2))) < 4


def test_noise_depends_on_every_part_of_its_key() -> None:
    base = {"seed": 7, "stream": STREAM_TARGET, "key": 9, "row": 0}
    changes: list[dict[str, int]] = [{}, {"seed": 8}, {"seed": 7 + (1 << 32)}, {"seed": 7 - (1 << 63)}, {"key": 10}]
    changes += [{"key": 9 + (1 << 32)}, {"row": 1}]
    changes += [{"stream": stream} for stream in (STREAM_DRAFT, STREAM_ACCEPT, STREAM_RESIDUAL)]
    drawn = []
    for change in changes:
        at = {**base, **change}
        place = torch.tensor([[at["key"]]]), torch.tensor([[at["row"]]])
        drawn.append(gumbel(torch.tensor([at["seed"]]), at["stream"], *place, 8).flatten())
    for index, one in enumerate(drawn):
        for other in drawn[index + 1 :]:
            assert (one != other).all()


def test_noise_belongs_to_the_token_not_to_its_place() -> None:
    seeds, key = torch.tensor([3, -4]), torch.tensor([[5, 6, 7], [8, 9, 10]])
    whole = gumbel(seeds, STREAM_TARGET, key, None, 23)
    ids = torch.tensor([22, 0, 5, 5, 13])
    assert torch.equal(gumbel(seeds, STREAM_TARGET, key, None, ids), whole[..., ids])
    assert torch.equal(gumbel(seeds, STREAM_TARGET, key, torch.zeros_like(key), 7), whole[..., :7])
    alone = gumbel(seeds[1:], STREAM_TARGET, key[1:, 1:2], None, 23)
    assert torch.equal(alone, whole[1:, 1:2])


def warped(logits: Tensor, warpers: list[LogitsProcessor]) -> Tensor:
    for warper in warpers:
        logits = warper(torch.empty(0, dtype=torch.long), logits)  # type: ignore[arg-type]
    return logits


# Probabilities of these logits are far from 1 - top_p, so float32 of either side decides alike.
SAMPLING = [(1.0, 0, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.5, 0, 0.83, 0.0), (1.0, 0, 1.0, 0.07), (0.9, 9, 0.71, 0.11)]
SAMPLING += [(1.0, 1, 1.0, 0.0), (1.0, 99, 0.01, 1.0)]


def test_processing_agrees_with_transformers() -> None:
    """Options differ per sequence here; transformers runs once for each of them."""
    logits = noise(len(SAMPLING), 6, 40) * 3
    temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*SAMPLING, strict=True))
    found = process_logits(logits, temperature, top_k, top_p, min_p)
    for index, (t, k, p, m) in enumerate(SAMPLING):
        warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(t)]
        warpers += [TopKLogitsWarper(k)] if k else []
        warpers += [TopPLogitsWarper(p)] if p < 1 else []
        warpers += [MinPLogitsWarper(m)] if m else []
        torch.testing.assert_close(found[index], warped(logits[index], warpers), rtol=1e-6, atol=1e-6)


def test_ties_at_the_border_are_kept_together() -> None:
    """So that the result does not depend on the order of a sort."""
    logits = torch.tensor([[[0.0, 2.0, 1.0, 2.0, 1.0, 1.0]]])
    by_count = process_logits(logits, ONE, top_k=torch.tensor([3]))
    by_mass = process_logits(logits, ONE, top_p=torch.tensor([0.7]))
    wanted = [-torch.inf, 2.0, 1.0, 2.0, 1.0, 1.0]
    assert by_count.flatten().tolist() == wanted
    assert by_mass.flatten().tolist() == wanted


def test_options_that_are_off_are_the_same_as_none() -> None:
    logits = noise(3, 4, 50) * 60  # spread so far that most probabilities underflow to 0
    temperature = torch.tensor([1.0, 0.0, 0.3])
    off = process_logits(logits, temperature, torch.zeros(3, dtype=torch.int64), torch.ones(3), torch.zeros(3))
    assert torch.equal(off, process_logits(logits, temperature))
    assert torch.equal(off[0], logits[0])


def test_temperature_zero_is_a_point_at_the_first_argmax() -> None:
    logits = torch.tensor([[[1.0, 5.0, 5.0, -2.0]], [[1.0, 5.0, 5.0, -2.0]]])
    every = [torch.tensor([2, 2]), torch.tensor([0.5, 0.5]), torch.tensor([0.1, 0.1])]
    for options in ([], every):
        found = process_logits(logits, torch.tensor([0.0, 1.0]), *options)
        assert found[0, 0].tolist() == [-torch.inf, 0.0, -torch.inf, -torch.inf]
        assert found[1, 0].tolist() == ([-torch.inf, 5.0, 5.0, -torch.inf] if options else [1.0, 5.0, 5.0, -2.0])


NAN, INF = torch.nan, torch.inf


@pytest.mark.parametrize(
    ("logits", "allowed"),
    [
        ([NAN, 1.0, NAN, 2.0], {1, 3}),
        ([NAN] * 4, {0}),
        ([-INF] * 4, {0}),
        ([NAN, -INF, -INF, NAN], {0}),
        ([1.0, INF, 2.0, 3.0], {1}),
        ([-INF, -INF, -1e30, -INF], {2}),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1e-38, 1e-4, 1.0, 1e30])
@pytest.mark.parametrize("cut", [False, True])
def test_strange_logits_keep_tokens_in_range(
    logits: list[float], allowed: set[int], temperature: float, cut: bool
) -> None:
    count = 50
    cuts = (torch.full((count,), 3), torch.full((count,), 0.9), torch.full((count,), 0.05)) if cut else ()
    source = torch.tensor(logits).expand(count, 1, -1)
    processed = process_logits(source, torch.full((count,), temperature), *cuts)
    assert not processed.isnan().any()
    assert processed.softmax(-1).sum(-1).allclose(torch.ones(count, 1))
    drawn = set(sample(processed, torch.arange(count), torch.ones(count, 1, dtype=torch.int64)).flatten().tolist())
    # A temperature of 1e30 makes all logits that are not -inf equal.
    assert drawn <= (allowed if temperature < 1e30 else {i for i in range(4) if not math.isnan(logits[i])} | allowed)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_processing_is_float32_unless_float64_comes_in(given: torch.dtype, kept: torch.dtype) -> None:
    logits = noise(1, 2, 9).to(given)
    before = logits.clone()
    found = process_logits(logits, ONE, torch.tensor([4]), torch.tensor([0.9]), torch.tensor([0.1]))
    assert found.dtype == kept
    assert torch.equal(logits, before)


def test_a_vocabulary_of_one() -> None:
    processed = process_logits(torch.zeros(1, 1, 1), ONE, torch.tensor([5]), torch.tensor([0.1]), ONE)
    assert sample(processed, torch.tensor([1]), torch.tensor([[1]])).tolist() == [[0]]


def test_sampling_takes_the_first_of_equals() -> None:
    processed = torch.full((1, 1, 6), -torch.inf)
    assert sample(processed, torch.tensor([1]), torch.tensor([[1]])).item() == 0


def draft_call(logits: Tensor, rule: str, row: int = 0, **options: object) -> tuple[Tensor, Tensor]:
    seeds, key = torch.arange(len(logits)), torch.arange(len(logits)) * 3 + 11
    given = {**dict.fromkeys(("top_k", "top_p", "min_p", "draft_to_target")), **options}
    return sample_draft(logits, torch.ones(len(logits)), seeds, key, row=row, rule=rule, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", ["strict", "typical", "synthetic"])
def test_drafts_of_shared_noise_are_the_targets_own_samples(rule: str) -> None:
    logits = noise(64, 1, 30)
    token, processed = draft_call(logits, rule, row=2)
    position = (torch.arange(64) * 3 + 11 + 2).unsqueeze(1)
    assert torch.equal(token, sample(logits, torch.arange(64), position))
    assert torch.equal(processed, logits)


@pytest.mark.parametrize("rule", ["probabilistic", "block"])
def test_drafts_of_step_noise_are_keyed_by_step_and_row(rule: str) -> None:
    logits = noise(64, 1, 30)
    key = (torch.arange(64) * 3 + 11).unsqueeze(1)
    wanted = sample(logits, torch.arange(64), key, torch.full_like(key, 2), STREAM_DRAFT)
    assert torch.equal(draft_call(logits, rule, row=2)[0], wanted)
    assert not torch.equal(draft_call(logits, rule, row=1)[0], wanted)


def test_a_reduced_draft_shares_the_noise_of_target_ids() -> None:
    """A target that gives the draft's ids the same logits, and others none, samples the same tokens."""
    ids, logits = torch.tensor([17, 4, 11, 8]), noise(64, 1, 4)
    token, processed = draft_call(logits, "strict", draft_to_target=ids)
    wide = torch.full((64, 1, 20), -torch.inf)
    wide[..., ids] = processed
    assert torch.equal(token, sample(wide, torch.arange(64), (torch.arange(64) * 3 + 11).unsqueeze(1)))


@pytest.mark.parametrize("ids", [None, torch.tensor([9, 1, 2, 0, 8, 3])])
def test_padded_ids_are_never_drafted(ids: Tensor | None) -> None:
    logits = torch.zeros(256, 1, 6)
    token, processed = draft_call(logits, "probabilistic", draft_to_target=ids, target_vocab_size=4)
    padded = (torch.arange(6) if ids is None else ids) >= 4
    assert (processed[..., padded] == -torch.inf).all()
    assert set(token.flatten().tolist()) == {0, 1, 2, 3}


def test_an_unknown_rule_is_refused() -> None:
    allowed = "strict, probabilistic, block, typical, synthetic"
    with pytest.raises(ValueError, match=f"^rule must be one of {allowed}; got 'greedy'.$"):
        draft_call(noise(1, 1, 3), "greedy")
