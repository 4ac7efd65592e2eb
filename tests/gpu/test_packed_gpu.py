"""Products of sorted weights in few bits by the kernels for Hopper, for 1 to 1000 rows: the bits of those by Triton."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specgraph.kernels.linear.experts import EXPERT_LINEAR
from specgraph.kernels.linear.linear import LINEAR, NORM_PARTS
from specgraph.kernels.ops import Op
from specgraph.kernels.packed.experts import PACKED_EXPERT_LINEAR, packed_expert_linear
from specgraph.kernels.packed.formats import FORMATS
from specgraph.kernels.packed.linear import PACKED_LINEAR, PACKED_LINEAR_NORM, packed_linear
from tests.gpu.capture import captured
from tests.kernels.packed.test_products import STEEPEST, lost, normal, packed
from tests.kernels.rounding import assert_within

ROWS = (1, 40, 64, 65, 127, 128, 129, 200, 300, 999)
MOST = 1000
SHAPES: dict[str, tuple[int, int, set[str]]] = {
    "qkv": (6144, 4096, {"norm", "bias"}),
    "o": (4096, 4096, {"residual", "next norm"}),
    "down": (1000, 8320, {"residual", "next norm"}),
    "gate_up": (1536, 4096, {"norm", "silu_mul"}),
    "one slice": (1000, 640, {"norm", "bias", "residual"}),
    "uneven": (1000, 1152, {"norm", "bias", "residual", "next norm"}),
    "uneven gates": (1000, 1152, {"bias", "silu_mul"}),
    "gates of one slice": (1000, 640, {"norm", "bias", "residual", "next norm", "silu_mul"}),
}
"""Outputs, inputs, and what surrounds the product. Slices are 2, 8 for "down", or 1; tiles have 64 and 128 rows."""
CASES = [
    *((name, torch.bfloat16, shape) for name in ("int4", "mxfp4", "fp8_blocks") for shape in SHAPES),
    *((name, torch.float16, "uneven") for name in ("int4", "fp8_blocks")),
]


def layer(name: str, dtype: torch.dtype, shape: str) -> tuple[Op, tuple[Any, ...], dict[str, Any]]:
    """The op and its arguments, for :data:`MOST` rows that are slices of others."""
    outer, inner, kinds = SHAPES[shape]
    inner += 32 if name == "mxfp4_arranged" and "uneven" in shape else 0  # a quarter of the inputs of a block
    gates = 2 if "silu_mul" in kinds else 1
    weight = packed(name, gates * outer, inner)
    x = (normal(MOST, inner + 16, seed=1) * inner**-0.5).to(dtype)[:, 8:-8]
    bias = normal(gates * outer, dtype=dtype, seed=2) if "bias" in kinds else None
    residual = normal(MOST, outer + 16, dtype=dtype, seed=3)[:, 8:-8] if "residual" in kinds else None
    sum_sq = None
    if "norm" in kinds and not FORMATS[name].quantises_rows:
        x, sum_sq = NORM_PARTS.form("triton")(x, (normal(inner, seed=4) * inner**-0.5).to(dtype))
    given = (x, weight, bias, residual, sum_sq)
    options = {"format": name, "norm_eps": 1e-6, "activation": "silu_mul" if gates == 2 else "none"}
    if "next norm" not in kinds:
        return PACKED_LINEAR, given, options
    next_norm = normal(outer, dtype=dtype, seed=5)
    return PACKED_LINEAR_NORM, (x, weight, next_norm, *given[2:]), options | {"norm_offset": 1.0}


def some(given: tuple[Any, ...], rows: slice) -> tuple[Any, ...]:
    """The arguments of some rows."""
    return tuple(part[rows] if isinstance(part, Tensor) and part.dim() == 2 else part for part in given)


def parts(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def exact(given: tuple[Any, ...], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The product in float64, and how far float32 may be from it before it is rounded."""
    x, weight, bias, residual, sum_sq = given
    form = FORMATS[options["format"]]
    bias, residual, sum_sq = (None if part is None else part.double() for part in (bias, residual, sum_sq))
    rows, dense = form.quantise_rows(x).double(), form.dequantise(weight, torch.float64)
    product = LINEAR.form("reference")
    y = product(rows, dense, bias, None, sum_sq, norm_eps=options["norm_eps"])
    scale = 1.0 if sum_sq is None else torch.rsqrt(sum_sq.sum(-1, keepdim=True) / x.shape[-1] + options["norm_eps"])
    error = lost(options["format"], x, weight) * scale + 2.0**-21 * (y.abs() + (0 if bias is None else bias.abs()))
    if options["activation"] == "silu_mul":
        (gate, up), (lost_gate, lost_up) = y.chunk(2, -1), error.chunk(2, -1)
        gate = torch.nn.functional.silu(gate)
        y = gate * up
        error = STEEPEST * lost_gate * (up.abs() + lost_up) + gate.abs() * lost_up + 2.0**-19 * y.abs()
    if residual is not None:
        y, error = y + residual, error + 2.0**-22 * (y.abs() + residual.abs())
    return y, error


@pytest.mark.parametrize(("name", "dtype", "shape"), CASES, ids=str)
def test_the_bits_are_those_of_the_tiles_at_every_number_of_rows(name: str, dtype: torch.dtype, shape: str) -> None:
    """With all that may surround a product, and with rows and outputs that do not fill tiles."""
    op, given, options = layer(f"{name}_arranged", dtype, shape)
    whole = parts(op.form("triton")(*given, **options))
    surrounding = given if op is PACKED_LINEAR else (*given[:2], *given[3:])
    assert_within(whole[0], *exact(surrounding, options))
    for rows in (*ROWS, MOST):
        for chosen in {(0, rows), (MOST - rows, MOST)}:
            of = slice(*chosen)
            few = some(given, of)
            assert op.choose("cuda", op.arguments(*few, **options)).name == "hopper", rows
            for ours, expected in zip(parts(op.form("hopper")(*few, **options)), whole, strict=True):
                assert torch.equal(ours, expected[of]), (chosen, ours.shape, (ours != expected[of]).nonzero()[:4])


@pytest.mark.parametrize("rows", [5, 300])
@pytest.mark.parametrize("name", ["int4_arranged", "mxfp4_arranged"])
def test_a_chain_in_a_graph_gives_the_bits_of_single_launches(name: str, rows: int) -> None:
    """In a graph, weights and scales are read before the kernel in front has ended."""
    weights = [[part.clone() for part in packed(name, 2048, 2048)] for _ in range(6)]
    gain, x = normal(2048, dtype=torch.bfloat16, seed=1) / 64, normal(rows, 2048, dtype=torch.bfloat16, seed=2)

    def chain(form: str, pdl: bool | None) -> Tensor:
        y, (weighted, sum_sq) = x, NORM_PARTS.form("triton")(x, gain)
        product = PACKED_LINEAR_NORM.form(form, pdl=pdl)
        for weight in weights:
            y, weighted, sum_sq = product(weighted, weight, gain, None, y, sum_sq, format=name, norm_eps=1e-5)
        return y

    expected = chain("triton", False)
    assert torch.equal(chain("hopper", False), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain("hopper", None)
    for _ in range(20):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.parametrize("kind", ["copied", "turned"])
@pytest.mark.parametrize("name", ["int4_arranged", "fp8_blocks_arranged"])
def test_a_weight_that_the_graph_writes_is_not_read_ahead(name: str, kind: str) -> None:
    """By the graph itself, or by the launcher, which lays out what is turned."""
    x = normal(4, 4096, dtype=torch.bfloat16, seed=1)
    weights = [FORMATS[name].quantise(normal(4096, 4096, dtype=torch.bfloat16, seed=seed)) for seed in (2, 3)]
    stored = [part.mT.contiguous().mT if kind == "turned" else part.clone() for part in weights[0]]

    def call() -> Tensor:
        weight = stored if kind == "turned" else [part.clone() for part in stored]
        return packed_linear(x, weight, format=name, constant_weight=kind == "turned")

    call()
    graph, out = captured(call)
    for turn in range(20):
        for part, value in zip(stored, weights[turn % 2], strict=True):
            part.copy_(value)
        graph.replay()
        assert torch.equal(out, call()), turn


EXPERTS, TOP_K, MOST_TOKENS = 32, 4, 128
GATE = "(clamp_max(clamp_min(x1, -7.0), 7.0) + 1) * (clamp_max(x0, 7.0) * sigmoid(clamp_max(x0, 7.0) * 1.702))"


def stack(name: str, outer: int, inner: int) -> list[Tensor]:
    """Weights of :data:`EXPERTS` experts that are not alike."""
    one = packed(name, outer, inner)
    return [torch.stack([part.roll(expert, 0) for expert in range(EXPERTS)]) for part in one]


def chosen_experts(tokens: int, seed: int) -> Tensor:
    """Ids ``[tokens * TOP_K]``, different ones for a token, except for every fifth."""
    ids = normal(tokens, EXPERTS, seed=seed).topk(TOP_K).indices
    ids[::5] = ids[::5, :1]
    return ids.flatten()


@pytest.mark.parametrize("kind", ["plain", "halves", "pairs"])
@pytest.mark.parametrize("name", ["int4_arranged", "mxfp4_arranged"])
def test_experts_have_the_bits_of_the_tiles_at_every_number_of_rows(name: str, kind: str) -> None:
    """With a gate and without one, and with tokens that have chosen an expert twice."""
    inner = 1440 if name == "mxfp4_arranged" else 1408
    weight, bias = stack(name, 1000, inner), normal(EXPERTS, 1000, dtype=torch.bfloat16, seed=1)
    x, ids = (normal(MOST_TOKENS, inner + 16, seed=2) * inner**-0.5).bfloat16()[:, 8:-8], chosen_experts(MOST_TOKENS, 3)
    gate = {} if kind == "plain" else {"gate": GATE, "pairs": kind == "pairs"}
    options = {"format": name, "top_k": TOP_K, **gate}
    whole = PACKED_EXPERT_LINEAR.form("triton")(x, weight, bias, ids, **options)
    if kind == "plain":
        expected = PACKED_EXPERT_LINEAR.form("reference")(x.double(), weight, bias.double(), ids, **options)
        dense = FORMATS[name].dequantise(weight, torch.float64).abs()
        spread = EXPERT_LINEAR.form("reference")(x.double().abs(), dense, bias.double().abs(), ids, top_k=TOP_K)
        assert_within(whole, expected, spread * (inner + 4) * 2.0**-24)
    for tokens in (1, 2, 3, 4, 8, 9, 16, 17, 64, 65, MOST_TOKENS):
        for of in (slice(0, tokens), slice(MOST_TOKENS - tokens, MOST_TOKENS)):
            rows = slice(of.start * TOP_K, of.stop * TOP_K)
            given = PACKED_EXPERT_LINEAR.arguments(x[of], weight, bias, ids[rows], **options)
            form = PACKED_EXPERT_LINEAR.choose("cuda", given)
            assert form.name == "hopper"
            assert torch.equal(form.run(given), whole[rows]), (tokens, of)


@pytest.mark.parametrize("tokens", [1, 4, 64])
def test_experts_in_a_graph_take_new_ids(tokens: int) -> None:
    """Two products in turn, as in a layer, whose ids and rows are written just before."""
    first, second = stack("mxfp4_arranged", 1472, 736), stack("mxfp4_arranged", 736, 736)
    x, ids = normal(tokens, 736, dtype=torch.bfloat16), chosen_experts(tokens, 0)

    def call(x: Tensor, ids: Tensor) -> Tensor:
        gated = packed_expert_linear(
            x, first, None, ids, format="mxfp4_arranged", gate="x0 * sigmoid(x0) * x1", top_k=TOP_K
        )
        return packed_expert_linear(gated, second, None, ids, format="mxfp4_arranged")

    call(x, ids)
    graph, out = captured(lambda: call(x + 0, ids + 0))
    for seed in range(1, 20):
        x.copy_(normal(tokens, 736, dtype=torch.bfloat16, seed=seed))
        ids.copy_(chosen_experts(tokens, seed))
        graph.replay()
        assert torch.equal(out, call(x, ids)), seed
