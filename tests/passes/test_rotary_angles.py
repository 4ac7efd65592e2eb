"""Angles of positions become one op in every spelling that means the same, and in no other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from specgraph.passes.fuse_rotary_cache import FuseRotaryCache
from specgraph.passes.lower_kernels import LowerKernels
from specgraph.passes.pipeline import run_passes
from tests.passes.test_lower_kernels import run_both, targets, toy

POSITIONS = torch.tensor([[0, 1, 2, 3, 99], [131071, 4, 5, 4096, 7]])


class Angles(nn.Module):
    """Cosine and sine as models write them; ``angles`` gets positions ``[B, T]`` and frequencies ``[F]``."""

    def __init__(self, angles: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype, scaling: float) -> None:
        super().__init__()
        self.angles, self.dtype, self.scaling = angles, dtype, scaling
        self.register_buffer("inv_freq", 10000.0 ** -(torch.arange(4) / 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        angles = self.angles(x, self.inv_freq)
        return (angles.cos() * self.scaling).to(self.dtype), (angles.sin() * self.scaling).to(self.dtype)


def product(x: Tensor, f: Tensor) -> Tensor:
    return x.unsqueeze(-1).float() * f


def matrix(x: Tensor, f: Tensor) -> Tensor:
    """transformers 5.17 and before."""
    wide = f[None, :, None].float().expand(x.shape[0], -1, 1)
    return (wide @ x[:, None, :].float()).transpose(1, 2)


def moved(x: Tensor, f: Tensor) -> Tensor:
    """As export writes ``to(x.device)`` in some places."""
    wide = f[None, :, None].expand(x.shape[0], -1, 1)
    wide = torch.ops.aten.to.dtype_layout(wide, dtype=torch.float32, layout=torch.strided, device=x.device)
    return (wide @ x[:, None, :].float()).transpose(1, 2)


def twice(angles: Tensor) -> Tensor:
    return torch.cat((angles, angles), dim=-1)


def pairs(angles: Tensor) -> Tensor:
    return torch.repeat_interleave(angles, 2, dim=-1)


@pytest.mark.parametrize(("dtype", "scaling"), [(torch.float32, 1.0), (torch.bfloat16, 1.3465735902799727)])
@pytest.mark.parametrize("spelled", [product, matrix, moved])
@pytest.mark.parametrize("layout", [twice, pairs, lambda angles: angles], ids=["twice", "pairs", "once"])
def test_every_spelling_becomes_one_op_of_the_same_bits(spelled, layout, dtype: torch.dtype, scaling: float):
    module = Angles(lambda x, f: layout(spelled(x, f)), dtype, scaling)
    program, expected, actual = run_both(module, POSITIONS, [FuseRotaryCache(), LowerKernels()])
    counts = targets(program, "toy")
    assert counts.pop("specgraph.rotary_angles") == 1 and not any(name.startswith("aten") for name in counts)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == dtype and torch.equal(a, b)


class Repeated(Angles):
    """Cosine and sine that are repeated after they are computed and scaled."""

    def __init__(
        self, cos: Callable[[Tensor], Tensor], sin: Callable[[Tensor], Tensor], angles: Callable[..., Tensor] = product
    ) -> None:
        super().__init__(angles, torch.bfloat16, 1.25)
        self.cos, self.sin = cos, sin

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        angles = self.angles(x, self.inv_freq)
        cos, sin = angles.cos() * self.scaling, angles.sin() * self.scaling
        return self.cos(cos).to(self.dtype), self.sin(sin).to(self.dtype)


@pytest.mark.parametrize("layout", [twice, pairs])
def test_repeating_cosines_is_repeating_angles(layout: Callable[[Tensor], Tensor]):
    program, expected, actual = run_both(Repeated(layout, layout), POSITIONS, [FuseRotaryCache(), LowerKernels()])
    counts = targets(program, "toy")
    assert counts.pop("specgraph.rotary_angles") == 1 and set(counts) == {"<built-in function getitem>"}
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize(
    "repeat", [lambda x: twice(twice(x)), lambda x: torch.cat((x, -x), -1), lambda x: torch.cat((x, x), 1)],
    ids=["twice as often", "negated", "more rows"],
)  # fmt: skip
def test_other_repetitions_are_computed_as_they_stand(repeat: Callable[[Tensor], Tensor]):
    program, expected, actual = run_both(Repeated(repeat, repeat), POSITIONS, [FuseRotaryCache()])
    counts = targets(program, "toy")
    assert counts["specgraph.rotary_angles"] == 1 and counts["aten.cat"] >= 2
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("sin", [pairs, lambda sin: sin], ids=["pairs", "once"])
def test_cosine_and_sine_must_be_repeated_alike(sin: Callable[[Tensor], Tensor]):
    _, reports = run_passes(toy(Repeated(twice, sin).eval(), POSITIONS), [FuseRotaryCache()])
    (miss,) = reports[0].result.near_misses
    assert "are scaled, repeated or rounded differently" in miss.reason


@pytest.mark.parametrize(
    ("angles", "reason"),
    [
        (lambda x, f: twice(product(x, f) + 1), "the argument of the cosine, is not a product of positions"),
        (
            lambda x, f: torch.cat((product(x, f), product(x, 2 * f)), -1),
            "not repeat the angles in halves or in pairs",
        ),
        (lambda x, f: twice(product(x, f)[:, 1:]), "the argument of the cosine, is not a product"),
        (lambda x, f: product(x, f.bfloat16().float()), "rounds what the angles are computed from"),
        (lambda x, f: product(x.unsqueeze(0), f), "not the product of positions"),
        (lambda x, f: product(x[0], f), "not the product of positions"),
        (lambda x, f: x.unsqueeze(-1).bfloat16() * f.bfloat16(), "rounds the angles to torch.bfloat16"),
        (
            lambda x, f: torch.repeat_interleave(product(x, f), 3, dim=-1),
            "not repeat the angles in halves or in pairs",
        ),
        (lambda x, f: x.float().unsqueeze(-1) * 2.0, "is a number"),
    ],
)
def test_other_angles_are_left_and_named(angles, reason: str):
    module = Angles(angles, torch.float32, 1.0).eval()
    stages, reports = run_passes(toy(module, POSITIONS), [FuseRotaryCache()])
    (miss,) = reports[0].result.near_misses
    assert reason in miss.reason and reports[0].result.matches == 0
    after = stages["fuse_rotary_cache"].modules["toy"]
    assert all(map(torch.equal, module(POSITIONS), after(POSITIONS)))


class Unlike(Angles):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        angles = self.angles(x, self.inv_freq)
        return angles.cos() * 2.0, angles.sin() * self.scaling


def test_cosine_and_sine_must_be_scaled_alike():
    _, reports = run_passes(toy(Unlike(product, torch.float32, 3.0).eval(), POSITIONS), [FuseRotaryCache()])
    (miss,) = reports[0].result.near_misses
    assert "are scaled, repeated or rounded differently" in miss.reason
