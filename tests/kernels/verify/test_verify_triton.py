"""The Triton form of verification: the tokens of the reference, log-probabilities of float64, the same bits always."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels import gpus
from specgraph.kernels.ops import OPS
from specgraph.kernels.sampling import scan
from specgraph.kernels.sampling.constants import STREAM_TARGET
from specgraph.kernels.sampling.gumbel import rough_exponential
from specgraph.kernels.sampling.sample import (
    RULES,
    STEP_NOISE_RULES,
    gumbel,
    process_logits,
    sample,
)
from specgraph.kernels.step.tokens import bad_rows
from specgraph.kernels.verify import Verified, Verify, invert_vocabulary
from specgraph.kernels.verify.verify_triton import covers, verify_triton
from tests.kernels.verify.definition import verified

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPLIT = {"split": 1024, "tile": 1024}
OPTIONS = {"posterior_threshold": 0.09, "posterior_alpha": 0.3, "acceptance_rate": 0.7, "odd_acceptance_rate": 0.3}


def problem(
    batch: int = 5, drafts: int = 3, vocab: int = 1500, rows: int | None = None, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Most drafts are the target's own samples, so that prefixes of all lengths occur; temperatures are mixed."""
    draw = torch.Generator().manual_seed(batch * 1000 + drafts * 100 + vocab)
    rows = drafts + 1 if rows is None else rows
    logits = (torch.randn(batch, rows, vocab, generator=draw) * 2).to(dtype)
    temperature = torch.tensor([0.7, 0.0, 1.0, 1.6]).repeat(batch)[:batch]
    seeds = torch.randint(-(2**62), 2**62, (batch,), generator=draw)
    positions = torch.randint(0, 2**34, (batch, 1), generator=draw) + torch.arange(drafts + 1)
    own = sample(process_logits(logits, temperature), seeds, positions[:, :rows])[:, :drafts]
    tokens = torch.randint(-1, vocab + 2, (batch, drafts), generator=draw)
    chosen = torch.where(torch.rand(own.shape, generator=draw) < 0.8, own, tokens[:, : own.shape[1]])
    given = {
        "logits": logits,
        "draft_tokens": torch.cat([chosen, tokens[:, own.shape[1] :]], 1),
        "temperature": temperature,
        "seeds": seeds,
        "positions": positions,
        "num_rows": torch.full((batch,), drafts + 1),
        "num_forced": torch.zeros(batch, dtype=torch.int64),
    }
    return {name: value.to(DEVICE) for name, value in given.items()}


def reference(given: dict[str, Any], rule: str = "strict", logprobs: str = "none") -> Verified:
    return verified(**given, rule=rule, logprobs=logprobs, **OPTIONS)


def launch(given: dict[str, Any], rule: str = "strict", logprobs: str = "none", **shape: int) -> Verified:
    absent = dict.fromkeys(("draft_logits", "top_k", "top_p", "min_p", "target_to_draft"))
    return verify_triton(Verify(**{**absent, **given}, rule=rule, logprobs=logprobs, **OPTIONS), **(shape or SPLIT))


def with_draft_logits(given: dict[str, Any], drawn: int, own: int | None = None) -> dict[str, Any]:
    """Drafts drawn from logits near the target's, ``drawn`` of them; ``own`` is the size of a reduced vocabulary."""
    drafts = given["draft_tokens"].shape[1]
    vocab = given["logits"].shape[-1]
    draw = torch.Generator().manual_seed(8)
    ids = torch.arange(vocab) if own is None else torch.randperm(vocab, generator=draw)[:own]
    near = given["logits"].cpu()[:, :drafts, ids].float()
    near = near + torch.randn(near.shape, generator=draw)
    tokens, processed = OPS["sample_draft"].form("reference")(
        near, given["temperature"].cpu(), given["seeds"].cpu(), given["positions"].cpu()[:, 0], None, None, None, ids,
        0, "block", vocab, True,
    )  # fmt: skip
    more = {"draft_logits": processed[:, :drawn].to(DEVICE), "draft_tokens": tokens.to(DEVICE)}
    return {**given, **more, "target_to_draft": None if own is None else invert_vocabulary(ids, vocab).to(DEVICE)}


CUTS = {"top_k": [40, 0, 5, 3, 9], "top_p": [0.9, 1.0, 0.5, 0.95, 1.0], "min_p": [0.0, 0.05, 0.01, 0.0, 0.0]}


def with_cuts(given: dict[str, Any]) -> dict[str, Any]:
    batch = len(given["logits"])
    return {**given, **{name: torch.tensor(v).repeat(batch)[:batch].to(DEVICE) for name, v in CUTS.items()}}


def assert_same_tokens(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


def assert_logprobs(given: dict[str, Any], found: tuple[Tensor, ...], kind: str) -> None:
    """Against a float64 log-softmax, where every row of the block has logits."""
    source = given["logits"].double()
    if kind == "processed":
        source = process_logits(source, given["temperature"].double())
    emitted, logprobs = found[0], found.logprobs
    own = source.log_softmax(-1).gather(2, emitted.clamp_min(0).unsqueeze(2)).squeeze(2)
    forced = torch.arange(emitted.shape[1], device=DEVICE) < given["num_forced"].unsqueeze(1)
    wanted = own.masked_fill((emitted < 0) | forced, 0.0)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rule", STEP_NOISE_RULES)
@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_draft_logits_beyond_the_drafts_change_no_bit(rule: str, drafts: int) -> None:
    """A step verifies fewer drafts than the state has room for; what is there of others may be anything."""
    given = with_draft_logits(problem(6, drafts, 300), drafts) if drafts else problem(6, 0, 300)
    own = given["draft_logits"] if drafts else torch.zeros(6, 0, 300, device=DEVICE)
    stale = torch.tensor([torch.nan, torch.inf, -torch.inf, 3.0], device=DEVICE).repeat(900).view(6, 2, 300)
    wider = {**given, "draft_logits": torch.cat([own, stale], 1)}
    found = [launch({**given, "draft_logits": own}, rule, "raw"), launch(wider, rule, "raw")]
    found += [reference({**given, "draft_logits": own}, rule, "raw"), reference(wider, rule, "raw")]
    for narrow, wide in (found[:2], found[2:]):
        assert all(torch.equal(a, b) for a, b in zip(narrow, wide, strict=True))
    assert_same_tokens(found[1], found[3])


@pytest.mark.parametrize(
    ("vocab", "drafts", "dtype"),
    [(1, 1, torch.float32), (300, 2, torch.float32), (2600, 1, torch.float16)],
)
@pytest.mark.parametrize("kind", ["raw", "processed"])
def test_strict_emits_the_references_tokens(vocab: int, drafts: int, dtype: torch.dtype, kind: str) -> None:
    given = problem(3, drafts, vocab, dtype=dtype)
    found = launch(given, logprobs=kind)
    assert_same_tokens(found, reference(given))
    assert_logprobs(given, found, kind)


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        ("strict", "raw"),
        ("typical", "processed"),
        ("synthetic", "none"),
        ("block", "processed"),
        ("probabilistic", "raw"),
    ],
)
def test_rows_and_forced_rows_as_in_the_reference(rule: str, kind: str) -> None:
    given = problem(10, 3, 40)
    given["num_rows"] = torch.tensor([4, 4, 4, 4, 3, 2, 1, 0, 0, 2], device=DEVICE)
    given["num_forced"] = torch.tensor([0, 1, 2, 3, 2, 2, 0, 0, 3, 3], device=DEVICE)
    given["logits"][4:, 3] = torch.nan  # padding
    given["logits"][7:9] = torch.nan  # inactive
    wanted, found = reference(given, rule, kind), launch(given, rule, kind)
    assert_same_tokens(found, wanted)
    assert len(set(wanted[1].tolist())) > 3
    if kind == "none":
        assert found.logprobs.shape == (10, 0)
    else:
        torch.testing.assert_close(found.logprobs, wanted.logprobs, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("rule", "rows"), [("strict", 1), ("strict", 3), ("typical", 2), ("block", 3)])
def test_a_wide_block_with_few_rows_of_logits(rule: str, rows: int) -> None:
    given = problem(6, 11, 300, rows)
    given["num_forced"] = torch.tensor([0, 3, 9, 10, 11, 7], device=DEVICE)
    given["num_rows"] = torch.tensor([12, 5, 12, 11, 11, 9], device=DEVICE)
    given["draft_tokens"] = given["draft_tokens"].clamp(0, 299)
    wanted, found = reference(given, rule, "raw"), launch(given, rule, "raw")
    assert_same_tokens(found, wanted)
    torch.testing.assert_close(found.logprobs, wanted.logprobs, rtol=0, atol=2e-6)


STRANGE = (torch.nan, -torch.inf, torch.inf)


@pytest.mark.parametrize(
    ("rule", "value"),
    [*(("strict", value) for value in STRANGE), ("probabilistic", torch.inf), ("block", torch.nan),
     ("block", -torch.inf), ("typical", torch.inf), ("typical", torch.nan), ("synthetic", -torch.inf)],
)  # fmt: skip
def test_strange_logits(rule: str, value: float) -> None:
    given = problem(4, 1, 50)
    hit = torch.rand(4, 2, 50, generator=torch.Generator().manual_seed(1)) < 0.3
    hit[2:] = True
    given["logits"] = given["logits"].masked_fill(hit.to(DEVICE), value)
    given["draft_tokens"][::2] = 0
    wanted, found = reference(given, rule, "raw"), launch(given, rule, "raw")
    assert_same_tokens(found, wanted)
    torch.testing.assert_close(found.logprobs, wanted.logprobs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_without_seeds_nothing_is_drawn(temperature: float) -> None:
    given = problem(2, 1, 1300)
    given["seeds"], given["temperature"] = None, torch.full((2,), temperature, device=DEVICE)
    for rule in ("strict", "synthetic", "probabilistic", "block"):
        assert_same_tokens(launch(given, rule), reference(given, rule))


@pytest.mark.parametrize(
    ("temperature", "shape"),
    [(0.0, "ties"), (0.0, "large"), (1e-29, "flat"), (1e-29, "ties"), (1e-29, "peaked"), (1e-6, "peaked"),
     (1e-6, "large"), (1.0, "flat"), (1.0, "ties"), (1.0, "peaked")],
)  # fmt: skip
def test_the_first_exact_argmax_wins_however_close_the_scores(temperature: float, shape: str) -> None:
    """Flat rows, ties and rows in which rounding leaves little of the noise, over several splits."""
    given = problem(1, 0, 1600)
    logits = torch.zeros_like(given["logits"])
    if shape == "ties":
        logits[..., ::7] = 3.0
    elif shape == "peaked":
        logits[..., 1500], logits[..., 1503], logits[..., 200] = 11.0, 11.0, 10.5
    elif shape == "large":
        logits += given["logits"] * 1e4
    given["logits"], given["temperature"] = logits, torch.full((1,), temperature, device=DEVICE)
    assert_same_tokens(launch(given, split=1024, tile=512), reference(given))


@triton.jit
def _worst_exponential(u):  # type: ignore[no-untyped-def]
    """``rough_exponential`` with all of the error that it may have."""
    error = tl.where((u * 65536.0).to(tl.int32) % 2 == 0, 1.5e-5, -1.5e-5)
    return rough_exponential(u) * (1.0 + error)


@pytest.mark.parametrize("vocab", [1500, 5000])
def test_scores_that_nearly_tie_are_compared_exactly(monkeypatch: pytest.MonkeyPatch, vocab: int) -> None:
    """Two tokens whose scores are nearer than the approximate ones can tell, in one split or apart."""
    if DEVICE == "cpu":  # the interpreter's logarithms are better than a GPU's
        monkeypatch.setattr(scan, "rough_exponential", _worst_exponential)
    given = problem(40, 0, vocab)
    given["temperature"] = torch.ones(40, device=DEVICE)
    noise = gumbel(given["seeds"], STREAM_TARGET, given["positions"], None, vocab)
    first = torch.arange(40, device=DEVICE)
    second = torch.where(first % 2 == 0, first + 8, first + vocab - 40)
    logits = torch.full_like(given["logits"], -60.0)
    logits[first, 0, first] = 1.0
    apart = torch.where(first % 4 < 2, 1e-5, -1e-5)
    logits[first, 0, second] = 1.0 + noise[first, 0, first] - noise[first, 0, second] + apart
    given["logits"] = logits
    found = launch(given, split=1024)
    assert_same_tokens(found, reference(given))
    assert torch.equal(found[0][:, 0], torch.where(apart > 0, second, first))


@pytest.mark.parametrize("seeded", [True, False])
def test_zeros_of_both_signs_are_equal(seeded: bool) -> None:
    given = problem(1, 0, 1300)
    given["temperature"], given["logits"] = torch.zeros(1, device=DEVICE), torch.full_like(given["logits"], -1.0)
    given["logits"][..., 5], given["logits"][..., 300::290] = -0.0, 0.0
    given["seeds"] = given["seeds"] if seeded else None
    assert launch(given)[0].item() == 5


@pytest.mark.parametrize("kind", ["none", "raw"])
def test_many_rows_have_larger_splits_and_the_same_bits(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    given = with_cuts(problem(2, 1, 5000, dtype=torch.bfloat16))
    assert scan.scan_size(5000, 204) == 1024 and scan.scan_size(5000, 205) == 4096
    few = launch(given, logprobs=kind, split=0)
    monkeypatch.setattr(gpus, "HOPPER", dataclasses.replace(gpus.HOPPER, scan_programs=1))
    many = launch(given, logprobs=kind, split=0)
    assert_same_tokens(few, reference(given))
    assert all(torch.equal(one, other) for one, other in zip(few, many, strict=True))


def test_all_turns_of_a_split_are_seen() -> None:
    given = problem(1, 1, 1300)
    for tile in (256, 512):
        found = launch(given, logprobs="raw", split=1024, tile=tile)
        assert_same_tokens(found, reference(given))
        assert_logprobs(given, found, "raw")


def test_a_nan_hides_no_token_of_its_split() -> None:
    given = problem(1, 1, 2100)
    given["logits"][..., 900] = 30.0
    given["logits"][..., 899] = given["logits"][..., 1500] = torch.nan
    found = launch(given, split=2048, tile=512)
    assert_same_tokens(found, reference(given))
    assert found[0][0, 0] == 900 and found.bad.all()


def test_a_row_has_the_same_bits_in_any_batch_and_block() -> None:
    """What plain decoding gives is what a block of rows gives, log-probabilities included."""
    given = problem(3, 2, 1100)
    given["draft_tokens"] = launch(given)[0][:, :2]  # as far as accepted
    whole = launch(given, logprobs="raw")
    picked = [2, 0]
    part = launch({name: value[picked] for name, value in given.items()}, logprobs="raw")
    for one, other in zip(whole, part, strict=True):
        assert torch.equal(one[picked], other)
    for row in (0, 2):
        alone = {
            **given,
            "logits": given["logits"][:, row : row + 1],
            "positions": given["positions"][:, row : row + 1],
        }
        alone |= {"draft_tokens": given["draft_tokens"][:, :0], "num_rows": torch.ones_like(given["num_rows"])}
        found, reached = launch(alone, logprobs="raw"), whole[1] > row
        assert torch.equal(found[0][reached, 0], whole[0][reached, row])
        assert torch.equal(found.logprobs[reached, 0], whole.logprobs[reached, row])


def test_strides_and_integer_types_do_not_matter() -> None:
    given = problem(2, 2, 300)
    wanted = launch(given)
    window = torch.cat([given["draft_tokens"][:, :1], given["draft_tokens"]], 1)
    strided = {**given, "draft_tokens": window[:, 1:], "logits": given["logits"].mT.contiguous().mT}
    assert_same_tokens(launch(strided), wanted)
    assert_same_tokens(launch({**given, "draft_tokens": given["draft_tokens"].int()}), wanted)


@pytest.mark.parametrize("rule", RULES)
def test_cuts(rule: str) -> None:
    given = with_cuts(problem(5, 1, 1100, dtype=torch.bfloat16))
    wanted, found = reference(given, rule, "processed"), launch(given, rule, "processed")
    assert_same_tokens(found, wanted)
    torch.testing.assert_close(found.logprobs, wanted.logprobs, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("drawn", "own", "cuts", "rule"),
    [
        *((drawn, own, False, rule) for drawn, own in ((0, None), (3, 200)) for rule in STEP_NOISE_RULES),
        (2, None, True, "probabilistic"),
        (2, 250, True, "block"),
    ],
)
def test_drafts_with_logits_are_verified_as_in_the_reference(
    drawn: int, own: int | None, cuts: bool, rule: str
) -> None:
    given = with_draft_logits(problem(6 if cuts else 12, 3, 300), drawn, own)
    if cuts:
        given = with_cuts(given)
    wanted, found = reference(given, rule, "raw"), launch(given, rule, "raw")
    assert_same_tokens(found, wanted)
    assert len(set(wanted[1].tolist())) > 1
    torch.testing.assert_close(found.logprobs, wanted.logprobs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("rule", STEP_NOISE_RULES)
def test_draft_logits_of_forced_and_missing_rows_are_not_looked_at(rule: str) -> None:
    given = with_draft_logits(problem(6, 3, 90), 3)
    given["num_rows"] = torch.tensor([4, 4, 4, 3, 1, 0], device=DEVICE)
    given["num_forced"] = torch.tensor([0, 1, 3, 2, 0, 0], device=DEVICE)
    wanted = reference(given, rule)
    given["draft_logits"][2], given["draft_logits"][4:], given["draft_logits"][1, :1] = torch.nan, torch.nan, torch.nan
    assert_same_tokens(launch(given, rule), wanted)


@pytest.mark.parametrize("rule", STEP_NOISE_RULES)
def test_drafts_from_the_targets_own_distribution_are_accepted(rule: str) -> None:
    """Nothing is left of ``p - q``; where a draft is rejected nevertheless the target's own distribution is drawn."""
    given = problem(4, 3, 300)
    given["temperature"] = torch.ones_like(given["temperature"])
    tokens, processed = OPS["sample_draft"].form("reference")(
        given["logits"][:, :3], given["temperature"], given["seeds"], given["positions"][:, 0], None, None, None, None,
        0, "block", None, True,
    )  # fmt: skip
    given |= {"draft_tokens": tokens, "draft_logits": processed}
    assert (launch(given, rule)[1] == 4).all()


@pytest.mark.parametrize("rule", ["strict", "typical", "block"])
def test_sequences_with_nan_among_the_logits_they_need(rule: str) -> None:
    given = problem(6, 2, 60)
    given["num_rows"] = torch.tensor([3, 3, 2, 3, 3, 0], device=DEVICE)
    given["num_forced"] = torch.tensor([0, 1, 0, 0, 0, 0], device=DEVICE)
    for b, r, place in ((0, 2, 59), (1, 0, 5), (2, 2, 5), (4, 1, 0), (5, 1, 3)):
        given["logits"][b, r, place] = torch.nan
    given["logits"][3, 0, 7], given["logits"][3, 1, 8] = torch.inf, -torch.inf
    found = launch(given, rule).bad
    assert found.tolist() == [-1, 0, 0, 0, -1, 0]
    assert torch.equal(found, bad_rows(given["logits"], given["positions"], given["num_rows"], given["num_forced"]))


@pytest.mark.parametrize(
    ("rule", "temperature"),
    [("strict", 0.0), ("strict", 1.0), ("probabilistic", 1.0), ("typical", 0.0), ("synthetic", 1.0), ("block", 0.0)],
)
def test_the_first_row_without_a_token_is_told(rule: str, temperature: float) -> None:
    given = problem(5, 2, 600)
    given["temperature"] = torch.full_like(given["temperature"], temperature)
    given["num_rows"] = torch.tensor([3, 3, 2, 3, 3], device=DEVICE)
    given["num_forced"] = torch.tensor([0, 1, 0, 0, 0], device=DEVICE)
    for b, rows in enumerate(([1, 2], [0, 2], [2], [0], [1])):
        given["logits"][b, rows] = -torch.inf
    given["logits"][3, 0, 599] = -1e30  # a token is left
    given["logits"][4, 2, 5] = torch.nan
    found = launch(given, rule).bad
    assert found.tolist() == [2, 3, 0, 0, -1]
    assert torch.equal(found, bad_rows(given["logits"], given["positions"], given["num_rows"], given["num_forced"]))


def test_what_is_covered() -> None:
    def given(logits: Tensor, draft_logits: Tensor | None) -> Verify:
        ids = torch.zeros(1, dtype=torch.int64)
        return Verify(logits, ids, draft_logits, ids, None, ids, None, None, None, ids, ids, None)

    logits = torch.zeros(1, 1, 4)
    assert covers(given(logits.half(), None)) and covers(given(logits, logits.bfloat16()))
    assert not covers(given(logits.double(), None))
    assert not covers(given(logits, logits.double()))
