"""Makes targets and heads of a given shape with random weights, on the device where they run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from specgraph.config import DraftConfig
from specgraph.config.drafters import drafter_options
from specgraph.drafters.base import DraftHead
from specgraph.drafters.registry import drafter_class
from specgraph.schemes.layout import Layout
from specgraph.schemes.layouts import layout_for
from specgraph.schemes.random import fill_packed

_COMMON: dict[str, Any] = {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
                           "max_position_embeddings": 131072, "bos_token_id": None, "eos_token_id": None}  # fmt: skip
_GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "num_experts_per_tok": 4, "sliding_window": 128,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0,
                        "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096},
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b-shape": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    },
    "llama-3-70b-shape": {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    },
    "llama-3.2-1b-shape": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b-shape": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "tie_word_embeddings": False,
    },
    "gpt-oss-20b-shape": {**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b-shape": {**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128},
    "qwen3.5-9b-shape": {
        "model_type": "qwen3_5_text", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "tie_word_embeddings": False,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
    "qwen3.5-small-shape": {
        "model_type": "qwen3_5_text", "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 8192,
        "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64,
        "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4, "tie_word_embeddings": True,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
    "tiny-shape": {
        "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Configurations by name; those without a ``model_type`` are Llama's. One can try the command on a CPU with the tiny
one."""


def shape_config(name: str) -> PretrainedConfig:
    """The configuration of a named shape."""
    return AutoConfig.for_model(**{"model_type": "llama", **_COMMON, **SHAPES[name]})


def random_target(
    name: str, device: torch.device, dtype: torch.dtype, seed: int = 0, weights: str | None = None
) -> PreTrainedModel:
    """A causal LM of a named shape. Its weights are drawn on the device, so the CPU never holds them.

    With ``weights``, a scheme of :func:`specgraph.quantise`, each of its weights is drawn and packed by itself, so that
    the device holds the packed model and one matrix.
    """
    with building(torch.device("meta") if weights else device, dtype, seed):
        built: Any = AutoModelForCausalLM.from_config(shape_config(name), dtype=dtype)
    if weights is not None:
        with building(device, dtype, seed):
            fill_packed(built, _layout(built, weights), device)
    return built.eval().requires_grad_(False)


def _layout(model: PreTrainedModel, weights: str) -> Layout:
    """How a shape is packed: in groups as large as fit all its layers."""
    layout = layout_for(model, weights, None, ("lm_head",))
    if weights != "int4":
        return layout
    inputs = {inputs for _, inputs in layout.features(model, {}).values()}
    sizes = (size for size in (128, 64, 32, 16, 8) if all(count % size == 0 for count in inputs))
    return layout_for(model, weights, next(sizes, None), ("lm_head",))


def random_head(model: PreTrainedModel, draft: DraftConfig, seed: int = 1) -> DraftHead | None:
    """A head with random weights for the drafter that ``draft`` names; None if that drafter has no heads."""
    device: torch.device = model.device
    with building(device, model.dtype, seed):
        return drafter_class(draft.kind).random(model, drafter_options(draft))


@contextlib.contextmanager
def building(device: torch.device, dtype: torch.dtype, seed: int) -> Iterator[None]:
    """A context in which modules are made on ``device`` in ``dtype``. The caller's random state does not change."""
    before = torch.get_default_dtype()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                yield
        finally:
            torch.set_default_dtype(before)
