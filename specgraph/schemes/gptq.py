"""The layout of GPTQ: integers of four bits with zero points, of which a word holds eight neighbouring inputs.

Files of the version ``gptq_v2`` hold zero points as they are, and those of ``gptq`` hold them less one. Tools take
0x11111111 off each word of eight zero points, with a borrow from the next one if a zero point is 0, and add it again in
the same way. A tensor ``g_idx`` has the group of each input. Where the quantiser sorted inputs by activations
(``desc_act``), groups are not neighbours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from specgraph.kernels.packed.format import nibbles
from specgraph.kernels.packed.int4 import INT4, OFFSET, group_of
from specgraph.kernels.packed.int4_zeros import INT4_ACT_ORDER, INT4_ZEROS
from specgraph.schemes.layout import check_one_of, check_stated
from specgraph.schemes.repacked import PER_WORD, Layer, Repacked, lower, read_common

VERSIONS = {"gptq": 0x11111111, "gptq_v2": 0}
"""What is taken off a word of zero points before it is stored."""


@dataclass(frozen=True)
class Gptq(Repacked):
    """Whether the numbers are symmetric and which inputs are a group is read from the files.

    Attributes:
        version: one of :data:`VERSIONS`.
    """

    method: ClassVar[str] = "gptq"

    version: str = "gptq"

    @classmethod
    def read(cls, stated: Mapping[str, Any]) -> Gptq:
        """The layout that a ``quantization_config`` states."""
        size = read_common(stated)
        check_stated("is_marlin_format", stated.get("is_marlin_format") or False, False)
        key = "checkpoint_format" if stated.get("checkpoint_format") is not None else "format"
        version = lower(stated.get(key) or "gptq")
        check_one_of(key, version, VERSIONS)
        return cls(INT4_ZEROS, size, version=str(version))

    def numbers_of(self, qweight: Tensor) -> Tensor:
        """Of ``[I / 8, O]``, whose words are the same."""
        return qweight.t().contiguous()

    def zero_points_of(self, qzeros: Tensor) -> Tensor:
        """Of ``[I / G, O / 8]``."""
        return (qzeros + VERSIONS[self.version]).t().contiguous()

    def features_of(self, qweight: tuple[int, ...]) -> tuple[int, int]:
        """Of ``[I / 8, O]``."""
        return qweight[0] * PER_WORD, qweight[1]

    def formed(self, layers: Sequence[Layer]) -> Gptq:
        """Symmetric integers if every zero point is the middle, or groups of any inputs if a layer has such."""
        if not all(self._is_ordered(layer) for layer in layers):
            return dataclasses.replace(self, form=INT4_ACT_ORDER)
        symmetric = all(self._is_symmetric(layer) for layer in layers)
        return dataclasses.replace(self, form=INT4 if symmetric else INT4_ZEROS)

    def _is_ordered(self, layer: Layer) -> bool:
        stored = layer.tensors.get("g_idx")
        if stored is None:
            return True
        group = group_of(layer.inputs, self.group_size)
        return torch.equal(stored.read(), torch.arange(layer.inputs, dtype=stored.dtype) // group)

    def _is_symmetric(self, layer: Layer) -> bool:
        return bool((nibbles(self.zero_points_of(layer.tensors["qzeros"].read())) == OFFSET).all())
