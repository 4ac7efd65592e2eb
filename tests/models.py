"""Small random models of every architecture the design names, built from configurations (nothing is downloaded)."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specgraph.drafters.base import DraftHead
from specgraph.drafters.eagle3 import Eagle3, Eagle3Config
from tests import step_text  # noqa: F401  (registers this model)

VOCAB = 101
WINDOW = 6

BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.4,
}
_MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0},
    "gemma3_text": {"head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 8, "num_hidden_layers": 3,
                    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    "phi": {"num_key_value_heads": 4},
    "phi3": {"sliding_window": WINDOW},
    "gpt_neox": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "olmo2": {},
    "starcoder2": {"sliding_window": WINDOW},
    "granite": {"logits_scaling": 2.0, "residual_multiplier": 0.7, "embedding_multiplier": 1.5},
    "cohere": {"logit_scale": 0.25},
    "smollm3": {"no_rope_layer_interval": 2},
    "glm4": {"head_dim": 8},
    "stablelm": {},
    "mixtral": _MOE,
    "qwen2_moe": {**_MOE, "shared_expert_intermediate_size": 24, "mlp_only_layers": [0]},
    "qwen3_moe": {**_MOE, "head_dim": 8, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "phimoe": _MOE,
    "deepseek_v3": {
        **_MOE, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
        "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
        "first_k_dense_replace": 1, "n_shared_experts": 1,
    },
    "glm4_moe": {**_MOE, "head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "gpt_oss": {**_MOE, "head_dim": 8, "sliding_window": WINDOW},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "do_layer_norm_before": True},
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "mimo_v2_flash": {
        **_MOE, "n_routed_experts": 4, "head_dim": 12, "v_head_dim": 8, "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"],
    },
    "step_text": {
        **_MOE, "n_routed_experts": 4, "head_dim": 8, "sliding_window": WINDOW, "num_sliding_attention_heads": 6,
        "layer_types": ["sliding_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"],
    },
}  # fmt: skip
"""Models that single tests use: the layers of their MTP modules are of another kind than the last layer."""
SHARED: dict[str, dict[str, Any]] = {
    "olmo3": {"sliding_window": WINDOW}, "olmoe": _MOE, "flex_olmo": _MOE,
    "minimax_m2": {**_MOE, "head_dim": 8, "rotary_dim": 4},
    "gpt_bigcode": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 48},
}  # fmt: skip
"""Models that tests of several devices use. Like olmo2 and olmo_hybrid, the first four norm queries and keys over all
heads. The last one has one key head, in one weight with the queries.
"""

_DELTA = {
    "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_KDA = {
    **_MOE, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "num_key_value_heads": 4,
    "mlp_layer_types": ["dense", "sparse"], "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 12, "n_group": 2, "topk_group": 1,
}  # fmt: skip
_CONV = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 16}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_MOE, **_DELTA, "shared_expert_intermediate_size": 24},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_MOE, **_DELTA, "shared_expert_intermediate_size": 24},
    "olmo_hybrid": {**_DELTA, "linear_num_key_heads": 4},
    "kimi_linear": {**_KDA, "linear_num_heads": 4, "linear_head_dim": 8},
    "bailing_hybrid": {**_KDA, "head_dim": 8},
    "lfm2": _CONV,
    "lfm2_moe": {**_MOE, **_CONV, "num_dense_layers": 1},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64, "mamba_chunk_size": 16, "head_dim": 8, "num_hidden_layers": 1},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {**_MOE, **_MAMBA, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 24},
    "nemotron_h": {
        "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 16, "head_dim": 8,
        "num_hidden_layers": 2, "layers_block_type": ["mamba", "attention"],
    },
    "zamba2": {
        "num_hidden_layers": 2, "layers_block_type": ["mamba", "hybrid"], "mamba_d_state": 16, "n_mamba_heads": 8,
        "mamba_headdim": 8, "mamba_ngroups": 1, "num_mem_blocks": 1,
    },
    "jamba": {
        **_MOE, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4,
        "expert_layer_period": 2, "expert_layer_offset": 1,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 16, "expand": 2, "chunk_size": 16},
    "mamba": {"state_size": 8, "expand": 2, "time_step_rank": 4},
    "falcon_mamba": {"state_size": 8, "expand": 2, "time_step_rank": 4},
}  # fmt: skip
"""Models with a recurrent state in some layers; the last three have no attention at all."""
for _newer in {"bailing_hybrid"} - {*CONFIG_MAPPING}:
    del HYBRIDS[_newer]  # an older transformers does not have it


WITHOUT_ATTENTION = ("mamba2", "mamba", "falcon_mamba")


def make_model(
    architecture: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    attention: str | None = None,
    **overrides: Any,
) -> PreTrainedModel:
    """A small random model in evaluation mode; `overrides` go to its configuration.

    `attention` is transformers' implementation; the default is sdpa, as eager rounds its softmax to float32.
    """
    options = {**BASE, **(ARCHITECTURES | MORE | SHARED | HYBRIDS).get(architecture, {}), **overrides}
    config = AutoConfig.for_model(architecture, **options)
    config._attn_implementation = attention or (
        "eager" if architecture in {"gemma2", "gpt_oss", "mimo_v2_flash", *WITHOUT_ATTENTION} else "sdpa"
    )
    config._experts_implementation = "eager"  # the default has no float64
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        # Zero-initialised extras (sinks, router biases) would hide mistakes in their handling.
        for name, parameter in model.named_parameters():
            if "sink" in name or name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.3)
    return model.to(dtype).eval()


@functools.cache
def shared_model(architecture: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """One instance per process for tests that do not change the model."""
    return make_model(architecture, seed=seed, dtype=dtype)


def saved(model: PreTrainedModel, folder: Path) -> Path:
    """The folder, with the files of the model in it."""
    model.save_pretrained(folder)
    return folder


def with_own_code(folder: Path) -> Path:
    """The folder of a llama, whose files now say that it is of a class that comes with them."""
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.MineForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mine", "auto_map": classes}))
    (folder / "mine.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class MineConfig(LlamaConfig):\n    model_type = 'mine'\n"
        "class MineForCausalLM(LlamaForCausalLM):\n    config_class = MineConfig\n"
    )
    return folder


def make_head(
    target: PreTrainedModel, kind: str = "llama", *, seed: int = 3, features: tuple[int, ...] = (0, 1, 2),
    layers: int = 1, vocab: int = VOCAB, mask_token_id: int | None = 5, **options: Any,
) -> DraftHead:  # fmt: skip
    """A random EAGLE-3 head for ``target``, in its dtype; ``options`` go to :class:`Eagle3Config`.

    With fewer than ``VOCAB`` tokens its vocabulary is a random part of the target's.
    """
    width = target.config.hidden_size
    inner = AutoConfig.for_model(kind, **{**BASE, "num_hidden_layers": layers, "head_dim": 8, "hidden_size": width})
    config = Eagle3Config(inner, width, len(features), vocab, **options)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = Eagle3(config, parallel=mask_token_id is not None)
        for name, parameter in head.named_parameters():
            norm = "norm" in name
            torch.nn.init.normal_(parameter, mean=float(norm), std=0.3 if norm else 0.4)
        if vocab < VOCAB:
            head.draft_to_target = torch.randperm(VOCAB)[:vocab].sort().values
    head = head.to(target.dtype).eval()
    return DraftHead(head, features, mask_token_id)


def exact_norms(module: torch.nn.Module) -> None:
    """Replace transformers' RMS norms, which round to float32 inside, where 1e-16 can become 6e-8.

    Those of Gemma and Step scale by their weight plus one, and call their epsilon ``eps``. Those that also take a gate,
    in recurrent layers, stay.
    """
    for name, norm in list(module.named_modules()):
        if "RMSNorm" in type(norm).__name__ and "Gated" not in type(norm).__name__:
            plus_one = not hasattr(norm, "variance_epsilon")
            exact = torch.nn.RMSNorm(norm.weight.shape, norm.eps if plus_one else norm.variance_epsilon)
            exact.weight = torch.nn.Parameter(norm.weight + 1) if plus_one else norm.weight
            module.set_submodule(name, exact)


def double_model(architecture: str, seed: int, **overrides: Any) -> PreTrainedModel:
    """A model that computes in float64 throughout."""
    model = make_model(architecture, seed=seed, dtype=torch.float64, **overrides)
    exact_norms(model)
    return model.eval()


def ragged_prompts(lengths: tuple[int, ...] = (3, 9, 5), seed: int = 0, vocab: int = VOCAB) -> list[torch.Tensor]:
    """Random prompts without the special ids 0 to 2."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (n,), generator=generator) for n in lengths]
