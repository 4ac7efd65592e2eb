"""Verification and draft sampling on a GPU at real shapes: the reference's tokens, and the same bits in any block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specgraph.kernels.ops import OPS
from specgraph.kernels.sampling.constants import STREAM_TARGET
from specgraph.kernels.sampling.floors import find_floors
from specgraph.kernels.sampling.sample import (
    RULES,
    STEP_NOISE_RULES,
    gumbel,
    process_logits,
    sample,
)
from specgraph.kernels.verify import Verified, invert_vocabulary
from tests.kernels.verify.definition import verified

LOGPROB_ERROR = 4e-6
NEAR_TIE = 4e-6
"""Scores closer than this, some units in the last place of the noise, may be ordered either way."""


def problem(batch: int, drafts: int, vocab: int, temperature: float | None = None) -> dict[str, Any]:
    draw = torch.Generator("cuda").manual_seed(batch * 100 + drafts)
    logits = (torch.randn(batch, drafts + 1, vocab, generator=draw, device="cuda") * 3).bfloat16()
    mixed = torch.tensor([0.8, 0.0, 1.0, 1.3], device="cuda").repeat(batch)[:batch]
    heat = mixed if temperature is None else torch.full((batch,), temperature, device="cuda")
    seeds = torch.randint(-(2**62), 2**62, (batch,), generator=draw, device="cuda")
    start = torch.randint(0, 2**20, (batch, 1), generator=draw, device="cuda")
    positions = start + torch.arange(drafts + 1, device="cuda")
    own = sample(process_logits(logits, heat), seeds, positions)[:, :drafts]
    wrong = torch.rand(own.shape, generator=draw, device="cuda") < 0.15
    return {
        "logits": logits,
        "draft_tokens": torch.where(wrong, own // 2, own),
        "temperature": heat,
        "seeds": seeds,
        "positions": positions,
        "num_rows": torch.full((batch,), drafts + 1, device="cuda"),
        "num_forced": torch.zeros(batch, dtype=torch.int64, device="cuda"),
    }


def op(given: dict[str, Any], rule: str = "strict", logprobs: str = "none") -> Verified:
    cuts = (given.get(name) for name in ("top_k", "top_p", "min_p"))
    found: tuple[Tensor, ...] = torch.ops.specgraph.verify(
        given["logits"], given["draft_tokens"], given.get("draft_logits"), given["temperature"], given["seeds"],
        given["positions"], *cuts, given["num_rows"], given["num_forced"], given.get("target_to_draft"),
        given.get("point_mass"), rule=rule, logprobs=logprobs,
    )  # fmt: skip
    return Verified(*found)


def reference(given: dict[str, Any], rule: str) -> Verified:
    return verified(**given, rule=rule)


def gaps(given: dict[str, Any]) -> Tensor:
    """How far apart the two best scores of each row are, relative to the best, ``[B, R]``."""
    vocab = given["logits"].shape[-1]
    noise = gumbel(given["seeds"], STREAM_TARGET, given["positions"], None, vocab)
    best = (process_logits(given["logits"], given["temperature"]) + noise).topk(2).values
    return (best[..., 0] - best[..., 1]) / best[..., 0].abs().clamp_min(1)


@pytest.mark.parametrize("vocab", [128256, 151936])
@pytest.mark.parametrize(("batch", "drafts"), [(1, 3), (8, 7), (32, 3)])
@pytest.mark.parametrize("rule", ["strict", "typical", "synthetic"])
def test_tokens_are_the_references(vocab: int, batch: int, drafts: int, rule: str) -> None:
    given = problem(batch, drafts, vocab)
    found, wanted = op(given, rule), reference(given, rule)
    clear = (gaps(given) > NEAR_TIE).all(1)
    assert clear.float().mean() > 0.9
    assert torch.equal(found[0][clear], wanted[0][clear])
    assert torch.equal(found[1][clear], wanted[1][clear])
    assert torch.equal(found.accepted_rows[clear], wanted.accepted_rows[clear])


CUTS = {
    "top_k": torch.tensor([50, 0, 1, 1000, 0, 7, 0, 200000]),
    "top_p": torch.tensor([0.9, 1.0, 0.5, 0.95, 0.3, 1.0, 0.999, 0.9]),
    "min_p": torch.tensor([0.0, 0.05, 0.0, 0.01, 0.0, 0.0, 0.0, 0.0]),
}


@pytest.mark.parametrize("vocab", [128256, 151936])
@pytest.mark.parametrize("names", ["top_k", "top_p", "top_k top_p min_p"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_floors_keep_what_the_reference_keeps(vocab: int, names: str, dtype: torch.dtype) -> None:
    """Rounding of the sums may move the floor of top-p by tokens that hold a millionth of the mass."""
    given = problem(8, 3, vocab)
    logits, heat = given["logits"].to(dtype), given["temperature"]
    cuts = [CUTS[name].cuda() if name in names.split() else None for name in CUTS]
    floors = find_floors(logits, heat, *cuts, split=4096)
    assert floors is not None
    wanted = process_logits(logits, heat, *cuts)
    kept = logits.float() >= floors.view(8, 4, 1)
    differ = (kept != (wanted > -torch.inf)) & (heat > 0).view(8, 1, 1)
    if "top_p" not in names:
        assert not differ.any()
    mass = process_logits(logits, heat).softmax(-1).masked_fill(~differ, 0.0).sum(-1)
    assert mass.max() < 3e-5
    assert (differ.sum(-1) > 0).float().mean() < 0.1


@pytest.mark.parametrize("rule", RULES)
def test_cuts_and_draft_logits(rule: str) -> None:
    """One of these few hundred draws may be a near tie."""
    given = problem(8, 7, 128256)
    draw = torch.Generator("cuda").manual_seed(3)
    ids = torch.randperm(128256, generator=draw, device="cuda")[:32000].sort().values
    near = given["logits"][:, :7, ids] + torch.randn(8, 7, 32000, generator=draw, device="cuda")
    cuts = {name: value.cuda() for name, value in CUTS.items()}
    tokens, processed = torch.ops.specgraph.sample_draft(
        near, given["temperature"], given["seeds"], given["positions"][:, 0].contiguous(), *cuts.values(), ids, 0,
        rule, 128256, True,
    )  # fmt: skip
    given |= {"draft_tokens": tokens, **cuts}
    if rule in STEP_NOISE_RULES:
        given |= {"draft_logits": processed, "target_to_draft": invert_vocabulary(ids, 128256)}
    found, wanted = op(given, rule), reference(given, rule)
    assert (found[0] != wanted[0]).any(1).sum() <= 1
    torch.cuda.set_sync_debug_mode("error")
    try:
        op(given, rule)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for batch in (1, 5):
        cut = {name: value if name == "target_to_draft" else value[:batch] for name, value in given.items()}
        assert all(torch.equal(one[:batch], other) for one, other in zip(found, op(cut, rule), strict=True))


@pytest.mark.parametrize("rule", STEP_NOISE_RULES)
def test_a_batch_with_point_masses_is_its_two_halves(rule: str) -> None:
    given = problem(8, 7, 128256)
    near = given["logits"][:, :7] + torch.randn(8, 7, 128256, device="cuda").bfloat16()
    given["draft_tokens"], given["draft_logits"] = torch.ops.specgraph.sample_draft(
        near, given["temperature"], given["seeds"], given["positions"][:, 0].contiguous(), None, None, None, None, 0,
        rule, 128256, True,
    )  # fmt: skip
    chosen = torch.arange(8, device="cuda") % 2 == 1
    given["draft_logits"][chosen] = torch.nan  # nobody looks at them
    whole = op({**given, "point_mass": chosen}, rule, "raw")
    halves = {"points": {**given, "draft_logits": None}, "drawn": given}
    for name, rows in (("points", chosen), ("drawn", ~chosen)):
        half = {n: value if value is None else value[rows] for n, value in halves[name].items()}
        for one, other in zip(whole, op(half, rule, "raw"), strict=True):
            assert torch.equal(one[rows], other)
    torch.cuda.set_sync_debug_mode("error")
    try:
        op({**given, "point_mass": chosen}, rule)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("temperature", [0.0, 0.8, None])
def test_logprobs_are_those_of_float64(temperature: float | None) -> None:
    given = problem(8, 3, 128256, temperature)
    for kind in ("raw", "processed"):
        out = op(given, logprobs=kind)
        emitted, found = out.emitted, out.logprobs
        source = given["logits"].double()
        if kind == "processed":
            source = process_logits(source, given["temperature"].double())
        own = source.log_softmax(-1).gather(2, emitted.clamp_min(0).unsqueeze(2)).squeeze(2)
        torch.testing.assert_close(found.double(), own.masked_fill(emitted < 0, 0.0), rtol=0, atol=LOGPROB_ERROR)


@pytest.mark.parametrize("vocab", [128256, 151936, 32003])
def test_a_row_has_the_same_bits_in_blocks_of_1_to_576_rows(vocab: int) -> None:
    """Every row of 64 sequences of 9 rows, against smaller batches, shorter blocks and single rows."""
    given = problem(64, 8, vocab)
    given["draft_tokens"] = op(given)[0][:, :8]
    whole = op(given, logprobs="raw")
    for batch in (1, 3, 17):
        cut = {name: value[:batch] for name, value in given.items()}
        part = op(cut, logprobs="raw")
        assert torch.equal(op(cut)[0], part[0])
        assert all(torch.equal(one[:batch], other) for one, other in zip(whole, part, strict=True))
    for first, width in ((0, 1), (0, 4), (2, 1), (5, 2), (8, 1)):
        rows = slice(first, first + width)
        short = {**given, "logits": given["logits"][:, rows], "positions": given["positions"][:, rows]}
        short["draft_tokens"] = given["draft_tokens"][:, first : first + width - 1]
        short["num_rows"] = torch.full_like(given["num_rows"], width)
        found, reached = op(short, logprobs="raw"), whole[1] > first
        both = (found[0][reached] >= 0) & (whole[0][reached][:, rows] >= 0)
        assert both[:, 0].all()
        for one, other in ((found[0], whole[0]), (found.logprobs, whole.logprobs)):
            assert torch.equal(one[reached][both], other[reached][:, rows][both])


@pytest.mark.parametrize("rule", ["strict", "block"])
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("count", [1, 7])
def test_drafts_are_the_references(rule: str, mapped: bool, count: int) -> None:
    vocab, batch = 32000, 32
    draw = torch.Generator("cuda").manual_seed(5)
    logits = (torch.randn(batch, count, vocab, generator=draw, device="cuda") * 3).bfloat16()
    ids = torch.randperm(128256, generator=draw, device="cuda")[:vocab].sort().values if mapped else None
    temperature = torch.tensor([0.8, 0.0, 1.0, 1.3], device="cuda").repeat(8)
    seeds, key = torch.arange(batch, device="cuda") * 977, torch.arange(batch, device="cuda") * 31
    arguments = (logits, temperature, seeds, key, None, None, None, ids, 0, rule, 128256, True)
    found, wanted = torch.ops.specgraph.sample_draft(*arguments), OPS["sample_draft"].form("reference")(*arguments)
    assert torch.equal(found[1], wanted[1])
    # One of these few hundred draws may be a near tie.
    assert (found[0] != wanted[0]).sum() <= 1
    none = torch.ops.specgraph.sample_draft(*arguments[:-1], False)
    assert torch.equal(none[0], found[0])


def test_strict_drafts_of_the_targets_own_logits_are_all_accepted() -> None:
    """The two kernels share noise and scores bit for bit."""
    given = problem(64, 7, 128256)
    key = given["positions"][:, 0].contiguous()
    drawn, _ = torch.ops.specgraph.sample_draft(
        given["logits"][:, :7], given["temperature"], given["seeds"], key, None, None, None, None, 0, "strict", None,
        False,
    )  # fmt: skip
    given["draft_tokens"] = drawn
    assert (op(given)[1] == 8).all()


def test_no_launch_waits_for_the_host_and_a_graph_replays_it() -> None:
    given = problem(8, 3, 128256)
    wanted = op(given, logprobs="raw")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        op(given, logprobs="raw")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = op(given, logprobs="raw")
    for _ in range(3):
        graph.replay()
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
