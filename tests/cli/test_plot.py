"""``generate plot=...``: how often each draft position was accepted, as a picture."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from specgraph.cli import commands, main
from specgraph.plots import plot_acceptance

pytestmark = pytest.mark.usefixtures("cached_decoders")
QUICK = ["debug.self_check=false", "max_new_tokens=8", "lowering=eager", "dtype=float64"]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, list[float]]]:
    """The curves of every picture, which is drawn, too."""
    found = []

    def draw(path: str, title: str, curves: Mapping[str, Sequence[float]]) -> None:
        found.append({name: list(shares) for name, shares in curves.items()})
        plot_acceptance(path, title, curves)

    monkeypatch.setattr(commands, "plot_acceptance", draw)
    return found


def run(model: Path, *further: str) -> int:
    return main(["generate", f"model={model}", "prompt=one two one two one", *QUICK, *further])


def shares(shown: str) -> list[list[str]]:
    lines = [line for line in shown.splitlines() if line.startswith("accepted per position")]
    return [line.split()[3:] for line in lines]


def test_a_picture_has_the_numbers_of_the_table(
    model: Path, tmp_path: Path, drawn: list[dict[str, list[float]]], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "acceptance.svg"
    assert run(model, f"plot={file}", "draft.num_speculative_tokens=3") == 0
    shown = capsys.readouterr().out
    assert re.search(rf"^plot +{re.escape(str(file))}$", shown, re.MULTILINE)
    assert [[f"{share:.2f}" for share in drawn[0]["ngram, K = 3, strict"]]] == shares(shown)
    assert "ngram, K = 3, strict" in file.read_text()


def test_the_jobs_of_a_sweep_share_a_picture_and_the_next_call_begins_anew(
    model: Path, tmp_path: Path, drawn: list[dict[str, list[float]]]
) -> None:
    file = f"plot={tmp_path / 'acceptance.png'}"
    assert run(model, "-m", file, "draft.num_speculative_tokens=1,2") == 0
    one, two = "ngram, K = 1, strict", "ngram, K = 2, strict"
    assert [[*curves] for curves in drawn] == [[one], [one, two]]
    assert [len(curve) for curve in drawn[-1].values()] == [1, 2]
    assert run(model, file) == 0
    assert [*drawn[-1]] == ["ngram, K = 4, strict"]


def test_without_drafts_nothing_is_drawn_and_the_table_says_so(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model, f"plot={tmp_path / 'acceptance.png'}", "draft=none") == 0
    assert "not drawn, since there are no drafts" in capsys.readouterr().out
    assert not (tmp_path / "acceptance.png").exists()


@pytest.mark.parametrize(
    ("plot", "message"),
    [
        ("a.gif", "plot=a.gif: a plot ends in .png, .svg or .pdf."),
        ("no/such/folder/a.png", "plot=no/such/folder/a.png: there is no folder for that file; create it first."),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_anything_runs(
    model: Path, plot: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model, f"plot={plot}") == 2
    shown = capsys.readouterr()
    assert shown.err == f"error: {message}\n" and not shown.out
