"""Sums over devices: in the order of the devices, in float32 or wider, each row by itself."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from specgraph.kernels.linear import all_reduce as kernels
from specgraph.kernels.linear.all_reduce import ALL_REDUCE, ALL_REDUCE_RANK, ALL_REDUCE_RANK_NORM
from specgraph.kernels.linear.linear import NormParts, norm_parts_reference
from specgraph.kernels.peers import MOST_PROGRAMS, SLOT, PeerGroup, exchanging, not_waiting
from tests.kernels.linear.test_norm import DEVICE, normal

all_reduce = torch.ops.specgraph.all_reduce


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_parts_are_added_in_order_and_rounded_once(dtype: torch.dtype, count: int) -> None:
    parts = [normal(2, 3, 16, dtype=dtype, seed=seed) for seed in range(count)]
    before = [part.clone() for part in parts]
    wide = [part.to(torch.promote_types(dtype, torch.float32)) for part in parts]
    expected = wide[0]
    for part in wide[1:]:
        expected = expected + part
    result = all_reduce(parts)
    assert torch.equal(result, expected.to(dtype)) and result.dtype == dtype
    assert all(map(torch.equal, parts, before)), "parts stay as they are"
    assert torch.equal(all_reduce([part[:1] for part in parts]), result[:1])


def test_the_order_of_devices_counts() -> None:
    large, small = torch.tensor([1e8]), torch.tensor([1.0])
    assert all_reduce([large, -large, small]).item() == 1
    assert all_reduce([small, large, -large]).item() == 0


def test_the_op_is_registered_as_it_behaves_and_promises_rows_of_their_own() -> None:
    parts = [normal(2, 4), normal(2, 4, seed=1)]
    torch.library.opcheck(all_reduce, (parts,), test_utils=("test_schema", "test_faketensor"))
    assert ALL_REDUCE.batch_invariant("cpu")


@pytest.mark.parametrize(
    ("other", "message"),
    [(torch.empty(2, 3), "must be alike"), (torch.empty(2, 4).double(), "must be alike"),
     (torch.empty(2, 4).long(), "must be alike")],
)  # fmt: skip
def test_parts_that_differ_are_refused(other: torch.Tensor, message: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError, match=message):
        all_reduce([torch.empty(2, 4), other])


def test_integers_are_refused() -> None:
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(ValueError, match=r"floating-point, not torch.int64"),
    ):
        all_reduce([torch.empty(2, 4).long()] * 2)


class Here(PeerGroup):
    """The memory of ranks that run one after the other in this process: GPUs that are not there."""

    def __init__(self, count: int) -> None:
        self.devices = [torch.device(DEVICE)] * count
        sizes = {"slots": 2 * count * MOST_PROGRAMS * SLOT, "arrivals": count * MOST_PROGRAMS}
        for name, size in {**sizes, "counts": MOST_PROGRAMS, "faults": 1}.items():
            dtype = torch.uint8 if name == "slots" else torch.int32
            setattr(self, name, [torch.zeros(size, dtype=dtype, device=DEVICE) for _ in range(count)])

    def come(self, rank: int, part: Tensor, number: int, block: int = kernels.BLOCK) -> None:
        """Let another rank have written its part for the first one, from its exchange ``number`` on."""
        shape = 2, len(self.devices), kernels.MOST_PROGRAMS, SLOT // part.element_size()
        slots = self.slots[0].view(part.dtype)[: math.prod(shape)].view(shape)
        for index, values in enumerate(part.flatten().split(block)):
            turn, program = divmod(index, kernels.MOST_PROGRAMS)
            slots[(number + turn) % 2, rank, program, : values.numel()] = values
            self.arrivals[0].view(-1, kernels.MOST_PROGRAMS)[rank, program] = number + turn


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])  # the interpreter makes no bfloat16
@pytest.mark.parametrize("count", [2, 3])
def test_a_rank_adds_what_the_others_have_written(count: int, dtype: torch.dtype) -> None:
    """In rows of one program and of two, and of two numbers, in every turn of the slots; then residual and norm."""
    torch.manual_seed(count)
    group = Here(count)
    for number, (rows, width) in enumerate(((1, 64), (3, 704), (2, 100), (3, 704), (3, 2)), 1):
        parts = [torch.randn(rows, width, device=DEVICE).to(dtype) for _ in range(count)]
        residual, gain = torch.randn_like(parts[0]), torch.randn_like(parts[0][0])
        group.counts[0].fill_(number - 1)
        for rank in range(1, count):
            group.come(rank, parts[rank], number)
        with exchanging(group):
            form = ALL_REDUCE_RANK_NORM.form("triton")
            out, weighted, sum_sq = form(parts[0], gain, residual, rank=0, norm_offset=1.0, world_size=count)
        exact = torch.promote_types(dtype, torch.float32)
        total = parts[0].to(exact)
        for part in parts[1:]:
            total = total + part.to(exact)
        assert torch.equal(out, (total + residual.to(exact)).to(dtype)) and not int(group.faults[0])
        expected = norm_parts_reference(NormParts(out, gain, norm_offset=1.0))
        assert torch.equal(weighted, expected[0])
        torch.testing.assert_close(sum_sq.double(), expected[1].double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_tiles_are_larger_where_they_are_more_than_programs(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "MOST_PROGRAMS", 1)
    group, block = Here(2), SLOT // dtype.itemsize
    assert block > kernels.BLOCK
    parts = [torch.randn(2 * block - 704, device=DEVICE).view(-1, 64).to(dtype) for _ in range(2)]
    group.come(1, parts[1], 1, block)
    with exchanging(group):
        form = ALL_REDUCE_RANK_NORM.form("triton")
        out, weighted, sum_sq = form(parts[0], torch.ones_like(parts[0][0]), rank=0, world_size=2)
    assert torch.equal(out, (parts[0].float() + parts[1].float()).to(dtype)) and torch.equal(weighted, out)
    torch.testing.assert_close(sum_sq[:, 0], out.float().square().sum(1), rtol=1e-5, atol=0)
    assert int(group.counts[0][0]) == 2 and not int(group.faults[0])


def test_who_has_waited_in_vain_gives_nan_to_the_others_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MOST_TRIES", 1)
    group, x, form = Here(2), torch.ones(5, device=DEVICE), ALL_REDUCE_RANK.form("triton")
    with exchanging(group):
        form(x, rank=1, world_size=2)
        assert torch.equal(form(x, rank=0, world_size=2), 2 * x)
        form(x, rank=1, world_size=2)
        assert bool(form(x, rank=0, world_size=2).isnan().all())


def test_nothing_is_exchanged_while_a_step_is_warmed_up() -> None:
    group, x = Here(2), torch.randn(3, 64, device=DEVICE)
    with exchanging(group), not_waiting():
        assert torch.equal(ALL_REDUCE_RANK.form("triton")(x, rank=1, world_size=2), x)
    assert not any(bool(tensor.any()) for tensor in (*group.counts, *group.arrivals, *group.faults))


def test_arguments_of_one_rank_are_checked() -> None:
    with FakeTensorMode():
        x = torch.empty(2, 64)
        for given, message in (
            ({"x": x, "rank": 2}, "rank is 2; it must be below 2"),
            ({"x": x.int(), "rank": 0}, "x must be floating-point, not torch.int32"),
            ({"x": x, "residual": x.double(), "rank": 0}, "residual must be as x"),
        ):
            with pytest.raises(ValueError, match=message):
                torch.ops.specgraph.all_reduce_rank(**given, world_size=2)
