"""The PyTorch module of DSpark heads. :mod:`specgraph.drafters.dspark` describes what it computes, and loads it.

Parameters have the names of the files.

Sources: DSpark (DeepSeek, 2026), ``deepspec/modeling/dspark`` of DeepSpec; the ``dspark`` of speculators.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specgraph.drafters.dflash_module import DFlash, DFlashConfig
from specgraph.drafters.plan import HeadPlan

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

    def forward(self, embedded: Tensor, hidden: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The input ``[..., r]`` of :attr:`markov_w2`, and the next state.

        Args:
            embedded: the embedding ``[..., r]`` of the token before.
            hidden: the row's hidden state ``[..., H]`` behind the last norm; may be None for ``vanilla``.
            state: ``[..., r]`` for ``rnn``, else None.
        """
        if hidden is None or self.kind == "vanilla":
            return embedded, None
        if self.kind == "gated":
            gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], dim=-1)))
            return gate * embedded, None
        assert state is not None
        joint = self.joint_proj(torch.cat([state, embedded, hidden], dim=-1))
        gate, candidate, out = joint.chunk(3, dim=-1)
        kept = torch.sigmoid(gate)
        return torch.tanh(out), kept * state + (1 - kept) * torch.tanh(candidate)


class ConfidenceHead(nn.Module):
    """Estimates the probability that a draft is accepted if those before it are."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        rank = config.markov_rank if config.confidence_with_markov else 0
        self.proj = nn.Linear(config.layers.hidden_size + rank, 1)

    def forward(self, *inputs: Tensor) -> Tensor:
        """The logit ``[...]`` of the estimate, from the inputs ``[..., H]`` and, with Markov, ``[..., r]``."""
        return self.proj(torch.cat(inputs, dim=-1)).squeeze(-1)


class DSpark(DFlash):
    """A DSpark head: a DFlash head, with logits that are corrected draft by draft."""

    config: DSparkConfig

    def __init__(self, config: DSparkConfig, *, mask_embedding: bool = False) -> None:
        super().__init__(config, mask_embedding=mask_embedding)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.confidence else None

    def draft(self, tokens: Tensor, positions: Tensor, count: int) -> tuple[Tensor, ...]:
        """Run the rows of a block. Of those that give the first ``count`` drafts, this gives the logits
        ``[B, K, Vd]``, the rows ``[B, K, H]`` behind the last norm and, for a recurrent Markov head, the state
        ``[B, 1, r]`` of the first.
        """
        rows = self.norm(self(tokens, positions))
        predicting = rows[:, self.drafting(count)]
        state = [self.first_state(rows, tokens)] if self.config.recurrent else []
        return self.lm_head(predicting), predicting, *state

    def first_state(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """The state ``[B, 1, r]`` of the first row that predicts a draft, in a block with ``rows`` ``[B, R, H]``.

        It is 0 at the anchor. A head that does not sample from the anchor was trained with its row in front, as if the
        anchor were the token before itself.
        """
        state = rows.new_zeros(rows.shape[0], 1, self.config.markov_rank)
        if not self.config.sample_from_anchor:
            assert self.markov_head is not None
            _, state = self.markov_head(self.markov_head.markov_w1(tokens[:, :1]), rows[:, :1], state)
        return state

    def correct(
        self, tokens: Tensor, logits: Tensor, hidden: Tensor | None = None, state: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Correct the logits of rows by the tokens before them, and give the state of the next row if there is one.

        Args:
            tokens: the target's id of the token before each row, int64 ``[...]``.
            logits: ``[..., Vd]``, as :meth:`draft` gives them.
            hidden: ``[..., H]``, as :meth:`draft` gives them; None if the Markov head is ``vanilla``.
            state: what the row before returned, ``[..., r]``, or what :meth:`draft` did; None if the Markov head is
                not recurrent.
        """
        assert self.markov_head is not None
        mixed, state = self.markov_head(self.markov_head.markov_w1(tokens), hidden, state)
        corrected: Tensor = logits + self.markov_head.markov_w2(mixed)
        return corrected if state is None else (corrected, state)

    def estimate(self, hidden: Tensor, tokens: Tensor | None = None) -> Tensor:
        """The estimates ``[...]``, in float32 or float64. The arguments are those of :meth:`confidence_logits`."""
        logits = self.confidence_logits(hidden, tokens)
        return torch.sigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32)))

    def confidence_logits(self, hidden: Tensor, tokens: Tensor | None = None) -> Tensor:
        """The logits ``[...]`` of the estimates that the drafts of rows ``[..., H]`` are accepted.

        ``tokens`` int64 ``[...]`` are those before each row; None for a head that does not read them.
        """
        assert self.confidence_head is not None
        inputs = [hidden]
        if tokens is not None:
            assert self.markov_head is not None
            inputs.append(self.markov_head.markov_w1(tokens))
        return self.confidence_head(*inputs)

    # Training, as :class:`~specgraph.drafters.shifted.ShiftedHead` describes it

    def unroll(
        self, tokens: Tensor, features: tuple[Tensor, ...], steps: int, mask_token_id: int | None,
        rows: Sequence[Tensor] | None = None,
    ) -> Iterator[Tensor]:  # fmt: skip
        """For draft 0, 1, ... of every position of a text, what its logits and its estimate are computed from.

        These are the rows that :meth:`DFlash.unroll` gives, behind the last norm and, with a Markov head, the embedding
        of the token before each draft, and what that head makes of both: ``[B, S, H]`` or ``[B, S, H + 2 * r]``. The
        token before draft ``i`` of row ``t`` is the text's, ``x[t+1+i]``, as if all drafts before were right.
        """
        state = features[0].new_zeros(*tokens.shape, self.config.markov_rank) if self.config.recurrent else None
        for row, out in enumerate(self.all_rows(tokens, features, steps, mask_token_id, rows)):
            read, step = [self.norm(out)], row - self.config.first_row
            if self.markov_head is not None:
                embedded = self.markov_head.markov_w1(tokens.roll(-1 - max(0, step), dims=1))
                mixed, state = self.markov_head(embedded, read[0], state)
                read += [embedded, mixed]
            if step >= 0:  # else only a state comes of the row, see first_state
                yield torch.cat(read, dim=-1)

    def step_logits(self, hidden: Tensor, step: int) -> Tensor:
        """Logits ``[R, Vd]`` of rows ``[R, H]`` or ``[R, H + 2 * r]`` that :meth:`unroll` gave."""
        normed, _, mixed = self._parts(hidden)
        logits: Tensor = self.lm_head(normed)
        return logits if self.markov_head is None else logits + self.markov_head.markov_w2(mixed)

    def step_estimates(self, hidden: Tensor) -> Tensor | None:
        """The logits ``[R]`` of estimates that the drafts of such rows are accepted; None without a confidence head.

        No gradient goes on from here. In DeepSpec it does, and changes the drafts for the sake of the estimates.
        """
        if self.confidence_head is None:
            return None
        normed, embedded, _ = self._parts(hidden.detach())
        return self.confidence_head(*[normed, embedded][: 1 + self.config.confidence_with_markov])

    def _parts(self, rows: Tensor) -> tuple[Tensor, ...]:
        """The three parts of what :meth:`unroll` gives; the last two are empty without a Markov head."""
        rank = self.config.markov_rank
        return torch.split(rows, [rows.shape[-1] - 2 * rank, rank, rank], dim=-1)

    @torch.no_grad()
    def start(self, plan: HeadPlan) -> None:
        """Start as :meth:`DFlash.start` does, and with a Markov head that corrects nothing yet."""
        super().start(plan)
        if self.markov_head is not None:
            self.markov_head.markov_w2.weight.zero_()
