"""The linear layer of four bits against a loop over its entries, and what a wrong layout would give."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from specgraph.kernels.linear.int4 import INT4_LINEAR, dequantise, int4_linear, pack, unpack
from tests.kernels.rounding import assert_within

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, OUTER, INNER, GROUPS = 3, 5, 48, 3

reference = INT4_LINEAR.form("reference")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Numbers of four bits, all sixteen among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 8, shape, generator=generator, dtype=torch.int8).to(DEVICE)


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)


def test_the_first_of_eight_numbers_is_in_the_lowest_bits() -> None:
    assert pack(torch.tensor([[-8, -7, 0, 7, -8, -8, -8, -8]])).tolist() == [[0x0000F810]]
    assert pack(torch.tensor([[-8] * 7 + [-1]])).tolist() == [[0x70000000]]
    assert pack(torch.tensor([[7] * 8])).tolist() == [[-1]]  # the highest bit of an int32 is its sign


def test_unpack_is_the_inverse_of_pack() -> None:
    values = numbers(OUTER, INNER)
    packed = pack(values)
    assert (packed.shape, packed.dtype) == ((OUTER, INNER // 8), torch.int32)
    assert torch.equal(unpack(packed), values.int())
    assert set(values.flatten().tolist()) == set(range(-8, 8))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.zeros(2, 12), r"\[2, 12\]; the last dimension must be a multiple of 8"),
        (torch.full((2, 8), 8), "from 8 to 8; four bits hold -8 to 7"),
        (torch.full((2, 8), -9), "from -9 to -9; four bits hold -8 to 7"),
    ],
)
def test_what_does_not_fit_is_not_packed(values: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(values)


@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
def test_every_entry_is_a_number_times_the_scale_of_its_group(has_bias: bool) -> None:
    values, scale, x = numbers(OUTER, INNER), normal(OUTER, GROUPS, dtype=torch.bfloat16), normal(ROWS, INNER, seed=2)
    bias = normal(OUTER, seed=3) if has_bias else None
    found = int4_linear(x, pack(values), scale, bias)
    for row in range(ROWS):
        for o in range(OUTER):
            terms = [float(x[row, i]) * int(values[o, i]) * float(scale[o, i * GROUPS // INNER]) for i in range(INNER)]
            expected = sum(terms) + (float(bias[o]) if bias is not None else 0.0)
            assert float(found[row, o]) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("form", ["reference", "triton"])
@pytest.mark.parametrize(
    ("dtype", "scale_dtype"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32),
     (torch.float16, torch.float16)], ids=str,
)  # fmt: skip
def test_the_result_is_rounded_once(form: str, dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    """The weight is not rounded to the dtype of the input. Float32 sums of 48 products have an error of their own."""
    packed, scale = pack(numbers(OUTER, INNER)), normal(OUTER, GROUPS, dtype=scale_dtype)
    x, bias = normal(2, ROWS, INNER, dtype=dtype, seed=2), normal(OUTER, dtype=dtype, seed=3)
    expected = reference(x.double(), packed, scale, bias.double())
    magnitude = x.double().abs() @ dequantise(packed, scale, torch.float64).abs().T + bias.double().abs()
    found = INT4_LINEAR.form(form)(x, packed, scale, bias)
    assert (found.dtype, found.shape) == (dtype, (2, ROWS, OUTER))
    assert_within(found, expected, (INNER + 2) * 2.0**-24 * magnitude)


def test_the_bits_of_a_row_do_not_depend_on_other_rows_on_a_gpu() -> None:
    packed, scale = pack(numbers(70, 256)), normal(70, 4, dtype=torch.bfloat16)
    x = normal(40, 256, dtype=torch.bfloat16)
    form = INT4_LINEAR.form("triton")
    together = form(x, packed, scale)
    for rows in (slice(0, 1), slice(3, 8), slice(17, 40)):
        assert torch.equal(form(x[rows], packed, scale), together[rows])


@pytest.mark.parametrize("groups", [1, 2, 3, 48])
def test_the_scale_says_how_large_a_group_is(groups: int) -> None:
    values, scale = numbers(OUTER, INNER), normal(OUTER, groups)
    expected = values.double() * scale.repeat_interleave(INNER // groups, 1)
    assert torch.equal(dequantise(pack(values), scale, torch.float64), expected)


FAULTS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "swapped nibbles": lambda packed, scale: (((packed & 0x0F0F0F0F) << 4) | ((packed >> 4) & 0x0F0F0F0F), scale),
    "the neighbouring group's scale": lambda packed, scale: (packed, scale.roll(1, 1)),
    "offset forgotten": lambda packed, scale: (packed ^ -0x77777778, scale),  # as if two's complement were stored
    "bytes reversed": lambda packed, scale: (packed.view(torch.uint8).unflatten(-1, (-1, 4)).flip(-1).flatten(-2)
                                             .view(torch.int32), scale),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_layout_gives_another_weight(fault: str) -> None:
    """The numbers and scales of these tests tell every layout that one could mistake for this one."""
    values, scale = numbers(OUTER, INNER), normal(OUTER, GROUPS)
    expected = values.double() * scale.repeat_interleave(INNER // GROUPS, 1)
    wrong = dequantise(*FAULTS[fault](pack(values), scale), torch.float64)
    assert wrong.shape == expected.shape and float((wrong - expected).abs().max()) > 0.1


def test_the_op_is_registered_as_it_behaves() -> None:
    packed, scale = pack(numbers(OUTER, INNER)), normal(OUTER, GROUPS, dtype=torch.float32)
    for bias in (None, normal(OUTER, dtype=torch.float32)):
        given = normal(2, ROWS, INNER, dtype=torch.float32), packed, scale, bias
        torch.library.opcheck(torch.ops.specgraph.int4_linear, given, test_utils=("test_schema", "test_faketensor"))


GOOD = {"x": torch.empty(2, 16), "packed": torch.empty(5, 2, dtype=torch.int32), "scale": torch.empty(5, 4)}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"x": torch.empty(2, 24)}, r"x has 24 inputs, and packed, which is \[5, 2\], has 16"),
        ({"x": torch.empty(2, 16, dtype=torch.int64)}, "x is torch.int64; it must be of floating point"),
        ({"packed": torch.empty(5, 2)}, "packed is torch.float32; it must be torch.int32"),
        ({"scale": torch.empty(4, 4)}, r"scale must be \[O, \*\] = \[5, \*\], not \[4, 4\]"),
        ({"scale": torch.empty(5, 3)}, "scale has 3 groups for 16 inputs; the number of groups must divide"),
        ({"scale": torch.empty(5, 0)}, "scale has 0 groups for 16 inputs"),
        ({"scale": torch.empty(5, 4, dtype=torch.int32)}, "scale is torch.int32; it must be one of torch.bfloat16"),
        ({"bias": torch.empty(4)}, r"bias must be \[O\] = \[5\], not \[4\]"),
    ],
)
def test_other_arguments_are_refused(wrong: dict[str, Tensor], message: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError, match=message):
        torch.ops.specgraph.int4_linear(**{**GOOD, **wrong})
