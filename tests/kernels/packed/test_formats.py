"""Formats of packed weights against loops over their entries, searches over all their numbers, and other packages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
from compressed_tensors.compressors.pack_quantized import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from specgraph.kernels.packed.format import join_nibbles, nibbles
from specgraph.kernels.packed.formats import format_of
from specgraph.kernels.packed.fp8 import FP8_BLOCKS
from specgraph.kernels.packed.int4 import INT4
from specgraph.kernels.packed.mxfp4 import MXFP4
from tests.kernels.packed.definition import (
    DEVICE,
    EVERY_FAULT,
    FAULTS,
    NAMES,
    SHAPES,
    VALUES,
    form_of,
    matrix,
    normal,
    random_weight,
    rounded_rows,
)  # fmt: skip

every_format = pytest.mark.parametrize("name", NAMES)
GROUPS = {**dict.fromkeys(NAMES), "int4": 16, "int4_arranged": 128}


# Reading


def test_the_first_number_of_a_word_is_in_its_lowest_bits() -> None:
    codes = torch.tensor([[0, 1, 8, 15, 0, 0, 0, 0], [15] * 8, [0] * 7 + [7]])
    for dtype, words in (
        (torch.int32, [[0x0000F810], [-1], [0x70000000]]),  # the highest bit of an int32 is its sign
        (torch.uint8, [[0x10, 0xF8, 0, 0], [255] * 4, [0, 0, 0, 0x70]]),
    ):
        stored = join_nibbles(codes, dtype)
        assert (stored.tolist(), stored.dtype) == (words, dtype)
        assert torch.equal(nibbles(stored).long(), codes)


@every_format
def test_every_code_is_the_number_that_it_means(name: str) -> None:
    weight = random_weight(name)
    found = form_of(name).numbers(weight[0], torch.float64)
    assert set(found.flatten().tolist()) == {value for value in VALUES[name] if abs(value) <= 448}
    ones = torch.full_like(weight[1], {"mxfp4": 127, "mxfp4_arranged": 0x7F7F7F7F}.get(name, 1))
    assert torch.equal(found, matrix(name, [weight[0], ones]))


@every_format
@pytest.mark.parametrize("experts", [None, 3], ids=["matrix", "stack"])
def test_every_entry_is_a_number_times_its_scale(name: str, experts: int | None) -> None:
    weight, form = random_weight(name, experts), form_of(name)
    expected = matrix(name, weight)
    assert expected.shape[-2:] == SHAPES[name] == form.check(weight)
    assert torch.equal(form.dequantise(weight, torch.float64), expected)
    assert torch.equal(form.dequantise(weight, torch.float32), expected.float())  # exact in float64


@pytest.mark.parametrize("groups", [1, 2, 3, 48])
def test_the_scale_of_int4_says_how_large_a_group_is(groups: int) -> None:
    weight = [random_weight("int4")[0], normal(5, groups)]
    assert torch.equal(INT4.dequantise(weight, torch.float64), matrix("int4", weight))


def test_the_scales_of_mxfp4_are_powers_of_two() -> None:
    found = MXFP4.scales(torch.arange(255, dtype=torch.uint8, device=DEVICE), torch.float64)
    assert found.tolist() == [2.0 ** (code - 127) for code in range(255)]


@pytest.mark.parametrize(("name", "fault"), EVERY_FAULT)
def test_a_wrong_layout_gives_another_weight(name: str, fault: str) -> None:
    """The numbers and scales of these tests tell every layout that one could mistake for this one."""
    weight = random_weight(name)
    wrong = form_of(name).dequantise(FAULTS[name][fault](*weight), torch.float64)
    difference = (wrong - matrix(name, weight)).abs().nan_to_num(torch.inf)
    assert wrong.shape == SHAPES[name] and float(difference.max()) > 0.1


# Rounding


@every_format
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_entry_becomes_the_nearest_number(name: str, dtype: torch.dtype) -> None:
    """Found by a search over all numbers that the format has, times the scale that it chose."""
    form, given = form_of(name), normal(*SHAPES[name], dtype=dtype)
    given[:, 3::7] *= 1e-2
    weight = form.quantise(given, GROUPS[name])
    shapes = form.shapes(*SHAPES[name], GROUPS[name], dtype)
    assert tuple((tuple(part.shape), part.dtype) for part in weight) == shapes
    assert form.check(weight) == SHAPES[name]
    scale = matrix(name, [_ones(name, weight[0]), weight[1]])
    choices = torch.tensor([value for value in VALUES[name] if abs(value) <= 448], dtype=torch.float64, device=DEVICE)
    best = torch.stack([(given.double() - choice * scale).abs() for choice in choices]).amin(0)
    # Dividing in float32 may take the other of two numbers that are equally near but for the rounding.
    exact = torch.promote_types(dtype, torch.float32)
    off = (matrix(name, weight) - given.double()).abs()
    assert bool((off <= best + torch.finfo(exact).eps * given.double().abs()).all())


def _ones(name: str, numbers: Tensor) -> Tensor:
    """Stored numbers that are all one."""
    if name.startswith("fp8"):
        return torch.ones_like(numbers.float()).to(numbers.dtype)
    return torch.full_like(numbers, -0x66666667 if name.startswith("int4") else 0x22)


@every_format
def test_a_stack_is_rounded_matrix_by_matrix(name: str) -> None:
    form, given = form_of(name), normal(3, *SHAPES[name], dtype=torch.bfloat16)
    together, apart = form.quantise(given, GROUPS[name]), [form.quantise(x, GROUPS[name]) for x in given]
    for found, parts in zip(together, zip(*apart, strict=True), strict=True):
        assert torch.equal(_bytes(found), torch.stack([_bytes(part) for part in parts]))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


@every_format
def test_zeros_stay_zeros_and_scales_finite(name: str) -> None:
    given = normal(*SHAPES[name], dtype=torch.float32)
    given[:, :128] = 0
    weight = form_of(name).quantise(given, GROUPS[name])
    assert not matrix(name, weight)[:, :32].any() and bool(form_of(name).scales(weight[1], torch.float32).all())


@pytest.mark.parametrize("name", ["mxfp4", "fp8_blocks"])
def test_a_weight_that_the_format_holds_is_rounded_to_itself(name: str) -> None:
    form = form_of(name)
    weight = form.quantise(normal(*SHAPES[name], dtype=torch.float32))
    again = form.quantise(form.dequantise(weight, torch.float64))
    assert all(torch.equal(_bytes(found), _bytes(part)) for found, part in zip(again, weight, strict=True))


def test_ties_of_mxfp4_go_to_the_even_mantissa_and_large_values_saturate() -> None:
    values = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.5, 7.99, 0.26, 0.24, 1.0]
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0, 0.5, 0.0, 1.0]
    row = torch.tensor([values + [-x for x in values] + [0.0] * 8], dtype=torch.float32, device=DEVICE)
    numbers, scale = MXFP4.quantise(row * 2.0**-5)
    assert scale.tolist() == [[127 - 5]]  # the exponent of 7.99 is 2, as that of 6 is
    assert MXFP4.numbers(numbers, torch.float32)[0].tolist() == expected + [-x for x in expected] + [0.0] * 8


@pytest.mark.parametrize("factor", [1.0, 2.0**-120, 2.0**-140, 2.0**120], ids=str)
def test_the_exponent_of_mxfp4_is_that_of_the_largest_magnitude_less_two(factor: float) -> None:
    given = normal(4, 64) * factor
    _, scale = MXFP4.quantise(given)
    top = given.unflatten(1, (-1, 32)).abs().amax(-1)
    assert torch.equal(scale.double(), (torch.log2(top).floor() - 2 + 127).clamp(0, 254))


@pytest.mark.parametrize("shape", [(200, 144), (128, 256), (1, 1), (129, 127)])
def test_numbers_of_fp8_are_those_of_pytorch(shape: tuple[int, int]) -> None:
    given = normal(*shape, dtype=torch.float32)
    numbers, scale = FP8_BLOCKS.quantise(given)
    for o in range(0, shape[0], 128):
        for i in range(0, shape[1], 128):
            block = given[o : o + 128, i : i + 128]
            own = scale[o // 128, i // 128]
            assert torch.equal(own, block.abs().max() / 448)
            expected = (block / own).to(torch.float8_e4m3fn)
            assert torch.equal(_bytes(numbers[o : o + 128, i : i + 128].contiguous()), _bytes(expected))


@every_format
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inputs", [144, 256, 48])
def test_rows_are_rounded_each_by_itself(name: str, dtype: torch.dtype, inputs: int) -> None:
    x = normal(2, 3, inputs, dtype=dtype) * torch.tensor([1e-3, 0, 30.0], device=DEVICE, dtype=dtype)[:, None]
    found, expected = form_of(name).quantise_rows(x), rounded_rows(name, x)
    assert torch.equal(found.to(expected.dtype), expected)
    assert format_of(name).quantises_rows == name.startswith("fp8") == (not torch.equal(found, x))


# Other packages


@pytest.mark.parametrize("group_size", [8, 32])
def test_int4_is_rounded_and_packed_as_by_compressed_tensors(group_size: int) -> None:
    weight = normal(6, 32, dtype=torch.float32).cpu()
    weight[2] = 0  # whose groups have no scale of their own
    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group_size)
    groups = weight.unflatten(-1, (-1, group_size))
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    values = quantize(weight, scale, zero, args, dtype=torch.int8)
    packed, found = INT4.quantise(weight, group_size)
    assert torch.equal(found, scale) and torch.equal(packed, pack_to_int32(values, 4))


def test_mxfp4_is_rounded_and_packed_as_by_compressed_tensors() -> None:
    """For the scales of the specification. Its own observer chooses larger ones for some groups."""
    args = QuantizationArgs(num_bits=4, type="float", symmetric=True, strategy="group", group_size=32)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight = normal(40, 96, dtype=torch.float32).cpu()
    weight[0, :14] = (
        torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]).repeat(2)
        * torch.tensor([1.0, -1.0])[torch.arange(14) // 7]
    )
    weight[0, 14:32] = 4.0
    packed, scale = MXFP4.quantise(weight)
    given = {"weight": weight, "weight_scale": MXFP4.scales(scale, torch.float32)}
    theirs = MXFP4PackedCompressor.compress(given, scheme)
    assert torch.equal(theirs["weight_scale"], scale) and torch.equal(theirs["weight_packed"], packed)
    back = MXFP4PackedCompressor.decompress({"weight_packed": packed, "weight_scale": scale}, scheme)["weight"]
    assert torch.equal(back, MXFP4.dequantise([packed, scale], back.dtype))


def test_stacks_of_mxfp4_are_those_that_transformers_reads() -> None:
    numbers, scale = random_weight("mxfp4", experts=3)
    blocks = numbers.view(MXFP4.stacked_shape(tuple(numbers.shape)))
    assert blocks.shape == (3, 5, 3, 16)
    for dtype in (torch.bfloat16, torch.float32):
        theirs = convert_moe_packed_tensors(blocks, scale, dtype=dtype)
        assert torch.equal(theirs.transpose(1, 2), MXFP4.dequantise([numbers, scale], dtype))


def test_fp8_is_what_transformers_reads() -> None:
    weight: Any = FP8_BLOCKS.quantise(normal(256, 384, dtype=torch.bfloat16))
    theirs = Fp8Dequantize(None)._dequantize_one(*weight)
    assert torch.equal(theirs, FP8_BLOCKS.dequantise(weight, torch.float32))


# What is refused


INT, BYTE, FP8 = torch.int32, torch.uint8, torch.float8_e4m3fn


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("name", "numbers", "scale", "message"),
    [
        ("int4", _empty(5, 2), _empty(5, 4), "numbers of a weight in int4 are torch.float32; they must be torch.int32"),
        ("int4", _empty(5, 2, dtype=INT), _empty(4, 4), r"scale is \[4, 4\]; it must have 5 rows"),
        ("int4", _empty(5, 2, dtype=INT), _empty(5, 3), "scale has 3 groups for 16 inputs; the number of groups must"),
        ("int4", _empty(5, 2, dtype=INT), _empty(5, 0), "scale has 0 groups for 16 inputs"),
        ("int4_arranged", _empty(5, 32, dtype=INT), _empty(5, 4), "256 inputs in groups of 64 cannot be arranged"),
        ("int4", _empty(5, 2, dtype=INT), _empty(5, 4, dtype=INT), "scale is torch.int32; .* one of torch.bfloat16"),
        ("int4", _empty(5, 2, dtype=INT), _empty(5), r"numbers are \[5, 2\] and scales \[5\]: they must agree in"),
        ("int4", _empty(2, 5, 2, dtype=INT), _empty(3, 5, 4), r"\[2, 5, 2\] and scales \[3, 5, 4\]: they must agree"),
        ("int4", _empty(2, dtype=INT), _empty(2), r"numbers are \[2\]"),
        ("mxfp4", _empty(5, 32, dtype=INT), _empty(5, 2, dtype=BYTE), "in mxfp4 are torch.int32; .* be torch.uint8"),
        ("mxfp4", _empty(5, 32, dtype=BYTE), _empty(5, 2), "scale is torch.float32; it must be one of torch.uint8"),
        ("mxfp4", _empty(5, 32, dtype=BYTE), _empty(5, 4, dtype=BYTE), r"\[5, 4\]; for \[5, 64\] it must be \[5, 2\]"),
        ("mxfp4", _empty(5, 24, dtype=BYTE), _empty(5, 1, dtype=BYTE), r"scale is \[5, 1\]; for \[5, 48\]"),
        ("fp8_blocks", _empty(200, 144), _empty(2, 2), "in fp8_blocks are torch.float32; they must be torch.float8_e4"),
        ("fp8_blocks", _empty(200, 144, dtype=FP8), _empty(2, 1), r"scale is \[2, 1\]; .* it must be \[2, 2\]"),
        ("fp8_blocks", _empty(200, 144, dtype=FP8), _empty(200, 2), r"scale is \[200, 2\]"),
        ("fp8_blocks", _empty(200, 144, dtype=FP8), _empty(2, 2, dtype=BYTE), "scale is torch.uint8; it must be"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_belong_together_are_refused(
    name: str, numbers: Tensor, scale: Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        form_of(name).check([numbers, scale])


@every_format
def test_another_number_of_tensors_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} weights have 2 tensors, weight.*, not 1"):
        form_of(name).check(random_weight(name)[:1])


@pytest.mark.parametrize(
    ("name", "inputs", "group_size", "reason"),
    [
        ("int4", 48, 16, None),
        ("int4", 256, None, None),
        ("int4_arranged", 256, None, None),
        ("int4_arranged", 256, 64, "the group size, 64, is no multiple of 128"),
        ("int4_arranged", 192, 128, "its 192 inputs are no multiple of 128"),
        ("fp8_blocks_arranged", 192, None, "its 192 inputs are no multiple of 128"),
        ("int4", 48, None, "its 48 inputs are no multiple of the group size, 128"),
        ("int4", 36, 16, "its 36 inputs are no multiple of the group size, 16"),
        ("int4", 48, 12, "the group size, 12, is no positive multiple of 8"),
        ("int4", 256, 0, "the group size, 0, is no positive multiple of 8"),
        ("int4", 48, -8, "the group size, -8, is no positive"),
        ("mxfp4", 96, None, None),
        ("mxfp4", 96, 32, None),
        ("mxfp4", 48, None, "its 48 inputs are no multiple of 32"),
        ("mxfp4", 96, 16, "groups of mxfp4 have 32 inputs, not 16"),
        ("fp8_blocks", 13, None, None),
        ("fp8_blocks", 128, 128, "fp8 has blocks of 128 x 128, and no groups of 128"),
    ],
)
def test_whether_a_weight_can_be_stored(name: str, inputs: int, group_size: int | None, reason: str | None) -> None:
    found = form_of(name).why_not(10, inputs, group_size)
    assert (found is None) if reason is None else reason in str(found)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="format is 'int3'; allowed is int4, mxfp4, fp8_blocks"):
        format_of("int3")
