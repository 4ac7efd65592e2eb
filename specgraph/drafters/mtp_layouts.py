"""How published checkpoints store MTP modules, and how each of them is used.

The modules lie in the target's own checkpoint, beside the tensors that transformers loads, or in one of their own. A
layout says which tensors belong to which module, what they are called here
(:class:`~specgraph.drafters.mtp_module.MtpModule`), and how the modules are used. Implementations disagree about that;
:attr:`Layout.sources` names the one that each option is taken from.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import CONFIG_MAPPING

from specgraph.checkpoints.files import StoredTensor
from specgraph.drafters.mtp_module import BLOCK, MtpOptions

Names = tuple[tuple[str, str], ...]
Modules = dict[int, dict[str, StoredTensor]]
"""The tensors of modules by the names of their parameters, by module."""


@dataclass(frozen=True, eq=False)
class Layout:
    """One way to store modules.

    Attributes:
        name: of the models that use it.
        prefix: how the names of the modules' tensors begin; ``{index}`` stands for the number of the module, and only
            the first module has tensors if it is missing.
        names: how ``rest`` begins for a tensor outside of the decoder layer, and the name of that parameter here.
        options: how the modules are used.
        sources: where each option was found, by its name.
        behind_layers: modules are numbered on behind the target's layers.
        sign: what the name of some tensor must contain, where the names do not tell two layouts apart otherwise.
    """

    name: str
    prefix: str
    names: Names
    options: MtpOptions
    sources: Mapping[str, str] = field(default_factory=dict)
    behind_layers: bool = False
    sign: str = ""

    def find(self, config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> Modules:
        """The tensors of every module, by their names here."""
        first = num_layers(config) if self.behind_layers else 0
        pattern = re.compile(re.escape(self.prefix).replace(r"\{index\}", r"(?P<index>\d+)"))
        found: Modules = {}
        for name, tensor in tensors.items() if first is not None else ():
            match = pattern.match(name)
            index = -1 if match is None else int(match.groupdict().get("index") or 0) - (first or 0)
            if match is not None and index >= 0:
                found.setdefault(index, {})[self._name(name[match.end() :])] = tensor
        return dict(sorted(found.items()))

    def shown(self, config: Mapping[str, Any], index: int, name: str) -> str:
        """The name that a file has for the parameter ``name`` of module ``index``."""
        number = index + (num_layers(config) or 0) if self.behind_layers else index
        rest = next((file + name.removeprefix(own) for file, own in self.names if name.startswith(own)), None)
        return self.prefix.format(index=number) + (name.removeprefix(BLOCK) if rest is None else rest)

    def own(self, config: Mapping[str, Any], index: int, name: str) -> str:
        """The name here of the parameter of module ``index`` that a file has under ``name``, as :meth:`shown` says."""
        number = index + (num_layers(config) or 0) if self.behind_layers else index
        return self._name(name.removeprefix(self.prefix.format(index=number)))

    def _name(self, rest: str) -> str:
        for begins, name in self.names:
            if rest.startswith(begins):
                return name + rest.removeprefix(begins)
        # Where the layout names the decoder layer, unlisted tensors do not belong to the layer.
        return rest if any(name == BLOCK for _, name in self.names) else BLOCK + rest


def num_layers(config: Mapping[str, Any]) -> int | None:
    """The number of the target's decoder layers, by its ``config.json``; None if that does not say."""
    text = config.get("text_config")
    value = (text if isinstance(text, dict) else config).get("num_hidden_layers")
    return value if isinstance(value, int) else None


DECLARED = {"layer_type": "mtp_layer_types", "mlp_type": "mtp_mlp_layer_types"}
"""The options that say of which kind a layer is, and transformers' keys that list these kinds for all modules."""
OPTIONS = "mtp_options"
"""The key of ``config.json`` under which ``train`` notes how modules are used."""
_DEEPSEEK: Names = (
    ("embed_tokens.", "embed_tokens."), ("enorm.", "embed_norm."), ("hnorm.", "hidden_norm."),
    ("eh_proj.", "projection."), ("shared_head.norm.", "norm."), ("shared_head.head.", "lm_head."),
)  # fmt: skip
_BEHIND = "model.layers.{index}."
_ALL_VLLM = dict.fromkeys(
    ("family", "target_hidden", "fed_hidden", "order", "rotary_position", "zero_first_embedding"), "vLLM 0.33"
)

STEP = Layout(
    "step",
    _BEHIND,
    (*_DEEPSEEK[:4], ("transformer.shared_head.norm.", "norm."), ("transformer.shared_head.output.", "lm_head.")),
    MtpOptions(target_hidden="residual", fed_hidden="residual"),
    {**_ALL_VLLM, "target_hidden": "vLLM 0.33 and SGLang", "fed_hidden": "vLLM 0.33 (transformers: final_norm)"},
    behind_layers=True,
    sign=".transformer.",
)
DEEPSEEK = Layout(
    "deepseek",
    _BEHIND,
    _DEEPSEEK,
    MtpOptions(zero_first_embedding=True),
    {
        **_ALL_VLLM,
        "target_hidden": "vLLM 0.33 and SGLang (llama.cpp: residual)",
        "fed_hidden": "vLLM 0.33 (deepseek_mtp; its glm4_moe_mtp: residual)",
        "rotary_position": "vLLM 0.33 and SGLang (transformers: token)",
        "zero_first_embedding": "vLLM 0.33 (transformers: no)",
    },
    behind_layers=True,
)
QWEN3_NEXT = Layout(
    "qwen3_next",
    "mtp.",
    (
        ("fc.", "projection."), ("pre_fc_norm_embedding.", "embed_norm."), ("pre_fc_norm_hidden.", "hidden_norm."),
        ("norm.", "norm."), ("layers.0.", BLOCK),
    ),
    MtpOptions(layer_type="full_attention"),
    {**_ALL_VLLM, "target_hidden": "vLLM 0.33, SGLang and llama.cpp", "layer_type": "vLLM 0.33"},
)  # fmt: skip
MIMO = Layout(
    "mimo",
    "model.mtp_layers.{index}.",
    (
        ("token_layernorm.", "embed_norm."), ("hidden_layernorm.", "hidden_norm."), ("input_proj.", "projection."),
        ("final_layernorm.", "norm."),
    ),
    MtpOptions(order="hidden", zero_first_embedding=True),
    _ALL_VLLM,
)  # fmt: skip
MIMO_V2 = Layout(
    "mimo_v2",
    "model.mtp.layers.{index}.",
    (
        *_DEEPSEEK[1:4], ("final_layernorm.", "norm."),
        ("pre_mlp_layernorm.", f"{BLOCK}post_attention_layernorm."),
    ),
    MtpOptions(family="target", layer_type="sliding_attention", mlp_type="dense"),
    {
        **_ALL_VLLM,
        "family": "SGLang 0.5.23 (vLLM 0.33 uses the first module alone)",
        "layer_type": "vLLM 0.33 and SGLang",
        "mlp_type": "vLLM 0.33 and SGLang",
    },
)  # fmt: skip
SPECULATORS = Layout(
    "speculators",
    "mtp_layers.{index}.",
    MIMO.names,
    MtpOptions(),
    {**dict.fromkeys(_ALL_VLLM, "speculators"), "family": "default (speculators knows one module)"},
)
LAYOUTS = {layout.name: layout for layout in (SPECULATORS, MIMO, MIMO_V2, QWEN3_NEXT, STEP, DEEPSEEK)}
"""In the order in which they are tried: Step's names would pass for those of DeepSeek."""


def recognise(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> Layout | None:
    """The layout of the modules among ``tensors``; None if there are none."""
    for layout in LAYOUTS.values():
        projections = any("projection.weight" in module for module in layout.find(config, tensors).values())
        if projections and any(layout.sign in name for name in tensors):
            return layout
    return None


def with_overrides(
    layout: Layout, config: Mapping[str, Any], text: object, given: Mapping[str, Any], index: int = 0
) -> tuple[MtpOptions, dict[str, str]]:
    """How module ``index`` is used, and where each option was found.

    An option is the one that a user gave (None: not given), or else that of :data:`OPTIONS` in ``config.json``, which
    ``train`` writes, or else what the configuration of a model declares about its modules, or else the layout's.

    Args:
        layout: of the checkpoint.
        config: the checkpoint's ``config.json``.
        text: the configuration of the model, as transformers reads it.
        given: what a user gave.
        index: the number of the module.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    noted = (config.get(OPTIONS) or {}).items()
    written = {name: value for name, value in noted if name in given and value is not None}
    listed = declared_kinds(text, index)
    sources = {
        **dict.fromkeys(given, "the target's layers"),
        **layout.sources,
        **{name: f"{DECLARED[name]} of config.json" for name in listed},
        **dict.fromkeys(written, OPTIONS),
        **{name: f"draft.{name}" for name in chosen},
    }
    return replace(layout.options, **{**listed, **written, **chosen}), sources


def shown_values(values: Sequence[Any]) -> Any:
    """The value of an option in all modules, or a list of theirs. A value that is left open is the target's."""
    named = ["as the target's" if value is None else value for value in values]
    return named[0] if len(set(named)) == 1 else ", ".join(named)


def declared_kinds(text: object, index: int) -> dict[str, Any]:
    """The options of module ``index`` that the configuration of a model lists, by their names."""
    lists: dict[str, Any] = {name: getattr(text, key, None) or () for name, key in DECLARED.items()}
    return {name: values[index] for name, values in lists.items() if index < len(values)}


def text_config(config: Mapping[str, Any]) -> object:
    """The part of a ``config.json`` that is about text, as transformers reads it; None if it does not know the model.

    Published lists by layer have entries of the modules at their ends, which transformers moves to keys of their own.
    """
    try:
        kind = CONFIG_MAPPING[config["model_type"]]
    except KeyError:
        return None
    return kind.from_dict(copy.deepcopy(dict(config))).get_text_config()
