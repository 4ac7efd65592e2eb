"""Formats whose numbers stand in the order in which the matrix instruction of a GPU takes them.

A quad of lanes holds the inputs of a line of an operand of ``wgmma``, each lane two neighbours of every eight. Words in
the published order hold neighbours, so that a lane would need words of other lanes. Here the numbers of 128 inputs are
sorted such that each lane finds its own side by side: four words of numbers of four bits, eight of numbers of eight.
With an input of them in binary,

    32 inputs, two digits | half of 32 | half of 16 | lane of a quad, two digits | one of a pair

a number of four bits stands in word ``lane | 32 inputs`` at place ``one of a pair | half of 32 | half of 16``, so that
a pair is 16 bits apart, and becomes a register of two numbers by a shift and a mask. One of eight bits stands in word
``lane | 32 inputs | half of 32`` at place ``half of 16 | one of a pair``.

Numbers e2m1 in bfloat16 are a sign, the lowest bit of the exponent above it and so on: bits 15 and 8 to 6, times
``2 ** -126``. So the eight numbers of a lane and of 32 inputs stand in a word such that two shifts and masks at most
give a pair (:data:`_BITS`), and words of 32 inputs follow one another.

Numbers keep their shape, and their name in a module says that they are arranged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from specgraph.kernels.checks import require
from specgraph.kernels.packed.chunks import by_chunks
from specgraph.kernels.packed.format import Format, join_nibbles, nibbles
from specgraph.kernels.packed.fp8 import FP8_BLOCKS, Fp8Blocks
from specgraph.kernels.packed.int4 import INT4, Int4
from specgraph.kernels.packed.mxfp4 import BIAS, GROUP, MXFP4, Mxfp4

_LARGEST_SCALE = 128
"""The stored scale of ``mxfp4`` up to which numbers of ``2 ** -126`` times their value can be multiplied with one
factor in bfloat16."""


class Arranged(Format):
    """A format in the order of this file. A subclass names the format that it arranges behind this one.

    Attributes:
        published: the format with the same numbers in the published order.
        digits: the digits of an input of those that are sorted together: 32 inputs, half of 32, half of 16, lane of a
            quad, one of a pair.
        order: the digits in the order in which the number of an input is stored.
        in_stacks: whether stacks of experts are arranged, too: where a GPU has run their kernels.
    """

    published: Format
    digits: tuple[int, ...] = (4, 2, 2, 4, 2)
    order: tuple[int, ...]
    in_stacks: bool = False
    cpu_product: str | None = None

    @property
    def together(self) -> int:
        """How many inputs are sorted together. Groups consist of whole ones of them."""
        return math.prod(self.digits)

    def arrange(self, weight: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tensors of a weight in the published order, in that of this format."""
        return by_chunks(self._in_order, weight[0]), *weight[1:]

    def restore(self, weight: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The inverse of :meth:`arrange`."""
        return by_chunks(self._published_order, weight[0]), *weight[1:]

    def _in_order(self, stored: Tensor) -> Tensor:
        return self._sorted(stored, self.digits, self.order)

    def _published_order(self, stored: Tensor) -> Tensor:
        digits = tuple(self.digits[digit] for digit in self.order)
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
        """Whether a weight with so many inputs and with such scales, as they are published, can be arranged."""
        return self._divides(inputs, self.published.block(inputs, scale)[1])

    def inputs_together(self, inputs: int, scale: Tensor) -> int:
        """Whole blocks of sorted inputs, too."""
        return math.lcm(super().inputs_together(inputs, scale), self.together)

    def _divides(self, *sizes: int) -> bool:
        return all(size % self.together == 0 for size in sizes)

    def why_not(self, outputs: int, inputs: int, group_size: int | None) -> str | None:
        """Groups are whole blocks of sorted inputs."""
        if inputs % self.together:
            return f"its {inputs} inputs are no multiple of {self.together}"
        if group_size is not None and group_size % self.together:
            return f"the group size, {group_size}, is no multiple of {self.together}"
        return super().why_not(outputs, inputs, group_size)

    def check_scale(self, outputs: int, inputs: int, scale: Tensor) -> None:
        """As the published format, with groups of whole blocks of sorted inputs."""
        super().check_scale(outputs, inputs, scale)
        require(
            self._divides(inputs, self.block(inputs, scale)[1]),
            lambda: f"{inputs} inputs in groups of {self.block(inputs, scale)[1]} cannot be arranged: "
            f"{self.together} must divide both",
        )

    def numbers(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Those of the published order."""
        return super().numbers(self._published_order(stored), dtype)

    def quantise(self, weight: Tensor, group_size: int | None = None) -> tuple[Tensor, ...]:
        """As the published format, then sorted."""
        return self.arrange(super().quantise(weight, group_size))


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


_BITS = (
    0, 1, 2, 27, 4, 5, 6, 13, 14, 3, 8, 9, 10, 7, 12, 15,
    16, 17, 18, 11, 20, 21, 22, 29, 30, 19, 24, 25, 26, 23, 28, 31,
)  # fmt: skip
"""Which bit of a word of eight numbers e2m1 in order stands at each place of an arranged one.

In both halves, magnitudes of the first three begin at 0, 4 and 10, and signs stand 9 places above, where the place
after the last of a word is its first one. The fourth has its sign at 15 and its magnitude at 14, 7 and 8.
"""


class ArrangedMxfp4(Arranged, Mxfp4):
    """Numbers e2m1 whose scales are 2 at most, 32 inputs together, with the scales of four groups in an int32.

    Scales are ``[..., O, ceil(I / 128)]``, the first in the lowest bits. Those behind the last are 1.
    """

    name = "mxfp4_arranged"
    published = MXFP4
    digits = (1, 2, 2, 4, 2)
    order = (0, 3, 4, 1, 2)
    parts = ("weight_arranged", "scale_arranged")
    stack_parts = ("_arranged", "_scales_arranged")
    scale_dtypes = (torch.int32,)
    in_stacks = True

    def arrange(self, weight: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Numbers in order, then the bits of each word, and scales side by side."""
        numbers, scale = super().arrange(weight)
        return numbers, self._side_by_side(scale)

    def _side_by_side(self, scale: Tensor) -> Tensor:
        return functional.pad(scale, (0, -scale.shape[-1] % 4), value=BIAS).contiguous().view(torch.int32)

    def _of_groups(self, weight: Sequence[Tensor]) -> Tensor:
        groups = weight[0].shape[-1] * self.per_element // GROUP
        return weight[1].contiguous().view(torch.uint8)[..., :groups]

    def restore(self, weight: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The inverse of :meth:`arrange`."""
        numbers, _ = super().restore(weight)
        return numbers, self._of_groups(weight).contiguous()

    def _in_order(self, stored: Tensor) -> Tensor:
        return _moved(super()._in_order(stored), _BITS)

    def _published_order(self, stored: Tensor) -> Tensor:
        return super()._published_order(_moved(stored, [_BITS.index(bit) for bit in range(32)]))

    def scales(self, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Those of whole words, which may be more than there are groups."""
        return super().scales(scale.contiguous().view(torch.uint8), dtype)

    def block(self, inputs: int, scale: Tensor) -> tuple[int, int]:
        """A row of a group, four of which have their scales in an element."""
        return 1, GROUP

    def part(self, weight: Sequence[Tensor], begin: int, size: int, *, of_inputs: bool) -> tuple[Tensor, ...]:
        """As of every format. Scales of inputs are copied: a part may begin inside of a word, and end there."""
        if not of_inputs:
            return super().part(weight, begin, size, of_inputs=False)
        of_groups = self._of_groups(weight)
        numbers, scale = self.published.part((weight[0], of_groups), begin, size, of_inputs=True)
        return numbers, self._side_by_side(scale)

    def shapes(
        self, outputs: int, inputs: int, group_size: int | None, dtype: torch.dtype
    ) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Bytes of two numbers, and words of four exponents."""
        return ((outputs, inputs // 2), torch.uint8), ((outputs, -(-inputs // (4 * GROUP))), torch.int32)

    def takes(self, inputs: int, scale: Tensor) -> bool:
        """Whether scales are 2 at most, too."""
        return super().takes(inputs, scale) and bool((scale <= _LARGEST_SCALE).all())


def _moved(stored: Tensor, places: Sequence[int]) -> Tensor:
    """Words with the bits that stood at ``places``."""
    words = stored.contiguous().view(torch.int32)
    made = torch.zeros_like(words)
    for bit, place in enumerate(places):
        made |= ((words >> place) & 1) << bit
    return made.view(stored.dtype)


INT4_ARRANGED, FP8_BLOCKS_ARRANGED, MXFP4_ARRANGED = ArrangedInt4(), ArrangedFp8Blocks(), ArrangedMxfp4()
