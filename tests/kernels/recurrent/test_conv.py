"""The short convolution: what transformers computes, and from cached inputs in any history."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn

from specgraph.kernels.recurrent.conv import CachedConv, CausalConv, cached_conv_reference, causal_conv_reference
from specgraph.kernels.state import RECURRENT
from tests.kernels.recurrent.histories import Memory, history, run

CHANNELS, LENGTHS = 6, (1, 2, 5, 40)


def weights(width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(width)
    return (torch.randn(CHANNELS, width, generator=generator, dtype=torch.float64),
            torch.randn(CHANNELS, generator=generator, dtype=torch.float64))  # fmt: skip


def inputs_of(length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(CHANNELS, length, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("activation", ["", "silu"])
@pytest.mark.parametrize("width", [1, 3, 4])
def test_it_is_the_function_of_transformers_and_its_definition(width: int, activation: str) -> None:
    (weight, bias), x = weights(width), inputs_of(7, 0)
    ours = causal_conv_reference(CausalConv(x.unsqueeze(0), weight, bias, activation=activation))[0]
    theirs = causal_conv1d_fn(x.unsqueeze(0), weight, bias, activation=activation or None)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    padded = torch.cat([x.new_zeros(CHANNELS, width - 1), x], 1)
    for t in range(7):
        plain = bias + (weight * padded[:, t : t + width]).sum(1)
        expected = plain * plain.sigmoid() if activation else plain
        torch.testing.assert_close(ours[:, t], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("accept", ["none", "all", "mixed"])
@pytest.mark.parametrize(("width", "k"), [(1, 3), (3, 0), (4, 1), (4, 7)])
def test_any_history_gives_what_the_definition_gives(width: int, k: int, accept: str) -> None:
    weight, bias = weights(width)
    inputs = [(inputs_of(n + 12, n),) for n in LENGTHS]
    plans = [[*history(n + 12, n, k, accept, seed)] for seed, n in enumerate(LENGTHS)]
    memory = Memory([2, 4, 0, 1])
    form = RECURRENT[torch.ops.specgraph.causal_conv.default]
    (kept,) = (b.allocate({"B": 5}, "cpu") for b in form.buffers([inputs[0][0].unsqueeze(0), weight], k))
    kept.fill_(torch.nan)

    def call(x: Tensor, span: Tensor) -> Tensor:
        return cached_conv_reference(CachedConv(x, weight, kept, span, bias, activation="silu"))

    outs = run(inputs, plans, memory, call, 1)
    for (x,), out in zip(inputs, outs, strict=True):
        whole = causal_conv_reference(CausalConv(x.unsqueeze(0), weight, bias, activation="silu"))[0]
        torch.testing.assert_close(out, whole, rtol=1e-12, atol=1e-12)
    assert kept[3].isnan().all()
