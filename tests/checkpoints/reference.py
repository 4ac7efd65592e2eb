"""EAGLE-3 step by step, one row at a time, in float64, from the tensors of a checkpoint: no layer of any library."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


@dataclass
class Reference:
    """A head and its cache. ``rope`` gives the angle of a pair of elements by its index, at position 1."""

    tensors: Tensors
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope: Callable[[int], float]
    norm_before_residual: bool = False
    norm_output: bool = False
    keys: dict[int, list[Tensor]] = field(default_factory=dict)
    values: dict[int, list[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tensors = {name: t.double() if t.is_floating_point() else t for name, t in self.tensors.items()}
        self.num_layers = 1 + max(int(name.split(".")[1]) for name in self.tensors if name.startswith("layers."))

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMS norm; the identity where the head has none."""
        weight = self.tensors.get(f"{name}.weight")
        return x if weight is None else weight * x / torch.sqrt((x * x).mean() + self.eps)

    def linear(self, x: Tensor, name: str) -> Tensor:
        bias = self.tensors.get(f"{name}.bias")
        out = self.tensors[f"{name}.weight"] @ x
        return out if bias is None else out + bias

    def combine(self, features: list[Tensor]) -> Tensor:
        """``g``: the features of one token behind the projection."""
        normed = [self.norm(feature.double(), f"fc_norm.{index}") for index, feature in enumerate(features)]
        joined = self.norm(torch.cat(normed), "input_norm")
        return self.linear(joined, "fc") if "fc.weight" in self.tensors else joined

    def rotate(self, x: Tensor, position: int) -> Tensor:
        half = self.head_dim // 2
        out = x.clone()
        for pair in range(half):
            angle = position * self.rope(pair)
            a, b = x[pair], x[pair + half]
            out[pair] = a * math.cos(angle) - b * math.sin(angle)
            out[pair + half] = b * math.cos(angle) + a * math.sin(angle)
        return out

    def attention(self, x: Tensor, position: int, layer: int) -> Tensor:
        prefix, d = f"layers.{layer}.self_attn", self.head_dim
        queries = self.linear(x, f"{prefix}.q_proj").view(self.heads, d)
        keys = self.linear(x, f"{prefix}.k_proj").view(self.kv_heads, d)
        values = self.linear(x, f"{prefix}.v_proj").view(self.kv_heads, d)
        turned = [self.rotate(self.norm(key, f"{prefix}.k_norm"), position) for key in keys]
        self.keys.setdefault(layer, []).append(torch.stack(turned))
        self.values.setdefault(layer, []).append(values)
        found = []
        for head, query in enumerate(queries):
            shared = head // (self.heads // self.kv_heads)
            query = self.rotate(self.norm(query, f"{prefix}.q_norm"), position)
            scores = torch.stack([query @ past[shared] / math.sqrt(d) for past in self.keys[layer]])
            weights = torch.exp(scores - scores.max())
            weights = weights / weights.sum()
            found.append(sum(w * past[shared] for w, past in zip(weights, self.values[layer], strict=True)))
        return self.linear(torch.cat(found), f"{prefix}.o_proj")  # type: ignore[arg-type]

    def mlp(self, x: Tensor, layer: int) -> Tensor:
        gate, up = (self.linear(x, f"layers.{layer}.mlp.{name}_proj") for name in ("gate", "up"))
        return self.linear(gate / (1 + torch.exp(-gate)) * up, f"layers.{layer}.mlp.down_proj")

    def step(self, token: int, hidden: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """One row: logits over the draft vocabulary, and what is fed on."""
        embedding = self.norm(self.tensors["embed_tokens.weight"][token], "layers.0.input_layernorm")
        normed = self.norm(hidden, "layers.0.hidden_norm")
        residual = normed if self.norm_before_residual else hidden
        for layer in range(self.num_layers):
            if layer == 0:
                x = torch.cat([embedding, normed])
            else:
                residual, x = hidden, self.norm(hidden, f"layers.{layer}.input_layernorm")
            hidden = residual + self.attention(x, position, layer)
            hidden = hidden + self.mlp(self.norm(hidden, f"layers.{layer}.post_attention_layernorm"), layer)
        last = self.norm(hidden, "norm")
        return self.tensors["lm_head.weight"] @ last, last if self.norm_output else hidden

    def target_id(self, draft_id: int) -> int:
        return draft_id + (int(self.tensors["d2t"][draft_id]) if "d2t" in self.tensors else 0)

    def draft(
        self, tokens: list[int], features: list[list[Tensor]], count: int, mask: int | None = None
    ) -> tuple[list[int], Tensor]:
        """``count`` drafts after rows of ``tokens[t]`` and ``features[t]``, and the logits of every row.

        With ``mask`` they are drafted in parallel, by rows with that token and ``mask_hidden``.
        """
        logits: list[Tensor] = []
        for position, (token, of_token) in enumerate(zip(tokens, features, strict=True)):
            found, fed = self.step(token, self.combine(of_token), position)
            logits.append(found)
        drafted = [self.target_id(int(logits[-1].argmax()))]
        for index in range(1, count):
            position = len(tokens) - 1 + index
            if mask is None:
                found, fed = self.step(drafted[-1], fed, position)
            else:
                found, _ = self.step(mask, self._mask_hidden(len(features[0])), position)
            logits.append(found)
            drafted.append(self.target_id(int(found.argmax())))
        return drafted, torch.stack(logits)

    def _mask_hidden(self, count: int) -> Tensor:
        return self.combine(list(self.tensors["mask_hidden"].flatten().chunk(count)))


def plain_rope(theta: float, head_dim: int) -> Callable[[int], float]:
    """The usual frequencies."""
    return lambda pair: float(theta ** (-2 * pair / head_dim))


def llama3_rope(theta: float, head_dim: int, scaling: dict[str, Any]) -> Callable[[int], float]:
    """Frequencies with long waves stretched by ``factor``, as Llama 3.1 describes them."""
    plain = plain_rope(theta, head_dim)
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    length = scaling["original_max_position_embeddings"]

    def rope(pair: int) -> float:
        frequency = plain(pair)
        wave = 2 * math.pi / frequency
        share = (length / wave - low) / (high - low)
        share = min(max(share, 0.0), 1.0)
        return share * frequency + (1 - share) * frequency / factor

    return rope
