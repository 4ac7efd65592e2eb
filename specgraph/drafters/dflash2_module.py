"""The PyTorch module of DFlash2 heads. :mod:`specgraph.drafters.dflash2` describes what it computes, and loads it.

Parameters have the names of the files.

Sources: DFlash 2 (z-lab and Inco AI, 2026); the ``dflash2`` of speculators.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specgraph.drafters.dflash_module import DFlash, DFlashConfig, DFlashLayer, Sublayer
from specgraph.drafters.plan import HeadPlan
from specgraph.kernels.linear.block_conv import block_conv
from specgraph.kernels.linear.candidates import score_candidates


@dataclass(frozen=True)
class DFlash2Config(DFlashConfig):
    """The shape of a DFlash2 head.

    Attributes:
        conv_taps: the rows that a convolution reads, its own included; 0 for no convolutions.
        conv_group: the channels that share what a row adds to the weights of a convolution.
        selector_rank: ``r``, the width of the selector; 0 for none.
        selector_rows: the number of tokens that the selector embeds.
        selector_top_k: ``k``, the number of candidates for each draft.
    """

    conv_taps: int = 0
    conv_group: int = 1
    selector_rank: int = 0
    selector_rows: int = 0
    selector_top_k: int = 1


class SublayerConv(nn.Module):
    """A convolution in front of a sublayer and one behind it. What both add to their weights comes of the input."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        size, taps = config.layers.hidden_size, config.conv_taps
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, size))
        self.kernel_projection = nn.Linear(size, 2 * taps * (size // config.conv_group), bias=False)

    def forward(self, x: Tensor, sublayer: Sublayer, residual: Tensor) -> Tensor:
        """Run ``sublayer`` on the rows ``[B, T, H]`` of blocks, and add what comes out to ``residual``."""
        front, behind = self.kernel_projection(x).chunk(2, dim=-1)
        return block_conv(sublayer(block_conv(x, self.base_kernel[0], front)), self.base_kernel[1], behind, residual)

    @torch.no_grad()
    def start(self) -> None:
        """Begin as the identity."""
        self.base_kernel.zero_()[:, 0] = 1.0
        self.kernel_projection.weight.zero_()


class DFlash2Layer(DFlashLayer):
    """A layer of a DFlash head with convolutions around its sublayers. The context goes through none of them."""

    def __init__(self, config: DFlash2Config, index: int) -> None:
        super().__init__(config.layers, index, config.masks[index])
        self.attention_conv, self.mlp_conv = SublayerConv(config), SublayerConv(config)

    def around(self, name: str, sublayer: Sublayer, x: Tensor, residual: Tensor) -> Tensor:
        """Run a sublayer between its two convolutions."""
        mixed: Tensor = self.get_submodule(f"{name}_conv")(x, sublayer, residual)
        return mixed


class CandidateSelector(nn.Module):
    """Corrects the logits of candidates by the token before them (:mod:`specgraph.kernels.linear.candidates`).

    The gates of a row with the hidden state ``h`` are ``W h``.
    """

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        shape = (config.selector_rows, config.selector_rank)
        self.predecessor_codebook = nn.Parameter(torch.zeros(shape))
        self.successor_codebook = nn.Parameter(torch.zeros(shape))
        self.hidden_projection = nn.Linear(config.layers.hidden_size, config.selector_rank, bias=False)


class DFlash2(DFlash):
    """A DFlash2 head: a DFlash head with convolutions, whose drafts are chosen among candidates one after the other."""

    config: DFlash2Config

    def __init__(self, config: DFlash2Config, *, mask_embedding: bool = False) -> None:
        super().__init__(config, mask_embedding=mask_embedding)
        self.candidate_selector = CandidateSelector(config) if config.selector_rank else None

    def make_layer(self, index: int) -> DFlashLayer:
        """One of the layers."""
        return DFlash2Layer(self.config, index) if self.config.conv_taps else super().make_layer(index)

    def draft(self, tokens: Tensor, positions: Tensor, count: int) -> Tensor | tuple[Tensor, ...]:
        """Run the rows of a block. Of those that give the first ``count`` drafts, this gives the candidates, int64
        ``[B, K, k]``, their logits ``[B, K, k]``, and what gates the selector, ``[B, K, r]``.

        Without a selector, it gives the logits ``[B, K, Vd]``.
        """
        rows = self.norm(self(tokens, positions)[:, self.drafting(count)])
        logits: Tensor = self.lm_head(rows)
        if self.candidate_selector is None:
            return logits
        unary, candidates = logits.topk(self.config.selector_top_k, dim=-1)
        return candidates, unary, self.candidate_selector.hidden_projection(rows)

    def score(self, tokens: Tensor, candidates: Tensor, unary: Tensor, gates: Tensor) -> Tensor:
        """Logits ``[B, R, Vd]`` of rows behind ``tokens``, int64 ``[B, R]``: those of the candidates, -inf elsewhere.

        The other arguments are what :meth:`draft` gives.
        """
        assert self.candidate_selector is not None
        codebooks = self.candidate_selector.predecessor_codebook, self.candidate_selector.successor_codebook
        return score_candidates(*codebooks, tokens, candidates, unary, gates, vocab_size=self.config.draft_vocab_size)

    # Training, as :class:`~specgraph.drafters.shifted.ShiftedHead` describes it

    def unroll(
        self, tokens: Tensor, features: tuple[Tensor, ...], steps: int, mask_token_id: int | None,
        rows: Sequence[Tensor] | None = None,
    ) -> Iterator[Tensor]:  # fmt: skip
        """For draft 0, 1, ... of every position of a text, what its logits are computed from.

        These are the rows that :meth:`DFlash.unroll` gives and, with a selector, the gated embedding of the token
        before each draft: ``[B, S, H]`` or ``[B, S, H + r]``. The token before draft ``i`` of row ``t`` is the text's,
        ``x[t+1+i]``, as if all drafts before were right.
        """
        selector = self.candidate_selector
        for step, out in enumerate(super().unroll(tokens, features, steps, mask_token_id, rows)):
            if selector is not None:
                before = F.embedding(tokens.roll(-1 - step, dims=1), selector.predecessor_codebook)
                out = torch.cat([out, before * selector.hidden_projection(self.norm(out))], dim=-1)
            yield out

    def step_logits(self, hidden: Tensor, step: int) -> Tensor:
        """Logits ``[R, Vd]`` of rows ``[R, H]`` or ``[R, H + r]`` that :meth:`unroll` gave.

        Decoding draws from the candidates among them. Training keeps the others, so that it makes candidates of tokens
        that are none yet.
        """
        rows, before = torch.split(hidden, [self.fc.out_features, self.config.selector_rank], dim=-1)
        logits = self.predict(rows)
        if self.candidate_selector is None:
            return logits
        candidates = logits.topk(self.config.selector_top_k, dim=-1).indices
        after = F.embedding(candidates, self.candidate_selector.successor_codebook)
        return logits.scatter_add(-1, candidates, (before.unsqueeze(-2) * after).sum(-1))

    @torch.no_grad()
    def start(self, plan: HeadPlan) -> None:
        """Start as :meth:`DFlash.start` does, with convolutions that are the identity and a selector that adds 0."""
        super().start(plan)
        for module in self.modules():
            if isinstance(module, SublayerConv):
                module.start()
        if self.candidate_selector is not None:
            nn.init.normal_(self.candidate_selector.predecessor_codebook)
