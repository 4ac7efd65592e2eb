"""RMS norms of rows that devices share: together, their parts are the norms of whole rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from specgraph.kernels.linear.norm import RMS_NORM
from specgraph.kernels.linear.shared_norm import MEAN_SQUARES, RMS_NORM_PART
from tests.kernels.linear.test_norm import BOUND, DEVICE, EPS, assert_close, normal

FORMS = ["reference", "triton"]


def means_of(form: str, parts: list[list[Tensor]]) -> Tensor:
    """The means of whole rows, of which each device has a list of parts."""
    return sum(MEAN_SQUARES.form(form)(own, count=len(parts)) for own in parts)  # type: ignore[return-value]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize(("queries", "keys", "count"), [(48, 16, 1), (64, 16, 2), (15, 9, 3), (1040, 260, 4)])
def test_parts_of_all_devices_are_the_norm(form: str, dtype: torch.dtype, queries: int, keys: int, count: int) -> None:
    whole = [normal(2, 3, count * width, dtype=dtype, seed=width) for width in (queries, keys)]
    weights = [normal(x.shape[-1], dtype=dtype, seed=7) for x in whole]
    # A device has queries, keys and values side by side.
    shares = [torch.cat([*own, own[1]], -1) for own in zip(*(x.chunk(count, -1) for x in whole), strict=True)]
    parts = [[*own.split([queries, keys, keys], -1)[:2]] for own in shares]
    means = means_of(form, parts)
    assert means.shape == (2, 3, 2) and means.dtype == torch.promote_types(dtype, torch.float32)
    for place, (x, weight) in enumerate(zip(whole, weights, strict=True)):
        assert_close(means[..., place], x.cpu().double().square().mean(-1))
        for given in (weight, None):
            gains = [None] * count if given is None else given.chunk(count)
            found = [
                RMS_NORM_PART.form(form)(own[place], gain, means, place=place, eps=EPS, offset=1.0)
                for own, gain in zip(parts, gains, strict=True)
            ]
            wide = None if given is None else given.double()
            expected = RMS_NORM.form("reference")(x.double(), wide, eps=EPS, offset=1.0)
            assert_close(torch.cat(found, -1), expected.cpu())
            assert all(part.is_contiguous() for part in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [128, 33])
def test_a_row_is_bit_for_bit_the_same_beside_any_others(dtype: torch.dtype, width: int) -> None:
    inputs, weight = [*normal(4, 3, 3 * width, dtype=dtype).split([2 * width, width], -1)], normal(width, dtype=dtype)
    means = MEAN_SQUARES.form("triton")(inputs, count=2)
    part = RMS_NORM_PART.form("triton")(inputs[1], weight, means, place=1, eps=EPS)
    for rows in ((slice(1, 2), slice(2, 3)), (slice(0, 2), slice(0, 1)), (slice(3, 4), slice(0, 3))):
        own = [x[rows] for x in inputs]
        assert torch.equal(MEAN_SQUARES.form("triton")(own, count=2), means[rows])
        alone = RMS_NORM_PART.form("triton")(own[1], weight, means[rows], place=1, eps=EPS)
        assert torch.equal(alone, part[rows])


def test_what_does_not_belong_to_a_row_is_not_read() -> None:
    buffer = torch.full((2, 3, 48), torch.nan, device=DEVICE)
    buffer[:, :, 1:22] = normal(2, 3, 21)
    own = buffer[:, :, 1:22]
    means = MEAN_SQUARES.form("triton")([own, normal(2, 3, 16)], count=2)
    assert not means.isnan().any()
    assert not RMS_NORM_PART.form("triton")(own, None, means, place=0, eps=EPS).isnan().any()


def test_the_ops_are_registered_as_they_behave() -> None:
    ops, checks = torch.ops.specgraph, ("test_schema", "test_faketensor")
    inputs, weight = [*normal(2, 3, 24).bfloat16().split([16, 8], -1)], normal(8).bfloat16()
    torch.library.opcheck(ops.mean_squares, (inputs,), {"count": 2}, test_utils=checks)
    means = ops.mean_squares(inputs, count=2)
    torch.library.opcheck(ops.rms_norm_part, (inputs[1], weight, means), {"place": 1, "eps": EPS}, test_utils=checks)
    assert ops.mean_squares([x[:0] for x in inputs], count=2).shape == (0, 3, 2)


@pytest.mark.parametrize(
    ("means", "place", "message"),
    [
        (torch.empty(2, 3, 2).bfloat16(), 0, r"means must be torch.float32 \[2, 3\] and more than 0 numbers, not"),
        (torch.empty(2, 3, 2), 2, r"means must be torch.float32 \[2, 3\] and more than 2 numbers, .*\[2, 3, 2\]"),
        (torch.empty(3, 2), 0, r"means must be torch.float32 \[2, 3\] .*\[3, 2\]"),
    ],
)
def test_fake_tensors_refuse_other_means(means: Tensor, place: int, message: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError, match=message):
        torch.ops.specgraph.rms_norm_part(torch.empty(2, 3, 8).bfloat16(), None, means, place=place, eps=EPS)


def test_fake_tensors_refuse_inputs_that_are_not_alike() -> None:
    with FakeTensorMode():
        x, op = torch.empty(2, 3, 8), torch.ops.specgraph.mean_squares
        for inputs, count, message in (
            ([x, x.bfloat16()], 2, r"of one floating-point dtype, not \['torch.float32', 'torch.bfloat16'\]"),
            ([x.long()], 2, "of one floating-point dtype"),
            ([x, x[:1]], 2, r"inputs must be .*not \[1, 3, 8\]"),
            ([x], 0, "count must be at least 1, not 0"),
        ):
            with pytest.raises(ValueError, match=message):
                op(inputs, count=count)
