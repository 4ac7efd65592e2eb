from __future__ import annotations

import pytest
import torch

from specgraph.ir.tensors import equal_tensors


@pytest.mark.parametrize("limit", [1, 7, 100])
def test_equal_means_every_element_whatever_the_parts(limit: int) -> None:
    a = torch.arange(60.0).reshape(3, 4, 5)
    assert equal_tensors(a, a.clone().transpose(0, 2).contiguous().transpose(0, 2), limit)
    for place in ((0, 0, 0), (1, 2, 3), (2, 3, 4)):
        b = a.clone()
        b[place] += 1e-5 + 1e-5 * b[place]
        assert not equal_tensors(a, b, limit)


def test_what_is_never_equal() -> None:
    a = torch.ones(4)
    assert not equal_tensors(a, torch.ones(2, 2))
    assert not equal_tensors(a, torch.ones(5))
    assert not equal_tensors(a, a.double())
    assert not equal_tensors(a, torch.empty(4, device="meta"))
    assert not equal_tensors(a * torch.nan, a * torch.nan)


def test_zeros_of_either_sign_and_empty_tensors_are_equal() -> None:
    assert equal_tensors(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert equal_tensors(torch.ones(0, 3), torch.ones(0, 3))


def test_float8_is_compared_in_another_type() -> None:
    a = torch.tensor([0.5, 1.0, 2.0]).to(torch.float8_e4m3fn)
    assert equal_tensors(a, a.clone())
    assert not equal_tensors(a, torch.tensor([0.5, 1.0, 4.0]).to(torch.float8_e4m3fn))
