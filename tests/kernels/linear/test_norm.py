"""Norms and means over rows: formulas, strided rows, and rows that do not see each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specgraph.kernels.linear import norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTHS = (1, 2, 5, 16, 33, 128, 1000, 2048)
BOUND = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3}
EPS = 1e-5

every_dtype = pytest.mark.parametrize("dtype", BOUND, ids=str)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 2 + 0.5).to(dtype).to(DEVICE)


def by_hand(x: Tensor, *, centre: bool, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Both norms in float64, by sums."""
    exact = x.cpu().to(torch.float64)
    width = exact.shape[-1]
    if centre:
        exact = exact - (exact.sum(-1) / width).unsqueeze(-1)
    scale = ((exact * exact).sum(-1) / width + EPS).sqrt().unsqueeze(-1)
    out = exact / scale
    out = out if weight is None else out * weight.cpu().double()
    return out if bias is None else out + bias.cpu().double()


def assert_close(found: Tensor, expected: Tensor) -> None:
    error = (found.cpu().double() - expected).norm() / expected.norm().clamp_min(1e-30)
    assert float(error) <= BOUND[found.dtype], f"relative error {float(error):.2e}"


# The definitions and the kernels answer to the same tests.
OPS = {op.name: op for op in (norm.RMS_NORM, norm.LAYER_NORM, norm.ROW_MEAN, norm.RMS_NORM_PAIR)}
FORMS: dict[str, dict[str, Callable[..., Tensor]]] = {
    form: {name: op.form(form) for name, op in OPS.items()} for form in ("reference", "triton")
}
rms_norm, layer_norm, row_mean, rms_norm_pair = FORMS["triton"].values()
every_form = pytest.mark.parametrize("form", FORMS)


@every_form
@every_dtype
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_and_means_equal_sums_in_float64(form: str, dtype: torch.dtype, width: int):
    x, weight, bias = (normal(*shape, dtype=dtype, seed=s) for s, shape in enumerate(((3, width), (width,), (width,))))
    functions = FORMS[form]
    for scale in (None, weight):
        assert_close(functions["rms_norm"](x, scale, eps=EPS), by_hand(x, centre=False, weight=scale))
        for shift in (None, bias):
            out = functions["layer_norm"](x, scale, shift, eps=EPS)
            if width > 2:  # of one or two values little but rounding is left after centring
                assert_close(out, by_hand(x, centre=True, weight=scale, bias=shift))
    mean = functions["row_mean"](x)
    assert mean.shape == (3, 1) and mean.dtype == dtype
    assert_close(mean, x.cpu().double().sum(-1, keepdim=True) / width)


@every_form
def test_the_offset_is_added_to_the_weight(form: str):
    x, weight = normal(3, 33), normal(33, seed=1)
    out = FORMS[form]["rms_norm"](x, weight, eps=EPS, offset=1.0)
    assert_close(out, by_hand(x, centre=False, weight=weight.double() + 1))
    unweighted = FORMS[form]["rms_norm"](x, None, eps=EPS, offset=1.0)
    assert_close(unweighted, by_hand(x, centre=False))


@every_form
@torch.no_grad()
def test_it_is_what_llama_and_gemma_compute(form: str):
    x, weight = normal(2, 3, 64), normal(64, seed=1)
    for layer, offset in ((LlamaRMSNorm(64, EPS), 0.0), (GemmaRMSNorm(64, EPS), 1.0)):
        layer.to(DEVICE).weight.copy_(weight)
        torch.testing.assert_close(FORMS[form]["rms_norm"](x, weight, eps=EPS, offset=offset), layer(x))


@every_form
@pytest.mark.parametrize("width", [5, 16])
def test_rows_are_read_where_they_lie(form: str, width: int):
    """Heads of a merged projection, transposed heads, every other row, columns, a view off its alignment."""
    merged = normal(2, 3, 8 * width + 3)
    views = {
        "queries": merged[..., : 6 * width].unflatten(-1, (6, width)),
        "keys": merged[..., 6 * width : 8 * width].unflatten(-1, (2, width)),
        "last row": merged[:, -1:, :width],
        "every other": merged[:, ::2, :width],
        "transposed": merged[..., : 6 * width].unflatten(-1, (6, width)).transpose(1, 2),
        "columns": normal(2, width, 3).transpose(1, 2),
        "shifted": merged.flatten()[1 : 1 + 4 * width].view(4, width),
        "expanded": merged[:, :1, :width].expand(-1, 5, -1),
        "one row": merged[0, 0, :width],
    }
    weight = normal(width, seed=1)
    for name, view in views.items():
        out = FORMS[form]["rms_norm"](view, weight, eps=EPS)
        assert out.is_contiguous() and out.shape == view.shape, name
        assert_close(out, by_hand(view, centre=False, weight=weight))
        assert_close(FORMS[form]["row_mean"](view), view.cpu().double().mean(-1, keepdim=True))


def test_the_heads_of_a_merged_projection_are_not_copied():
    merged = normal(2, 3, 8 * 16)
    heads = merged[..., 16:].unflatten(-1, (7, 16))
    rows = norm.Rows.of(heads)
    assert rows.x is heads and rows.arguments() == (7, 8, 1) and rows.alignment == 16
    assert norm.Rows.of(merged[:, -1]).x.data_ptr() == merged[:, -1].data_ptr()
    assert norm.Rows.of(merged.transpose(0, 1)).x.data_ptr() == merged.data_ptr()
    # This one would let a kernel assume less than those above.
    assert norm.Rows.of(merged.flatten()[1:-15].view(-1, 16)).x.data_ptr() % 16 == 0


@every_dtype
@pytest.mark.parametrize("width", [5, 33, 128, 1040])
def test_a_row_is_bit_for_bit_the_same_beside_any_others(dtype: torch.dtype, width: int):
    x, weight, bias = (normal(*shape, dtype=dtype, seed=s) for s, shape in enumerate(((9, width), (width,), (width,))))
    apart = torch.full((9, 2 * width + 1), torch.nan, dtype=dtype, device=DEVICE)
    apart[:, 1 : width + 1] = x
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "rms_norm": lambda rows: rms_norm(rows, weight, eps=EPS),
        "layer_norm": lambda rows: layer_norm(rows, weight, bias, eps=EPS),
        "row_mean": row_mean,
    }
    for name, call in calls.items():
        together = call(x)
        assert torch.equal(call(apart[:, 1 : width + 1]), together), name
        assert torch.equal(call(x.view(3, 3, width)).flatten(0, 1), together), name
        for first, end in ((0, 1), (4, 5), (8, 9), (1, 4), (2, 9)):
            assert torch.equal(call(x[first:end]), together[first:end]), name


def test_a_weight_is_read_where_it_lies():
    x, weight = normal(2, 24), torch.full((24, 3), torch.nan, device=DEVICE)
    weight[:, 1] = normal(24, seed=1)
    expected = layer_norm(x, weight[:, 1].contiguous(), weight[:, 1].contiguous(), eps=EPS)
    assert torch.equal(layer_norm(x, weight[:, 1], weight[:, 1], eps=EPS), expected)
    shifted = weight[:, 1].repeat(2)[1:25]
    assert torch.equal(rms_norm(x, shifted, eps=EPS), rms_norm(x, shifted.clone(), eps=EPS))


def test_rows_beyond_their_width_and_other_rows_are_not_read():
    buffer = torch.full((4, 3, 48), torch.nan, device=DEVICE)
    buffer[::2, 1, 16:37] = normal(2, 21)
    view = buffer[::2, 1:2, 16:37]
    assert not rms_norm(view, None, eps=EPS).isnan().any()
    assert not layer_norm(view, None, None, eps=EPS).isnan().any()
    assert not row_mean(view).isnan().any()


def test_a_nan_stays_in_its_row():
    x = normal(3, 33)
    x[1, 4] = torch.nan
    for out in (rms_norm(x, None, eps=EPS), layer_norm(x, None, None, eps=EPS), row_mean(x)):
        assert out.isnan().any(-1).tolist() == [False, True, False]


def test_no_rows_give_no_rows():
    x = normal(0, 3, 16)
    assert rms_norm(x, None, eps=EPS).shape == (0, 3, 16)
    assert layer_norm(x, None, None, eps=EPS).shape == (0, 3, 16)
    assert row_mean(x).shape == (0, 3, 1)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_ops_are_registered_as_they_behave(weighted: bool):
    checks = ("test_schema", "test_faketensor")
    x, weight = normal(2, 24).unflatten(-1, (3, 8)).transpose(0, 1), normal(8, seed=1) if weighted else None
    ops = torch.ops.specgraph
    torch.library.opcheck(ops.rms_norm, (x, weight), {"eps": EPS, "offset": 1.0}, test_utils=checks)
    torch.library.opcheck(ops.layer_norm, (x, weight, weight), {"eps": EPS}, test_utils=checks)
    torch.library.opcheck(ops.row_mean, (x,), test_utils=checks)


@pytest.mark.parametrize(
    ("name", "vectors", "message"),
    [
        ("rms_norm", [(5,)], r"weight must be \[H\] = \[4\], not \[5\]"),
        ("rms_norm", [(1, 4)], r"weight must be \[H\] = \[4\], not \[1, 4\]"),
        ("layer_norm", [(4,), (3,)], r"bias must be \[H\] = \[4\], not \[3\]"),
    ],
)
def test_fake_tensors_refuse_wrong_shapes(name: str, vectors: list[tuple[int, ...]], message: str):
    op: Any = getattr(torch.ops.specgraph, name)
    with FakeTensorMode(), pytest.raises(ValueError, match=message):
        op(torch.empty(2, 4), *(torch.empty(shape) for shape in vectors), eps=EPS)


def test_ids_have_no_mean():
    with FakeTensorMode(), pytest.raises(ValueError, match=r"x must be float \[\.\.\., H\], not torch.int64"):
        torch.ops.specgraph.row_mean(torch.empty(2, 4, dtype=torch.int64))


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("width", [5, 16, 1000])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_pair_is_two_norms_side_by_side(dtype: torch.dtype, width: int, weighted: bool):
    x, y, table = (
        normal(2, 3, width, dtype=dtype),
        normal(3, 2, width, dtype=dtype, seed=1).transpose(0, 1),
        normal(7, width, dtype=dtype, seed=2),
    )
    weights = [normal(width, dtype=dtype, seed=s) if weighted else None for s in (3, 4)]
    options = {"x_eps": EPS, "y_eps": 1e-2, "x_offset": 1.0}
    tokens = torch.tensor([[6, 0, 3], [3, 3, 1]], device=DEVICE)
    for left, ids in ((x, None), (table, tokens)):
        rows = left if ids is None else left[ids]
        for form in FORMS:
            single, pair = FORMS[form]["rms_norm"], FORMS[form]["rms_norm_pair"]
            expected = single(rows, weights[0], eps=EPS, offset=1.0), single(y, weights[1], eps=1e-2)
            found = pair(left, y, *weights, ids, **options)
            assert torch.equal(found, torch.cat(expected, dim=-1)) and found.is_contiguous()


def test_a_pair_is_registered_as_it_behaves():
    op, checks = torch.ops.specgraph.rms_norm_pair, ("test_schema", "test_faketensor")
    x, weight, tokens = normal(2, 3, 8), normal(8, seed=1), torch.zeros(2, 3, dtype=torch.int64, device=DEVICE)
    options = {"x_eps": EPS, "y_eps": EPS}
    torch.library.opcheck(op, (x, x, weight, None), options, test_utils=checks)
    torch.library.opcheck(op, (normal(7, 8), x, weight, None, tokens), options, test_utils=checks)
    assert rms_norm_pair(x[:0], x[:0], weight, None, **options).shape == (0, 3, 16)
    with FakeTensorMode(), pytest.raises(ValueError, match="x and y must be pairs of rows, not torch"):
        op(torch.empty(2, 4), torch.empty(3, 4), None, None, **options)
