"""What a state has room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StateSizes:
    """What a state has room for.

    Attributes:
        rows: sequences that are decoded together.
        pages_per_sequence: pages that one sequence has at most.
        num_pages: pages of all sequences.
        max_length: tokens of a sequence.
        eos_ids: EOS ids of a sequence.
        bias_tokens: tokens of all words of a sequence that have a bias.
        snapshots: copies of recurrent state.
    """

    rows: int
    pages_per_sequence: int
    num_pages: int
    max_length: int
    eos_ids: int = 1
    bias_tokens: int = 1
    snapshots: int = 0

    def by_letter(self) -> dict[str, int]:
        """What the letters of :class:`~specgraph.kernels.state.Buffer` stand for."""
        return {
            "B": self.rows, "M": self.pages_per_sequence, "N": self.num_pages, "S": self.max_length, "E": self.eos_ids,
            "W": self.bias_tokens,
        }  # fmt: skip


def largest(many: Sequence[StateSizes]) -> StateSizes:
    """Room for whatever one of these has room for."""
    each = [vars(sizes) for sizes in many]
    return StateSizes(**{name: max(sizes[name] for sizes in each) for name in each[0]})
