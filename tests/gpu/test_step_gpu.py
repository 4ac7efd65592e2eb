"""Everything that step graphs call runs without waiting for the device, and in a CUDA graph, as it does on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specgraph.kernels.step import ngram_lookup
from tests.gpu.capture import captured, no_synchronisation
from tests.kernels.step.step_cases import moved, run_case, step_cases, tensors

CASES = step_cases()


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    """Ids bit for bit; a logarithm of a GPU may differ from a CPU's in its last bits."""
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        tolerance = 1e-6 if b.is_floating_point() else 0
        torch.testing.assert_close(a.cpu(), b, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("name", CASES)
def test_it_does_not_wait_and_gives_what_a_cpu_gives(name: str) -> None:
    expected = run_case(moved(CASES[name], "cpu"))
    case = moved(CASES[name], "cuda")
    with no_synchronisation():
        found = run_case(case)
    assert_same(found, expected)


@pytest.mark.parametrize("name", CASES)
def test_it_runs_in_a_graph_on_new_values(name: str) -> None:
    expected = run_case(moved(CASES[name], "cpu"))
    run_case(moved(CASES[name], "cuda"))
    case, fresh = moved(CASES[name], "cuda"), moved(CASES[name], "cuda")
    for tensor in tensors(case[1:]):
        tensor.zero_()  # what it is captured on must not matter
    graph, found = captured(lambda: run_case(case))
    for _ in range(2):
        for tensor, value in zip(tensors(case[1:]), tensors(fresh[1:]), strict=True):
            tensor.copy_(value)
        graph.replay()
    assert_same(found, expected)


def test_a_lookup_runs_in_a_graph_for_any_sequences() -> None:
    history = torch.randint(0, 3, (6, 64), generator=torch.Generator().manual_seed(0))
    length, rows = torch.tensor([64, 40, 2, 0]), torch.tensor([5, 0, -1, 3])
    options = {"num_speculative_tokens": 3, "max_ngram": 3, "min_ngram": 1}
    expected = ngram_lookup(history, rows, length, **options)
    history, rows, length = history.cuda(), rows.cuda(), length.cuda()
    with no_synchronisation():
        found = ngram_lookup(history, rows, length, **options)
    graph, again = captured(lambda: ngram_lookup(history, rows, length, **options))
    graph.replay()
    assert torch.equal(found.cpu(), expected) and torch.equal(again.cpu(), expected)
