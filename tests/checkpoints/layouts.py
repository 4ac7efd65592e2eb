"""Small random checkpoints of every published layout, written from the descriptions of the formats."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCAB, DRAFT_VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 101, 40, 32, 48, 4, 2, 8
MASK = 7
FEATURES = 3


@dataclass
class Written:
    """What goes to the files: tensors by the names of the speculators layout, and the configuration."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    prefix: str = "layers.0."
    features: tuple[int, ...] = (2, 3, 4)
    extra: dict[str, Tensor] = field(default_factory=dict)

    def save(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        named = {name.replace("layers.0.", self.prefix, 1): tensor for name, tensor in self.tensors.items()}
        save_file(named | self.extra, folder / "model.safetensors")
        return folder


def head_tensors(
    *,
    hidden: int = HIDDEN,
    target_hidden: int = HIDDEN,
    layers: int = 1,
    draft_vocab: int = DRAFT_VOCAB,
    embedding: bool = True,
    qk_norms: bool = False,
    biases: bool = False,
    fc: bool = True,
    norm_before_fc: bool = False,
    fc_norm: bool = False,
    mask_hidden: tuple[int, ...] | None = None,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Random tensors, large enough that a misplaced norm or bias shows."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float = 0.3) -> Tensor:
        return scale * torch.randn(*shape, generator=generator)

    def gain(size: int) -> Tensor:
        return 0.5 + torch.rand(size, generator=generator)

    width = FEATURES * target_hidden
    found: dict[str, Tensor] = {"norm.weight": gain(hidden), "lm_head.weight": random(draft_vocab, hidden)}
    if embedding:
        found["embed_tokens.weight"] = random(VOCAB, hidden, scale=1.0)
    if fc:
        found["fc.weight"] = random(hidden, width)
        found |= {"fc.bias": random(hidden)} if biases else {}
    if norm_before_fc:
        found["input_norm.weight"] = gain(width)
    if fc_norm:
        found |= {f"fc_norm.{index}.weight": gain(target_hidden) for index in range(FEATURES)}
    if mask_hidden is not None:
        found["mask_hidden"] = random(*mask_hidden, width)
    if draft_vocab < VOCAB:
        kept = torch.randperm(VOCAB, generator=generator)[:draft_vocab].sort().values
        found["d2t"] = kept - torch.arange(draft_vocab)
        found["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, kept, True)
    for index in range(layers):
        found |= _layer(index, hidden, qk_norms, biases, random, gain)
    return found


def _layer(index: int, hidden: int, qk_norms: bool, biases: bool, random: Any, gain: Any) -> dict[str, Tensor]:
    taken = 2 * hidden if index == 0 else hidden
    widths = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, taken), "self_attn.k_proj": (KV_HEADS * HEAD_DIM, taken),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, taken), "self_attn.o_proj": (hidden, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INNER, hidden), "mlp.up_proj": (INNER, hidden), "mlp.down_proj": (hidden, INNER),
    }  # fmt: skip
    norms = ["input_layernorm", "post_attention_layernorm"] + (["hidden_norm"] if index == 0 else [])
    found = {f"{name}.weight": random(*shape) for name, shape in widths.items()}
    found |= {f"{name}.weight": gain(hidden) for name in norms}
    if biases:
        found |= {f"{name}.bias": random(shape[0]) for name, shape in widths.items()}
    if qk_norms:
        found |= {f"self_attn.{name}_norm.weight": gain(HEAD_DIM) for name in "qk"}
    return {f"layers.{index}.{name}": tensor for name, tensor in found.items()}


def llama_keys(**changed: Any) -> dict[str, Any]:
    """The keys of a Llama configuration."""
    keys = {
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": HEADS, "head_dim": HEAD_DIM,
        "num_key_value_heads": KV_HEADS, "num_hidden_layers": 1, "vocab_size": VOCAB, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "model_type": "llama", "max_position_embeddings": 128,
    }  # fmt: skip
    return keys | changed


def eagle() -> Written:
    """SafeAI: a plain Llama architecture, ``midlayer.``, no embedding, no layer ids; its own rotary base."""
    config = llama_keys(architectures=["LlamaForCausalLM"], draft_vocab_size=DRAFT_VOCAB, rope_theta=5e5, bias=False)
    extra = {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(HEAD_DIM // 2)}
    return Written(config, head_tensors(embedding=False), "midlayer.", extra=extra)


def specforge() -> Written:
    """SpecForge: its architecture, ``midlayer.``, nested ids, the newer rope spelling, a wrong depth."""
    config = llama_keys(
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=DRAFT_VOCAB,
        num_hidden_layers=32,
        rope_parameters={"rope_theta": 2e4, "rope_type": "default"},
        eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 4], "use_aux_hidden_state": True},
    )
    return Written(config, head_tensors(biases=True, seed=1), "midlayer.", (1, 3, 5))


def nvidia() -> Written:
    """NVIDIA: ``layers.0.``, two layers, q/k norms, ModelOpt flags, llama3 scaling, a full vocabulary."""
    flags = {
        "eagle_aux_hidden_state_layer_ids": [], "use_aux_hidden_state": True, "use_mtp_layernorm": False,
        "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "next_layer_regular": True,
        "parallel_draft_step": 1, "parallel_draft_heads_num_layers": None,
    }  # fmt: skip
    scaling = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32}  # fmt: skip
    config = llama_keys(
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=VOCAB,
        rope_theta=3e4,
        rope_scaling=scaling,
        norm_before_residual=True,
        eagle_config=flags,
    )
    return Written(config, head_tensors(layers=2, draft_vocab=VOCAB, qk_norms=True, seed=2))


def nvidia_last_hidden_state() -> Written:
    """NVIDIA without auxiliary states: no fc, no first norm, no last norm."""
    written = nvidia()
    written.config["eagle_config"] |= {
        "use_aux_hidden_state": False, "use_input_layernorm_in_first_layer": False, "use_last_layernorm": False,
    }  # fmt: skip
    for name in ("fc.weight", "layers.0.input_layernorm.weight", "norm.weight"):
        del written.tensors[name]
    written.features = (7,)
    return written


def speculators(algorithm: str = "eagle3", **options: Any) -> Written:
    """speculators: a nested configuration of the layers and hs ids at the top level."""
    flags = {key: options.pop(key, False) for key in ("norm_before_residual", "norm_output")}
    norms = {key: bool(options.get(key)) for key in ("norm_before_fc", "fc_norm")}
    model_type = "qwen3" if options.get("qk_norms") else "llama"
    layers = llama_keys(model_type=model_type, num_hidden_layers=options.get("layers", 1), rope_theta=1e6)
    config: dict[str, Any] = {
        "architectures": ["Eagle3Speculator" if algorithm == "eagle3" else "PEagleSpeculator"],
        "speculators_model_type": algorithm, "speculators_version": "0.9.0", "draft_vocab_size": DRAFT_VOCAB,
        "target_hidden_size": None, "eagle_aux_hidden_state_layer_ids": [1, 3, 6], "transformer_layer_config": layers,
        "speculators_config": {
            "algorithm": algorithm, "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": None, "architectures": []},
        },
        **flags, **norms,
    }  # fmt: skip
    if algorithm == "peagle":
        config["mask_token_id"] = MASK
        options["mask_hidden"] = (1, 1)
    return Written(config, head_tensors(**options), features=(1, 3, 6))


def specforge_parallel() -> Written:
    """A P-EAGLE head in the SpecForge layout, with the other spellings of its mask."""
    written = specforge()
    written.config["ptd_token_id"] = MASK
    written.tensors = head_tensors(mask_hidden=(1,), norm_before_fc=True, seed=3)
    written.config["norm_before_fc"] = True
    return written
