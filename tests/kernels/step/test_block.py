"""The rows of a block: what they are, and the Triton form against plain PyTorch."""

from __future__ import annotations

import pytest
import torch

from specgraph.kernels.ops import OPS
from specgraph.kernels.step.block import block_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_a_block_is_the_newest_token_and_masks_at_the_positions_behind_it() -> None:
    emitted = torch.tensor([[4, 5, 6], [7, -1, -1], [-1, -1, -1], [8, 99, -1]])
    start, count = torch.tensor([10, 0, 3, 20]), torch.tensor([3, 1, 0, 2])
    tokens, positions = block_rows(emitted, start, count, mask_token_id=50, count=2, vocab_size=60)
    assert tokens.tolist() == [[6, 50, 50], [7, 50, 50], [0, 50, 50], [59, 50, 50]]
    assert positions.tolist() == [[13, 14, 15], [1, 2, 3], [3, 4, 5], [22, 23, 24]]


@pytest.mark.parametrize(("batch", "width", "count"), [(1, 1, 1), (5, 4, 3), (3, 9, 7), (2, 3, 16), (0, 2, 1)])
def test_the_triton_form_is_the_definition(batch: int, width: int, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    num_emitted = torch.randint(0, width + 1, (batch,), generator=generator)
    emitted = torch.randint(0, 90, (batch, width), generator=generator)
    emitted = torch.where(torch.arange(width) < num_emitted.unsqueeze(1), emitted, -1)
    given = (emitted, torch.randint(0, 999, (batch,), generator=generator), num_emitted)
    options = {"mask_token_id": 77, "count": count, "vocab_size": 80}
    expected = OPS["block_rows"].form("reference")(*given, **options)
    found = OPS["block_rows"].form("triton")(*(x.to(DEVICE) for x in given), **options)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))
