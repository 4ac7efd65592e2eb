"""What launches share: counters of arrivals."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from specgraph.kernels.launch import arrival_counters, new_counters, own_counters

CPU = torch.device("cpu")


def test_launches_on_a_device_share_counters_unless_they_are_given_their_own() -> None:
    shared, own, inner = arrival_counters(CPU), new_counters(CPU), new_counters(CPU)
    assert arrival_counters(CPU) is shared and not shared.any()
    with own_counters(own):
        assert arrival_counters(CPU) is own
        with own_counters(inner):
            assert arrival_counters(CPU) is inner
        with own_counters(None):
            assert arrival_counters(CPU) is own
    assert arrival_counters(CPU) is shared


def test_own_counters_end_with_an_error_and_serve_their_device_alone() -> None:
    shared = arrival_counters(CPU)
    with pytest.raises(KeyError), own_counters(new_counters(CPU)):
        raise KeyError
    with own_counters(new_counters(torch.device("meta"))):
        assert arrival_counters(CPU) is shared


def test_another_thread_keeps_the_shared_counters() -> None:
    seen: list[Tensor] = []
    with own_counters(new_counters(CPU)):
        thread = threading.Thread(target=lambda: seen.append(arrival_counters(CPU)))
        thread.start()
        thread.join()
    assert seen[0] is arrival_counters(CPU)
