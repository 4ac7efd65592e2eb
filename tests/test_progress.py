"""Progress: a bar on a terminal, lines elsewhere, nothing for short work."""

from __future__ import annotations

import io
import re

import pytest

from specgraph.progress import Progress


class Terminal(io.StringIO):
    """A standard error that a bar can be redrawn on."""

    def isatty(self) -> bool:
        return True


def _terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Called in the test itself, because pytest puts its own standard error in place after the fixtures have run."""
    stderr = Terminal()
    monkeypatch.setattr("sys.stderr", stderr)
    for name, value in (("COLUMNS", "100"), ("LINES", "40")):
        monkeypatch.setenv(name, value)
    return stderr


def _without_times(lines: str) -> list[str]:
    return [re.sub(r"\d\d:\d\d<(\d\d:\d\d|\?)", "T", line) for line in lines.splitlines()]


def _work(show: bool | None, *, after: float = 0.0, keep: bool = False) -> list[str]:
    """Four units; returns the notes that were asked for as functions."""
    asked: list[str] = []

    def costly() -> str:
        asked.append("costly")
        return "costly"

    with Progress("target", 4, show, done=1, after=after, keep=keep) as progress:
        progress.advance(0, "starting")
        progress.advance(1, costly)
        progress.advance(2, "loss 1.5")
    return asked


@pytest.mark.parametrize("show", [None, False])
def test_nothing_is_shown_where_no_bar_can_be_redrawn(show: bool | None, capsys: pytest.CaptureFixture[str]) -> None:
    assert _work(show) == []
    assert capsys.readouterr() == ("", "")


def test_lines_when_they_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """Texts appear at once; a function waits for the next line, which is ten seconds away, or the end."""
    assert _work(True) == []
    shown = capsys.readouterr()
    assert shown.out == ""
    assert _without_times(shown.err) == ["target 1/4 [T]", "target 1/4 [T, starting]", "target 4/4 [T, loss 1.5]"]


@pytest.mark.parametrize("show", [None, True])
def test_a_bar_on_a_terminal(show: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _terminal(monkeypatch)
    _work(show, keep=True)
    drawn = terminal.getvalue()
    assert drawn.count("\n") == 1 and drawn.endswith("\n")
    assert "loss 1.5" in drawn.split("\r")[-1] and "100%" in drawn.split("\r")[-1]


def test_a_bar_that_is_not_kept_leaves_an_empty_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _terminal(monkeypatch)
    with Progress("compile", 2, after=0.0) as progress:
        progress.advance(1, "passes")
    *_, blank, end = terminal.getvalue().split("\r")
    assert "passes" in terminal.getvalue() and blank.strip() == end == ""


@pytest.mark.parametrize("show", [None, True])
def test_short_work_shows_nothing(show: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _terminal(monkeypatch)
    _work(show, after=3600.0, keep=True)
    assert terminal.getvalue() == ""


def test_a_function_is_asked_when_its_note_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _terminal(monkeypatch)
    with Progress("target", 2, after=0.0) as progress:
        progress._bar.mininterval = 3600.0
        progress.advance(1, lambda: "too early")
        progress.advance(1, lambda: "at the end")
    assert "at the end" in terminal.getvalue() and "too early" not in terminal.getvalue()
