"""The fenced blocks of a Markdown page."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FENCE = "```"


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: its file.
        line: the number of its first line behind the fence, from 1.
        language: what stands behind the fence.
        text: what is in it.
        section: the number of headings in front of it.
    """

    page: Path
    line: int
    language: str
    text: str
    section: int

    @property
    def place(self) -> str:
        """What failures call it."""
        return f"{self.page.name}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    found, open_at, language, body, section = [], 0, "", [""], 0
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if not line.lstrip().startswith(FENCE):
            body.append(line)
            section += line.startswith("#") and not open_at
        elif not open_at:
            open_at, language, body = number + 1, line.strip()[len(FENCE) :].strip(), []
        else:
            assert line.strip() == FENCE, f"{page.name}:{number} opens a block inside of the one of line {open_at}"
            found.append(Block(page, open_at, language, "\n".join(body) + "\n", section))
            open_at = 0
    assert not open_at, f"{page.name}:{open_at} opens a block that does not end"
    return found


def commands_of(text: str) -> Iterator[list[str]]:
    """The commands of a shell block as lists of words, without comments. Quotes may hold new lines."""
    pending = ""
    for line in text.splitlines():
        pending += line
        if pending.endswith("\\"):
            pending = pending[:-1] + " "
            continue
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # a quotation that goes on in the next line
            pending += "\n"
            continue
        pending = ""
        if words:
            yield words
    assert not pending.strip(), f"a command does not end: {pending}"
