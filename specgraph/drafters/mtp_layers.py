"""Which decoder layer an MTP module has: that of the target's own class, of one of the kinds that the target has.

Layers of one target can differ: in how they attend (``layer_types`` of transformers' configurations), in whether they
have experts, and in single values (``per_layer_config``). The kind of a module's layer is an option of its layout,
unless the configuration lists the kinds of the modules' layers (``mtp_layer_types``, ``mtp_mlp_layer_types``). Where
neither names a kind, the module's layer is like the target's last layer with full attention.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from specgraph.drafters.mtp_module import MtpOptions
from specgraph.drafters.plan import SIZES, HeadPlan
from specgraph.errors import ConfigError
from specgraph.schemes.layers import dense_shapes


def make_block(model: PreTrainedModel, device: torch.device | str, options: MtpOptions) -> PreTrainedModel:
    """A base model of the target's class with one decoder layer, in the target's dtype.

    The layer is of the kind that ``options`` name. Its parameters are initialised as the class does it, on ``device``.

    Raises:
        ConfigError: the target has no layers of this kind, its base model is not a stack ``layers`` with a ``norm``
            behind it, or a single layer of its class has other parameters than the layers in the stack.
    """
    base: Any = model.base_model
    if not isinstance(getattr(base, "layers", None), nn.ModuleList) or getattr(base, "norm", None) is None:
        raise ConfigError(
            f"{type(model).__name__} has no decoder layers under 'layers' with a 'norm' behind them, so MTP modules "
            "cannot be made of its layers; use another drafter."
        )
    config = block_config(model, options)
    with torch.device(device):
        block: Any = type(base)._from_config(config, dtype=base.dtype)
    _check_alike(model, block, options)
    if hasattr(base, "rotary_emb"):
        block.rotary_emb = base.rotary_emb
    return block.eval()


def _check_alike(model: PreTrainedModel, block: Any, options: MtpOptions) -> None:
    """Refuse a layer whose parameters differ from those of the target's layer :func:`like_layer`.

    If no layer of the target is of the wanted kind in both respects, the parameters that both have are compared.
    """
    base: Any = model.base_model
    like, same = like_layer(model, options)
    known, own = dense_shapes(base.layers[like]), dense_shapes(block.layers[0])
    names: Iterable[str] = {**known, **own} if same else (name for name in known if name in own)
    name = next((name for name in names if known.get(name) != own.get(name)), None)
    if name is not None:
        raise ConfigError(
            f"A single-layer copy of {type(model).__name__} has other parameter shapes than its layer {like}: {name} "
            f"has the shape {own.get(name)}, not {known.get(name)}. The layers depend on their index in a way that "
            "specgraph does not know, so it makes no MTP modules of them; use another drafter."
        )


def block_config(model: PreTrainedModel, options: MtpOptions) -> PretrainedConfig:
    """A copy of the configuration of a target for one decoder layer, of the kind that ``options`` name.

    What depends on the number of the layer otherwise is that of layer :func:`like_layer`.
    """
    text: Any = model.config.get_text_config()
    like, _ = like_layer(model, options)
    config: Any = copy.deepcopy(text.per_layer_config[like])
    layers = config.num_hidden_layers
    lists = {n: v for n, v in vars(config).items() if isinstance(v, list) and len(v) == layers and "layer" in n}
    config.num_hidden_layers = 1
    for name, values in lists.items():
        setattr(config, name, [values[like]])
    _set_mlp_type(config, options.mlp_type, mlp_type(cast(Any, model.base_model).layers[like]))
    config.vocab_size, config.pad_token_id = 1, 0  # the block gets no embedding
    if hasattr(config, "quantization_config"):  # of the target, which says nothing about a block with dense weights
        del config.quantization_config
    config.bos_token_id = config.eos_token_id = None
    return config


def like_layer(model: PreTrainedModel, options: MtpOptions) -> tuple[int, bool]:
    """The number of the target's layer that a module's layer is like, and whether it is of the wanted kind entirely.

    It is the last layer that attends as wanted, if possible one that also has experts or has none as wanted. If the
    options name no kind of attention, it is the last layer with full attention, as in published checkpoints.

    Raises:
        ConfigError: no layer attends as wanted.
    """
    layers, wanted = cast(Any, model.base_model).layers, options.mlp_type
    candidates = _attending(model, options.layer_type)
    both = [index for index in candidates if wanted is None or mlp_type(layers[index]) == wanted]
    return (both or candidates)[-1], bool(both)


def _attending(model: PreTrainedModel, wanted: str | None) -> list[int]:
    """The numbers of the target's layers that attend as ``wanted``; None stands for full attention, if there is any."""
    text: Any = model.config.get_text_config()
    kinds = getattr(text, "layer_types", None) or [None] * text.num_hidden_layers
    found = [index for index, kind in enumerate(kinds) if kind == (wanted or "full_attention")]
    if found or wanted is None:
        return found or [*range(text.num_hidden_layers)]
    known = ", ".join(sorted({str(kind) for kind in kinds if kind is not None}))
    raise ConfigError(
        f"The MTP modules have a decoder layer of the type {wanted}, and {type(model).__name__} has "
        + (f"only {known}; set draft.layer_type to one of these, or " if known else "no types of layers; ")
        + "use a target that has such layers."
    )


def mlp_type(layer: nn.Module) -> str:
    """``sparse`` if a decoder layer has experts, else ``dense``."""
    return "sparse" if any("experts" in name for name, _ in layer.named_modules()) else "dense"


def _set_mlp_type(config: Any, wanted: str | None, own: str) -> None:
    """Let the only layer of ``config`` have experts or not, as ``wanted``, or else as the layer that it is like.

    Configurations say it by a list, by the number of dense layers at the beginning, or by the numbers of the dense
    layers and a period. The list already has the kind of that layer, which ``own`` names for the other keys.
    """
    dense = (wanted or own) == "dense"
    values = {
        "mlp_layer_types": None if wanted is None else [wanted],
        "first_k_dense_replace": int(dense),
        "mlp_only_layers": [0] if dense else [],
        "decoder_sparse_step": 1,
    }
    for key, value in values.items():
        if value is not None and getattr(config, key, None) is not None:
            setattr(config, key, value)


def check_layers(plan: HeadPlan) -> None:
    """Refuse sizes of layers that are not those of the target's own."""
    text: Any = plan.model.config.get_text_config()
    for name in SIZES:
        own, given = getattr(text, name, None), getattr(plan.layers, name)
        if own is not None and own != given:
            raise ConfigError(f"MTP modules have the target's own layers; leave head.{name}={given} out.")
