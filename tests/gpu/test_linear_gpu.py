"""The linear layer compiled: the shapes of Llama-3-8B and its EAGLE-3 head, in bfloat16, for 1 to 576 rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specgraph.kernels.launch import arrival_counters
from specgraph.kernels.linear.linear import ACTIVATIONS, LINEAR, LINEAR_NORM, NORM_PARTS
from specgraph.kernels.linear.product import Tiles, num_slices, tiles
from specgraph.kernels.ops import Op
from tests.gpu.capture import captured

ROWS = (1, 2, 4, 5, 8, 9, 16, 17, 31, 64, 65, 128, 256, 257)
MOST = 576
SHAPES = {
    "qkv": (6144, 4096, {"norm": True}),
    "o": (4096, 4096, {"residual": True}),
    "gate_up": (14336, 4096, {"norm": True, "activation": "silu_mul"}),
    "down": (4096, 14336, {"residual": True}),
    "lm_head": (128256, 4096, {"norm": True}),
    "draft qkv": (6144, 8192, {}),
    "draft fc": (4096, 12288, {}),
    "draft lm_head": (32000, 4096, {"norm": True}),
    "uneven": (1000, 1336, {"norm": True, "residual": True}),
    "uneven gates": (1000, 1336, {"norm": True, "activation": "silu_mul"}),
    "awkward": (1000, 1111, {"norm": True, "residual": True}),
}
shapes = pytest.mark.parametrize("name", SHAPES)


def called(op: Op, given: tuple[Tensor, ...], options: dict[str, object], **tuning: object) -> Any:
    """The variant that the op would choose; a tiling is the Triton form's alone."""
    chosen = op.choose("cuda", op.arguments(*given, **options)).name if tuning.get("tiling") is None else "triton"
    return op.form(chosen, **{name: value for name, value in tuning.items() if value is not None})(*given, **options)


def linear(*given: Tensor, tiling: Tiles | None = None, pdl: bool | None = None, **options: object) -> Tensor:
    return called(LINEAR, given, options, tiling=tiling, pdl=pdl)


def linear_norm(
    *given: Tensor, tiling: Tiles | None = None, pdl: bool | None = None, **options: object
) -> tuple[Tensor, Tensor, Tensor]:
    return called(LINEAR_NORM, given, options, tiling=tiling, pdl=pdl)


def norm_parts(*given: Tensor, pdl: bool | None = None) -> tuple[Tensor, Tensor]:
    return called(NORM_PARTS, given, {}, pdl=pdl)


def layer(name: str, rows: int = MOST) -> tuple[Tensor, dict[str, object], Tensor | None]:
    """The rows, the layer's other arguments, and the residual, which has rows as well."""
    outer, inner, kind = SHAPES[name]
    torch.manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda").bfloat16()

    activation = kind.get("activation", "none")
    weight = randn(2 * outer if activation == "silu_mul" else outer, inner).mul_(inner**-0.5)
    given = {"weight": weight, "activation": activation, "norm_eps": 1e-5}
    given["norm_weight"] = randn(inner) if kind.get("norm") else None
    return randn(rows, inner), given, randn(rows, outer) if kind.get("residual") else None


def run(given: tuple[Tensor, dict[str, object], Tensor | None], rows: slice, **options: object) -> Tensor:
    x, others, residual = given
    others, sum_sq = dict(others), None
    gain, x = others.pop("norm_weight"), x[rows]
    if gain is not None:
        x, sum_sq = norm_parts(x, gain)
    return linear(x, **others, residual=None if residual is None else residual[rows], sum_sq=sum_sq, **options)


def exact(given: tuple[Tensor, dict[str, object], Tensor | None]) -> Tensor:
    x, others, residual = given
    x, weight, gain = x.double(), others["weight"], others["norm_weight"]
    if gain is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + others["norm_eps"]) * gain.double()
    # By parts: the largest weight takes 4 GB in float64.
    out = torch.cat([x @ part.double().T for part in weight.split(16384)], -1)
    if others["activation"] == "silu_mul":
        gate, up = out.chunk(2, -1)
        out = torch.nn.functional.silu(gate) * up
    return out if residual is None else out + residual.double()


@shapes
def test_against_float64(name: str):
    given = layer(name)
    expected = exact(given)
    for rows in (1, 5, 17, 64, 65, MOST):
        part = slice(MOST - rows, MOST)
        out = run(given, part).double()
        assert (out - expected[part]).norm() / expected[part].norm() < 8e-3, rows


@shapes
def test_a_row_has_the_same_bits_at_every_number_of_rows(name: str):
    given = layer(name)
    whole = run(given, slice(0, MOST))
    for rows in ROWS:
        for part in (slice(0, rows), slice(MOST - rows, MOST)):
            assert torch.equal(run(given, part), whole[part]), (rows, part)


def cuts(name: str) -> list[Tiles]:
    outer, inner, kind = SHAPES[name]
    pieces = num_slices(2 * outer if kind.get("activation") == "silu_mul" else outer, inner)
    return [
        Tiles(64, 16, 128, pieces, False, 4, 3),
        Tiles(128, 16, 64, pieces, False, 8, 3),
        Tiles(128, 16, 128, pieces, True, 4, 2),
        Tiles(64, 32, 64, pieces, True, 8, 3),
        Tiles(64, 64, 128, pieces, True, 4, 2),
        Tiles(128, 128, 64, pieces, True, 8, 2),
    ]


@pytest.mark.parametrize("name", ["qkv", "gate_up", "down"])
def test_the_bits_do_not_follow_the_tiling_nor_the_way_of_launching(name: str):
    given = layer(name, 64)
    whole = run(given, slice(0, 64))
    for cut in cuts(name):
        for pdl in (False, None):
            assert torch.equal(run(given, slice(0, 64), tiling=cut, pdl=pdl), whole), (cut, pdl)


@pytest.mark.parametrize("name", ["o", "down", "gate_up", "awkward"])
def test_the_parts_of_the_next_norm_have_the_same_bits_however_they_are_made(name: str):
    """By the product at any number of rows and with any tiling, or apart."""
    x, others, residual = layer(name)
    gain = torch.randn(SHAPES[name][0], device="cuda").bfloat16()
    weight, activation = others["weight"], others["activation"]

    def joined(rows: slice, **options: object) -> tuple[Tensor, ...]:
        added = None if residual is None else residual[rows]
        return linear_norm(x[rows], weight, gain, None, added, activation=activation, **options)

    whole = joined(slice(0, MOST))
    apart = norm_parts(whole[0], gain)
    assert torch.equal(whole[1], apart[0]) and torch.equal(whole[2], apart[1])
    expected = (
        torch.nn.functional.pad(whole[0].double(), (0, -gain.numel() % 64)).unflatten(-1, (-1, 64)).square().sum(-1)
    )
    assert ((whole[2] - expected).abs() <= 1e-6 * expected).all()
    for rows in ROWS:
        for ours, of in zip(joined(slice(0, rows)), whole, strict=True):
            assert torch.equal(ours, of[:rows]), rows
    for cut in cuts(name):
        for pdl in (False, None):
            for ours, of in zip(joined(slice(0, 40), tiling=cut, pdl=pdl), whole, strict=True):
                assert torch.equal(ours, of[:40]), (cut, pdl)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_kernels_for_hopper_have_the_bits_of_the_tiles(activation: str, dtype: torch.dtype):
    """With everything that a product may have around it, of pieces that are uneven, and of x that is a slice."""
    outer, inner, gates = 1000, 4104, 2 if activation.endswith("_mul") else 1

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda").to(dtype)

    torch.manual_seed(0)
    weight, bias, gain = randn(gates * outer, inner).mul_(inner**-0.5), randn(gates * outer), randn(outer)
    for rows in (1, 2, 7, 8, 9, 16, 17, 33, 64, 257, 300, 2100):
        x, sum_sq = norm_parts(randn(rows, inner + 16)[:, 8:-8], randn(inner))
        given = (x, weight, gain, bias, randn(rows, outer), sum_sq)
        options = {"norm_eps": 1e-6, "norm_offset": 1.0, "activation": activation}
        cut = tiles(rows, *weight.shape)
        for ours, of in zip(linear_norm(*given, **options), linear_norm(*given, **options, tiling=cut), strict=True):
            assert torch.equal(ours, of), rows
        x = randn(rows, inner + 16)[:, 8:-8]
        assert torch.equal(linear(x, weight, bias), linear(x, weight, bias, tiling=cut)), rows


def test_a_weight_may_be_written_just_before_it_is_used():
    """Outside of graphs nothing says that weights are constant, so nothing of them is read ahead."""
    x = torch.randn(4, 4096, device="cuda").bfloat16()
    weight = torch.zeros(8192, 4096, device="cuda", dtype=torch.bfloat16)
    for value in range(1, 40):
        weight.fill_(value)
        out = linear(x, weight)
        expected = linear(x, weight, pdl=False)
        assert torch.equal(out, expected), value


@pytest.mark.parametrize("kind", ["cast", "turned"])
def test_a_weight_that_the_graph_writes_is_not_read_ahead(kind: str):
    x = torch.randn(4, 4096, device="cuda").bfloat16()
    stored = torch.zeros(4096, 4096, device="cuda", dtype=torch.float32 if kind == "cast" else torch.bfloat16)

    def call() -> Tensor:
        if kind == "cast":
            return linear(x, stored.bfloat16(), constant_weight=False)
        return linear(x, stored.t())  # which the launcher lays out anew

    call()
    graph, out = captured(call)
    for value in range(1, 20):
        stored.normal_(generator=torch.Generator("cuda").manual_seed(value))
        graph.replay()
        assert torch.equal(out, call()), value


@pytest.mark.parametrize("rows", [5, 300])
def test_a_chain_in_a_graph_gives_the_bits_of_single_launches(rows: int):
    """Programs of the next product start before the last has finished; its output, residual and counters must hold."""
    torch.manual_seed(0)
    weights = torch.randn(8, 4096, 4096, device="cuda").mul_(1 / 64).bfloat16()
    gain = torch.ones(4096, device="cuda").bfloat16()
    x = torch.randn(rows, 4096, device="cuda").bfloat16()

    def chain(pdl: bool | None, wait: bool = False) -> Tensor:
        y, (weighted, sum_sq) = x, norm_parts(x, gain, pdl=pdl)
        for weight in weights:
            y, weighted, sum_sq = linear_norm(weighted, weight, gain, None, y, sum_sq, norm_eps=1e-5, pdl=pdl)
            if wait:
                torch.cuda.synchronize()
        return y

    expected = chain(False, wait=True)
    assert torch.equal(chain(None), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(None)
    for _ in range(20):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)
    assert not arrival_counters(x.device).any()
