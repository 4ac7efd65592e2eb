"""The linear layer with its neighbours: against float64, and bit for bit across numbers of rows and tilings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from specgraph.kernels.launch import arrival_counters, supports_pdl
from specgraph.kernels.linear.linear import ACTIVATIONS, LINEAR, LINEAR_NORM, NORM_PARTS
from specgraph.kernels.linear.product import Tiles, num_slices, tiles
from tests.kernels.rounding import assert_within, unit

# Rows past the end, which nothing stores, and infinities: numpy warns, a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEEPEST = 1.13
"""The largest slope of an activation: 1.10 for silu, 1.13 for both forms of gelu."""
linear_reference, linear_norm_reference, norm_parts_reference = (
    op.form("reference") for op in (LINEAR, LINEAR_NORM, NORM_PARTS)
)
norm_parts = NORM_PARTS.form("triton")
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


def linear(*given: Any, tiling: Tiles | None = None, **options: Any) -> Tensor:
    out: Tensor = LINEAR.form("triton", tiling=tiling)(*given, **options)
    return out


def linear_norm(*given: Any, tiling: Tiles | None = None, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    out: tuple[Tensor, Tensor, Tensor] = LINEAR_NORM.form("triton", tiling=tiling)(*given, **options)
    return out


def poisoned(rows: int, features: int, dtype: torch.dtype, generator: torch.Generator, scale: float = 1.0) -> Tensor:
    """``[rows, features]``, a view that starts 16 bytes into rows of a larger tensor, NaN around it."""
    margin = 16
    around = torch.full((rows + 2, features + 2 * margin), torch.nan, dtype=dtype)
    view = around[1:-1, margin:-margin]
    view.copy_(torch.randn(rows, features, generator=generator) * scale)
    return around.to(DEVICE)[1:-1, margin:-margin]


def arguments(
    rows: int, outer: int, inner: int, dtype: torch.dtype, *, norm: bool = True, extras: bool = True, **options: Any
) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    weight_rows = 2 * outer if options.get("activation", "none").endswith("_mul") else outer
    x = poisoned(rows, inner, dtype, generator)
    weight = poisoned(weight_rows, inner, dtype, generator, inner**-0.5)
    bias = poisoned(1, weight_rows, dtype, generator)[0] if extras else None
    residual = poisoned(rows, outer, dtype, generator) if extras else None
    norm_weight = poisoned(1, inner, dtype, generator)[0] if norm else None
    return (x, weight, bias, residual, norm_weight), {"norm_eps": 1e-5, **options}


def exact(given: tuple[Tensor | None, ...], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Written again, in float64, from the docstring; and how much of it may be lost before the last rounding.

    A norm rounds its rows before the product, and the product adds up in float32.
    """
    dtype = given[0].dtype
    x, weight, bias, residual, norm_weight = (None if t is None else t.detach().cpu().double() for t in given)
    assert x is not None and weight is not None
    if norm_weight is not None:
        mean = (x * x).sum(-1, keepdim=True) / x.shape[-1]
        x = x / (mean + options["norm_eps"]).sqrt() * (norm_weight + options.get("norm_offset", 0.0))
    out = torch.einsum("ni,oi->no", x, weight)
    lost = torch.einsum("ni,oi->no", x.abs(), weight.abs())
    lost = lost * ((x.shape[-1] + 2) * unit(torch.float32) + (unit(dtype) if norm_weight is not None else 0.0))
    out = out if bias is None else out + bias
    activation = options.get("activation", "none")
    gate, up = out.chunk(2, -1) if activation.endswith("_mul") else (out, None)
    lost, lost_up = lost.chunk(2, -1) if up is not None else (lost, None)
    lost = lost if activation == "none" else STEEPEST * lost
    match activation.removesuffix("_mul"):
        case "silu":
            gate = gate / (1 + (-gate).exp())
        case "gelu":
            gate = gate * 0.5 * torch.erfc(-gate / 2**0.5)
        case "gelu_tanh":
            gate = gate * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
        case "relu":
            gate = gate.clamp_min(0)
    out = gate if up is None else gate * up
    lost = lost if up is None else lost * (up.abs() + lost_up) + gate.abs() * lost_up
    return out if residual is None else out + residual, lost


def assert_close(out: Tensor, given: tuple[Tensor | None, ...], options: dict[str, Any]) -> None:
    expected, lost = exact(given, options)
    assert out.shape == expected.shape and out.dtype == given[0].dtype
    if out.dtype != torch.float32:
        assert_within(out.cpu(), expected, lost)
        return
    error = (out.cpu().double() - expected).norm() / expected.norm()
    assert error < 1e-5, f"relative error {error:.2e}"


def normed_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    *,
    reference: bool = False,
    norm_offset: float = 0.0,
    **options: Any,
) -> Tensor:
    """The norm in its two parts, then the product."""
    parts, product = (norm_parts_reference, linear_reference) if reference else (norm_parts, linear)
    sum_sq = None
    if norm_weight is not None:
        x, sum_sq = parts(x, norm_weight, norm_offset=norm_offset)
    return product(x, weight, bias, residual, sum_sq, **options)


CASES = [
    ("plain", {"norm": False, "extras": False}),
    ("bias and residual", {"norm": False}),
    ("norm", {"extras": False}),
    ("gemma's norm", {"norm_offset": 1.0, "norm_eps": 1e-3}),
    *((activation, {"activation": activation}) for activation in ACTIVATIONS if activation != "none"),
]


@pytest.fixture
def ordered_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter leaves ``tl.dot`` to a BLAS, whose bits follow the shape; a GPU's do not. Here: k by k.

    For bfloat16, ``tests/interpreter.py`` adds in the steps of a GPU already.
    """
    if DEVICE == "cuda":
        return
    in_steps = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> TensorHandle:
        if a.dtype.scalar == triton.language.bfloat16:
            return in_steps(self, a, b, d, *options)
        total = d.data.copy()
        for k in range(a.data.shape[1]):
            total += a.data[:, k, None].astype(total.dtype) * b.data[k].astype(total.dtype)
        return TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@dtypes
@pytest.mark.parametrize("case", [case for _, case in CASES], ids=[name for name, _ in CASES])
def test_it_computes_what_the_reference_says(case: dict[str, Any], dtype: torch.dtype):
    shape = (3, 70, 96) if dtype == torch.float32 else (17, 40, 200)
    given, options = arguments(*shape, dtype, **case)
    assert_close(normed_linear(*given, **options), given, options)
    assert_close(normed_linear(*given, **options, reference=True), given, options)


def cuts(block_k: int, pieces: int) -> list[Tiles]:
    """Every way to cut a product that must give the same bits."""
    return [
        Tiles(block_o, block_n, block_k, pieces, serial, warps, 2)
        for block_o, block_n, warps, serial in [
            (64, 16, 4, False),
            (64, 32, 4, True),
            (64, 64, 4, False),
            (128, 128, 8, True),
            (128, 16, 8, False),
        ]
    ]


@dtypes
@pytest.mark.parametrize(("activation", "pieces"), [("none", 1), ("silu_mul", 3)])
@pytest.mark.usefixtures("ordered_dot")
def test_the_bits_do_not_follow_the_tiling(activation: str, pieces: int, dtype: torch.dtype):
    given, options = arguments(19, 72, 300, dtype, activation=activation)
    first, *others = (normed_linear(*given, **options, tiling=tiling) for tiling in cuts(32, pieces))
    assert_close(first, given, options)
    for out in others:
        assert torch.equal(out, first)


@dtypes
@pytest.mark.usefixtures("ordered_dot")
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype):
    """With the tilings that are chosen; the weight is one that is cut in pieces."""
    inner = 2048
    assert num_slices(64, inner) > 1
    (x, weight, bias, residual, norm_weight), options = arguments(70, 64, inner, dtype)
    whole = normed_linear(x, weight, bias, residual, norm_weight, **options)
    for first, last in [(0, 1), (69, 70), (3, 20)]:
        part = normed_linear(x[first:last], weight, bias, residual[first:last], norm_weight, **options)
        assert torch.equal(part, whole[first:last]), (first, last)


def test_the_summed_dimension_is_cut_without_regard_to_the_rows():
    for outer, inner in [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (48, 72)]:
        for itemsize in (2, 4):
            chosen = [tiles(rows, outer, inner, itemsize) for rows in (1, 16, 17, 64, 65, 256, 257, 4096)]
            assert {tiling.slices for tiling in chosen} == {num_slices(outer, inner)}
            assert len({tiling.block_k for tiling in chosen}) == 1 or itemsize == 2
            assert all(tiling.block_o >= 64 and tiling.warps % 4 == 0 for tiling in chosen), (
                "wgmma at every number of rows"
            )


def test_a_row_of_nan_or_infinity_stays_alone():
    (x, weight, _, _, norm_weight), options = arguments(6, 40, 96, torch.float32, extras=False)
    clean = normed_linear(x, weight, None, None, norm_weight, **options)
    x[2, 5], x[4, 7] = torch.nan, torch.inf
    out = normed_linear(x, weight, None, None, norm_weight, **options)
    assert out[[2, 4]].isnan().all()
    assert torch.equal(out[[0, 1, 3, 5]], clean[[0, 1, 3, 5]])


@pytest.mark.parametrize("scale", [1e-16, 1e-6, 1e6, 1e18])
def test_the_mean_square_has_the_range_of_float32(scale: float):
    (x, weight, _, _, norm_weight), options = arguments(3, 40, 96, torch.float32, extras=False, norm_eps=0.0)
    x *= scale
    x[1, :-1] = 0  # one large value beside none
    given = (x, weight, None, None, norm_weight)
    assert_close(normed_linear(*given, **options), given, options)


def test_rows_of_zeros_are_normed_to_zeros():
    (_, weight, _, _, norm_weight), options = arguments(3, 40, 96, torch.float32, extras=False)
    out = normed_linear(torch.zeros(3, 96, device=DEVICE), weight, None, None, norm_weight, **options)
    assert torch.equal(out, torch.zeros_like(out))


def test_leading_dimensions_other_strides_and_no_rows():
    (x, weight, _, residual, _), _ = arguments(12, 40, 96, torch.float32)
    expected = linear(x, weight, None, residual)
    shaped = linear(x.unflatten(0, (3, 4)), weight, None, residual.unflatten(0, (3, 4)))
    assert torch.equal(shaped, expected.unflatten(0, (3, 4)))
    transposed = x.T.contiguous().T
    assert torch.equal(linear(transposed, weight.T.contiguous().T, None, residual), expected)
    assert linear(x[:0], weight).shape == (0, 40)


def test_the_counters_are_left_at_zero():
    given, _ = arguments(5, 40, 384, torch.float32)
    linear(*given[:4], tiling=cuts(32, 3)[0])
    assert not arrival_counters(given[0].device).any()


def test_programmatic_launch_is_for_gpus_that_have_it():
    assert not supports_pdl(torch.device("cpu"))


@dtypes
@pytest.mark.parametrize(
    "case", [{}, {"activation": "silu_mul"}, {"norm_offset": 1.0}], ids=["plain", "gated", "gemma"]
)
@pytest.mark.usefixtures("ordered_dot")
def test_a_linear_gives_the_parts_of_the_norm_that_follows(case: dict[str, Any], dtype: torch.dtype):
    """The bits of the product and of the parts taken apart, for every tiling; entries are no whole number of groups."""
    (x, weight, bias, residual, _), options = arguments(19, 200, 300, dtype, norm=False, **case)
    norm_weight = poisoned(1, 200, dtype, torch.Generator().manual_seed(1))[0]
    offset = options.pop("norm_offset", 0.0)
    for tiling in cuts(32, 3):
        out, weighted, sum_sq = linear_norm(
            x, weight, norm_weight, bias, residual, **options, norm_offset=offset, tiling=tiling
        )
        assert torch.equal(out, linear(x, weight, bias, residual, **options, tiling=tiling))
        apart = norm_parts(out, norm_weight, norm_offset=offset)
        assert torch.equal(weighted, apart[0]) and torch.equal(sum_sq, apart[1])
    expected = norm_parts_reference(out, norm_weight, norm_offset=offset)
    assert torch.equal(weighted, expected[0])
    torch.testing.assert_close(sum_sq, expected[1], rtol=1e-6, atol=0)
    assert sum_sq.shape == (19, 4)


@dtypes
def test_parts_of_a_row_have_the_same_bits_in_any_company(dtype: torch.dtype):
    x = poisoned(40, 200, dtype, torch.Generator().manual_seed(0))
    norm_weight = torch.rand(200, device=DEVICE).to(dtype)
    whole = norm_parts(x, norm_weight)
    for first, last in [(0, 1), (39, 40), (3, 20)]:
        for part, of in zip(norm_parts(x[first:last], norm_weight), whole, strict=True):
            assert torch.equal(part, of[first:last])
    assert [t.shape for t in norm_parts(x[:0], norm_weight)] == [(0, 200), (0, 4)]


@pytest.mark.parametrize("value", [1.0, 255 / 256, 1e-3, 1e15])
def test_squares_of_equal_entries_add_up(value: float):
    """The largest sums that the integers they are added as must hold."""
    x = torch.full((3, 4096), value, device=DEVICE)
    given, options = arguments(3, 40, 4096, torch.float32, extras=False, norm_eps=0.0)
    _, sum_sq = norm_parts(x, given[4])
    assert sum_sq.shape == (3, 64)
    torch.testing.assert_close(sum_sq, torch.full_like(sum_sq, 64 * value**2), rtol=1e-6, atol=0)
    out = normed_linear(x, given[1], None, None, given[4], **options)
    assert_close(out, (x, *given[1:]), options)


def float64_arguments(activation: str) -> tuple[tuple[Tensor, ...], dict[str, Any], Tensor]:
    """The arguments of the op, and what it should give."""
    given, options = arguments(3, 40, 24, torch.float64, activation=activation)
    expected, _ = exact(given, options)
    weighted, sum_sq = norm_parts_reference(given[0], given[4])
    return (weighted, given[1], given[2], given[3], sum_sq), options, expected


@pytest.mark.parametrize("activation", ["none", "gelu_mul"])
def test_the_ops_are_registered_as_they_behave(activation: str):
    given, options, expected = float64_arguments(activation)
    ops = torch.ops.specgraph
    checks = ("test_schema", "test_faketensor")
    norm_weight = torch.rand(40, dtype=torch.float64, device=DEVICE)
    torch.library.opcheck(ops.linear, given, options, test_utils=checks)
    torch.library.opcheck(ops.norm_parts, (expected.to(DEVICE), norm_weight), {"norm_offset": 1.0}, test_utils=checks)
    joined = (*given[:2], norm_weight, *given[2:])
    torch.library.opcheck(ops.linear_norm, joined, options, test_utils=checks)
    torch.testing.assert_close(ops.linear(*given, **options).cpu(), expected, rtol=1e-12, atol=1e-12)
    for ours, reference in zip(
        ops.linear_norm(*joined, **options), linear_norm_reference(*joined, **options), strict=True
    ):
        assert torch.equal(ours, reference)


@pytest.mark.parametrize(
    ("index", "shape", "message"),
    [
        (0, (3, 25), r"x must be \[\.\.\., I\] = \[\.\.\., 24\], not \[3, 25\]"),
        (1, (80,), r"weight must be \[O, I\], not \[80\]"),
        (1, (81, 24), "silu_mul takes gate rows and as many up rows, not 81 together"),
        (2, (40,), r"bias must be \[O\] = \[80\], not \[40\]"),
        (3, (3, 80), r"residual must be \(3, 40\), not \(3, 80\)"),
        (4, (3, 2), r"sum_sq must be \(3, 1\), not \(3, 2\)"),
    ],
)
def test_fake_tensors_refuse_wrong_shapes(index: int, shape: tuple[int, ...], message: str):
    wrong, options, _ = float64_arguments("silu_mul")
    wrong = [*wrong]
    wrong[index] = torch.zeros(shape, dtype=torch.float64)
    if index == 1:
        wrong[2] = None
    with FakeTensorMode() as mode, pytest.raises(ValueError, match=message):
        torch.ops.specgraph.linear(*(None if t is None else mode.from_tensor(t) for t in wrong), **options)


def test_fake_tensors_refuse_a_norm_of_another_width():
    with FakeTensorMode() as mode, pytest.raises(ValueError, match=r"norm_weight must be \[I\] = \[24\], not \[25\]"):
        torch.ops.specgraph.norm_parts(mode.from_tensor(torch.zeros(3, 24)), mode.from_tensor(torch.zeros(25)))


def test_fake_tensors_refuse_other_activations_and_mixed_dtypes():
    x, weight = torch.zeros(3, 24), torch.zeros(40, 24)
    with FakeTensorMode() as mode:
        given = mode.from_tensor(x), mode.from_tensor(weight)
        with pytest.raises(ValueError, match=r"activation must be one of none, silu, .* not swish"):
            torch.ops.specgraph.linear(*given, activation="swish")
        with pytest.raises(ValueError, match=r"weight is torch.float32, x is torch.float16: they must agree"):
            torch.ops.specgraph.linear(given[0].half(), given[1])
    with pytest.raises(ValueError, match=r"weight is torch.float16, x is torch.bfloat16: they must agree"):
        linear(x.bfloat16(), weight.half())
