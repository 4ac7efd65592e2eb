"""The soak on the CPU, and leaks that it must find."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.soak import MOST, Growth, Held, Requests, Sample, main, soak, soak_text
from specgraph import SpeculativeDecoder
from specgraph.errors import SpecgraphError
from specgraph.runtime.execution.engine import Engine
from specgraph.runtime.memory.pages import PagePool, Reservation
from tests.decoding import compiled
from tests.models import shared_model

COUNT = 80
"""The first request that is refused is number 78."""


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    cache = {"prefill_chunk": 7, "block_size": 4, "pool_tokens": 96}
    return compiled(
        shared_model("llama", dtype=torch.float64), "ngram", 3, max_batch_size=3, max_length=96, cache=cache
    )


def test_nothing_stays_behind(decoder: SpeculativeDecoder) -> None:
    row = soak(decoder, 3, COUNT)
    # Resident memory is the whole process's. So few requests cannot leak as much of it as the threads and the caches of
    # other tests take, while every object and every block that they leave is counted.
    assert [fault for fault in row.faults() if not fault.startswith("resident bytes")] == [] and row.differing == 0
    assert row.refused + sum(row.ended.values()) == row.requests == COUNT
    assert row.refused and {*row.ended} == {"eos", "length", "cancelled"}
    assert row.compared == COUNT - row.refused
    shown = soak_text(row)
    assert "free rows                3 of 3" in shown and "free pages               24 of 24" in shown


def test_objects_that_stay_are_found(decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    leave = Engine._leave

    def keep(self: Engine, sequence: Any) -> None:
        kept.append(sequence)
        leave(self, sequence)

    monkeypatch.setattr(Engine, "_leave", keep)
    (fault,) = (fault for fault in soak(decoder, 3, COUNT // 2).faults() if "objects of" in fault)
    assert "grew from" in fault


def test_pages_that_stay_and_other_tokens_are_found(
    decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_back, once = PagePool.give_back, iter([1])

    def lose(self: PagePool, reserved: Reservation) -> None:
        lost = next(once, 0) if self.count == 24 else 0
        give_back(self, Reservation(reserved.pages[lost:], epoch=reserved.epoch))

    monkeypatch.setattr(PagePool, "give_back", lose)
    monkeypatch.setattr("benchmarks.soak._alone", lambda decoder, request: [7] * (MOST + 1))
    faults = soak(decoder, 3, 20).faults()
    assert "3 of 3 rows and 23 of 24 pages are free" in faults
    assert any(fault.endswith("requests got other tokens than alone") for fault in faults)


def test_growth_is_judged_by_the_number_of_requests() -> None:
    before = Held(Counter(a=10, b=10), 1000, 1 << 20, 0)
    after = Held(Counter(a=10, b=261), 1000, 1 << 24, 2 << 20)
    found = {growth.name: growth for growth in after.growth(before, 16000)}
    assert {name for name, growth in found.items() if growth.leaks} == {"bytes on the GPU", "objects of b"}
    assert found["objects of b"] == Growth("objects of b", 10, 261, 160)
    assert found["resident bytes"].allowed == 16 << 20 and found["bytes on the GPU"].allowed == 1 << 20


def test_requests_repeat_and_a_sample_holds_their_tokens() -> None:
    requests = Requests(50, 96, [3, 4, 5, 6])
    assert requests.get(9) == requests.get(9) != requests.get(10)
    assert 0 < sum(map(requests.refused, range(1000))) < 50
    sample = Sample([4, 9])
    for number, tokens, cancelled in ((4, [1, 2], False), (5, [8], False), (4, [3], False), (9, [6], True)):
        sample.add(number, tokens, cancelled=cancelled)
    assert not sample.differs(4, [1, 2, 3]) and sample.differs(4, [1, 2, 3, 4]) and sample.differs(4, [1, 2])
    assert not sample.differs(9, [6, 7]) and sample.differs(9, [7, 6])


def test_the_script_prints_and_writes_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["target=tiny-shape", "device=cpu", "dtype=float64", "draft=none", "max_batch_size=2", "num_requests=6"]
    (row,) = main([*given, f"json={tmp_path / 'a.json'}"])
    assert "free rows                2 of 2" in capsys.readouterr().out
    (written,) = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert row.requests == written["requests"] == 6 and row.capacity.free_pages == row.capacity.pages == 4
    monkeypatch.setattr("benchmarks.soak._alone", lambda decoder, request: [7] * (MOST + 1))
    with pytest.raises(SpecgraphError, match="soak of 6 requests failed"):
        main(given)
