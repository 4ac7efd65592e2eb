"""Reads from a target's configuration the sizes of the arguments of its kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig


@dataclass(frozen=True)
class Experts:
    """The experts of a layer: how many there are, how many a token uses, and the width between their two products."""

    count: int
    per_token: int
    intermediate: int

    @staticmethod
    def of(text: Any) -> Experts | None:
        """The experts of a configuration, under the names that transformers' models use; None if it has none."""
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        count = next((value for name in names if (value := getattr(text, name, None))), 0)
        if not count:
            return None
        width = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
        return Experts(count, text.num_experts_per_tok, width)


GATED_QUERIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Models whose query projection also computes a gate for the output of attention. Their configurations do not say so.
"""


@dataclass(frozen=True)
class DeltaRule:
    """Layers with a gated delta rule in the place of attention: the widths of all keys and values, and the heads."""

    keys: int
    values: int
    heads: int

    @staticmethod
    def of(text: Any) -> DeltaRule | None:
        """The sizes in a configuration, under the names that transformers' models use; None without such layers."""
        heads = getattr(text, "linear_num_value_heads", None)
        if not heads:
            return None
        keys = text.linear_num_key_heads * text.linear_key_head_dim
        return DeltaRule(keys, heads * text.linear_value_head_dim, heads)

    def linears(self, hidden: int) -> dict[str, tuple[int, int]]:
        """The linears (inputs, outputs). Queries, keys, values, their output gates, decays and rates are merged."""
        merged = 2 * self.keys + 2 * self.values + 2 * self.heads
        return {"delta_rule_in": (hidden, merged), "delta_rule_out": (self.values, hidden)}


@dataclass(frozen=True)
class Sizes:
    """The sizes of a causal LM that matter to kernels. In layers with ``experts``, an MLP beside them is not timed.

    ``gated_queries`` says whether the query projection also computes a gate for the output of attention. Without
    ``heads`` there is neither attention nor an MLP, as in Mamba, and of the linears only ``lm_head`` is known.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: Experts | None = None
    delta_rule: DeltaRule | None = None
    gated_queries: bool = False

    @staticmethod
    def of(config: PretrainedConfig) -> Sizes:
        text: Any = config.get_text_config()
        heads = getattr(text, "num_attention_heads", 0)
        return Sizes(
            hidden=text.hidden_size,
            intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            heads=heads,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // max(heads, 1),
            vocab=text.vocab_size,
            experts=Experts.of(text),
            delta_rule=DeltaRule.of(text),
            gated_queries=text.model_type in GATED_QUERIES,
        )

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """The widths (inputs, outputs) of the linears of a step, by name. q/k/v and gate/up are merged."""
        if not self.heads:
            return {"lm_head": (self.hidden, self.vocab)}
        width = self.heads * self.head_dim
        queries = width * (2 if self.gated_queries else 1)
        dense = {"gate_up": (self.hidden, 2 * self.intermediate), "down": (self.intermediate, self.hidden)}
        return {
            "qkv": (self.hidden, queries + 2 * self.kv_heads * self.head_dim),
            "o": (width, self.hidden),
            **(self.delta_rule.linears(self.hidden) if self.delta_rule else {}),
            **({} if self.experts else dense),
            "lm_head": (self.hidden, self.vocab),
        }
