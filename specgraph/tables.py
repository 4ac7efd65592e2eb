"""Tables as text, laid out by tabulate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from tabulate import tabulate


def text_table(
    rows: Iterable[Sequence[str]], header: Sequence[str] = (), *, align: Literal["left", "right"] = "left"
) -> str:
    """One line per row, columns two spaces apart, no rules; for people and for tools that split at spaces.

    Args:
        rows: the cells, all rows equally long.
        header: the names of the columns, which become the first line.
        align: the side on which the cells of a column stand.
    """
    # As a row of its own: around what it knows to be a header, tabulate leaves two more spaces.
    lines = [header, *rows] if header else list(rows)
    return tabulate(lines, tablefmt="plain", disable_numparse=True, stralign=align)


def markdown_table(rows: Iterable[Sequence[str]], header: Sequence[str]) -> str:
    """A Markdown table whose columns are padded, so that it reads well as plain text, too."""
    return tabulate(rows, header, tablefmt="github", disable_numparse=True)
