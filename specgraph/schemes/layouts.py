"""The layouts that are known, and which one a ``config.json`` states or a model is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from specgraph.errors import UnsupportedModelError
from specgraph.kernels.packed import int4, mxfp4, nvfp4
from specgraph.kernels.packed.formats import format_of
from specgraph.kernels.packed.fp8 import FP8_BLOCKS
from specgraph.kernels.packed.mxfp4 import MXFP4
from specgraph.schemes.awq import Awq
from specgraph.schemes.compressed_tensors import CompressedTensors
from specgraph.schemes.fine_grained import FineGrained
from specgraph.schemes.gpt_oss import NO_EXPERTS, GptOss
from specgraph.schemes.gptq import Gptq
from specgraph.schemes.layout import Layout, check_one_of

LAYOUTS: dict[str, type[Layout]] = {kind.method: kind for kind in (CompressedTensors, FineGrained, GptOss, Awq, Gptq)}
"""Every layout by the ``quant_method`` of its tool."""
FOREIGN = ("bitsandbytes", "torchao")
"""Tools whose weights only their own layers and tensors can unpack."""
_GROUPS = {"int4": int4.GROUP, "int4_zeros": int4.GROUP, "mxfp4": mxfp4.GROUP, "nvfp4": nvfp4.GROUP}
"""How many inputs of a scheme have one scale unless it is said."""


def read_layout(stated: Mapping[str, Any]) -> Layout:
    """The layout that a ``quantization_config`` states.

    Raises:
        UnsupportedModelError: it is of another tool, or states a format that is not known.
    """
    method = stated.get("quant_method") if isinstance(stated, Mapping) else stated
    if method in FOREIGN:
        raise UnsupportedModelError(
            f"quant_method of quantization_config is {method!r}, whose weights only {method} unpacks; load the "
            "checkpoint from which they were made, and pack its weights with specgraph.quantise."
        )
    check_one_of("quant_method", method, LAYOUTS)
    assert isinstance(method, str), "as all that are allowed"
    return LAYOUTS[method].read(stated)


def layout_for(model: nn.Module, scheme: str, group_size: int | None, ignore: Sequence[str]) -> Layout:
    """The layout in which a model is stored in one of :data:`~specgraph.config.schemes.SCHEMES`."""
    if scheme == "fp8":
        return FineGrained(FP8_BLOCKS, group_size, tuple(ignore))
    if scheme == "mxfp4" and getattr(getattr(model, "config", None), "model_type", None) == "gpt_oss":
        return GptOss(MXFP4, group_size, tuple(dict.fromkeys((*NO_EXPERTS, *ignore))))
    size = _GROUPS.get(scheme) if group_size is None else group_size
    return CompressedTensors(format_of(scheme), size, tuple(ignore))
