"""Products by a function in C++ on a CPU: every format, ragged sizes, and bits that no other row changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import specgraph.ir.packed  # noqa: F401  (says how C++ is compiled)
from specgraph.kernels.linear.linear import NORM_PARTS
from specgraph.kernels.packed.experts import PACKED_EXPERT_LINEAR
from specgraph.kernels.packed.formats import FORMATS
from specgraph.kernels.packed.linear import PACKED_LINEAR, PACKED_LINEAR_NORM, PackedLinear
from tests.kernels.packed.definition import VALUES
from tests.kernels.rounding import assert_within

pytestmark = pytest.mark.usefixtures("torch_compile")
NAMES = sorted(name for name, form in FORMATS.items() if form.cpu_product is not None)
names = pytest.mark.parametrize("name", NAMES)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """A random weight; one whose format has a scale of activations gets one that fits normal numbers."""
    form, own = FORMATS[name], FORMATS[name.replace("_static", "_token").removesuffix("_rows")]
    weight, group = normal(*shape, dtype=dtype), 32 if name.startswith("int4") else None
    scale = torch.tensor([448 * 6 / 3.0 if name == "nvfp4_rows" else 3 / 448 if "fp8" in name else 3 / 127.5])
    return [*own.quantise(weight, group), *[scale] * (len(form.parts) - len(own.parts))]


def lost(name: str, x: Tensor, weight: list[Tensor]) -> Tensor:
    """How much float32 may lose of sums of products."""
    return exact_product(name, x, weight, torch.abs) * (x.shape[-1] + 4) * 2.0**-24


def exact_product(name: str, x: Tensor, weight: list[Tensor], of: Callable[[Tensor], Tensor] = torch.clone) -> Tensor:
    """The product in float64, of the magnitudes of all factors if wanted."""
    form = FORMATS[name]
    return of(form.quantise_rows(x, weight).double()) @ of(form.dequantise(weight, torch.float64)).mT


@names
@dtypes
@pytest.mark.parametrize(("outputs", "inputs"), [(70, 288), (5, 32), (200, 416)])
def test_products_are_those_of_float64(name: str, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    """So many inputs are no whole vectors of words, and no whole blocks of fp8. One row, few and many are computed in
    different ways."""
    weight, x = packed(name, outputs, inputs, dtype=dtype), normal(3, 7, inputs, dtype=dtype, seed=1)
    found = PACKED_LINEAR.form("cpu")(x, weight, format=name)
    assert (found.dtype, found.shape) == (dtype, (3, 7, outputs))
    assert_within(found, exact_product(name, x, weight), lost(name, x, weight))
    for rows in (slice(0, 1), slice(1, 3), slice(2, 7)):
        assert torch.equal(PACKED_LINEAR.form("cpu")(x[1, rows], weight, format=name), found[1, rows])


@pytest.mark.parametrize("name", ["int4", "mxfp4", "fp8_channel", "int8_channel"])
def test_every_number_and_every_exponent_is_read(name: str) -> None:
    """The product with an identity is the weight; all codes of a format, and all exponents of a scale."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(16).reshape(64, 64)
    scale = normal(64, 1)
    if name.startswith("fp8"):
        codes = torch.where(codes & 127 == 127, 0, codes)  # no numbers
    if name == "mxfp4":  # of 128 inputs, with exponents up to that of the largest number times 6
        scale = (torch.arange(256) % 252).to(torch.uint8).reshape(64, 4)
    weight = [codes.view(FORMATS[name].stored), scale]
    dense = FORMATS[name].dequantise(weight, torch.float32)
    identity = torch.eye(dense.shape[1])
    assert torch.equal(PACKED_LINEAR.form("cpu")(identity, weight, format=name), dense.T)
    assert name not in VALUES or len({*FORMATS[name].numbers(weight[0], torch.float32).flatten().tolist()}) == len(
        {*VALUES[name]}
    )


@names
def test_what_surrounds_a_product(name: str) -> None:
    """Bias, residual, the norm before and after, and a gate."""
    weight, x, bias = packed(name, 64, 128), normal(5, 128, seed=1), normal(64, seed=2)
    residual, norm_weight, sum_sq = normal(5, 64, seed=3), normal(64, seed=4), normal(5, 1, seed=5).exp() * 64
    sums = None if FORMATS[name].quantises_rows else sum_sq
    form, options = PACKED_LINEAR.form("cpu"), {"format": name}
    found = form(x, weight, bias, residual, sums, **options, norm_eps=1e-5)
    scale = 1.0 if sums is None else torch.rsqrt(sums.double() / 128 + 1e-5)
    parts = exact_product(name, x, weight) * scale, bias.double(), residual.double()
    error = lost(name, x, weight) * scale + 2.0**-22 * (parts[0].abs() + parts[1].abs() + parts[2].abs())
    assert_within(found, parts[0] + parts[1] + parts[2], error)

    joined = PACKED_LINEAR_NORM.form("cpu")(x, weight, norm_weight, bias, residual, sums, **options, norm_eps=1e-5)
    for part, expected in zip(joined, (found, *NORM_PARTS.form("reference")(found, norm_weight)), strict=True):
        assert torch.equal(part, expected)

    gated = form(x, weight, **options, activation="silu_mul")
    gate, up = form(x, weight, **options).double().chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    assert_within(gated, expected, 2.0**-21 * expected.abs())


def test_threads_share_outputs_without_other_bits() -> None:
    weight, x, before = packed("mxfp4", 201, 288), normal(5, 288, seed=1), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(PACKED_LINEAR.form("cpu")(x, weight, format="mxfp4"))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[1], found[0]) and torch.equal(found[2], found[0])


@pytest.mark.parametrize("name", [name for name in NAMES if not FORMATS[name].own_inputs])
def test_every_row_meets_its_own_expert(name: str) -> None:
    weight, ids = packed(name, 4, 72, 96), torch.tensor([2, 0, 2, 3, 0, 2])
    x, bias = normal(3, 96, seed=1), normal(4, 72, seed=2)
    found = PACKED_EXPERT_LINEAR.form("cpu")(x, weight, bias, ids, format=name, top_k=2)
    for row, expert in enumerate(ids.tolist()):
        own = [part[expert] for part in weight]
        assert torch.equal(found[row], PACKED_LINEAR.form("cpu")(x[row // 2][None], own, bias[expert], format=name)[0])


@pytest.mark.parametrize(
    ("name", "x"),
    [("int4_act_order", normal(2, 96)), ("mxfp4", normal(2, 96).double()), ("mxfp4", normal(0, 96)),
     ("fp8_blocks", normal(2, 30)), ("int4_arranged", normal(2, 256))],
)  # fmt: skip
def test_other_products_are_left_to_the_reference(name: str, x: Tensor) -> None:
    weight = list(FORMATS[name].quantise(normal(64, x.shape[1]), 32 if name == "int4_act_order" else None))
    assert PACKED_LINEAR.choose("cpu", PackedLinear(x, weight, format=name)).name == "reference"


def test_it_is_what_runs_on_a_cpu() -> None:
    given = PackedLinear(normal(2, 96), packed("mxfp4", 64, 96), format="mxfp4")
    assert PACKED_LINEAR.choose("cpu", given).name == "cpu"


def test_without_compiling_the_reference_runs() -> None:
    given = PackedLinear(normal(2, 96), packed("mxfp4", 64, 96), format="mxfp4")
    with torch._dynamo.config.patch(disable=True):
        assert PACKED_LINEAR.choose("cpu", given).name == "reference"
