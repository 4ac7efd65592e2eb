"""The short causal convolution in front of recurrent layers: every channel is convolved with its own few weights.

For channel ``d`` and row ``t``, with ``w`` weights and inputs of zero in front of the sequence::

    out[t, d] = activation(bias[d] + sum over i < w of weight[d, i] * x[t - w + 1 + i, d])

- ``specgraph::causal_conv`` replaces transformers' function while a model is traced. It begins at the first row.
- ``specgraph::cached_conv`` is what the pass ``insert_recurrent_state`` makes of it. Its state are the last inputs of
  every sequence.

Source: ``causal_conv1d_fn`` of the package causal-conv1d (Dao), whose arguments transformers' function has.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specgraph.kernels.checks import check_shapes, require
from specgraph.kernels.ops import Variant, declare, not_float64, triton_or_reference
from specgraph.kernels.recurrent.arguments import ACTIVATIONS, CHUNK, CachedConv, CausalConv
from specgraph.kernels.recurrent.conv_cpu import cached_conv_cpu
from specgraph.kernels.recurrent.conv_triton import cached_conv_triton
from specgraph.kernels.recurrent.last_rows import row_buffer
from specgraph.kernels.recurrent.span import keep_rows, known_rows, spans
from specgraph.kernels.state import RECURRENT, Buffer, Recurrent


def _convolve(x: Tensor, given: CausalConv | CachedConv) -> Tensor:
    """The convolution of ``x`` ``[B, D, S + w - 1]``, whose first rows precede the ``S`` rows of the result."""
    weight = given.weight
    out = torch.nn.functional.conv1d(x.to(weight.dtype), weight.unsqueeze(1), given.bias, groups=weight.shape[0])
    return (torch.nn.functional.silu(out) if given.activation else out).to(given.x.dtype)


def causal_conv_reference(given: CausalConv) -> Tensor:
    """:class:`CausalConv` in plain PyTorch."""
    return _convolve(torch.nn.functional.pad(given.x, (given.weight.shape[1] - 1, 0)), given)


def cached_conv_reference(given: CachedConv) -> Tensor:
    """:class:`CachedConv` in plain PyTorch; it waits for the device."""
    out, before = _cached_conv_fake(given).zero_(), given.weight.shape[1] - 1
    for own in spans(given.span):
        new = given.x[own.entry, :, : own.num_rows]
        known = known_rows(given.inputs, own, max(0, own.begin - before)).T
        padded = torch.nn.functional.pad(torch.cat([known, new], 1), (max(0, before - own.begin), 0))
        out[own.entry, :, : own.num_rows] = _convolve(padded.unsqueeze(0), given)[0]
        keep_rows(given.inputs, own, new.T)
    return out


def _check(given: CausalConv | CachedConv) -> None:
    check_shapes(given, x="B D T", weight="D w", bias="D")
    require(given.activation in ACTIVATIONS, lambda: f"activation is one of {ACTIVATIONS}, not {given.activation!r}")


def _causal_conv_fake(given: CausalConv) -> Tensor:
    _check(given)
    return torch.empty_like(given.x, memory_format=torch.contiguous_format)


def _cached_conv_fake(given: CachedConv) -> Tensor:
    _check(given)
    inputs = given.inputs
    check_shapes(given, x="B D T", inputs="N R D", span="B 5")
    require(inputs.dtype == given.x.dtype, lambda: "inputs must have the dtype of x")
    least = given.weight.shape[1] - 1
    require(inputs.shape[1] >= least, lambda: f"{given.weight.shape[1]} weights need {least} rows of inputs")
    return given.x.new_empty(given.x.transpose(1, 2).shape).transpose(1, 2)


declare(
    "causal_conv", CausalConv, _causal_conv_fake, (Variant("reference", causal_conv_reference, False),),
)
CACHED_CONV = declare(
    "cached_conv", CachedConv, _cached_conv_fake,
    triton_or_reference(
        cached_conv_triton, cached_conv_reference, covers=not_float64("x"), cpu=cached_conv_cpu,
        cpu_covers=not_float64("x"),
    ),
    mutates=("inputs",),
)


def _buffers(operands: Sequence[Tensor], unsettled: int) -> tuple[Buffer, ...]:
    """The inputs that the first row of the next call reads, and those that may turn out not to belong there.

    Those that the first row behind the last boundary reads are kept, too. Without them, a prompt would have to be cut
    at every boundary at which its state is to be copied.
    """
    x, weight = operands[:2]
    return (row_buffer(int(weight.shape[1]) - 1, unsettled, int(x.shape[1]), dtype=x.dtype, chunk=CHUNK),)


RECURRENT[torch.ops.specgraph.causal_conv.default] = Recurrent(
    torch.ops.specgraph.cached_conv.default,
    ("inputs",),
    _buffers,
    lambda arguments, state, span: (*arguments[:2], *state, span, *arguments[2:]),
    operations=lambda given: 2 * given.weight.numel(),
)
