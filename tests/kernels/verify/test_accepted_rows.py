"""Accepted rows, and batches in which the drafts of some sequences are point masses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specgraph.kernels.sampling.sample import RULES, STEP_NOISE_RULES, process_logits
from specgraph.kernels.verify import Verified, emit, residual
from tests.kernels.verify.definition import acceptance_chances, verified
from tests.kernels.verify.test_verify import op_arguments
from tests.kernels.verify.test_verify import problem as drafted
from tests.kernels.verify.test_verify_triton import DEVICE, launch, problem, reference, with_cuts, with_draft_logits

both_forms = pytest.mark.parametrize("form", [reference, launch], ids=["reference", "triton"])
both_rules = pytest.mark.parametrize("rule", STEP_NOISE_RULES)


def assert_first_rows(found: Verified) -> None:
    """A chain of drafts: the token at place i was given by row i, and nothing by any other row."""
    for rows, count in zip(found.accepted_rows.tolist(), found.num_emitted.tolist(), strict=True):
        assert rows == [*range(count), *[-1] * (len(rows) - count)]


# accepted rows


@both_forms
@pytest.mark.parametrize("rule", RULES)
def test_the_rows_of_a_chain_are_the_first_ones(form: Any, rule: str) -> None:
    """With forced rows, padding and inactive sequences beside the others."""
    given = problem(10, 3, 40)
    given["num_rows"] = torch.tensor([4, 4, 4, 4, 3, 2, 1, 0, 0, 2], device=DEVICE)
    given["num_forced"] = torch.tensor([0, 1, 2, 3, 2, 2, 0, 0, 3, 3], device=DEVICE)
    found = form(given, rule)
    assert found.accepted_rows.dtype == torch.int64
    assert_first_rows(found)
    assert len(set(found.num_emitted.tolist())) > 3


@both_forms
@pytest.mark.parametrize("rule", ["strict", "block"])
def test_rows_are_numbered_in_the_block_where_only_some_have_logits(form: Any, rule: str) -> None:
    given = problem(6, 11, 300, 3)
    given["num_forced"] = torch.tensor([0, 3, 9, 10, 11, 7], device=DEVICE)
    given["num_rows"] = torch.tensor([12, 5, 12, 11, 11, 9], device=DEVICE)
    given["draft_tokens"] = given["draft_tokens"].clamp(0, 299)
    assert_first_rows(form(given, rule))


def test_emitting_names_the_rows() -> None:
    count, token = torch.tensor([2, 0, 3, 1]), torch.tensor([9, 8, 7, 6])
    drafts = torch.tensor([[1, 2, 3]] * 4)
    emitted, number, rows = emit(drafts, count, token, torch.tensor([4, 4, 3, 0]), torch.tensor([0, 0, 3, 0]))
    assert emitted.tolist() == [[1, 2, 9, -1], [8, -1, -1, -1], [1, 2, 3, -1], [1, -1, -1, -1]]
    assert number.tolist() == [3, 1, 3, 1]
    assert rows.tolist() == [[0, 1, 2, -1], [0, -1, -1, -1], [0, 1, 2, -1], [0, -1, -1, -1]]


# point masses


def mixed(drawn: int = 3, own: int | None = None, cuts: bool = False, batch: int = 4) -> dict[str, Any]:
    """Every other sequence has point masses; what the draft logits hold for it is arbitrary."""
    given = with_draft_logits(problem(batch, 3, 300), drawn, own)
    given["point_mass"] = torch.arange(batch, device=DEVICE) % 2 == 1
    return with_cuts(given) if cuts else given


def part(given: dict[str, Any], chosen: Tensor) -> dict[str, Any]:
    return {n: v[chosen] if isinstance(v, Tensor) and n != "target_to_draft" else v for n, v in given.items()}


@both_forms
@pytest.mark.parametrize(
    ("drawn", "own", "cuts", "rule"),
    [
        *((drawn, own, False, rule) for drawn, own in ((3, None), (2, 250)) for rule in STEP_NOISE_RULES),
        (3, None, True, "probabilistic"),
    ],
)
def test_a_mixed_batch_is_its_two_halves(form: Any, rule: str, drawn: int, own: int | None, cuts: bool) -> None:
    given = mixed(drawn, own, cuts)
    chosen = given["point_mass"]
    whole = form(given, rule, "raw")
    points = {**part(given, chosen), "point_mass": None, "draft_logits": None, "target_to_draft": None}
    others = {**part(given, ~chosen), "point_mass": None}
    for half, rows in ((points, chosen), (others, ~chosen)):
        for one, other in zip(whole, form(half, rule, "raw"), strict=True):
            assert torch.equal(one[rows], other)
    assert whole.num_emitted[chosen].max() > 1 and whole.num_emitted[~chosen].max() > 1


@both_forms
@both_rules
def test_draft_logits_of_point_masses_are_not_looked_at(form: Any, rule: str) -> None:
    given = mixed()
    wanted = form(given, rule)
    given["draft_logits"][given["point_mass"]] = torch.nan
    for one, other in zip(wanted, form(given, rule), strict=True):
        assert torch.equal(one, other)


@both_forms
@both_rules
@pytest.mark.parametrize(("drawn", "own", "points"), [(3, None, False), (2, 250, True)])
def test_draft_logits_lie_where_the_row_index_says(
    form: Any, rule: str, drawn: int, own: int | None, points: bool
) -> None:
    given = mixed(drawn, own)
    chosen, kept = given["point_mass"], given["draft_logits"]
    given["point_mass"] = chosen if points else None
    wanted = form({**given, "point_mass": chosen}, rule, "raw")
    rows = torch.randperm(7, generator=torch.Generator().manual_seed(1))[:4].to(DEVICE)
    buffer = torch.full((7, *kept.shape[1:]), torch.nan, dtype=kept.dtype, device=DEVICE)
    buffer[rows] = kept
    given |= {"draft_logits": buffer, "draft_rows": rows if points else rows.masked_fill(chosen, -1)}
    for one, other in zip(wanted, form(given, rule, "raw"), strict=True):
        assert torch.equal(one, other)


@both_rules
def test_the_kernels_give_the_references_tokens(rule: str) -> None:
    given = mixed(2, batch=12)
    wanted, found = reference(given, rule, "raw"), launch(given, rule, "raw")
    assert torch.equal(found.emitted, wanted.emitted) and torch.equal(found.accepted_rows, wanted.accepted_rows)
    torch.testing.assert_close(found.logprobs, wanted.logprobs, rtol=0, atol=2e-6)


@both_rules
def test_a_point_mass_is_a_distribution_with_one_token(rule: str) -> None:
    given = drafted()
    chosen = torch.arange(64) % 2 == 0
    points = torch.full_like(given["draft_logits"], -torch.inf).scatter(2, given["draft_tokens"].unsqueeze(2), 0.0)
    spelt = torch.where(chosen.view(-1, 1, 1), points, given["draft_logits"])
    found = verified(**given, point_mass=chosen, rule=rule)
    assert torch.equal(found.emitted, verified(**{**given, "draft_logits": spelt}, rule=rule).emitted)


def test_point_masses_are_accepted_by_the_targets_probability_and_leave_the_rest() -> None:
    """In float64: with q = 1 at the draft, ``min(1, p / q)`` is p, and ``max(p - q, 0)`` is p without the draft."""
    given = drafted(batch=40)
    rows, zero = torch.full((40,), 5), torch.zeros(40, dtype=torch.int64)
    chosen = torch.arange(40) % 3 > 0
    processed = process_logits(given["logits"], torch.ones(40))
    arguments, options = (processed, given["draft_tokens"], given["draft_logits"]), {"rule": "probabilistic"}
    p = given["logits"].double().softmax(-1)
    own = p[:, :4].gather(2, given["draft_tokens"].unsqueeze(2)).squeeze(2)
    chances = acceptance_chances(*arguments, rows, zero, **options, point_mass=chosen)[:, :4]
    torch.testing.assert_close(chances[chosen].double(), own[chosen], rtol=1e-6, atol=1e-7)
    drawn = acceptance_chances(*arguments, rows, zero, **options)[:, :4]
    assert torch.equal(chances[~chosen], drawn[~chosen]) and not torch.equal(chances[chosen], drawn[chosen])
    rest = p[:, 0].scatter(1, given["draft_tokens"][:, :1], 0.0)
    weights = residual(*arguments, zero, zero, rows, **options, point_mass=chosen)
    torch.testing.assert_close(
        weights[chosen].double().softmax(-1), (rest / rest.sum(-1, keepdim=True))[chosen], rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("rule", ["strict", "typical", "synthetic"])
def test_rules_without_distributions_take_no_notice(rule: str) -> None:
    given = drafted()
    found = verified(**given, rule=rule, point_mass=torch.arange(64) % 2 == 0)
    assert all(map(torch.equal, found, verified(**given, rule=rule)))


@pytest.mark.parametrize("rule", RULES)
def test_the_op_passes_torchs_own_checks(rule: str) -> None:
    arguments = op_arguments(drafted(batch=3, vocab=9, own=4), rule, "raw")
    point_mass = torch.tensor([True, False, True])
    torch.library.opcheck(torch.ops.specgraph.verify.default, (*arguments[:12], point_mass, *arguments[13:]))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(2, dtype=torch.bool), r"point_mass must be \[B\] = \[64\], not \[2\]"),
        (torch.ones(64), "point_mass must be bool, got torch.float32"),
    ],
)
def test_what_does_not_fit_is_refused(value: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verified(**drafted(), rule="block", point_mass=value)
