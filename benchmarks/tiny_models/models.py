"""Makes small causal LMs from a configuration, saves them and loads them."""

import os
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from benchmarks.tiny_models.config import ModelConfig


def build_model(cfg: ModelConfig, tokenizer: Any) -> Any:
    """A randomly initialised causal LM in float32 with tied embeddings, and with the tokenizer's EOS and PAD."""
    settings = {
        "vocab_size": len(tokenizer),
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.intermediate_size,
        "num_hidden_layers": cfg.num_hidden_layers,
        "num_attention_heads": cfg.num_attention_heads,
        "num_key_value_heads": cfg.num_key_value_heads,
        "head_dim": cfg.head_dim,
        "max_position_embeddings": cfg.max_position_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta},
        "attention_dropout": cfg.attention_dropout,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = AutoConfig.for_model(cfg.model_type, **{**settings, **cfg.options})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def count_parameters(model: torch.nn.Module) -> int:
    """The number of parameters. A tied one counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def save_model(model: Any, tokenizer: Any, folder: str) -> None:
    """Write the weights (as bf16 safetensors), the configuration and the tokenizer. The model itself becomes bf16."""
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load_model(folder: str, device: torch.device) -> Any:
    """Load a saved model in float32 for evaluation, so that the saved weights are measured and not those before."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()


def folder_bytes(folder: str) -> int:
    """The size on disk of all files in ``folder`` and its subfolders."""
    return sum(os.path.getsize(os.path.join(path, name)) for path, _, names in os.walk(folder) for name in names)
