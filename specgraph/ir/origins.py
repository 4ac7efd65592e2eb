"""Says which line of a model's source a traced node comes from."""

from __future__ import annotations

import functools
import re
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch

_FRAME = re.compile(r'File "(.+)", line (\d+), in .*\n\s*(.+)')
_TORCH = str(Path(torch.__file__).parent)
_HOOKS = tuple(str(Path(__file__).parents[1] / folder) for folder in ("frontend", "ir"))
"""Where the functions are that tracing puts into a model, such as the one in the place of its attention."""


def model_line(meta: Mapping[str, Any]) -> str | None:
    """The innermost line of the call stack that is neither PyTorch's nor of tracing: ``package/file.py:12: code``.

    ``meta`` is the ``meta`` of a node, where torch.export keeps the stack. None if it has none, as most nodes that a
    pass has made.
    """
    for file, number, code in reversed(_FRAME.findall(meta.get("stack_trace") or "")):
        if _is_models(file):
            return f"{_short(file)}:{number}: {code.strip()}"
    return None


class ModelFrames:
    """Of the call stack where it is made, the frames that :func:`model_line` needs.

    They are the innermost one that is a model's, and the ``forward`` that it belongs to, without which torch.fx takes
    no stack. To note every frame takes a tenth of an export.
    """

    def __init__(self) -> None:
        innermost: FrameType | None = sys._getframe(1)
        while innermost is not None and not _is_models(innermost.f_code.co_filename):
            innermost = innermost.f_back
        forward = innermost
        while forward is not None and forward.f_code.co_name != "forward":
            forward = forward.f_back
        frames = [] if forward is None else [forward] if forward is innermost else [forward, innermost]
        self._frames = [_summary(frame) for frame in frames if frame is not None]

    def summary(self) -> traceback.StackSummary:
        return traceback.StackSummary.from_list(self._frames)


def _summary(frame: FrameType) -> traceback.FrameSummary:
    return traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, lookup_line=False)


@functools.lru_cache(maxsize=1024)
def _is_models(file: str) -> bool:
    """Whether a source file is neither PyTorch's nor one of tracing."""
    return not file.startswith(("torch/", _TORCH, *_HOOKS))


@functools.lru_cache(maxsize=1024)
def _short(file: str) -> str:
    """The path of a file from its topmost package on, which is the same on every machine."""
    path = top = Path(file)
    while (top.parent / "__init__.py").is_file():
        top = top.parent
    return path.relative_to(top.parent).as_posix()
