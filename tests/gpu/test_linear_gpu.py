"""The linear layer compiled: the shapes of Llama-3-8B and its EAGLE-3 head, in bfloat16, for 1 to 576 rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specgraph.kernels.launch import arrival_counters
from specgraph.kernels.linear import Tiles, linear, summation

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
    "awkward": (1000, 1111, {"norm": True, "residual": True}),
}
shapes = pytest.mark.parametrize("name", SHAPES)


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
    return linear(x[rows], **others, residual=None if residual is None else residual[rows], **options)


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


@pytest.mark.parametrize("name", ["qkv", "gate_up", "down"])
def test_the_bits_do_not_follow_the_tiling_nor_the_way_of_launching(name: str):
    given = layer(name, 64)
    block_k, pieces = summation(*given[1]["weight"].shape)
    whole = run(given, slice(0, 64))
    for cut in [
        Tiles(64, 16, block_k, pieces, False, 4, 3),
        Tiles(128, 16, block_k, pieces, False, 8, 3),
        Tiles(128, 16, block_k, pieces, True, 4, 2, norm_inside=False),
        Tiles(64, 32, block_k, pieces, True, 8, 3),
        Tiles(64, 64, block_k, pieces, True, 4, 2),
        Tiles(128, 128, block_k, pieces, True, 8, 2, norm_inside=False),
    ]:
        for pdl in (False, None):
            assert torch.equal(run(given, slice(0, 64), tiling=cut, pdl=pdl), whole), (cut, pdl)


def test_a_chain_in_a_graph_gives_the_bits_of_single_launches():
    """Programs of the next product start before the last has finished; its output, residual and counters must hold."""
    torch.manual_seed(0)
    weights = torch.randn(8, 4096, 4096, device="cuda").mul_(1 / 64).bfloat16()
    gain = torch.ones(4096, device="cuda").bfloat16()
    x = torch.randn(5, 4096, device="cuda").bfloat16()

    def chain(pdl: bool | None, wait: bool = False) -> Tensor:
        y = x
        for weight in weights:
            y = linear(y, weight, None, y, gain, norm_eps=1e-5, pdl=pdl)
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
