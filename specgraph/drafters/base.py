"""What a drafter is: a small module and a description of what it needs. It knows neither passes nor kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import fx

Kind = Literal["none", "history", "autoregressive"]


@dataclass(frozen=True)
class Drafter:
    """A drafter as the compiler sees it.

    Attributes:
        name: what reports call it.
        kind: how the step graph uses it. ``none`` proposes nothing. ``history`` calls its module once with the token
            history (int64 ``[B, S]``) and its length (``[B]``) and gets K proposals (``[B, K]``, -1 where it has none):
            point masses, without a distribution. ``autoregressive`` has a body (tokens to hidden states) with a KV
            cache and a head (to logits); it is brought to the accepted prefix and then called once per further draft.
        num_speculative_tokens: K, drafts per step and sequence.
        modules: its traced graphs by the name they get in the program.
        features: indices ``k`` of the target hidden states ``hs[k]`` it reads.
    """

    name: str
    kind: Kind
    num_speculative_tokens: int
    modules: dict[str, fx.GraphModule]
    features: tuple[int, ...] = ()
