"""Verification of wide rows on a CPU is the definition, and leaves the rows behind a wrong draft alone."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from specgraph.kernels.sampling import kept
from specgraph.kernels.sampling.sample import RULES, SHARED_NOISE_RULES, STEP_NOISE_RULES, process_logits, sample
from specgraph.kernels.step.tokens import NAN_FOUND
from specgraph.kernels.verify import row_by_row
from specgraph.kernels.verify.arguments import LOGPROBS, Verified, Verify
from specgraph.kernels.verify.pieces import invert_vocabulary
from specgraph.kernels.verify.verify import VERIFY, verify_reference
from tests.kernels.sampling.rows import ROWS

DRAFTS, BATCH, VOCAB = 3, 48, 900


@pytest.fixture(autouse=True)
def every_row_is_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "WIDE", 1)


def problem(
    count: int = DRAFTS + 1, rule: str = "strict", dtype: torch.dtype = torch.float32, **options: Any
) -> Verify:
    """Sequences with options, logits and rows of every kind, where most drafts are the target's own tokens."""
    random = torch.Generator().manual_seed(count)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=random)

    def among(*values: float) -> Tensor:
        return torch.tensor(values)[integers(0, len(values), BATCH)]

    kinds = [row for name, row in ROWS.items() if name != "nan"]
    logits = torch.stack(
        [torch.stack([kinds[b % len(kinds)](VOCAB, random) for _ in range(count)]) for b in range(BATCH)]
    ).to(dtype)
    given: dict[str, Any] = {
        "logits": logits, "draft_logits": None, "temperature": among(0.0, 1e-3, 0.7, 1.0, 40.0),
        "top_k": among(0, 1, 20, VOCAB, 10**6).long(), "top_p": among(1e-9, 0.5, 0.9, 1.0),
        "min_p": among(0.0, 0.05, 1.0), "seeds": integers(-(2**62), 2**62, BATCH),
        "positions": integers(0, 2**34, BATCH, 1) + torch.arange(DRAFTS + 1),
        "num_rows": integers(0, DRAFTS + 2, BATCH), "num_forced": integers(0, DRAFTS + 1, BATCH),
        "target_to_draft": None, "rule": rule,
    }  # fmt: skip
    given |= options
    first = given["num_forced"].clamp(max=DRAFTS + 1 - count)
    weights = process_logits(logits, *(given[name] for name in ("temperature", "top_k", "top_p", "min_p")))
    rows = first.unsqueeze(1) + torch.arange(count)
    own = sample(weights, given["seeds"], given["positions"].gather(1, rows)).to(torch.int64)
    drafts = integers(-1, VOCAB + 1, BATCH, DRAFTS + 1).scatter(1, rows, own)[:, :DRAFTS]
    wrong = torch.rand(BATCH, DRAFTS, generator=random) < 0.2
    drafts = torch.where(wrong, integers(-1, VOCAB + 1, BATCH, DRAFTS), drafts)
    return Verify(**{"draft_tokens": drafts, **given})


def verified(given: Verify) -> Verified:
    """What the CPU's form gives."""
    assert VERIFY.choose("cpu", given).name == "cpu"
    arguments = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
    return VERIFY.form("cpu")(**arguments)  # type: ignore[no-any-return]


def assert_defined(given: Verify) -> Verified:
    found, expected = verified(given), verify_reference(given)
    for name, a, b in zip(expected._fields, found, expected, strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype, name
    return found


@pytest.mark.parametrize("count", range(1, DRAFTS + 2))
@pytest.mark.parametrize("rule", RULES)
def test_it_is_the_definition(count: int, rule: str) -> None:
    found = assert_defined(problem(count, rule))
    assert len(set(found.num_emitted.tolist())) > 3


@pytest.mark.parametrize("rule", ["strict", "block"])
@pytest.mark.parametrize("off", [("top_k", "top_p", "min_p"), ("top_k",), ("top_p", "min_p"), ("seeds",)])
def test_options_that_are_off(rule: str, off: tuple[str, ...]) -> None:
    given = problem(rule=rule, **dict.fromkeys(off))
    if "seeds" in off:
        given.temperature.zero_()
        given.logprobs = "raw"  # temperature 0 without log-probabilities is for all rows together
    assert_defined(given)


@pytest.mark.parametrize("rule", STEP_NOISE_RULES)
def test_the_token_behind_accepted_drafts_has_noise_of_its_own(rule: str) -> None:
    """Four tokens are as likely as each other, so that drafts are accepted now and then and noise decides the next."""
    given = problem(rule=rule, top_k=None, top_p=None, min_p=None, temperature=torch.ones(BATCH))
    given.logits = torch.full_like(given.logits, -math.inf)
    given.logits[..., 100:104] = 0.0
    given.draft_tokens = torch.randint(100, 104, (BATCH, DRAFTS), generator=torch.Generator().manual_seed(2))
    found = assert_defined(given)
    assert int((found.num_emitted - given.num_forced > 1).sum()) > 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_dtypes(dtype: torch.dtype) -> None:
    assert_defined(problem(dtype=dtype))


@pytest.mark.parametrize("logprobs", LOGPROBS)
@pytest.mark.parametrize("rule", ["strict", "probabilistic"])
@pytest.mark.parametrize("count", [2, DRAFTS + 1])
def test_log_probabilities(logprobs: str, rule: str, count: int) -> None:
    found = assert_defined(problem(count, rule, logprobs=logprobs))
    assert logprobs == "none" or bool((found.logprobs < 0).any())


def test_raw_log_probabilities_of_other_logits() -> None:
    given = problem(logprobs="raw")
    given.raw_logits = given.logits.flip(-1).bfloat16()
    assert_defined(given)


@pytest.mark.parametrize("rule", RULES)
def test_nan_is_found_where_it_counts(rule: str) -> None:
    given = problem(rule=rule)
    given.logits = torch.where(torch.rand(given.logits.shape, generator=torch.Generator().manual_seed(1)) < 3e-4,
                               math.nan, given.logits)  # fmt: skip
    found = assert_defined(given)
    assert 0 < int((found.bad == NAN_FOUND).sum()) < int(given.logits.isnan().flatten(1).any(1).sum())


@pytest.mark.parametrize("rule", ["probabilistic", "block"])
def test_drafts_with_a_distribution_over_a_vocabulary_of_their_own(rule: str) -> None:
    random = torch.Generator().manual_seed(5)
    given = problem(rule=rule)
    ids = torch.randperm(VOCAB, generator=random)[:300]
    given.target_to_draft = invert_vocabulary(ids, VOCAB)
    given.draft_logits = torch.randn(20, DRAFTS, 300, generator=random) * 3
    given.draft_rows = torch.randint(-1, 20, (BATCH,), generator=random)
    given.point_mass = torch.rand(BATCH, generator=random) < 0.3
    assert_defined(given)


def test_rows_behind_a_wrong_draft_are_not_processed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def spy(logits: Tensor, *options: Tensor | None) -> Tensor:
        seen.append(logits.data_ptr())
        return kept.process_row(logits, *options)  # type: ignore[arg-type]

    monkeypatch.setattr(row_by_row, "process_row", spy)
    given = problem()
    emitted = verified(given).num_emitted
    drawn = (emitted - given.num_forced).clamp_min(0)[given.num_forced < given.num_rows]
    assert len(seen) == len(set(seen)) == int(drawn.sum()) < BATCH * (DRAFTS + 1)


def test_narrow_rows_and_float64_take_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    assert VERIFY.choose("cpu", problem(dtype=torch.float64)).name == "reference"
    monkeypatch.setattr(kept, "WIDE", VOCAB + 1)
    assert VERIFY.choose("cpu", problem()).name == "reference"


def test_tokens_do_not_depend_on_the_other_sequences() -> None:
    given = problem()
    every = verified(given)
    for b in range(0, BATCH, 7):
        alone = {
            field.name: value[b : b + 1] if isinstance(value := getattr(given, field.name), Tensor) else value
            for field in dataclasses.fields(given)
        }
        assert torch.equal(verified(Verify(**alone)).emitted[0], every.emitted[b])


def test_bad_shapes_are_refused() -> None:
    for rule in SHARED_NOISE_RULES:
        given = problem(rule=rule)
        given.temperature = given.temperature[:2]
        with pytest.raises(ValueError, match=r"temperature must be \[B\] = \[48\], not \[2\]"):
            verified(given)
