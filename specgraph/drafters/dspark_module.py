"""The PyTorch module of DSpark heads. :mod:`specgraph.drafters.dspark` describes what it computes, and loads it.

Parameters have the names of the files.

Sources: DSpark (DeepSeek, 2026), ``deepspec/modeling/dspark`` of DeepSpec; the ``dspark`` of speculators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from specgraph.drafters.dflash_module import DFlash, DFlashConfig

MARKOV_KINDS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True)
class DSparkConfig(DFlashConfig):
    """The shape of a DSpark head.

    Attributes:
        markov_rank: ``r``, the width of the Markov head; 0 for none.
        markov_kind: one of :data:`MARKOV_KINDS`, see :class:`MarkovHead`.
        markov_rows: the number of tokens that the Markov head embeds.
        confidence: whether there is a confidence head.
        confidence_with_markov: whether it also reads the Markov head's embedding of the token before.
    """

    markov_rank: int = 0
    markov_kind: str = "vanilla"
    markov_rows: int = 0
    confidence: bool = False
    confidence_with_markov: bool = False

    @property
    def recurrent(self) -> bool:
        """Whether the Markov head carries a state from draft to draft."""
        return self.markov_rank > 0 and self.markov_kind == "rnn"


class MarkovHead(nn.Module):
    """A correction of a row's logits by the token before it, ``W2 f(W1[token])``, of rank ``r``.

    ``f`` is the identity (``vanilla``), a gate computed from the row's hidden state and the embedding (``gated``), or a
    recurrent unit over the drafts of a block, whose state begins with 0 (``rnn``).
    """

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        rank, hidden = config.markov_rank, config.layers.hidden_size
        self.kind = config.markov_kind
        self.markov_w1 = nn.Embedding(config.markov_rows, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def forward(self, embedded: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What :attr:`markov_w2` reads ``[..., r]``, and the next state.

        Args:
            embedded: the embedding ``[..., r]`` of the token before.
            hidden: the row's hidden state ``[..., H]`` behind the last norm.
            state: ``[..., r]`` for ``rnn``, else None.
        """
        if self.kind == "gated":
            gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], dim=-1)))
            return gate * embedded, None
        if self.kind == "rnn":
            assert state is not None
            joint = self.joint_proj(torch.cat([state, embedded, hidden], dim=-1))
            gate, candidate, out = joint.chunk(3, dim=-1)
            kept = torch.sigmoid(gate)
            return torch.tanh(out), kept * state + (1 - kept) * torch.tanh(candidate)
        return embedded, None


class ConfidenceHead(nn.Module):
    """Estimates the probability that a draft is accepted if those before it are."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(
            config.layers.hidden_size + (config.markov_rank if config.confidence_with_markov else 0), 1
        )

    def forward(self, *inputs: Tensor) -> Tensor:
        """The logit ``[...]`` of the estimate, from the inputs ``[..., H]`` and, with Markov, ``[..., r]``."""
        logit: Tensor = self.proj(torch.cat(inputs, dim=-1)).squeeze(-1)
        return logit


class Refined(NamedTuple):
    """What the sequential part of a head makes of one row.

    ``logits`` are ``[..., Vd]``, ``confidence`` is the logit ``[...]`` of the estimated acceptance, and ``state``
    ``[..., r]`` goes to the next row. The last two are None if the head has no such part.
    """

    logits: Tensor
    confidence: Tensor | None
    state: Tensor | None


class DSpark(DFlash):
    """A DSpark head: a DFlash head, with logits that are corrected draft by draft."""

    config: DSparkConfig

    def __init__(self, config: DSparkConfig, *, mask_embedding: bool = False) -> None:
        super().__init__(config, mask_embedding=mask_embedding)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.confidence else None

    @property
    def sequential(self) -> bool:
        """Whether anything is computed draft by draft."""
        return self.markov_head is not None or self.confidence_head is not None

    def predict(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``[B, R, Vd]`` of rows ``[B, R, H]`` that :meth:`forward` gave, and these rows behind the last norm."""
        normed = self.norm(hidden)
        return self.lm_head(normed), normed

    def refine(self, tokens: Tensor, logits: Tensor, hidden: Tensor, state: Tensor | None = None) -> Refined:
        """Correct the logits of rows by the tokens before them, and estimate whether their drafts will be accepted.

        Args:
            tokens: the target's id of the token before each row, int64 ``[...]``.
            logits: ``[..., Vd]``, as :meth:`predict` gives them.
            hidden: ``[..., H]``, as :meth:`predict` gives them.
            state: what the row before returned, ``[..., r]``; None for heads that are not recurrent.
        """
        inputs = [hidden]
        if self.markov_head is not None:
            embedded = self.markov_head.markov_w1(tokens)
            mixed, state = self.markov_head(embedded, hidden, state)
            logits = logits + self.markov_head.markov_w2(mixed)
            inputs += [embedded] * self.config.confidence_with_markov
        confidence = None if self.confidence_head is None else self.confidence_head(*inputs)
        return Refined(logits, confidence, state)
