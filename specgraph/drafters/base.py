"""What a drafter is: small modules and a description of what they need. It knows neither passes nor kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, fx

from specgraph.ir.model_info import ModelInfo

Kind = Literal["none", "history", "autoregressive"]


@dataclass(frozen=True, eq=False)
class Mask:
    """What a drafter runs in the place of a token it has not drafted yet, when it drafts in parallel.

    Attributes:
        token_id: the mask token, an id its embedding takes.
        hidden: ``[H]``, what stands in for the hidden state, for drafters that read one.
    """

    token_id: int
    hidden: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Drafter:
    """A drafter as the compiler sees it.

    Attributes:
        name: what reports call it.
        kind: how the step graph uses it. ``none`` proposes nothing. ``history`` calls its module ``draft`` once with
            the token history (int64 ``[B, S]``) and its length (``[B]``) and gets K proposals (``[B, K]``, -1 where it
            has none): point masses, without a distribution. ``autoregressive`` has a ``draft_body`` (rows to hidden
            states) with a KV cache and a ``draft_head`` (to logits); it is brought to the accepted prefix and then
            called once per further draft, or once in all by ``parallel_draft``.
        num_speculative_tokens: K, drafts per step and sequence.
        modules: its traced graphs by the name they get in the program.
        model: facts about it, for drafters that are models.
        features: indices ``k`` of the target hidden states ``hs[k]`` it reads. An autoregressive drafter with features
            is *shifted*: its row ``t`` takes token ``t + 1`` and what ``draft_features`` makes of the target's hidden
            states at ``t``, and predicts token ``t + 2``. In the chain the hidden state is the one its own head
            returned beside the logits. Without features row ``t`` takes token ``t`` alone.
        draft_to_target: int64 ``[Vd]``, the target id of every draft id; None if they are the same.
        mask: makes ``draft.parallel`` possible.
        parallel: whether it was trained to draft in parallel, which is then the default.
    """

    name: str
    kind: Kind
    num_speculative_tokens: int
    modules: dict[str, fx.GraphModule]
    model: ModelInfo | None = None
    features: tuple[int, ...] = ()
    draft_to_target: Tensor | None = None
    mask: Mask | None = None
    parallel: bool = False

    @property
    def shifted(self) -> bool:
        """Whether row ``t`` takes token ``t + 1`` and a hidden state."""
        return self.kind == "autoregressive" and bool(self.features)
