"""The script that tables acceptance by the length of the context: its texts, and a run of the smallest sizes."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest

from benchmarks.long_contexts import PAD, SUCCESSORS, VOCAB, Texts, main


def test_a_share_of_every_text_repeats_what_stood_before() -> None:
    """By chance, eight tokens in a row occur twice in few places of a text."""
    for copied, least, most in ((0.0, 0.0, 0.02), (0.6, 0.4, 0.65)):
        texts, again = Texts(copied, seed=3).draw(8, 4096).numpy(), []
        assert texts.min() > PAD and texts.max() < VOCAB and not (texts[0] == texts[1]).all()
        for text in texts:
            runs = [tuple(run) for run in np.lib.stride_tricks.sliding_window_view(text, 8).tolist()]
            again.append(1 - len({*runs}) / len(runs))
        assert least <= sum(again) / len(again) <= most
    after: dict[int, set[int]] = {}
    for text in Texts(0.0).draw(40, 2048).tolist():
        for token, following in itertools.pairwise(text):
            after.setdefault(token, set()).add(following)
    assert max(map(len, after.values())) == SUCCESSORS


def test_a_run_prints_a_line_for_every_draft_window_and_length(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "heads=[eagle3] contexts=[24,48] window=8 length=64 head_length=32 row_tokens=64 target_seconds=0.1 "
    words += "head_seconds=0.1 hidden_size=64 layers=3 steps=2 batch=2"
    monkeypatch.setattr(sys, "argv", ["long_contexts", *words.split()])
    main()
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()]
    expected = [("none", "-"), ("eagle3", "-"), ("eagle3", "8")]
    assert [tuple(cells[:3]) for cells in lines[2:]] == [
        (*kind, length) for kind in expected for length in ("24", "48")
    ]
    assert all(1 <= float(cells[3]) <= 5 and float(cells[4]) > 0 for cells in lines[2:])
