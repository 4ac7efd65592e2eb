"""Loads DFlash heads: which options their configurations give, and how their tensors become a module.

Layouts: that of z-lab, with the options in ``dflash_config``, and that of speculators. They have the same names of
tensors, and differ in what a configuration leaves open: see :func:`_masks` and :func:`default_features`. Heads of other
kinds with the same layers add their own options and their own module.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from specgraph.checkpoints.checkpoint import Checkpoint
from specgraph.checkpoints.files import StoredTensor, load_pickle
from specgraph.checkpoints.head_options import HeadOptions
from specgraph.checkpoints.layers import read_layers, read_size
from specgraph.checkpoints.reading import ID_KEYS, Reader, layer_settings
from specgraph.drafters.dflash_module import BlockMask
from specgraph.drafters.eagle3 import DEFAULT_SOURCE
from specgraph.drafters.eagle3 import default_features as eagle3_features
from specgraph.errors import ConfigError

MASK_EMBEDDING = "mask_embedding"
"""The name of an optional file beside the weights, and of the tensor ``[H]`` that is made of it."""
USUAL: dict[str, tuple[Any, ...]] = {
    "projector_type": (None, "dflash"), "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1, 1.0), "is_neox_style": (None, True), "logit_scale": (None, 1, 1.0),
    "conv_kernel_size": (None, 0), "selector_rank": (None, 0), "final_logit_softcapping": (None, 0),
    "input_embedding_scale": (None, 1, 1.0), "output_multiplier": (None, 1, 1.0),
}  # fmt: skip
"""Keys of variants that have another forward pass or another meaning of rows, and the values that mean none of that."""


def default_features(num_draft_layers: int, num_layers: int) -> tuple[int, ...]:
    """The hidden states that a head reads if its configuration names none, in z-lab's rule: as many as it has layers,
    from the output of the target's second layer to that of its third from last.

    A head of one layer reads the output of the layer in the middle. Layers whose output is meant are counted from 0, so
    that the output of layer ``i`` is hs[i + 1].
    """
    if num_draft_layers == 1:
        return (num_layers // 2 + 1,)
    step = (num_layers - 4) / (num_draft_layers - 1)
    return tuple(round(1 + index * step) + 1 for index in range(num_draft_layers))


def head_reader(checkpoint: Checkpoint) -> Reader:
    """Reads the configuration of a head with these layers."""
    return Reader(checkpoint, part="dflash_config", id_keys=("target_layer_ids", *ID_KEYS))


def common_options(
    reader: Reader,
    overrides: Any,
    target_layers: int | None,
    own: Mapping[str, Any],
    *,
    from_anchor: bool,
    causal_windows: bool,
) -> HeadOptions:
    """The options of a head with these layers.

    Args:
        reader: its configuration.
        overrides: the options of a user.
        target_layers: the number of layers of the target, or None.
        own: the options that heads of this kind alone have.
        from_anchor: whether a row predicts the token behind its own position, if the configuration does not say so.
            JetSpec's heads and sglang have other names for that option.
        causal_windows: whether rows see no later rows of their block in layers with a window, if it does not say so.
    """
    from_anchor = reader.flag(
        "sample_from_anchor", from_anchor, other_names=("query_zero_predicts_next", "draft_shift")
    )
    layers = read_layers(reader, set(reader.checkpoint.tensors), overrides.rope_theta)
    if reader.checkpoint.layout == "speculators":
        default: tuple[Any, str] = eagle3_features, DEFAULT_SOURCE
    else:
        default = partial(default_features, layers.num_layers), "default: evenly spaced from hs[2] to hs[L - 2]"
    features = reader.features(overrides.feature_layers, target_layers, *default)
    settings = {
        "masks": _masks(reader, layers.num_layers, overrides, causal_windows),
        "block_size": _block_size(reader, 1 if from_anchor else 2),
        "sample_from_anchor": from_anchor,
        **own,
    }
    return HeadOptions(layers, features, _mask_token(reader, overrides), settings, reader.sources)


def _block_size(reader: Reader, least: int) -> int:
    """The rows of a trained block; newer files have it in ``dflash_config``."""
    own = reader.nested.get("block_size")
    size = read_size(reader.checkpoint, "block_size") if own is None else own
    if not isinstance(size, int) or size < least:
        raise ConfigError(
            f"block_size of {reader.checkpoint.path} is {size!r}, which leaves no token to draft; it must be {least} "
            "or more."
        )
    return int(reader.note("block_size", size, "config.json" if own is None else reader.part))


def _mask_token(reader: Reader, overrides: Any) -> int:
    """The mask token: the override, else the configuration's, else that of the file with the mask embedding."""
    path = reader.checkpoint.path
    beside = read_mask_embedding(path)
    token = reader.mask_token(overrides.mask_token_id, (beside and beside[1], f"{MASK_EMBEDDING}.pt"))
    if token is None:
        raise ConfigError(f"{path} names no mask token; set draft.mask_token_id.")
    return token


def _masks(reader: Reader, count: int, overrides: Any, causal_windows: bool) -> tuple[BlockMask, ...]:
    """The mask of each layer, that is, which keys the rows of a block see.

    ``layer_types`` names the layers with a sliding window, unless ``use_sliding_window`` is false. In the layout of
    z-lab, ``use_swa`` gives all layers one, and rows then see each other in both directions; else ``is_causal``,
    ``causal`` or ``causal_head`` decides for all layers, and where none of them is set, layers with a window are
    causal if ``causal_windows``. In the layout of speculators, ``sliding_window_non_causal`` says that these are not,
    and the window is counted from the anchor.
    """
    own = reader.checkpoint.layout == "speculators"
    everywhere = not own and reader.flag("use_swa", False)
    settings = layer_settings(reader.checkpoint)
    types = [] if settings.get("use_sliding_window") is False else list(settings.get("layer_types") or [])
    sliding = [everywhere or kind == "sliding_attention" for kind in (types + [None] * count)[:count]]
    window = _window(reader, everywhere) if any(sliding) else None
    causal = False if everywhere else _causal(reader, own, causal_windows)
    anchored = any(sliding) and reader.flag("anchored_window", own, overrides.anchored_window)
    return tuple(BlockMask(window if slides else None, slides if causal is None else causal, slides and anchored)
                 for slides in sliding)  # fmt: skip


def _window(reader: Reader, everywhere: bool) -> int:
    key = "swa_window_size" if everywhere else "sliding_window"
    value = reader.nested.get(key, layer_settings(reader.checkpoint).get(key))
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} of {reader.checkpoint.path} is {value!r}; it must be an integer above 0.")
    return int(reader.note("sliding_window", value, key))


def _causal(reader: Reader, speculators: bool, causal_windows: bool) -> bool | None:
    """Whether rows see no later rows of their block; None if that is so in layers with a sliding window alone."""
    config, nested = reader.checkpoint.config, reader.nested
    if speculators:
        return False if reader.flag("sliding_window_non_causal", not causal_windows) else None
    declared = ((config, "is_causal"), (nested, "causal"), (nested, "causal_head"))
    for values, key in declared:
        if values.get(key) is not None:
            return bool(reader.note("causal", bool(values[key]), key))
    reader.note("causal", "in layers with a sliding window" if causal_windows else False, "default")
    return None if causal_windows else False


def read_mask_embedding(path: Path) -> tuple[Tensor, int | None] | None:
    """The embedding ``[H]`` of the mask token and its id, from the file beside the weights; None if there is none.

    Raises:
        ConfigError: the file holds something else.
    """
    file = (path if path.is_dir() else path.parent) / f"{MASK_EMBEDDING}.pt"
    if not file.is_file():
        return None
    found = load_pickle(file)
    embedding = found.get("embedding") if isinstance(found, dict) else None
    if not isinstance(embedding, Tensor):
        raise ConfigError(f"{file} holds no tensor 'embedding'; remove the file or download it again.")
    token = found.get("mask_token_id")
    return embedding.flatten(), None if token is None else int(token)


def stored_tensors(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, with the mask embedding if it has one."""
    found, tensors = read_mask_embedding(checkpoint.path), dict(checkpoint.tensors)
    if found is not None:
        embedding, _ = found
        shape, file = tuple(embedding.shape), checkpoint.path / f"{MASK_EMBEDDING}.pt"
        tensors[MASK_EMBEDDING] = StoredTensor(shape, embedding.dtype, file, lambda: embedding)
    return tensors
