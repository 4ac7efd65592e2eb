"""Summaries of the functions that a graph calls: the first sentence of the text that documents each."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable

from torch import fx

from specgraph.ir.shapes import called
from specgraph.kernels.ops import find

_ROLE = re.compile(r":\w+:`~?(?:[\w.]*\.)?(\w+)`")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s")
_OUTSIDE = ("torch", "operator", "_operator", "builtins", "math")
"""Packages whose functions need no explanation."""


def summaries(nodes: Iterable[fx.Node]) -> dict[str, str]:
    """The sentence for every function that one of ``nodes`` calls, by the name that a listing has for it.

    Those of PyTorch and of Python are left out, and so are functions without a text.
    """
    functions = {called(node): node.target for node in nodes if node.op == "call_function"}
    found = {name: _documented(function) for name, function in functions.items()}
    return {name: sentence for name, text in found.items() if (sentence := _first_sentence(text))}


def _documented(function: object) -> str:
    """The text of a function, or of the arguments of an op of ours."""
    op = find(function)
    if op is not None:
        return inspect.getdoc(op.arguments) or ""
    module = getattr(function, "__module__", None) or "torch"
    return "" if module.partition(".")[0] in _OUTSIDE else inspect.getdoc(function) or ""


def _first_sentence(text: str) -> str:
    """It, on one line and without the marks of reStructuredText."""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    plain = _ROLE.sub(r"\1", paragraph).replace("``", "")
    return _SENTENCE_END.split(plain)[0] if plain else ""
