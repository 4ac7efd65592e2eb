"""Norms of several groups of heads in one launch: they are those that single norms give, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from specgraph.kernels.linear.head_norms import RMS_NORMS
from specgraph.kernels.linear.norm import RMS_NORM
from tests.kernels.linear.test_norm import BOUND, DEVICE, EPS, normal

FORMS = ["reference", "triton"]
QUERIES, KEYS = 6, 2


def projected(width: int, dtype: torch.dtype, batch: int = 2, rows: int = 3) -> list[Tensor]:
    """Queries and keys as views of a merged projection, which has values behind them."""
    merged = normal(batch, rows, (QUERIES + 2 * KEYS) * width, dtype=dtype)
    parts = merged.split([QUERIES * width, KEYS * width, KEYS * width], dim=-1)[:2]
    return [part.unflatten(2, (-1, width)) for part in parts]


def weights_of(inputs: list[Tensor]) -> list[Tensor]:
    return [normal(x.shape[3], dtype=x.dtype, seed=s + 1) for s, x in enumerate(inputs)]


def one_by_one(form: str, inputs: list[Tensor], weights: list[Tensor], offset: float = 0.0) -> list[Tensor]:
    single = RMS_NORM.form(form)
    return [single(x, weight, eps=EPS, offset=offset) for x, weight in zip(inputs, weights, strict=True)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("width", [5, 16, 128, 1040])
def test_they_have_the_bits_of_single_norms(form: str, dtype: torch.dtype, width: int) -> None:
    inputs = projected(width, dtype)
    own = normal(2, 3, 1, width, dtype=dtype, seed=9)
    for group in (inputs, [inputs[1]], [*inputs, own, inputs[0].transpose(0, 1).contiguous().transpose(0, 1)]):
        weights = weights_of(group)
        found = RMS_NORMS.form(form)(group, weights, eps=EPS, offset=1.0)
        assert all(map(torch.equal, found, one_by_one(form, group, weights, 1.0)))
        assert all(out.is_contiguous() for out in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_is_bit_for_bit_the_same_beside_any_others(dtype: torch.dtype) -> None:
    inputs = projected(128, dtype, batch=4, rows=3)
    weights = weights_of(inputs)
    norms = RMS_NORMS.form("triton")
    together = norms(inputs, weights, eps=EPS)
    for rows in ((slice(1, 2), slice(2, 3)), (slice(0, 2), slice(0, 1)), (slice(3, 4), slice(0, 3))):
        alone = norms([x[rows] for x in inputs], weights, eps=EPS)
        assert all(torch.equal(out, whole[rows]) for out, whole in zip(alone, together, strict=True))


def test_what_does_not_belong_to_a_head_is_not_read() -> None:
    buffer = torch.full((2, 3, 4, 48), torch.nan, device=DEVICE)
    buffer[:, :, 1:3, :21] = normal(2, 3, 2, 21)
    inputs = [buffer[:, :, 1:3, :21], normal(2, 3, 1, 21)]
    assert not any(out.isnan().any() for out in RMS_NORMS.form("triton")(inputs, weights_of(inputs), eps=EPS))


@pytest.mark.parametrize("gated", [False, True])
def test_the_heads_of_a_merged_projection_are_not_copied(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = projected(32 if gated else 16, torch.bfloat16)
    if gated:  # behind the queries of a head stands its gate
        inputs = [x[..., :16] for x in inputs]
    weights = weights_of(inputs)
    expected = one_by_one("triton", inputs, weights)

    def copied(x: Tensor, **options: object) -> Tensor:
        raise AssertionError(f"a copy of {tuple(x.shape)}")

    monkeypatch.setattr(Tensor, "clone", copied)
    assert all(map(torch.equal, RMS_NORMS.form("triton")(inputs, weights, eps=EPS), expected))


def test_the_op_is_registered_as_it_behaves() -> None:
    inputs = projected(8, torch.float32)
    weights = weights_of(inputs)
    op, checks = torch.ops.specgraph.rms_norms, ("test_schema", "test_faketensor")
    torch.library.opcheck(op, (inputs, weights), {"eps": EPS}, test_utils=checks)
    assert [out.shape for out in op([x[:0] for x in inputs], weights, eps=EPS)] == [(0, 3, 6, 8), (0, 3, 2, 8)]


@pytest.mark.parametrize(
    ("shapes", "weights", "message"),
    [
        ([(2, 3, 4, 8), (2, 3, 1, 8)], [(8,)], "2 inputs have 1 weights"),
        ([(2, 3, 8)], [(8,)], r"inputs must be \[B, T, \*, D\], not \[2, 3, 8\]"),
        ([(2, 3, 4, 8), (2, 2, 4, 8)], [(8,), (8,)], r"inputs must be .*\[2, 3, \*, 8\], not \[2, 2, 4, 8\]"),
        ([(2, 3, 4, 8), (2, 3, 4, 4)], [(8,), (4,)], r"inputs must be .*\[2, 3, \*, 8\], not \[2, 3, 4, 4\]"),
        ([(2, 3, 4, 8)], [(4,)], r"weights must be \[D\] = \[8\], not \[4\]"),
    ],
)
def test_fake_tensors_refuse_wrong_shapes(shapes: list[tuple[int, ...]], weights: list[tuple[int, ...]], message: str):
    with FakeTensorMode(), pytest.raises(ValueError, match=message):
        torch.ops.specgraph.rms_norms([torch.empty(s) for s in shapes], [torch.empty(w) for w in weights], eps=EPS)
