"""The products of few rows with weights of four bits on a CPU, and the layout that PyTorch's kernel for them has."""

from __future__ import annotations

import pytest
import torch

from specgraph.kernels.packed.few_rows import few_rows_int4, int4_tiles
from specgraph.kernels.packed.formats import FORMATS
from specgraph.kernels.packed.int4 import INT4
from tests.kernels.packed.definition import matrix, normal
from tests.kernels.rounding import assert_within


@pytest.mark.parametrize("group", [32, 64, 128, 256])
@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
def test_products_are_those_of_the_weight(group: int, has_bias: bool) -> None:
    weight = INT4.quantise(normal(64, 256, dtype=torch.bfloat16).cpu(), group)
    x = normal(2, 3, 256, dtype=torch.bfloat16, seed=2).cpu()
    bias = normal(64, dtype=torch.bfloat16, seed=3).cpu() if has_bias else None
    form = INT4.few_rows_form(weight, torch.bfloat16)
    assert form is not None and form[0] is few_rows_int4
    found, exact = few_rows_int4(x, *form[1], None), matrix("int4", weight)
    assert_within(found, x.double() @ exact.T, 258 * 2.0**-24 * (x.double().abs() @ exact.abs().T))
    if bias is not None:
        assert torch.equal(few_rows_int4(x, *form[1], bias), found + bias)
    for row in range(3):
        assert torch.equal(few_rows_int4(x[:, row : row + 1], *form[1]), found[:, row : row + 1])


def test_other_weights_have_no_such_form() -> None:
    words, scale = INT4.quantise(normal(64, 256, dtype=torch.bfloat16).cpu(), 32)
    assert int4_tiles(words, scale, torch.bfloat16) is not None
    assert int4_tiles(words, scale.float(), torch.bfloat16) is not None
    assert int4_tiles(words, scale.float() * 1.001, torch.bfloat16) is None  # would be rounded
    assert int4_tiles(words, scale, torch.float32) is None
    assert int4_tiles(words[:33], scale[:33], torch.bfloat16) is None
    assert int4_tiles(*INT4.quantise(normal(64, 256).cpu().bfloat16(), 16), torch.bfloat16) is None
    for name in ("mxfp4", "fp8_blocks"):
        assert FORMATS[name].few_rows_form([words, scale], torch.bfloat16) is None
