"""What forms for CPUs of the step's small ops share: Python over a few integers.

The definitions of these ops are ten to twenty operations each, of 1 to 3 us, on a few dozen integers. Python needs less
time for so few than two operations need. Where there are many, as over a prompt, the definitions are faster.
"""

from __future__ import annotations

from torch import Tensor

MOST_INTEGERS = 256
"""Up to this many integers are computed in Python."""


def is_small(integers: Tensor) -> bool:
    """Whether there are integers, and few of them."""
    return 0 < integers.numel() <= MOST_INTEGERS


def cut_tokens(tokens: list[int], num_forced: int, ends: list[int]) -> list[int]:
    """The tokens of one sequence, where those after the first unforced one among ``ends`` are replaced by -1."""
    for row in range(num_forced, len(tokens)):
        if tokens[row] >= 0 and tokens[row] in ends:
            return tokens[: row + 1] + [-1] * (len(tokens) - row - 1)
    return tokens
