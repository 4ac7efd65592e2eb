"""Products with packed weights against float64, and bit for bit across numbers of rows and tilings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from specgraph.kernels.linear import experts
from specgraph.kernels.linear.linear import NORM_PARTS, NormParts, norm_parts_reference
from specgraph.kernels.linear.product import PACKED_SLICE, Tiles, packed_slices, packed_tiles
from specgraph.kernels.packed.experts import PACKED_EXPERT_LINEAR
from specgraph.kernels.packed.formats import FORMATS
from specgraph.kernels.packed.linear import PACKED_LINEAR, PACKED_LINEAR_NORM
from specgraph.kernels.packed.operands import packed_operands, quantised_rows
from tests.kernels.packed.definition import NAMES
from tests.kernels.rounding import assert_within

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEEPEST = 1.13
"""The largest slope of an activation."""
reference = PACKED_LINEAR.form("reference")
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
WEIGHTS = [
    ("int4", 70, 256, 128), ("int4", 70, 192, 64), ("int4", 70, 160, 32), ("int4", 70, 96, 48), ("int4", 70, 512, 256),
    ("int4", 5, 32, 32), ("int4_arranged", 70, 384, 128), ("int4_arranged", 70, 512, 256),
    ("mxfp4", 70, 160, 32), ("mxfp4", 5, 32, 32), ("mxfp4_arranged", 70, 160, 32), ("mxfp4_arranged", 5, 32, 32),
    ("fp8_blocks", 200, 320, 128), ("fp8_blocks", 70, 40, 128), ("fp8_blocks", 70, 30, 128),
    ("fp8_blocks_arranged", 200, 384, 128),
]  # fmt: skip
"""Formats, outputs, inputs and the inputs that have one scale. Kernels make the numbers of all but three in registers:
groups of 48 inputs, and rows that are no whole words."""
weights = pytest.mark.parametrize(("name", "outputs", "inputs", "group"), WEIGHTS)


@pytest.fixture
def ordered_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter leaves products of float16 to a BLAS, whose bits follow the shape; a GPU's do not."""
    if DEVICE == "cuda":
        return
    in_steps = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> TensorHandle:
        if a.dtype.scalar != triton.language.float16:
            return in_steps(self, a, b, d, *options)
        total = d.data
        for k in range(0, a.data.shape[1], 16):
            part = a.data[:, k : k + 16].astype(np.float64) @ b.data[k : k + 16].astype(np.float64)
            total = (total + part).astype(np.float32)
        return TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def packed(name: str, *shape: int, group: int | None = None, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return list(FORMATS[name].quantise(normal(*shape, dtype=dtype), group))


def lost(name: str, x: Tensor, weight: list[Tensor]) -> Tensor:
    """How much float32 may lose of sums of products, before what follows them."""
    rows, dense = FORMATS[name].quantise_rows(x).double(), FORMATS[name].dequantise(weight, torch.float64)
    return (rows.abs() @ dense.abs().mT) * (x.shape[-1] + 4) * 2.0**-24


@weights
@dtypes
def test_products_are_those_of_float64(name: str, outputs: int, inputs: int, group: int, dtype: torch.dtype) -> None:
    weight, x = packed(name, outputs, inputs, group=group, dtype=dtype), normal(3, inputs, dtype=dtype, seed=1)
    made_in_registers = packed_operands(FORMATS[name], x, weight) is not None
    assert made_in_registers == ((name, inputs) not in {("int4", 96), ("fp8_blocks", 30)})
    found = PACKED_LINEAR.form("triton")(x, weight, format=name)
    assert (found.dtype, found.shape) == (dtype, (3, outputs))
    assert_within(found, reference(x.double(), weight, format=name), lost(name, x, weight))


@pytest.mark.parametrize("name", NAMES)
@dtypes
def test_every_number_is_at_its_place(name: str, dtype: torch.dtype) -> None:
    """The product with an identity is the weight; a weight with all numbers that there are."""
    words = torch.randint(-(2**31), 2**31, (64, 16), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    codes = torch.arange(256, dtype=torch.uint8).repeat(16).reshape(64, 64)
    if name.startswith("int4"):
        groups = torch.arange(128, dtype=torch.int32) * 7 % 4
        scale = normal(64, 1 if name == "int4_arranged" else 4)
        weight = [words, scale, words[8:16, :4].contiguous(), groups][: len(FORMATS[name].parts)]
    elif name.startswith("mxfp4"):
        many = 129 if name.endswith("arranged") else 252
        exponents = torch.arange(256) % many if dtype == torch.float32 else torch.arange(256) % 12 + 115
        weight = [words, exponents.to(torch.uint8).reshape(64, 4)]
        weight[1] = weight[1].view(torch.int32) if name.endswith("arranged") else weight[1]
    else:
        codes = codes.reshape(32, 128) if name.endswith("arranged") else codes
        finite = torch.where(codes & 127 == 127, 0, codes)
        weight = [finite.view(torch.float8_e4m3fn), torch.tensor([[1.0]])]
    weight = [part.to(DEVICE) for part in weight]
    expected = FORMATS[name].dequantise(weight, torch.float32).T
    found = PACKED_LINEAR.form("triton")(torch.eye(expected.shape[0], dtype=dtype, device=DEVICE), weight, format=name)
    if name.startswith("fp8"):  # the one of a row is 448 times its scale, which is rounded
        torch.testing.assert_close(found.float(), expected, rtol=torch.finfo(dtype).eps, atol=0)
    else:
        assert torch.equal(found, expected.to(dtype))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_surrounds_a_product(name: str, dtype: torch.dtype) -> None:
    """Bias and residual, a gated activation, and the parts of the norms before and after."""
    inputs, group = (256, 128) if name.endswith("arranged") and not name.startswith("mxfp4") else (160, 32)
    weight, bias = packed(name, 144, inputs, group=group), normal(144, dtype=dtype)
    x, own_norm = normal(5, inputs, dtype=dtype, seed=1), normal(inputs, dtype=dtype)
    residual, norm_weight = normal(5, 144, dtype=dtype, seed=2), normal(144, dtype=dtype, seed=3)
    sum_sq = None if FORMATS[name].quantises_rows else norm_parts_reference(NormParts(x, own_norm))[1]
    given, options = (x, weight, bias, residual, sum_sq), {"format": name, "norm_eps": 1e-5}
    out = PACKED_LINEAR.form("triton")(*given, **options)
    wide = x.double(), weight, bias.double(), residual.double(), None if sum_sq is None else sum_sq.double()
    scale = 1.0 if sum_sq is None else float(torch.rsqrt(sum_sq.double().sum(-1) / inputs).max())
    error = lost(name, x, weight) * scale + 2.0**-22 * (reference(*wide, **options).abs() + residual.double().abs())
    assert_within(out, reference(*wide, **options), error)

    joined = PACKED_LINEAR_NORM.form("triton")(*given[:2], norm_weight, *given[2:], **options)
    for part, expected in zip(joined, (out, *NORM_PARTS.form("triton")(out, norm_weight)), strict=True):
        assert torch.equal(part, expected)

    gated = PACKED_LINEAR.form("triton")(x, weight, format=name, activation="silu_mul")
    gate, up = reference(x.double(), weight, format=name).chunk(2, -1)
    lost_gate, lost_up = lost(name, x, weight).chunk(2, -1)
    gate = gate / (1 + (-gate).exp())
    error = STEEPEST * lost_gate * (up.abs() + lost_up) + gate.abs() * lost_up + 2.0**-21 * (gate * up).abs()
    assert_within(gated, gate * up, error)


CUTS = [
    Tiles(64, 16, 128, 3, False, 4, 2),
    Tiles(64, 64, 256, 3, True, 4, 2),
    Tiles(128, 32, 128, 3, True, 8, 2),
    Tiles(128, 16, 256, 3, False, 4, 2),
]
"""Ways to cut a product that must give the same bits."""


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("int4", 64),
        ("int4", 128),
        ("int4_arranged", 128),
        ("mxfp4", 32),
        ("mxfp4_arranged", 32),
        ("fp8_blocks", 128),
        ("fp8_blocks_arranged", 128),
    ],
)
@pytest.mark.usefixtures("ordered_dot")
def test_the_bits_of_a_row_depend_neither_on_the_others_nor_on_the_tiling(name: str, group: int) -> None:
    weight, x = packed(name, 72, 640, group=group), normal(70, 640, dtype=torch.bfloat16, seed=1)
    form = PACKED_LINEAR.form
    whole = form("triton")(x, weight, format=name)
    for rows in (slice(0, 1), slice(3, 20)):
        assert torch.equal(form("triton")(x[rows], weight, format=name), whole[rows])
    first, *others = (form("triton", tiling=cut)(x[:19], weight, format=name) for cut in CUTS)
    for other in others:
        assert torch.equal(other, first)


@pytest.mark.parametrize("arranged", [False, True])
def test_the_summed_dimension_is_cut_without_regard_to_the_rows(arranged: bool) -> None:
    for outputs, inputs in [(6144, 4096), (28672, 4096), (4096, 14336), (5760, 2880), (48, 72)]:
        for itemsize in (2, 4):
            chosen = [
                packed_tiles(rows, outputs, inputs, itemsize, arranged=arranged)
                for rows in (1, 16, 17, 64, 65, 257, 4096)
            ]
            assert {tiling.slices for tiling in chosen} == {packed_slices(outputs, inputs, arranged=arranged)}
            assert all(PACKED_SLICE % tiling.block_k == 0 for tiling in chosen), "slices begin at the same inputs"
            assert all(tiling.block_o >= 64 and tiling.warps % 4 == 0 for tiling in chosen), "wgmma everywhere"


@dtypes
def test_rows_are_quantised_as_the_format_says(dtype: torch.dtype) -> None:
    x = normal(20, 300, dtype=dtype) * torch.logspace(-4, 3, 300, device=DEVICE).to(dtype)
    x[3], x[4, :200], x[5] = 0, 1e-7, torch.arange(300, device=DEVICE) / 64
    numbers, scales = quantised_rows(x)
    assert (numbers.dtype, scales.dtype, list(scales.shape)) == (torch.float16, torch.float32, [20, 3])
    found = numbers.float() * scales.repeat_interleave(128, 1)[:, :300]
    assert torch.equal(found, FORMATS["fp8_blocks"].quantise_rows(x).float())


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("int4", 128),
        ("int4", 32),
        ("int4", 16),
        ("int4_arranged", 128),
        ("mxfp4", 32),
        ("mxfp4_arranged", 32),
        ("fp8_blocks", 128),
        ("fp8_blocks_arranged", 128),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("ordered_dot")
def test_every_row_meets_its_own_expert(name: str, group: int, dtype: torch.dtype) -> None:
    weight = packed(name, 4, 72, 384 if group == 128 else 96, group=group)
    inputs, ids = 384 if group == 128 else 96, torch.tensor([2, 0, 2, 3, 0, 2, 3], device=DEVICE)
    x, bias = normal(7, inputs, dtype=dtype, seed=1), normal(4, 72, dtype=dtype, seed=2)
    form = PACKED_EXPERT_LINEAR.form("triton")
    found = form(x, weight, bias, ids, format=name)
    for row, expert in enumerate(ids.tolist()):
        own = [part[expert] for part in weight]
        expected = reference(x[row].double(), own, bias[expert].double(), format=name)
        error = lost(name, x[row], own) + 2.0**-23 * bias[expert].double().abs()
        assert_within(found[row], expected, error)
    assert torch.equal(form(x[2:5], weight, bias, ids[2:5], format=name), found[2:5])
    wide = PACKED_EXPERT_LINEAR.form("triton", tiling=experts.Tiles(64, 64, 128, 4, 2))
    if group != 16:
        assert torch.equal(wide(x, weight, bias, ids, format=name), found)
