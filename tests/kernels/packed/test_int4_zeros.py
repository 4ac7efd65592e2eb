"""Integers with zero points against loops over their bits, and against compressed-tensors."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor, pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor

from specgraph.kernels.packed.experts import PACKED_EXPERT_LINEAR
from specgraph.kernels.packed.formats import format_of
from specgraph.kernels.packed.int4 import WHOLE_ROW
from specgraph.kernels.packed.int4_zeros import INT4_ACT_ORDER, INT4_ZEROS
from specgraph.kernels.packed.linear import PACKED_LINEAR, packed_linear
from tests.kernels.packed.definition import DEVICE, normal
from tests.kernels.rounding import assert_within

ops = torch.ops.specgraph
OUTPUTS, INPUTS, GROUPS = 13, 48, 3
"""The last word of zero points has three that are of no output."""
both = pytest.mark.parametrize("name", ["int4_zeros", "int4_act_order"])
every_form = pytest.mark.parametrize("form", ["reference", "triton"])


def words(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32).to(DEVICE)


def random_weight(name: str, groups: int = GROUPS, outputs: int = OUTPUTS, seed: int = 0) -> list[Tensor]:
    """Random words and scales, and groups of inputs that are no neighbours."""
    scale = normal(outputs, groups, dtype=torch.bfloat16, seed=seed)
    weight = [words(outputs, INPUTS // 8, seed=seed), scale, words(-(-outputs // 8), groups, seed=seed + 100)]
    if name == "int4_act_order":
        order = torch.randperm(INPUTS, generator=torch.Generator().manual_seed(seed))
        weight.append((order % groups).to(torch.int32).to(DEVICE))
    return weight


def matrix(weight: Sequence[Tensor]) -> Tensor:
    """The weight ``[O, I]`` in float64, by a loop over its entries."""
    numbers, scale, zeros, *groups = (part.cpu().tolist() for part in weight)
    outputs, inputs = len(numbers), 8 * len(numbers[0])
    of = groups[0] if groups else [i * len(scale[0]) // inputs for i in range(inputs)]
    entries = [
        [((numbers[o][i // 8] >> 4 * (i % 8) & 15) - (zeros[o // 8][of[i]] >> 4 * (o % 8) & 15)) * scale[o][of[i]]
         for i in range(inputs)] for o in range(outputs)
    ]  # fmt: skip
    return torch.tensor(entries, dtype=torch.float64, device=DEVICE)


@both
@pytest.mark.parametrize("groups", [1, 2, 3, 48])
def test_every_entry_is_the_distance_from_its_zero_point_times_its_scale(name: str, groups: int) -> None:
    weight, form = random_weight(name, groups), format_of(name)
    assert form.check(weight) == (OUTPUTS, INPUTS)
    for dtype in (torch.float64, torch.float32):
        assert torch.equal(form.dequantise(weight, dtype), matrix(weight).to(dtype))  # exact in float64


def test_a_stack_is_the_stack_of_its_matrices() -> None:
    weights = [random_weight("int4_zeros", seed=seed) for seed in range(3)]
    stack = [torch.stack(parts) for parts in zip(*weights, strict=True)]
    assert INT4_ZEROS.check(stack) == (OUTPUTS, INPUTS)
    assert torch.equal(INT4_ZEROS.dequantise(stack, torch.float64), torch.stack([matrix(weight) for weight in weights]))


def arguments(group_size: int) -> QuantizationArgs:
    if group_size == WHOLE_ROW:
        return QuantizationArgs(num_bits=4, type="int", symmetric=False, strategy="channel")
    return QuantizationArgs(num_bits=4, type="int", symmetric=False, strategy="group", group_size=group_size)


@pytest.mark.parametrize("group_size", [8, 16, WHOLE_ROW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("outputs", [13, 16])
def test_compressed_tensors_reads_the_same(group_size: int, dtype: torch.dtype, outputs: int) -> None:
    """Bit for bit, in the dtype of the scales."""
    weight = random_weight("int4_zeros", 1 if group_size == WHOLE_ROW else INPUTS // group_size, outputs)
    weight[1] = weight[1].to(dtype)
    given = dict(zip(INT4_ZEROS.parts, (part.cpu() for part in weight), strict=True))
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments(group_size))
    stated = {**given, "weight_shape": torch.tensor([outputs, INPUTS])}
    theirs = PackedQuantizationCompressor.decompress(stated, scheme)["weight"]
    assert torch.equal(INT4_ZEROS.dequantise([*given.values()], dtype), theirs)


@pytest.mark.parametrize("group_size", [8, 16, WHOLE_ROW])
def test_weights_are_rounded_and_packed_as_by_compressed_tensors(group_size: int) -> None:
    weight = normal(OUTPUTS, INPUTS, dtype=torch.float32).cpu()
    weight[3] = weight[3].abs()
    weight[4] = -weight[4].abs()
    args = arguments(group_size)
    groups = weight.unflatten(-1, (-1, INPUTS if group_size == WHOLE_ROW else group_size))
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    values = quantize(weight, scale, zero, args, dtype=torch.int8)
    packed, found, zeros = INT4_ZEROS.quantise(weight, group_size)
    assert torch.equal(found, scale) and torch.equal(packed, pack_to_int32(values, 4))
    assert torch.equal(matrix([packed, found, zeros]), matrix([packed, scale, _packed(zero)]))
    shapes = INT4_ZEROS.shapes(OUTPUTS, INPUTS, group_size, torch.float32)
    assert tuple((tuple(part.shape), part.dtype) for part in (packed, found, zeros)) == shapes
    assert INT4_ZEROS.check((packed, found, zeros)) == (OUTPUTS, INPUTS)


def test_zeros_stay_zeros_and_scales_finite() -> None:
    weight = normal(OUTPUTS, INPUTS, dtype=torch.float32)
    weight[2:4, :16] = 0
    rounded = INT4_ZEROS.quantise(weight, 16)
    assert not matrix(rounded)[2:4, :16].any() and bool((rounded[1] > 0).all())
    half = rounded[1].double().repeat_interleave(16, -1) * 0.5001
    assert bool(((matrix(rounded) - weight.double()).abs() <= 2 * half).all())  # the zero point is rounded, too


def _packed(zero: Tensor) -> Tensor:
    return pack_to_int32(zero.to(torch.int8), 4, packed_dim=0)


def test_groups_that_are_neighbours_are_a_case_of_groups_of_any_inputs() -> None:
    weight = normal(OUTPUTS, INPUTS, dtype=torch.bfloat16)
    plain, ordered = INT4_ZEROS.quantise(weight, 16), INT4_ACT_ORDER.quantise(weight, 16)
    assert torch.equal(INT4_ACT_ORDER.dequantise(ordered, torch.float64), matrix(plain))
    shapes = INT4_ACT_ORDER.shapes(OUTPUTS, INPUTS, 16, torch.bfloat16)
    assert tuple((tuple(part.shape), part.dtype) for part in ordered) == shapes


# Products


@both
@every_form
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_product_takes_every_entry(name: str, form: str, dtype: torch.dtype) -> None:
    if form == "triton" and dtype == torch.float64:
        dtype = torch.float16
    weight, x, bias = random_weight(name), normal(4, INPUTS, dtype=dtype, seed=2), normal(OUTPUTS, dtype=dtype, seed=3)
    exact = matrix(weight)
    expected = x.double() @ exact.T + bias.double()
    magnitude = x.double().abs() @ exact.abs().T + bias.double().abs()
    found = PACKED_LINEAR.form(form)(x, weight, bias, format=name)
    assert (found.dtype, found.shape) == (dtype, expected.shape)
    step = 2.0**-52 if dtype == torch.float64 else 2.0**-24
    assert_within(found, expected, (INPUTS + 2) * step * magnitude)


@every_form
def test_each_row_meets_its_own_expert(form: str) -> None:
    weights = [random_weight("int4_zeros", seed=seed) for seed in range(3)]
    stack = [torch.stack(parts) for parts in zip(*weights, strict=True)]
    ids = torch.tensor([2, 0, 2, 1, 2], device=DEVICE)
    x, exact = normal(len(ids), INPUTS, dtype=torch.float32, seed=2), [matrix(weight) for weight in weights]
    found = PACKED_EXPERT_LINEAR.form(form)(x, stack, None, ids, format="int4_zeros")
    for row, given, expert in zip(found, x.double(), ids.tolist(), strict=True):
        assert_within(row, exact[expert] @ given, (INPUTS + 2) * 2.0**-24 * (exact[expert].abs() @ given.abs()))


@both
def test_the_ops_are_registered_as_they_behave(name: str) -> None:
    given = normal(2, 4, INPUTS, dtype=torch.float32), random_weight(name), normal(OUTPUTS, dtype=torch.float32)
    torch.library.opcheck(ops.packed_linear, given, {"format": name}, test_utils=("test_faketensor", "test_schema"))


FAULTS = {
    "zero point forgotten": lambda weight: [weight[0], weight[1], torch.full_like(weight[2], -0x77777778), *weight[3:]],
    "zero point less one": lambda weight: [*weight[:2], weight[2] ^ 0x11111111, *weight[3:]],
    "the neighbouring group's zero point": lambda weight: [*weight[:2], weight[2].roll(1, -1), *weight[3:]],
    "the neighbouring group's scale": lambda weight: [weight[0], weight[1].roll(1, -1), *weight[2:]],
    "zero points reversed": lambda weight: [*weight[:2], weight[2].view(torch.uint8).flip(-1).view(torch.int32),
                                            *weight[3:]],
}  # fmt: skip


@both
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_layout_gives_another_weight_and_another_product(name: str, fault: str) -> None:
    weight, x = random_weight(name), normal(4, INPUTS, seed=2)
    wrong = FAULTS[fault](weight)
    assert float((format_of(name).dequantise(wrong, torch.float64) - matrix(weight)).abs().max()) > 0.1
    assert float((packed_linear(x, wrong, format=name) - x @ matrix(weight).T).abs().max()) > 0.1


# What is refused


INT = torch.int32


@pytest.mark.parametrize(
    ("name", "place", "other", "message"),
    [
        ("int4_zeros", 2, torch.zeros(2, 3), r"zero_point is torch.float32 \[2, 3\]; .* be torch.int32 \[2, 3\]"),
        ("int4_zeros", 2, torch.zeros(1, 3, dtype=INT), r"zero_point is torch.int32 \[1, 3\]; for scales \[13, 3\]"),
        ("int4_zeros", 2, torch.zeros(2, 4, dtype=INT), r"\[2, 4\]; .* it must be torch.int32 \[2, 3\]"),
        ("int4_zeros", 1, torch.ones(13, 5), "scale has 5 groups for 48 inputs"),
        ("int4_act_order", 3, torch.zeros(47, dtype=INT), r"g_idx is torch.int32 \[47\]; they must be a matrix"),
        ("int4_act_order", 3, torch.zeros(48), r"g_idx is torch.float32 \[48\]; .* torch.int32 \[48\]"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_belong_together_are_refused(name: str, place: int, other: Tensor, message: str) -> None:
    weight = random_weight(name)
    weight[place] = other
    with pytest.raises(ValueError, match=message):
        format_of(name).check(weight)


def test_another_number_of_tensors_and_stacks_of_other_orders_are_refused() -> None:
    with pytest.raises(ValueError, match=r"int4_zeros weights have 3 tensors, weight_packed, .*, not 2"):
        INT4_ZEROS.check(random_weight("int4_zeros")[:2])
    stack = [torch.stack([part, part]) for part in random_weight("int4_act_order")]
    with pytest.raises(ValueError, match=r"numbers are \[2, 13, 6\], and g_idx .*; they must be a matrix"):
        INT4_ACT_ORDER.check(stack)


@pytest.mark.parametrize(
    ("inputs", "group_size", "reason"),
    [
        (48, WHOLE_ROW, None),
        (48, 16, None),
        (36, WHOLE_ROW, "the group size, 36, is no"),
        (48, -8, "the group size, -8, is no"),
    ],
)
def test_a_group_may_be_a_whole_row(inputs: int, group_size: int, reason: str | None) -> None:
    found = INT4_ZEROS.why_not(8, inputs, group_size)
    assert (found is None) if reason is None else reason in str(found)
