"""Progress of long work, on standard error."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from tqdm import tqdm


class Progress:
    """A progress bar that appears only when work takes longer than two seconds.

    ``show`` None shows it on a terminal only.
    """

    def __init__(self, what: str, total: int, show: bool | None = None) -> None:
        hidden = not (sys.stderr.isatty() if show is None else show)
        self._bar: Any = tqdm(desc=what, total=total, delay=2.0, leave=False, disable=hidden)

    def advance(self, count: int = 1, doing: str | None = None) -> None:
        """Note that ``count`` more units are done, and what is done next."""
        if doing is not None:
            self._bar.set_postfix_str(doing)
        self._bar.update(count)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
