"""Says which line of a model's source a traced node comes from."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
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
        if is_models(file):
            return f"{_short(file)}:{number}: {code.strip()}"
    return None


@functools.lru_cache(maxsize=1024)
def is_models(file: str) -> bool:
    """Whether a source file is neither PyTorch's nor one of tracing."""
    return not file.startswith(("torch/", _TORCH, *_HOOKS))


@functools.lru_cache(maxsize=1024)
def _short(file: str) -> str:
    """The path of a file from its topmost package on, which is the same on every machine."""
    path = top = Path(file)
    while (top.parent / "__init__.py").is_file():
        top = top.parent
    return path.relative_to(top.parent).as_posix()
