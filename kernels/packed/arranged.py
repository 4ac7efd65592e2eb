"""Formats whose numbers stand in the order in which the matrix instruction of a GPU takes them.

A quad of lanes holds the inputs of a line of an operand of ``wgmma``, each lane two neighbours of every eight. Words in
the published order hold neighbours, so that a lane would need words of other lanes. Here the numbers of 128 inputs are
sorted such that each lane finds its own side by side: four words of numbers of four bits, eight of numbers of eight.
With an input of them in binary,

    32 inputs, two digits | half of 32 | half of 16 | lane of a quad, two digits | one of a pair

a number of four bits stands in word ``lane | 32 inputs`` at place ``one of a pair | half of 32 | half of 16``, so that
a pair is 16 bits apart, and becomes a register of two numbers by a shift and a mask. One of eight bits stands in word
``lane | 32 inputs | half of 32`` at place ``half of 16 | one of a pair``.

A tensor keeps its shape, and its name in a module says that it is arranged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specgraph.kernels.checks import require
from specgraph.kernels.packed.format import Format, join_nibbles, nibbles
from specgraph.kernels.packed.fp8 import FP8_BLOCKS, Fp8Blocks
from specgraph.kernels.packed.int4 import INT4, Int4

ARRANGED_INPUTS = 128
"""How many inputs are sorted together. Groups consist of whole ones of them."""
_DIGITS = (4, 2, 2, 4, 2)
"""The digits of an input: 32 inputs, half of 32, half of 16, lane of a quad, one of a pair."""


class Arranged(Format):
    """A format in the order of this file. A subclass names the format that it arranges behind this one.

    Attributes:
        published: the format with the same numbers in the published order.
        order: the digits of an input in the order in which its number is stored.
    """

    published: Format
    order: tuple[int, ...]

    def arrange(self, stored: Tensor) -> Tensor:
        """Numbers ``[..., O, I / per_element]`` in the published order, in that of this format."""
        return self._sorted(stored, _DIGITS, self.order)

    def restore(self, stored: Tensor) -> Tensor:
        """The inverse of :meth:`arrange`."""
        digits = tuple(_DIGITS[digit] for digit in self.order)
        return self._sorted(stored, digits, tuple(self.order.index(digit) for digit in range(len(digits))))

    def _sorted(self, stored: Tensor, digits: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
        codes, four_bits = stored.contiguous().view(torch.uint8), self.per_element > 1
        codes = nibbles(codes) if four_bits else codes
        front = codes.shape[:-1]
        codes = codes.reshape(*front, codes.shape[-1] // math.prod(digits), *digits)
        blocks = len(front) + 1
        codes = codes.permute(*range(blocks), *(blocks + digit for digit in order)).reshape(*front, -1)
        return (join_nibbles(codes, torch.uint8) if four_bits else codes).view(stored.dtype)

    def takes(self, inputs: int, scale: Tensor) -> bool:
        """Whether a weight with so many inputs and with such scales can be arranged."""
        return inputs % ARRANGED_INPUTS == 0 and self.block(inputs, scale)[1] % ARRANGED_INPUTS == 0

    def why_not(self, outputs: int, inputs: int, group_size: int | None) -> str | None:
        """Groups are whole blocks of sorted inputs."""
        if inputs % ARRANGED_INPUTS:
            return f"its {inputs} inputs are no multiple of {ARRANGED_INPUTS}"
        if group_size is not None and group_size % ARRANGED_INPUTS:
            return f"the group size, {group_size}, is no multiple of {ARRANGED_INPUTS}"
        return super().why_not(outputs, inputs, group_size)

    def check_scale(self, outputs: int, inputs: int, scale: Tensor) -> None:
        """As the published format, with groups of whole blocks of sorted inputs."""
        super().check_scale(outputs, inputs, scale)
        require(
            self.takes(inputs, scale),
            lambda: f"{inputs} inputs in groups of {self.block(inputs, scale)[1]} cannot be arranged: "
            f"{ARRANGED_INPUTS} must divide both",
        )

    def numbers(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Those of the published order."""
        return super().numbers(self.restore(stored), dtype)

    def quantise(self, weight: Tensor, group_size: int | None = None) -> tuple[Tensor, ...]:
        """As the published format, then sorted."""
        numbers, *others = super().quantise(weight, group_size)
        return self.arrange(numbers), *others

    def few_rows_form(
        self, weight: Sequence[Tensor], dtype: torch.dtype
    ) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]] | None:
        """That of the published format."""
        return super().few_rows_form([self.restore(weight[0]), *weight[1:]], dtype)


class ArrangedInt4(Arranged, Int4):
    """Symmetric integers of four bits in groups of a multiple of 128 inputs."""

    name = "int4_arranged"
    published = INT4
    order = (3, 0, 4, 1, 2)
    parts = ("weight_arranged", "weight_scale")
    stack_parts = ("_arranged", "_scale")


class ArrangedFp8Blocks(Arranged, Fp8Blocks):
    """Numbers e4m3 with a scale for each block, of a multiple of 128 inputs."""

    name = "fp8_blocks_arranged"
    published = FP8_BLOCKS
    order = (3, 0, 1, 2, 4)
    parts = ("weight_arranged", "weight_scale_inv")
    stack_parts = ("_arranged", "_scale_inv")


INT4_ARRANGED, FP8_BLOCKS_ARRANGED = ArrangedInt4(), ArrangedFp8Blocks()
