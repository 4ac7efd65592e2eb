"""The short convolution: what transformers computes, and from cached inputs in any history."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn

from specgraph.kernels.recurrent.arguments import CachedConv, CausalConv
from specgraph.kernels.recurrent.conv import CACHED_CONV, causal_conv_reference
from specgraph.kernels.state import RECURRENT
from tests.kernels.recurrent.histories import ALL, Memory, assert_near, device_of, history, run, unsettled

CHANNELS, LENGTHS = 6, (1, 2, 5, 40)
PLANS = [(1, 3), (3, 0), (4, 1), (4, 7)]
"""The number of weights, and K."""
FORMS = [*(("reference", torch.float64, 1e-12, accept) for accept in ("none", "all", "mixed", "drafts")),
         *((form, torch.float32, 1e-6, accept) for form in ("triton", "cpu") for accept in ("mixed", "drafts")),
]  # fmt: skip
"""A variant, what it is tested in, how near it is to the definition (of the largest value), and what is accepted."""


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


def decode(
    form: str, dtype: torch.dtype, width: int, k: int, accept: str, cuts: int = 0, own: slice = ALL
) -> tuple[list[Tensor], Tensor]:
    """What sequences emit under a history, by default all of them, and the inputs that are kept."""
    device = device_of(form)
    weight, bias = (part.to(device, dtype) for part in weights(width))
    inputs = [(inputs_of(n + 12, n).to(device, dtype),) for n in LENGTHS[own]]
    plans = [[*history(n + 12, n, k, accept, seed + cuts)] for seed, n in enumerate(LENGTHS)][own]
    memory = Memory([2, 4, 0, 1][own])
    form_with_state, given = RECURRENT[torch.ops.specgraph.causal_conv.default], [inputs[0][0].unsqueeze(0), weight]
    (kept,) = (b.allocate({"B": 5}, device) for b in form_with_state.buffers(given, unsettled(k, accept)))
    kept.fill_(torch.nan)

    def call(x: Tensor, span: Tensor) -> Tensor:
        return CACHED_CONV.form(form)(x, weight, kept, span.to(device), bias, activation="silu")

    return run(inputs, plans, memory, call, 1), kept


def whole(n: int, width: int) -> Tensor:
    """The definition over a whole sequence."""
    weight, bias = weights(width)
    x = inputs_of(n + 12, n).unsqueeze(0)
    return causal_conv_reference(CausalConv(x, weight, bias, activation="silu"))[0]


@pytest.mark.parametrize(
    ("form", "dtype", "near", "accept", "width", "k"),
    [(*form, *plan) for form in FORMS for plan in PLANS if form[3] == "mixed" or plan == PLANS[-1]],
)
def test_any_history_gives_what_the_definition_gives(
    form: str, dtype: torch.dtype, near: float, accept: str, width: int, k: int
) -> None:
    """Mixed histories have every plan; of the others, :func:`test_no_bit_depends_on_the_history` has more."""
    outs, kept = decode(form, dtype, width, k, accept)
    for n, out in zip(LENGTHS, outs, strict=True):
        assert_near(out, whole(n, width), near)
    assert kept[3].isnan().all()


@pytest.mark.parametrize("form", ["triton", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_bit_depends_on_the_history(form: str, dtype: torch.dtype) -> None:
    wanted, _ = decode(form, dtype, 4, 7, "all")
    histories = [(0, "all"), (3, "mixed"), (1, "none"), (3, "drafts")]
    # What a history changes does not depend on the dtype, so that two are enough for one of them in the interpreter.
    fewer = form == "triton" and dtype == torch.bfloat16
    for cuts, (k, accept) in enumerate(histories[:2] if fewer else histories):
        outs, _ = decode(form, dtype, 4, k, accept, cuts)
        assert all(torch.equal(a, b) for a, b in zip(outs, wanted, strict=True))
    # A program of Triton's sees one sequence, so that it is enough to give one of them another place in the batch.
    for number in range(len(wanted)) if form == "cpu" else [len(wanted) - 1]:
        (alone,), _ = decode(form, dtype, 4, 3, "mixed", own=slice(number, number + 1))
        assert torch.equal(alone, wanted[number])


def test_on_a_cpu_only_float64_is_left_to_the_reference() -> None:
    for dtype, name in ((torch.float32, "cpu"), (torch.bfloat16, "cpu"), (torch.float64, "reference")):
        x, weight = torch.zeros(1, CHANNELS, 1, dtype=dtype), torch.zeros(CHANNELS, 3, dtype=dtype)
        given = CachedConv(x, weight, torch.zeros(1, 4, CHANNELS, dtype=dtype), torch.zeros(1, 5, dtype=torch.int64))
        assert CACHED_CONV.choose("cpu", given).name == name
