"""Spans and what is settled behind them: the Triton form is the reference, number for number."""

from __future__ import annotations

import pytest
import torch

from specgraph.kernels.recurrent.span import RECURRENT_SPAN, SETTLE_SPAN
from tests.kernels.recurrent.histories import DEVICE


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_the_triton_form_is_the_reference(batch: int) -> None:
    draw = torch.Generator().manual_seed(batch)

    def numbers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=draw).to(DEVICE)

    for width in (1, 4):
        settled, rows = numbers(0, 50, 9), torch.randperm(9, generator=draw)[:batch].to(DEVICE)
        rows[1::3] = -1
        positions = numbers(0, 50, batch, 1) + torch.arange(width, device=DEVICE)
        given = (settled, rows, positions, numbers(0, width + 1, batch), numbers(0, 5, batch), numbers(20, 60, batch))
        span, wanted = (RECURRENT_SPAN.form(form)(*given) for form in ("triton", "reference"))
        after = [settled.clone(), settled.clone()]
        for own, form in zip(after, ("triton", "reference"), strict=True):
            SETTLE_SPAN.form(form)(own, span)
        assert torch.equal(span, wanted)
        assert torch.equal(*after)
