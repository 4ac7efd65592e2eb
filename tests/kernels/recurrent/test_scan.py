"""The selective scan: what transformers computes, row after row, and from a state with cached rows in any history."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.mamba.modeling_mamba import mamba_selective_scan

from specgraph.frontend.recurrent import mamba_hook
from specgraph.kernels.recurrent.arguments import CHUNK, SelectiveScan
from specgraph.kernels.recurrent.scan import CACHED_SCAN, selective_scan_reference
from specgraph.kernels.state import RECURRENT
from tests.kernels.recurrent.histories import ALL, Memory, assert_near, device_of, history, run, unsettled

CHANNELS, SIZE = 6, 4
LENGTHS = {"reference": (1, 5, CHUNK, 2 * CHUNK + 5), "triton": (1, CHUNK, CHUNK + 5)}
LENGTHS["cpu"] = LENGTHS["reference"]
MORE = {"reference": 24, "triton": 12, "cpu": 24}
"""Prompts, and how much further every sequence is decoded, which is across a boundary; less in the interpreter."""
DECAY = -torch.linspace(0.1, 4, CHANNELS * SIZE, dtype=torch.float64).reshape(CHANNELS, SIZE)
FORMS = [*(("reference", torch.float64, 1e-10, accept) for accept in ("none", "all", "mixed", "drafts")),
         *((form, torch.float32, 1e-5, accept) for form in ("triton", "cpu") for accept in ("mixed", "drafts")),
]  # fmt: skip
"""A variant, what it is tested in, how near it is to the definition (of the largest value), and what is accepted."""
Rows = tuple[Tensor, Tensor, Tensor, Tensor]


def rows_of(length: int, seed: int) -> Rows:
    """Inputs, steps, and the vectors by which the state is written and read, of one sequence."""
    generator = torch.Generator().manual_seed(seed)

    def normal(count: int) -> Tensor:
        return torch.randn(count, length, generator=generator, dtype=torch.float64)

    return normal(CHANNELS), normal(CHANNELS).exp(), normal(SIZE), normal(SIZE)


def whole(rows: Rows) -> Tensor:
    """The definition over a whole sequence."""
    x, dt, b, c = (part.unsqueeze(0) for part in rows)
    return selective_scan_reference(SelectiveScan(x, dt, DECAY, b, c))[0]


@pytest.mark.parametrize("gated", [True, False])
def test_it_is_the_function_of_transformers(gated: bool) -> None:
    x, dt, b, c = (part.unsqueeze(0).float() for part in rows_of(40, 0))
    d, bias = torch.linspace(0.5, 2, CHANNELS), torch.linspace(-2, 1, CHANNELS)
    given = {"D": d, "z": x.flip(2) if gated else None, "delta_bias": bias, "delta_softplus": True}
    theirs = mamba_selective_scan(x, dt, DECAY.float(), b, c, **given)
    exact = {name: part.double() if isinstance(part, Tensor) else part for name, part in given.items()}
    ours = mamba_hook(*(part.double() for part in (x, dt, DECAY.float(), b, c)), **exact)
    assert (theirs - ours).abs().max() <= 1e-5 * ours.abs().max()


def decode(
    form: str, dtype: torch.dtype, k: int, accept: str, cuts: int = 0, own: slice = ALL
) -> tuple[list[Tensor], Memory, Tensor]:
    """What sequences emit under a history, by default all of them, what they share, and the states."""
    prompts, more, device = LENGTHS[form], MORE[form], device_of(form)
    inputs = [tuple(x.to(device, dtype) for x in rows_of(n + more, seed)) for seed, n in enumerate(prompts)][own]
    plans = [[*history(n + more, n, k, accept, seed + cuts)] for seed, n in enumerate(prompts)][own]
    memory, decay = Memory([3, 0, 5, 2][: len(prompts)][own]), DECAY.to(device, dtype)
    (x, dt, _, _), rows = inputs[0], unsettled(k, accept)
    state = RECURRENT[torch.ops.specgraph.selective_scan.default].buffers([x[None], dt[None], decay], rows)
    buffers = [buffer.allocate({"B": 6}, device) for buffer in state]
    for buffer in buffers[1:]:
        buffer.fill_(torch.nan)
    buffers[0][[1, 4]] = torch.nan

    def call(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, span: Tensor) -> Tensor:
        return CACHED_SCAN.form(form)(x, dt, decay, b, c, *buffers, span.to(device))

    return run(inputs, plans, memory, call, 1), memory, buffers[0]


@pytest.mark.parametrize(
    ("form", "dtype", "near", "accept", "k"),
    [(*form, k) for form in FORMS for k in (0, 1, 3, 7) if form[3] == "mixed" or k == 3],
)
def test_any_history_gives_what_the_definition_gives(
    form: str, dtype: torch.dtype, near: float, accept: str, k: int
) -> None:
    """Mixed histories have every K; of the others, :func:`test_no_bit_depends_on_the_history` has more."""
    outs, memory, states = decode(form, dtype, k, accept)
    for seed, (out, row, length) in enumerate(zip(outs, memory.rows.tolist(), LENGTHS[form], strict=True)):
        rows = rows_of(length + MORE[form], seed)
        assert_near(out, whole(rows), near)
        # What the state at the boundary is, unit vectors read from it in a row that forgets and adds nothing.
        anchor = int(memory.settled[row]) // CHUNK * CHUNK
        x, dt, b, c = (part[:, :anchor] for part in rows)
        for index in range(SIZE):
            last = torch.zeros(SIZE, 1, dtype=c.dtype)
            last[index] = 1
            still, nothing = torch.zeros(CHANNELS, 1, dtype=c.dtype), torch.zeros(SIZE, 1, dtype=c.dtype)
            read = whole(tuple(torch.cat(pair, 1) for pair in ((x, still), (dt, still), (b, nothing), (c, last))))  # type: ignore[arg-type]
            assert_near(states[row, :, index], read[:, -1], near)
    assert states[[1, 4]].isnan().all()


@pytest.mark.parametrize("form", ["triton", "cpu"])
def test_no_bit_depends_on_the_history(form: str) -> None:
    wanted, _, _ = decode(form, torch.float32, 7, "all")
    for cuts, (k, accept) in enumerate([(0, "all"), (1, "none"), (3, "mixed"), (3, "drafts")]):
        outs, _, _ = decode(form, torch.float32, k, accept, cuts)
        assert all(torch.equal(a, b) for a, b in zip(outs, wanted, strict=True))
    # A program of Triton's sees one sequence, but a library's product has all rows of a call.
    for number, own in enumerate(wanted if form == "cpu" else ()):
        (alone,), _, _ = decode(form, torch.float32, 3, "mixed", own=slice(number, number + 1))
        assert torch.equal(alone, own)
