"""The sizes of a target that its kernels see, read from its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig


@dataclass(frozen=True)
class Experts:
    """The experts of a layer: how many, how many a token meets, and the width between their two products."""

    count: int
    per_token: int
    intermediate: int

    @staticmethod
    def of(text: Any) -> Experts | None:
        """Those of a configuration, under the names that transformers' models have for them."""
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        count = next((value for name in names if (value := getattr(text, name, None))), 0)
        if not count:
            return None
        width = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
        return Experts(count, text.num_experts_per_tok, width)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a causal LM that its kernels see. What layers have beside ``experts`` is not timed."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: Experts | None = None

    @staticmethod
    def of(config: PretrainedConfig) -> Sizes:
        text: Any = config.get_text_config()
        heads = text.num_attention_heads
        return Sizes(
            hidden=text.hidden_size,
            intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            heads=heads,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            vocab=text.vocab_size,
            experts=Experts.of(text),
        )

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Name to (inputs, outputs) of the products of a step, q/k/v and gate/up merged."""
        width = self.heads * self.head_dim
        dense = {"gate_up": (self.hidden, 2 * self.intermediate), "down": (self.intermediate, self.hidden)}
        return {
            "qkv": (self.hidden, width + 2 * self.kv_heads * self.head_dim),
            "o": (width, self.hidden),
            **({} if self.experts else dense),
            "lm_head": (self.hidden, self.vocab),
        }
