"""The layout of AWQ: integers of four bits with zero points, of which a word holds eight neighbouring outputs.

The outputs stand in a word in the order 0, 2, 4, 6, 1, 3, 5, 7, the first in the lowest bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from specgraph.kernels.packed.chunks import columns_by_chunks
from specgraph.kernels.packed.format import join_nibbles, nibbles
from specgraph.kernels.packed.int4_zeros import INT4_ZEROS
from specgraph.schemes.layout import check_stated
from specgraph.schemes.repacked import PER_WORD, Repacked, lower, read_common
from specgraph.schemes.targets import named

PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""The place of each of eight outputs in a word."""


@dataclass(frozen=True)
class Awq(Repacked):
    """Version ``gemm``. ``ignore`` is what ``modules_to_not_convert`` says. It may name no packed layer."""

    method: ClassVar[str] = "awq"

    @classmethod
    def read(cls, stated: Mapping[str, Any]) -> Awq:
        """The layout that a ``quantization_config`` states."""
        size = read_common(stated)
        key = next((key for key in ("version", "format") if stated.get(key) is not None), None)
        if key is not None:
            check_stated(key, lower(stated[key]), "gemm")
        check_stated("zero_point", stated.get("zero_point", True), True)
        return cls(INT4_ZEROS, size, tuple(stated.get("modules_to_not_convert") or ()))

    def numbers_of(self, qweight: Tensor) -> Tensor:
        """Of ``[I, O / 8]``."""
        inputs, outputs = self.features_of(tuple(qweight.shape))
        return columns_by_chunks(_words_of_outputs, qweight, qweight.new_empty(outputs, inputs // PER_WORD))

    def zero_points_of(self, qzeros: Tensor) -> Tensor:
        """Of ``[I / G, O / 8]``."""
        return join_nibbles(_codes(qzeros), torch.uint8).view(torch.int32).t().contiguous()

    def features_of(self, qweight: tuple[int, ...]) -> tuple[int, int]:
        """Of ``[I, O / 8]``."""
        return qweight[0], qweight[1] * PER_WORD

    def named_dense(self, name: str) -> bool:
        """Whether an entry of ``ignore`` is the name of the layer or a part of it, as transformers reads it."""
        return named(name, self.ignore)


def _words_of_outputs(qweight: Tensor) -> Tensor:
    """Words of neighbouring inputs ``[O, I / 8]`` of ones of neighbouring outputs ``[I, O / 8]``."""
    return join_nibbles(_codes(qweight).t().contiguous(), torch.uint8).view(torch.int32)


def _codes(words: Tensor) -> Tensor:
    """The integers of words in the order of their outputs, in bytes."""
    codes = torch.unflatten(nibbles(words.contiguous().view(torch.uint8)), -1, (-1, PER_WORD))
    return codes[..., PLACES].flatten(-2)
