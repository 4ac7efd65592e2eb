"""The selective scan: what transformers computes, row after row, and from a state with cached rows in any history."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.mamba.modeling_mamba import mamba_selective_scan

from specgraph.frontend.recurrent import mamba_hook
from specgraph.kernels.recurrent.scan import (
    CHUNK,
    AnchoredScan,
    SelectiveScan,
    anchored_scan_reference,
    selective_scan_reference,
)
from specgraph.kernels.state import RECURRENT
from tests.kernels.recurrent.histories import Memory, history, run

CHANNELS, SIZE, LENGTHS = 6, 4, (1, 5, CHUNK, 2 * CHUNK + 5)
DECAY = -torch.linspace(0.1, 4, CHANNELS * SIZE, dtype=torch.float64).reshape(CHANNELS, SIZE)
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


@pytest.mark.parametrize("accept", ["none", "all", "mixed"])
@pytest.mark.parametrize("k", [0, 1, 3, 7])
def test_any_history_gives_what_the_definition_gives(k: int, accept: str) -> None:
    inputs = [rows_of(length + 24, seed) for seed, length in enumerate(LENGTHS)]
    plans = [[*history(n + 24, n, k, accept, seed)] for seed, n in enumerate(LENGTHS)]
    memory = Memory([3, 0, 5, 2])
    x, dt, _, _ = inputs[0]
    form = RECURRENT[torch.ops.specgraph.selective_scan.default]
    buffers = [b.allocate({"B": 6}, "cpu") for b in form.buffers([x[None], dt[None], DECAY], k)]
    for buffer in buffers[1:]:
        buffer.fill_(torch.nan)
    buffers[0][[1, 4]] = torch.nan

    def call(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, span: Tensor) -> Tensor:
        return anchored_scan_reference(AnchoredScan(x, dt, DECAY, b, c, *buffers, span))

    outs = run(inputs, plans, memory, call, 1)
    for rows, out, row in zip(inputs, outs, memory.rows.tolist(), strict=True):
        torch.testing.assert_close(out, whole(rows), rtol=1e-10, atol=1e-12)
        # What the state at the boundary is, unit vectors read from it in a row that forgets and adds nothing.
        anchor = int(memory.settled[row]) // CHUNK * CHUNK
        x, dt, b, c = (part[:, :anchor] for part in rows)
        for index in range(SIZE):
            last = torch.zeros(SIZE, 1, dtype=c.dtype)
            last[index] = 1
            still, nothing = torch.zeros(CHANNELS, 1, dtype=c.dtype), torch.zeros(SIZE, 1, dtype=c.dtype)
            read = whole(tuple(torch.cat(pair, 1) for pair in ((x, still), (dt, still), (b, nothing), (c, last))))  # type: ignore[arg-type]
            torch.testing.assert_close(buffers[0][row, :, index], read[:, -1], rtol=1e-10, atol=1e-12)
    assert buffers[0][[1, 4]].isnan().all()
