"""What the MTP module of a Qwen3-Next or Qwen3.5 checkpoint drafts, from its published tensors and nothing else.

The arithmetic is written out, without a cache and without the classes of transformers: every row is computed again from
the first token for every draft. Only the target's hidden states come from transformers. Sources: vLLM's
``qwen3_next_mtp.py`` and ``qwen3_5_mtp.py``, as noted in :mod:`specgraph.drafters.mtp_layouts`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import PreTrainedModel

from specgraph.frontend.recurrent import hooked_recurrence
from tests.detectors import NextLogits

LAYER = "mtp.layers.0."


def published_logits(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> NextLogits:
    """The logits of the next draft, from the accepted tokens and the drafts before it.

    Args:
        model: the target, whose recurrent functions are computed in float64.
        tensors: those of its checkpoint.
    """
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    text: Any = model.config.get_text_config()

    def norm(name: str, rows: Tensor) -> Tensor:
        return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + text.rms_norm_eps) * (1 + tensors[name])

    def linear(name: str, rows: Tensor) -> Tensor:
        return rows @ tensors[f"{name}.weight"].T

    def rotated(rows: Tensor) -> Tensor:
        """``[heads, S, head_dim]``, of which the first part turns with the position."""
        count = int(text.head_dim * text.rope_parameters["partial_rotary_factor"])
        frequency = text.rope_parameters["rope_theta"] ** -(torch.arange(0, count, 2) / count)
        angle = torch.arange(rows.shape[1]).unsqueeze(1) * frequency
        cos, sin = angle.cos().double(), angle.sin().double()
        first, second = rows[..., :count].chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rows[..., count:]], dim=-1)

    def attention(rows: Tensor) -> Tensor:
        size, place = text.head_dim, f"{LAYER}self_attn."
        query, gate = linear(f"{place}q_proj", rows).view(len(rows), -1, 2 * size).chunk(2, dim=-1)
        key, value = (linear(f"{place}{name}_proj", rows).view(len(rows), -1, size) for name in "kv")
        query, key = norm(f"{place}q_norm.weight", query), norm(f"{place}k_norm.weight", key)
        query, key = rotated(query.transpose(0, 1)), rotated(key.transpose(0, 1))
        group = len(query) // len(key)
        key, value = key.repeat_interleave(group, 0), value.transpose(0, 1).repeat_interleave(group, 0)
        later = torch.ones(len(rows), len(rows), dtype=torch.bool).triu(1)
        scores = (query @ key.mT / size**0.5).masked_fill(later, -torch.inf)
        mixed = (scores.softmax(-1) @ value).transpose(0, 1) * gate.sigmoid()
        return linear(f"{place}o_proj", mixed.flatten(1))

    def gated(place: str, rows: Tensor) -> Tensor:
        hidden = silu(linear(f"{place}gate_proj", rows)) * linear(f"{place}up_proj", rows)
        return linear(f"{place}down_proj", hidden)

    def experts(rows: Tensor) -> Tensor:
        place = f"{LAYER}mlp."
        # transformers rounds these weights to float32 and scales them to the sum 1.
        weights, chosen = linear(f"{place}gate", rows).softmax(-1, torch.float).topk(text.num_experts_per_tok)
        weights = (weights / weights.sum(-1, keepdim=True)).double()
        every = torch.stack([gated(f"{place}experts.{e}.", rows) for e in range(text.num_experts)], dim=1)
        routed = (weights.unsqueeze(-1) * every.gather(1, chosen.unsqueeze(-1).expand(-1, -1, rows.shape[1]))).sum(1)
        shared = linear(f"{place}shared_expert_gate", rows).sigmoid() * gated(f"{place}shared_expert.", rows)
        return routed + shared

    def module(tokens: Sequence[int], hidden: Tensor) -> Tensor:
        embedded = norm("mtp.pre_fc_norm_embedding.weight", embedding.weight[list(tokens)])
        pair = torch.cat([embedded, norm("mtp.pre_fc_norm_hidden.weight", hidden)], dim=-1)
        rows = linear("mtp.fc", pair)
        rows = rows + attention(norm(f"{LAYER}input_layernorm.weight", rows))
        normed = norm(f"{LAYER}post_attention_layernorm.weight", rows)
        sparse = f"{LAYER}mlp.gate.weight" in tensors
        return norm("mtp.norm.weight", rows + (experts(normed) if sparse else gated(f"{LAYER}mlp.", normed)))

    @functools.cache
    def hidden_states(tokens: tuple[int, ...]) -> Tensor:
        base: Any = model.base_model
        with hooked_recurrence(model):
            states: Tensor = base(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
        return states

    @torch.no_grad()
    def one(accepted: list[int], drafted: list[int]) -> Tensor:
        hidden, text_ = hidden_states(tuple(accepted[:-1])), accepted + drafted
        while len(hidden) < len(text_) - 1:  # behind the target's rows, the module reads what it gave
            hidden = torch.cat([hidden, module(text_[1 : len(hidden) + 1], hidden)[-1:]])
        logits: Tensor = head(module(text_[1:], hidden)[-1])
        return logits

    def next_logits(accepted: Sequence[list[int]], drafted: Sequence[list[int]]) -> Tensor:
        return torch.stack([one(a, d) for a, d in zip(accepted, drafted, strict=True)])

    return next_logits


def split_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Experts that are stored in one tensor of gates and projections as tensors of their own."""
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith(".experts.gate_up_proj")]:
        place, joint, down = name.removesuffix("gate_up_proj"), found.pop(name), name.replace("gate_up", "down")
        for index, (gate_up, last) in enumerate(zip(joint, found.pop(down), strict=True)):
            gate, up = gate_up.chunk(2)
            found |= {f"{place}{index}.{part}_proj.weight": tensor
                      for part, tensor in (("gate", gate), ("up", up), ("down", last))}  # fmt: skip
    return found
