"""The part of a message that names the path which a wrong path most likely stands for."""

from __future__ import annotations

import difflib
import os
from pathlib import Path


def did_you_mean_path(path: str | Path) -> str:
    """The text ``" (did you mean 'a/b'?)"`` for a path that does not exist, or an empty text if none is similar.

    From left to right, each part that its folder does not have is replaced by the most similar name that it has.
    """
    given, near = Path(path).expanduser(), Path()
    for part in given.parts:
        if not (near / part).exists():
            close = difflib.get_close_matches(part, _names(near), 1)
            if not close:
                return ""
            part = close[0]
        near /= part
    return "" if near == given else f" (did you mean {str(near)!r}?)"


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:  # a file, or a folder that may not be read
        return []
