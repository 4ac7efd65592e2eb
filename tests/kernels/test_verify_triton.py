"""The Triton form of verification: the tokens of the reference, log-probabilities of float64, the same bits always."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specgraph.kernels.sample import process_logits, sample
from specgraph.kernels.verify import verify_reference
from specgraph.kernels.verify_triton import COVERED_RULES, covers, verify_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPLIT = {"split": 1024, "tile": 1024}
OPTIONS = {"posterior_threshold": 0.09, "posterior_alpha": 0.3, "acceptance_rate": 0.7}


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


def reference(given: dict[str, Any], rule: str = "strict", logprobs: str = "none") -> tuple[Tensor, ...]:
    rest = {name: value for name, value in given.items() if name not in ("logits", "draft_tokens")}
    return verify_reference(
        given["logits"], given["draft_tokens"], None, **rest, rule=rule, return_logprobs=logprobs, **OPTIONS
    )


def launch(given: dict[str, Any], rule: str = "strict", logprobs: str = "none", **shape: int) -> tuple[Tensor, ...]:
    return verify_triton(**given, rule=rule, logprobs=logprobs, **OPTIONS, **(shape or SPLIT))


def assert_same_tokens(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


def assert_logprobs(given: dict[str, Any], found: tuple[Tensor, ...], kind: str) -> None:
    """Against a float64 log-softmax, where every row of the block has logits."""
    source = given["logits"].double()
    if kind == "processed":
        source = process_logits(source, given["temperature"].double())
    emitted, logprobs = found[0], found[2]
    own = source.log_softmax(-1).gather(2, emitted.clamp_min(0).unsqueeze(2)).squeeze(2)
    forced = torch.arange(emitted.shape[1], device=DEVICE) < given["num_forced"].unsqueeze(1)
    wanted = own.masked_fill((emitted < 0) | forced, 0.0)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), wanted, rtol=1e-6, atol=1e-6)


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


@pytest.mark.parametrize(("rule", "kind"), [("strict", "raw"), ("typical", "processed"), ("synthetic", "none")])
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
        assert found[2].shape == (10, 0)
    else:
        torch.testing.assert_close(found[2], wanted[2], rtol=0, atol=2e-6)


@pytest.mark.parametrize(("rule", "rows"), [("strict", 1), ("strict", 3), ("typical", 2)])
def test_a_wide_block_with_few_rows_of_logits(rule: str, rows: int) -> None:
    given = problem(6, 11, 300, rows)
    given["num_forced"] = torch.tensor([0, 3, 9, 10, 11, 7], device=DEVICE)
    given["num_rows"] = torch.tensor([12, 5, 12, 11, 11, 9], device=DEVICE)
    given["draft_tokens"] = given["draft_tokens"].clamp(0, 299)
    wanted, found = reference(given, rule, "raw"), launch(given, rule, "raw")
    assert_same_tokens(found, wanted)
    torch.testing.assert_close(found[2], wanted[2], rtol=0, atol=2e-6)


@pytest.mark.parametrize("rule", COVERED_RULES)
@pytest.mark.parametrize("value", [torch.nan, -torch.inf, torch.inf])
def test_strange_logits(rule: str, value: float) -> None:
    given = problem(4, 1, 50)
    hit = torch.rand(4, 2, 50, generator=torch.Generator().manual_seed(1)) < 0.3
    hit[2:] = True
    given["logits"] = given["logits"].masked_fill(hit.to(DEVICE), value)
    given["draft_tokens"][::2] = 0
    wanted, found = reference(given, rule, "raw"), launch(given, rule, "raw")
    assert_same_tokens(found, wanted)
    torch.testing.assert_close(found[2], wanted[2], rtol=0, atol=2e-6)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_without_seeds_nothing_is_drawn(temperature: float) -> None:
    given = problem(2, 1, 1300)
    given["seeds"], given["temperature"] = None, torch.full((2,), temperature, device=DEVICE)
    for rule in ("strict", "synthetic"):
        assert_same_tokens(launch(given, rule), reference(given, rule))


@pytest.mark.parametrize("temperature", [0.0, 1e-29, 1e-6, 1.0])
@pytest.mark.parametrize("shape", ["flat", "ties", "peaked", "large"])
def test_the_first_exact_argmax_wins_however_close_the_bounds(temperature: float, shape: str) -> None:
    """Cases in which the second-best bound of a split says nothing, over several turns and splits."""
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


def test_all_turns_of_a_split_are_seen() -> None:
    given = problem(1, 1, 1300)
    for tile in (256, 512):
        found = launch(given, logprobs="raw", split=1024, tile=tile)
        assert_same_tokens(found, reference(given))
        assert_logprobs(given, found, "raw")


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
        assert torch.equal(found[2][reached, 0], whole[2][reached, row])


def test_strides_and_integer_types_do_not_matter() -> None:
    given = problem(2, 2, 300)
    wanted = launch(given)
    window = torch.cat([given["draft_tokens"][:, :1], given["draft_tokens"]], 1)
    strided = {**given, "draft_tokens": window[:, 1:], "logits": given["logits"].mT.contiguous().mT}
    assert_same_tokens(launch(strided), wanted)
    assert_same_tokens(launch({**given, "draft_tokens": given["draft_tokens"].int()}), wanted)


def test_what_is_covered() -> None:
    logits, option = torch.zeros(1, 1, 4), torch.ones(1)
    assert covers(logits.half(), "strict", None, None, None)
    assert not covers(logits.double(), "strict", None, None, None)
    assert not covers(logits, "block", None, None, None)
    assert not any(covers(logits, "strict", *(option if i == j else None for i in range(3))) for j in range(3))
