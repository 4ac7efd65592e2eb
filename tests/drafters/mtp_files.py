"""Checkpoints with MTP modules for the tests: small random ones in every published layout."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from specgraph.drafters.base import DraftHead
from specgraph.drafters.mtp import MtpDraftConfig, MtpDrafter
from specgraph.drafters.mtp_layouts import LAYOUTS
from tests.models import make_model

BLOCK = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj", "input_layernorm", "post_attention_layernorm",
)  # fmt: skip
DEEPSEEK = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
PUBLISHED: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "deepseek": ("llama", {}, [f"model.layers.{i}.{n}" for i in (2, 3) for n in (*DEEPSEEK, *BLOCK)]),
    "step": (
        "step_text", {
            "num_nextn_predict_layers": 2, "mlp_layer_types": ["dense", "sparse", "dense", "dense"],
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
            "mtp_layer_types": None, "mtp_mlp_layer_types": None,
        },
        [f"model.layers.{i}.{n}" for i in (2, 3)
         for n in (*DEEPSEEK[:3], *BLOCK, "self_attn.q_norm", "self_attn.k_norm", "self_attn.g_proj", "embed_tokens",
                   "transformer.shared_head.norm", "transformer.shared_head.output")],
    ),
    "mimo": (
        "qwen2", {},
        [f"model.mtp_layers.{i}.{n}" for i in (0, 1)
         for n in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", *BLOCK)],
    ),
    "mimo_v2": (
        "mimo_v2_flash", {},
        [f"model.mtp.layers.{i}.{n}" for i in (0, 1)
         for n in ("enorm", "hnorm", "eh_proj", "final_layernorm", "pre_mlp_layernorm", *BLOCK[:-1],
                   "self_attn.attention_sink_bias")],
    ),
    "qwen3_next": (
        "qwen3_5_text", {"mtp_num_hidden_layers": 1},
        ["mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm",
         *(f"mtp.layers.0.{name}" for name in (*BLOCK, "self_attn.q_norm", "self_attn.k_norm"))],
    ),
    "speculators": (
        "qwen3", {"speculators_model_type": "mtp"},
        [f"mtp_layers.0.{name}" for name in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm",
                                             *BLOCK, "self_attn.q_norm", "self_attn.k_norm")],
    ),
}  # fmt: skip
"""Of every layout a target (DeepSeek and MiMo have stand-ins), keys of the configuration, and the names of
tensors without ``.weight`` and biases, as public loaders read them. Step's lists by layer end with those of its
modules."""


OPTIONS: dict[str, dict[str, Any]] = {
    "deepseek": {"zero_first_embedding": True},
    "step": {"target_hidden": "residual", "fed_hidden": "residual", "layer_type": "sliding_attention",
             "mlp_type": "dense"},
    "mimo": {"order": "hidden", "zero_first_embedding": True},
    "mimo_v2": {"family": "target", "layer_type": "sliding_attention", "mlp_type": "dense"},
    "qwen3_next": {"layer_type": "full_attention"},
    "speculators": {},
}  # fmt: skip
"""How the layouts differ from chained modules that read the embedding first and normed hidden states."""


@functools.cache
def model_of(architecture: str) -> PreTrainedModel:
    return make_model(architecture, dtype=torch.float64, tie_word_embeddings=False)


def random_modules(model: PreTrainedModel, count: int, own: bool = False, **options: Any) -> DraftHead:
    """``own``: every module has an embedding and a projection of its own."""
    head = MtpDrafter.random(model, MtpDraftConfig(num_modules=count, **options))
    generator = torch.Generator().manual_seed(5)
    shared = {id(p) for p in model.parameters()}
    for part in [getattr(m, name) for m in head.module for name in ("embed_tokens", "lm_head")] if own else ():
        part.weight = torch.nn.Parameter(torch.empty_like(part.weight), requires_grad=False)
    for name, parameter in head.module.named_parameters():
        if id(parameter) not in shared:
            noise = 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data = (noise + (1.0 if "norm" in name else 0.0)).to(parameter.dtype)
    return head


def tensors_of(layout: str, head: DraftHead, model: PreTrainedModel) -> dict[str, Tensor]:
    """The modules' tensors by the names of a layout; those that are the target's are left out."""
    config, found = {"num_hidden_layers": model.config.num_hidden_layers}, {}
    shared = {id(p) for p in model.parameters()}
    for index, module in enumerate(head.module):
        named = module.named_parameters(remove_duplicate=False)
        own = {name: p for name, p in named if not name.startswith("block.") and id(p) not in shared}
        block = {n: t for n, t in module.block.state_dict().items() if n.startswith("layers.")}
        own |= {f"block.{name}": tensor for name, tensor in revert_weight_conversion(module.block, block).items()}
        found |= {LAYOUTS[layout].shown(config, index, name): tensor for name, tensor in own.items()}
    return {name: tensor.detach().clone().contiguous() for name, tensor in found.items()}


def save_inside(folder: Path, layout: str, model: PreTrainedModel, head: DraftHead, **config: Any) -> Path:
    """A target's checkpoint with the modules in it, as they are published."""
    model.save_pretrained(folder)
    weights, written = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    save_file(load_file(weights) | tensors_of(layout, head, model), weights)
    (folder / "config.json").write_text(json.dumps(written | config))
    return folder


def example(layout: str, folder: Path) -> tuple[PreTrainedModel, DraftHead, Path]:
    architecture, config, names = PUBLISHED[layout]
    model = make_model(architecture, dtype=torch.float64, tie_word_embeddings=False, **config)
    count = 2 if any(".1." in name or ".3." in name for name in names) else 1
    head = random_modules(model, count, own=layout == "step", **OPTIONS[layout])
    return model, head, save_inside(folder, layout, model, head, **config)
