"""Tables as text, laid out by tabulate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from tabulate import tabulate


def text_table(
    rows: Iterable[Sequence[str]], header: Sequence[str] = (), *, align: Literal["left", "right"] = "left"
) -> str:
    """A table without lines between cells, with one line per row and two spaces between columns.

    Tools that split lines at spaces can read it, too.

    Args:
        rows: the cells; all rows have the same length.
        header: the names of the columns, which become the first line.
        align: the side to which the cells of a column are aligned.
    """
    # The header is passed as a row, because tabulate adds two more spaces around a header.
    lines = [header, *rows] if header else list(rows)
    return tabulate(lines, tablefmt="plain", disable_numparse=True, stralign=align)


def markdown_table(rows: Iterable[Sequence[str]], header: Sequence[str]) -> str:
    """A Markdown table with padded columns, which is easy to read as plain text, too."""
    return tabulate(rows, header, tablefmt="github", disable_numparse=True)
