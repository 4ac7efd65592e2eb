"""Progress of long work on stderr."""

import sys
import time


class Progress:
    """One line per task: rewritten in place on a terminal, repeated every ``every`` seconds elsewhere."""

    def __init__(self, label: str, total: int, every: float = 10.0) -> None:
        self.label, self.total, self.every = label, total, every
        self.start = self.shown = time.monotonic()
        self.live = sys.stderr.isatty()

    def due(self) -> bool:
        """Whether a new line is wanted: ask before computing what it would say."""
        return time.monotonic() - self.shown > (0.2 if self.live else self.every)

    def show(self, done: int, note: str = "") -> None:
        """Print ``done`` of the total, the time so far and a note."""
        self.shown = time.monotonic()
        line = f"{self.label} {done}/{self.total} {self.shown - self.start:.0f}s {note}".rstrip()
        end = "\n" if not self.live or done >= self.total else ""
        print(f"\r\033[K{line}" if self.live else line, end=end, file=sys.stderr, flush=True)
