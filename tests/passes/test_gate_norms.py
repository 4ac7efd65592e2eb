"""Norms that are only read by their gate become one op with it, and no others do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from specgraph.passes.fuse_norm import FuseNorm
from specgraph.passes.lower_kernels import LowerKernels
from tests.passes.test_lower_kernels import run_both, targets

silu = nn.functional.silu


class Gated(nn.Module):
    """A norm of rows ``[6, 8]``, and a function of it and of a projection ``[2, 3, 24]``."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 8, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        rows = x[..., :8].reshape(-1, 8)
        exact = rows.float()
        normed = self.weight * (exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return self.function(normed, x)


def gate(x: Tensor) -> Tensor:
    return x[..., 8:16].reshape(-1, 8)


JOINED = {
    "silu": lambda n, x: (n * silu(gate(x).float())).to(x.dtype),
    "sigmoid": lambda n, x: (torch.sigmoid(gate(x).float()) * n.float()).to(x.dtype),
}
APART = {
    "a norm that another node reads": lambda n, x: (n * silu(gate(x).float())).to(x.dtype) + n,
    "a gate of the norm itself": lambda n, x: (n * silu(n.float())).to(x.dtype),
    "another function": lambda n, x: (n * torch.tanh(gate(x).float())).to(x.dtype),
    "a number per row": lambda n, x: (n * silu(gate(x)[:, :1].float())).to(x.dtype),
    "a gate of other rows": lambda n, x: (n * silu(gate(x)[:1].float())).to(x.dtype),
}


@pytest.mark.parametrize("what", [*JOINED, *APART])
def test_norms_and_gates(what: str) -> None:
    x = torch.randn(2, 3, 24, generator=torch.Generator().manual_seed(0))
    module = Gated({**JOINED, **APART}[what])
    program, expected, actual = run_both(module, x, [FuseNorm(), LowerKernels()])
    assert ("specgraph.gated_rms_norm" in targets(program, "toy")) == (what in JOINED)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def test_in_bfloat16_every_rounding_stays() -> None:
    x = torch.randn(2, 3, 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    program, expected, actual = run_both(Gated(JOINED["silu"], torch.bfloat16), x, [FuseNorm(), LowerKernels()])
    assert "specgraph.gated_rms_norm" in targets(program, "toy")
    # The op rounds the norm once, and the model twice.
    assert (actual.float() - expected.float()).abs().max() <= 2**-7 * expected.float().abs().max()
