"""Angles of rotary embeddings: the Triton form, accuracy at long contexts, and what a row may not depend on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specgraph.kernels.attention.rotary import LAYOUTS, ROTARY_ANGLES

rotary_angles, rotary_angles_reference = (ROTARY_ANGLES.form(name) for name in ("triton", "reference"))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FURTHEST = 131071


def frequencies(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (500000.0 ** -(torch.arange(count, dtype=torch.float64) / count)).to(dtype)


def at(*positions: int) -> Tensor:
    return torch.tensor([positions])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [1, 3, 40, 64])
@pytest.mark.parametrize(("exact", "dtype"), [
    (torch.float32, torch.bfloat16), (torch.float32, torch.float32), (torch.float64, torch.float64),
    (torch.bfloat16, torch.float16),
])  # fmt: skip
def test_the_kernel_gives_the_reference(layout: str, count: int, exact: torch.dtype, dtype: torch.dtype):
    positions, inv_freq = torch.tensor([[0, 1, 77, -3], [FURTHEST, 4095, 5, -1]]), frequencies(count, exact)
    options = {"dtype": dtype, "scaling": 1.25, "layout": layout, "max_position": 100000}
    found = rotary_angles(positions.to(DEVICE), inv_freq.to(DEVICE), **options)
    for a, b in zip(found, rotary_angles_reference(positions, inv_freq, **options), strict=True):
        assert a.shape == b.shape == (2, 4, count * (1 if layout == "once" else 2)) and a.dtype == dtype
        # Different libraries round the last place of float32 differently; the argument is the same.
        scale = 2 * torch.finfo(torch.float32 if dtype == torch.float32 else dtype).eps
        torch.testing.assert_close(a.cpu(), b, rtol=scale, atol=scale if exact != torch.float64 else 1e-15)


def test_arguments_of_long_contexts_are_reduced_accurately():
    positions, inv_freq = at(*range(FURTHEST - 64, FURTHEST + 1)), frequencies(64)
    cos, sin = rotary_angles(positions.to(DEVICE), inv_freq.to(DEVICE), dtype=torch.float32)
    angles = (positions.float().unsqueeze(2) * inv_freq).double()
    for found, exact in ((cos, angles.cos()), (sin, angles.sin())):
        error = (found.cpu()[..., :64].double() - exact).abs().max()
        assert error < 2 * torch.finfo(torch.float32).eps


def test_a_row_is_the_same_among_any_others():
    positions, inv_freq = torch.randint(FURTHEST, (7, 9)), frequencies(64)
    whole = rotary_angles(positions.to(DEVICE), inv_freq.to(DEVICE), dtype=torch.bfloat16)
    for b, t in ((0, 0), (3, 8), (6, 4)):
        alone = rotary_angles(positions[b : b + 1, t : t + 1].to(DEVICE), inv_freq.to(DEVICE), dtype=torch.bfloat16)
        assert all(torch.equal(one[0, 0], many[b, t]) for one, many in zip(alone, whole, strict=True))


def test_columns_follow_the_layout_and_positions_the_limit():
    inv_freq = torch.tensor([1.0, 0.5])
    cosines = {n: rotary_angles_reference(at(2), inv_freq, dtype=torch.float64, layout=n)[0] for n in LAYOUTS}
    one, two = (torch.tensor(x).cos().item() for x in (2.0, 1.0))
    assert cosines["halves"].flatten().tolist() == pytest.approx([one, two, one, two])
    assert cosines["pairs"].flatten().tolist() == pytest.approx([one, one, two, two])
    assert cosines["once"].flatten().tolist() == pytest.approx([one, two])
    far, limit = (rotary_angles_reference(at(p), inv_freq, dtype=torch.float32, max_position=9)[1] for p in (50, 9))
    assert torch.equal(far, limit)
    early, zero = (rotary_angles_reference(at(p), inv_freq, dtype=torch.float32, max_position=9)[0] for p in (-2, 0))
    assert torch.equal(early, zero)


def test_no_rows():
    cos, sin = rotary_angles(torch.zeros(2, 0, dtype=torch.int64), frequencies(4), dtype=torch.float32)
    assert cos.shape == sin.shape == (2, 0, 8)


def test_the_op_is_registered_as_it_behaves():
    args = (torch.tensor([[3, 4]], device=DEVICE), frequencies(4).to(DEVICE))
    for layout in LAYOUTS:
        options = {"dtype": torch.bfloat16, "scaling": 2.0, "layout": layout}
        torch.library.opcheck(
            torch.ops.specgraph.rotary_angles, args, options, test_utils=("test_schema", "test_faketensor")
        )


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="layout must be one of halves, pairs, once; got 'odd'"):
        rotary_angles(at(1), frequencies(2), dtype=torch.float32, layout="odd")
    with pytest.raises(ValueError, match=r"positions must be \[B, T\], not \["):
        rotary_angles(at(1)[0], frequencies(2), dtype=torch.float32)
    with pytest.raises(ValueError, match=r"inv_freq must be \[F\], not"):
        rotary_angles(at(1), at(1), dtype=torch.float32)
