"""Top-k, top-p and min-p as floors of a row: exactly what ``process_logits`` keeps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specgraph.kernels.sampling.floors import find_floors
from specgraph.kernels.sampling.sample import clean_logits, process_logits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def options(
    batch: int, top_k: list[int] | None, top_p: list[float] | None, min_p: list[float] | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    def spread(values: list[int] | list[float] | None) -> Tensor | None:
        return None if values is None else torch.tensor(values).repeat(batch)[:batch].to(DEVICE)

    return spread(top_k), spread(top_p), spread(min_p)


def assert_kept(
    logits: Tensor,
    heat: list[float],
    top_k: list[int] | None = None,
    top_p: list[float] | None = None,
    min_p: list[float] | None = None,
) -> None:
    """The floors keep what the reference keeps; greedy rows are left alone."""
    logits, batch = logits.to(DEVICE), len(logits)
    temperature = torch.tensor(heat).repeat(batch)[:batch].to(DEVICE)
    cuts = options(batch, top_k, top_p, min_p)
    floors = find_floors(logits, temperature, *cuts, split=1024)
    assert floors is not None
    kept = clean_logits(logits) >= floors.view(*logits.shape[:2], 1)
    kept &= clean_logits(logits) > -torch.inf
    wanted = process_logits(logits, temperature, *cuts) > -torch.inf
    hot = temperature > 0
    assert torch.equal(kept[hot], wanted[hot])
    assert (floors.view(batch, -1)[~hot] == -torch.inf).all()


EVERY = {"top_k": [40, 0, 1, 3, 5000], "top_p": [0.9, 1.0, 0.5, 1e-6, 0.999], "min_p": [0.0, 0.05, 0.3, 1.0]}


@pytest.mark.parametrize(
    ("names", "dtype"),
    [
        ("top_k", torch.bfloat16), ("top_p", torch.bfloat16), ("min_p", torch.bfloat16),
        ("top_k top_p", torch.float16), ("top_p min_p", torch.bfloat16), ("top_k top_p min_p", torch.float32),
    ],
)  # fmt: skip
def test_random_rows(names: str, dtype: torch.dtype) -> None:
    given = {name: EVERY[name] for name in names.split()}
    assert_kept(noise(6, 1, 1500).to(dtype), [0.8, 1.0, 1.5, 0.0, 0.3, 1.0], **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", ["ties", "equal", "zeros", "tiny", "nan", "few", "empty", "infinite", "peaked"])
def test_adversarial_rows(shape: str) -> None:
    logits = noise(5, 1, 600)
    if shape == "ties":
        logits = logits.round()
    elif shape == "equal":
        logits[:] = -2.5
    elif shape == "zeros":
        logits = torch.where(logits > 0, 0.0, -0.0)
        logits[..., 7] = -1.0
    elif shape == "tiny":
        logits *= 1e-40
    elif shape == "nan":
        logits[..., ::3] = torch.nan
    elif shape == "few":
        logits[..., 4:] = -torch.inf
    elif shape == "empty":
        logits[:] = torch.nan
        logits[..., 5:] = -torch.inf
    elif shape == "infinite":
        logits[..., 3], logits[..., 500], logits[..., 4] = torch.inf, torch.inf, 3.4028234663852886e38
    elif shape == "peaked":
        logits[..., 500] = 60.0
    assert_kept(logits, [0.8, 1.0, 1.0, 2.0, 1.0], **EVERY)  # type: ignore[arg-type]


def test_logits_that_tie_only_after_the_division_are_kept_together() -> None:
    logits = torch.full((1, 1, 600), -5.0)
    near = torch.tensor(1.0)
    for place in range(8):
        logits[0, 0, place] = near
        near = torch.nextafter(near, torch.tensor(0.0))
    assert len((logits / 3.0).unique()) < 9
    for k in (1, 4, 8):
        assert_kept(logits, [3.0], top_k=[k])


def test_a_row_has_the_same_floor_in_any_batch() -> None:
    logits, heat = noise(4, 3, 1100).bfloat16().to(DEVICE), torch.tensor([0.7, 1.0, 1.3, 0.9]).to(DEVICE)
    cuts = options(4, [50, 0], [0.9], [0.01, 0.0])
    whole = find_floors(logits, heat, *cuts, split=1024)
    assert whole is not None
    for b, r in ((0, 2), (1, 0), (2, 1), (3, 1)):
        one = [None if cut is None else cut[b : b + 1] for cut in cuts]
        alone = find_floors(logits[b : b + 1, r : r + 1].contiguous(), heat[b : b + 1], *one, split=1024)
        assert torch.equal(alone, whole.view(4, 3)[b, r : r + 1])  # type: ignore[arg-type]


@pytest.mark.parametrize("mapped", [False, True])
def test_ids_the_target_does_not_have_do_not_count(mapped: bool) -> None:
    logits, heat = noise(2, 1, 1100).bfloat16().to(DEVICE), torch.ones(2, device=DEVICE)
    ids = torch.arange(1100, device=DEVICE) if not mapped else torch.arange(1100, device=DEVICE).flip(0)
    cuts = options(2, [30], [0.8], None)
    found = find_floors(logits, heat, *cuts, split=1024, ids=ids if mapped else None, limit=700)
    masked = logits.masked_fill(ids >= 700, -torch.inf)
    assert torch.equal(found, find_floors(masked, heat, *cuts, split=1024))  # type: ignore[arg-type]


def test_without_options_there_are_no_floors() -> None:
    assert find_floors(noise(1, 1, 8), torch.ones(1), None, None, None, split=1024) is None
