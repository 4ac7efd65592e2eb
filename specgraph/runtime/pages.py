"""The pages of a KV cache that no sequence has."""

from __future__ import annotations

from collections.abc import Sequence


class PagePool:
    """Hands out pages, which lie anywhere: a sequence reaches its own through its block table.

    A sequence gets the pages for its whole length when it is admitted, so it never waits for one later.
    """

    def __init__(self, count: int) -> None:
        """``count`` pages, numbered from 0, all free."""
        self.count = count
        self._free = list(range(count - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """How many pages nobody has."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """``count`` of the free pages.

        Raises:
            ValueError: there are fewer.
        """
        if count > len(self._free):
            raise ValueError(f"{count} pages are asked for, and {len(self._free)} of {self.count} are free.")
        split = len(self._free) - count
        taken, self._free = self._free[split:], self._free[:split]
        return taken[::-1]

    def give_back(self, pages: Sequence[int]) -> None:
        """Pages that :meth:`take` gave, and that their sequence needs no more."""
        self._free += reversed(pages)
