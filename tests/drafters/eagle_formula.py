"""EAGLE-1 and EAGLE-2 heads for the tests: files as SafeAILab writes them, and the published formula in plain PyTorch.

The formula shares nothing with specgraph: no module, no cache, no layer of any library.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.checkpoints.layouts import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, VOCAB, Written, llama_keys
from tests.models import double_model

EPS = 1e-5


@functools.cache
def target() -> PreTrainedModel:
    return double_model("llama", 0, num_hidden_layers=3, tie_word_embeddings=False)


SHAPES = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN), "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
    "post_attention_layernorm": (HIDDEN,),
}  # fmt: skip
QKV = tuple(f"layers.0.self_attn.{name}_proj" for name in "qkv")


def written(*biases: str, layers: int = 1, embedding: bool = False, norms: bool = False, **config: Any) -> Written:
    """A random head as SafeAILab's files are; ``biases`` names the linears that have one."""
    shapes: dict[str, tuple[int, ...]] = {"fc": (HIDDEN, 2 * HIDDEN)}
    for index in range(layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in SHAPES.items()}
        shapes |= {f"layers.{index}.input_layernorm": (HIDDEN,)} if index else {}
        shapes |= {f"layers.{index}.self_attn.{name}_norm": (HEAD_DIM,) for name in ("q", "k") if norms}
    shapes |= {"embed_tokens": (VOCAB, HIDDEN)} if embedding else {}
    named = {f"{name}.weight": shape for name, shape in shapes.items()}
    named |= {f"{name}.bias": shapes[name][:1] for name in biases}
    generator = torch.Generator().manual_seed(4)
    # Nothing norms what is fed on: with larger weights a chain of drafts would grow beyond all bounds.
    tensors = {name: 0.15 * torch.randn(shape, generator=generator) + ("norm" in name) for name, shape in named.items()}
    keys = llama_keys(architectures=["LlamaForCausalLM"], num_hidden_layers=layers) | config
    return Written({key: value for key, value in keys.items() if value is not None}, tensors)


HEADS_WRITTEN: dict[str, tuple[Written, float]] = {
    "plain": (written(), 10000.0),
    "bias of fc": (written("fc", bias=False, rope_theta=500.0), 500.0),
    "biases, own embedding": (written("fc", *QKV, embedding=True, rope_parameters={"rope_theta": 50.0}), 50.0),
    "two layers": (written(layers=2, num_hidden_layers=32, bias=True, qkv_bias=True), 10000.0),
    "norms of queries and keys": (written(norms=True, model_type="qwen3", rope_theta=1e6), 1e6),
}
"""Heads and the base of their rotary embedding. What the configurations say of biases and depth is often wrong."""


def formula(name: str, tokens: Sequence[int], hidden: Tensor) -> Tensor:
    """Rows ``[T, H]``: ``x = fc(cat(emb, h))``, then for every layer ``x += attn(x)`` and ``x += mlp(norm(x))``.

    Only layers behind the first have a norm in front of their attention.
    """
    given, theta = HEADS_WRITTEN[name]
    weights = {"embed_tokens.weight": target().get_input_embeddings().weight.detach()}
    weights |= {key: tensor.double() for key, tensor in given.tensors.items()}
    x = _linear(weights, "fc", torch.cat([weights["embed_tokens.weight"][list(tokens)], hidden], -1))
    for index in range(sum(key.endswith("o_proj.weight") for key in weights)):
        layer = {k.removeprefix(f"layers.{index}."): v for k, v in weights.items() if k.startswith(f"layers.{index}.")}
        x = x + _attention(layer, x if index == 0 else _norm(layer, "input_layernorm", x), theta)
        y = _norm(layer, "post_attention_layernorm", x)
        gate, up = (_linear(layer, f"mlp.{part}_proj", y) for part in ("gate", "up"))
        x = x + _linear(layer, "mlp.down_proj", gate / (1 + torch.exp(-gate)) * up)
    return x


def _linear(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)


def _norm(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    weight = weights.get(f"{name}.weight")
    return x if weight is None else weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS)


def _attention(weights: dict[str, Tensor], x: Tensor, theta: float) -> Tensor:
    """Causal attention of 4 heads, two of which share keys and values."""
    length, parts = len(x), {}
    for part in "qkv":
        parts[part] = _linear(weights, f"self_attn.{part}_proj", x).view(length, -1, HEAD_DIM).transpose(0, 1)
    queries, keys = (_rotate(_norm(weights, f"self_attn.{part}_norm", parts[part]), theta) for part in "qk")
    keys, values = (each.repeat_interleave(HEADS // KV_HEADS, dim=0) for each in (keys, parts["v"]))
    scores = queries @ keys.transpose(1, 2) / math.sqrt(HEAD_DIM)
    hidden = torch.ones(length, length).triu(1).bool()
    mixed = scores.masked_fill(hidden, -math.inf).softmax(-1) @ values
    return _linear(weights, "self_attn.o_proj", mixed.transpose(0, 1).flatten(1))


def _rotate(x: Tensor, theta: float) -> Tensor:
    """Pairs of elements turned by their position; the angles are float32, as transformers computes them."""
    angles = torch.arange(x.shape[1])[:, None] * (1.0 / theta ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    a, b, cos, sin = x[..., :4], x[..., 4:], angles.cos().double(), angles.sin().double()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def project(x: Tensor) -> Tensor:
    """The target's vocabulary projection."""
    weight: Tensor = target().get_output_embeddings().weight.detach()
    return x @ weight.T


@functools.cache
def behind(name: str, accepted: tuple[int, ...], drafted: tuple[int, ...]) -> Tensor:
    """The target's hidden states of all accepted tokens but the last, and one row of the formula for every draft and
    for the next one: what the formula gives is fed on as it is.
    """
    if drafted:
        hidden = behind(name, accepted, drafted[:-1])
    else:
        known = target()(input_ids=torch.tensor([accepted[:-1]]), use_cache=False, output_hidden_states=True)
        hidden = known.hidden_states[-1][0]
    return torch.cat([hidden, formula(name, [*accepted[1:], *drafted], hidden)[-1:]])
