"""The Triton form of draft sampling and its noise, against the reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels import gpus
from specgraph.kernels.ops import OPS
from specgraph.kernels.sampling import gumbel
from specgraph.kernels.sampling.draft import sample_draft
from specgraph.kernels.sampling.gumbel import noise_key, philox
from specgraph.kernels.sampling.sample import uniform

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def _uniforms(out_ptr, seeds_ptr, key_ptr, row_ptr, STREAM: tl.constexpr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    seed, key, row = tl.load(seeds_ptr + at), tl.load(key_ptr + at), tl.load(row_ptr + at)
    k0, k1, c1, c2, c3 = noise_key(seed, STREAM, key, row)
    w0, _, _, _ = philox((at * 0).to(tl.uint32), c1, c2, c3, k0, k1)
    tl.store(out_ptr + at, gumbel.uniform(w0))


@triton.jit
def _uniforms_of_words(out_ptr, words_ptr, COUNT: tl.constexpr):
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    tl.store(out_ptr + at, gumbel.uniform(tl.load(words_ptr + at).to(tl.uint32)))


@pytest.mark.parametrize("stream", [0, 1, 2, 3])
def test_uniforms_are_the_references_bit_for_bit(stream: int) -> None:
    draw = torch.Generator().manual_seed(stream)
    seeds, key = (torch.randint(-(2**63), 2**63 - 1, (1024,), generator=draw, device="cpu") for _ in range(2))
    row = torch.randint(0, 2**32, (1024,), generator=draw)
    seeds, key, row, out = seeds.to(DEVICE), key.abs().to(DEVICE), row.to(DEVICE), torch.empty(1024, device=DEVICE)
    _uniforms[(1,)](out, seeds, key, row, STREAM=stream, COUNT=1024)
    assert torch.equal(out, uniform(seeds, stream, key.unsqueeze(1), row.unsqueeze(1)).squeeze(1))


def test_uniforms_of_all_words_are_exact() -> None:
    """The upper 23 bits count; half of the words have the lower nine, too."""
    words = torch.arange(0, 2**32, 512)
    words[1::2] += 511
    found = torch.empty(len(words), device=DEVICE)
    _uniforms_of_words[(len(words) // 16384,)](found, words.to(DEVICE), COUNT=16384)
    assert torch.equal(found.double().cpu(), ((words >> 9) + 0.5).double() * 2.0**-23)


def drafts(
    logits: Tensor, rule: str, ids: Tensor | None, limit: int | None, seeded: bool, kept: bool = True,
    tile: int = 1024, split: int | None = 1024,
    cuts: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:  # fmt: skip
    """What the kernel and the reference draw; temperatures are mixed."""
    batch = len(logits)
    temperature = torch.tensor([0.7, 0.0, 1.0, 1.6]).repeat(batch)[:batch].to(DEVICE)
    seeds = torch.arange(batch, device=DEVICE) * 7919 - (1 << 40) if seeded else None
    key, logits = torch.arange(batch, device=DEVICE) * 31 + 5, logits.to(DEVICE)
    ids = None if ids is None else ids.to(DEVICE)
    arguments = (logits, temperature, seeds, key, *cuts, ids, 3, rule, limit, kept)
    found, wanted = OPS["sample_draft"].form("triton", split=split, tile=tile), OPS["sample_draft"].form("reference")
    return found(*arguments), wanted(*arguments)


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 2


@pytest.mark.parametrize("rule", ["strict", "block"])
@pytest.mark.parametrize(("vocab", "mapped", "limit"), [(1, False, None), (1300, False, 1200), (1100, True, 5000)])
@pytest.mark.parametrize("seeded", [True, False])
def test_drafts_are_the_references(rule: str, vocab: int, mapped: bool, limit: int | None, seeded: bool) -> None:
    ids = torch.randperm(6000, generator=torch.Generator().manual_seed(1))[:vocab] if mapped else None
    for one, other in zip(*drafts(noise(3, 2, vocab), rule, ids, limit, seeded), strict=True):
        assert torch.equal(one, other)


def test_half_precision_and_several_tiles() -> None:
    for one, other in zip(*drafts(noise(4, 1, 1500).half(), "strict", None, None, True, tile=256), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("mapped", "limit"), [(False, None), (True, 900)])
def test_cuts(mapped: bool, limit: int | None) -> None:
    ids = torch.randperm(1100, generator=torch.Generator().manual_seed(1)) if mapped else None
    cuts = (
        torch.tensor([0, 7, 40], device=DEVICE),
        torch.tensor([0.8, 1.0, 0.5], device=DEVICE),
        torch.tensor([0.0, 0.0, 0.1], device=DEVICE),
    )
    for one, other in zip(*drafts(noise(3, 1, 1100).bfloat16(), "block", ids, limit, True, cuts=cuts), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("mapped", [False, True])
def test_many_rows_have_larger_splits_and_the_same_tokens(monkeypatch: pytest.MonkeyPatch, mapped: bool) -> None:
    monkeypatch.setattr(gpus, "HOPPER", dataclasses.replace(gpus.HOPPER, scan_programs=1))
    ids = torch.randperm(9000, generator=torch.Generator().manual_seed(1))[:5000] if mapped else None
    for one, other in zip(*drafts(noise(3, 1, 5000).bfloat16(), "strict", ids, 8000, True, split=None), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("value", [torch.nan, -torch.inf, torch.inf])
def test_strange_logits(value: float) -> None:
    logits, ids = noise(4, 1, 50), torch.arange(50) * 3
    logits[:2, :, ::3] = value
    logits[2:] = value
    for mapped in (None, ids):
        for one, other in zip(*drafts(logits, "strict", mapped, 140, True), strict=True):
            assert torch.equal(one, other)


HUGE = 3.3e38


@pytest.mark.parametrize("row", [[torch.nan, 1.0, 2.0, 30.0, 0.0], [0.0, 0.0, HUGE, 0.0, 30.0]])
@pytest.mark.parametrize("seeded", [True, False])
def test_a_row_with_a_strange_logit_beside_a_row_of_larger_logits(row: list[float], seeded: bool) -> None:
    """Nothing of another row counts."""
    logits = torch.tensor([[[100.0, 90.0, 80.0, 70.0, 60.0], row]]).repeat(4, 1, 1)
    for one, other in zip(*drafts(logits, "strict", None, None, seeded), strict=True):
        assert torch.equal(one, other)


def test_top_k_may_leave_a_token_beside_a_nan() -> None:
    logits = noise(1, 1, 1300)
    logits[..., 0], logits[..., 900], logits[..., 901] = 19.9, 20.0, torch.nan
    cuts = (torch.ones(1, dtype=torch.int64, device=DEVICE), None, None)
    for one, other in zip(*drafts(logits, "strict", None, None, True, cuts=cuts), strict=True):
        assert torch.equal(one, other) and (one.shape != (1, 1) or one.item() == 900)


def test_weights_that_nobody_wants_are_not_made() -> None:
    (token, none), wanted = drafts(noise(4, 2, 300), "strict", None, None, True, kept=False)
    assert torch.equal(token, wanted[0])
    assert none.shape == wanted[1].shape == (4, 2, 0)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("ids", [None, torch.tensor([9, 1, 2, 0, 8, 3])])
def test_the_op(kept: bool, ids: Tensor | None) -> None:
    seeds = torch.arange(2)
    arguments = (noise(2, 3, 6), torch.ones(2), seeds, seeds, None, None, None, ids, 1, "strict", 7, kept)
    torch.library.opcheck(torch.ops.specgraph.sample_draft.default, arguments)
    options = {"row": 1, "rule": "strict", "target_vocab_size": 7, "draft_to_target": ids, "return_processed": kept}
    for one, other in zip(
        sample_draft(*arguments[:7], **options), OPS["sample_draft"].form("reference")(*arguments), strict=True
    ):
        assert torch.equal(one, other)
