"""Shows the progress of long work on standard error, by tqdm."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, TextIO

from tqdm import tqdm
from transformers.utils import logging

_LINE = "{desc} {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
"""The format of a line where a bar cannot be redrawn. tqdm puts a comma before the note."""

Note = str | Callable[[], str]


class Progress:
    """The progress of one piece of work: a bar on a terminal, and a line every ten seconds in a log file."""

    def __init__(
        self, what: str, total: int, show: bool | None = None, *, done: int = 0, after: float = 2.0, keep: bool = False
    ) -> None:
        """Begin; nothing is shown yet.

        Args:
            what: one or two words that name the work.
            total: the number of units of work.
            show: whether to show anything; None shows progress on a terminal only.
            done: the number of units that an earlier run did, if this one continues it.
            after: the seconds that must pass before anything is shown, so that short work shows nothing.
            keep: whether the bar stays on the screen when the work ends. Lines always stay.
        """
        terminal = sys.stderr.isatty()
        hidden = not (terminal if show is None else show)
        extent: dict[str, Any] = {"total": total, "initial": done, "miniters": 0}
        style = _bar_style(keep) if terminal else _line_style()
        self._bar: Any = tqdm(desc=what, disable=hidden, delay=after, **extent, **style)

    def advance(self, count: int = 1, note: Note | None = None) -> None:
        """Say that ``count`` more units are done.

        Args:
            count: the number of units; 0 changes only the note.
            note: what is done next, or what was measured. A text is shown at once, and so is the end of the work. A
                function is called only when the display is due, so that it may do something slow, such as waiting for
                a GPU.
        """
        bar = self._bar
        if bar.disable:
            return
        urgent = isinstance(note, str) or bar.n + count >= bar.total
        if note is not None and self._due(0.0 if urgent else bar.mininterval):
            bar.set_postfix_str(note if isinstance(note, str) else note(), refresh=False)
        if not bar.update(count) and urgent and self._due(0.0):
            bar.refresh()

    def _due(self, interval: float) -> bool:
        """Whether the first seconds are over and the display is older than ``interval`` seconds."""
        bar, now = self._bar, time.time()
        return bool(now >= bar.start_t + bar.delay and now - bar.last_print_t >= interval)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()


def _bar_style(keep: bool) -> dict[str, Any]:
    """How tqdm draws on a terminal."""
    return {"mininterval": 0.1, "leave": keep}


def _line_style() -> dict[str, Any]:
    """How tqdm draws elsewhere. No bar is erased at the end."""
    return {"mininterval": 10.0, "leave": False, "position": 0, "bar_format": _LINE, "file": _Lines(sys.stderr)}


class _Lines:
    """A file for tqdm that writes every drawing of a bar as a separate line."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> None:
        line = text.strip()
        if line:
            self._file.write(line + "\n")

    def flush(self) -> None:
        self._file.flush()


@contextlib.contextmanager
def progress_bars(wanted: bool) -> Iterator[None]:
    """A context that hides transformers' own progress bars unless they are ``wanted`` and can be redrawn."""
    shown = logging.is_progress_bar_enabled()
    if not wanted:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
