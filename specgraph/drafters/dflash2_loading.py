"""The options of DFlash2 heads, and their configuration in the layout of z-lab.

Options that DFlash heads have, too, are read in the same way. In the layout of z-lab, those of the convolutions and of
the selector are in ``dflash_config``, and in that of speculators they are at the top level. Tensors have the same
names.
"""

from __future__ import annotations

from typing import Any

from specgraph.checkpoints.reading import Reader
from specgraph.drafters.base import DraftHead
from specgraph.drafters.dflash2_module import DFlash2Config
from specgraph.drafters.dflash_loading import USUAL
from specgraph.drafters.dflash_saving import z_lab_config
from specgraph.drafters.heads import Record
from specgraph.errors import ConfigError

CODEBOOK = "candidate_selector.predecessor_codebook"
KERNEL = "layers.0.attention_conv.base_kernel"
UNUSUAL: dict[str, tuple[Any, ...]] = {
    key: values for key, values in USUAL.items() if key not in ("conv_kernel_size", "selector_rank")
}
"""Keys of variants, and the values that mean none of that, as in :data:`~specgraph.drafters.dflash_loading.USUAL`."""
CONV_GROUP, SELECTOR_TOP_K = 16, 16
"""What the published heads have, which a configuration that says nothing means."""


def conv_settings(reader: Reader) -> dict[str, Any]:
    """The options of the convolutions, which are there if the configuration or, if that is silent, the tensors say so.

    Raises:
        ConfigError: a size makes no sense.
    """
    taps = _size(reader, "conv_kernel_size", KERNEL, 0)
    return {"conv_taps": taps, "conv_group": _size(reader, "conv_group_size", CONV_GROUP, 1)} if taps else {}


def selector_settings(reader: Reader) -> dict[str, Any]:
    """The options of the selector, which is there if the configuration or, if that is silent, the tensors say so.

    Raises:
        ConfigError: a size makes no sense.
    """
    rank, stored = _size(reader, "selector_rank", CODEBOOK, 0), reader.checkpoint.tensors.get(CODEBOOK)
    if not rank:
        return {}
    return {
        "selector_rank": rank,
        "selector_rows": stored.shape[0] if stored else 0,
        "selector_top_k": _size(reader, "selector_top_k", SELECTOR_TOP_K, 1),
    }


def _size(reader: Reader, key: str, default: int | str, least: int) -> int:
    """An integer from the configuration, or the default, or the second dimension from behind of the tensor it names."""
    checkpoint = reader.checkpoint
    for values, source in ((reader.nested, reader.part), (checkpoint.config, "config.json")):
        if values.get(key) is not None:
            value = values[key]
            if not isinstance(value, int) or value < least:
                raise ConfigError(f"{key} of {checkpoint.path} is {value!r}; it must be an integer of {least} or more.")
            return int(reader.note(key, value, source))
    if isinstance(default, int):
        return int(reader.note(key, default, "default"))
    stored = checkpoint.tensors.get(default)
    return int(reader.note(key, 0 if stored is None else stored.shape[1], "tensors"))


def dflash2_config(head: DraftHead, record: Record) -> dict[str, Any]:
    """The ``config.json`` of a head in the layout of z-lab.

    Raises:
        ConfigError: the layout cannot express the head.
    """
    config: DFlash2Config = head.module.config
    written = z_lab_config(head, record) | {"architectures": ["DFlash2DraftModel"]}
    written["dflash_config"] |= {
        "block_size": written.pop("block_size"),
        "conv_kernel_size": config.conv_taps,
        "conv_group_size": config.conv_group,
        "selector_rank": config.selector_rank,
        "selector_top_k": config.selector_top_k,
    }
    return written
