"""``specgraph::rank``: the ranks of given tokens among all tokens of their row of logits.

Row ``r`` of the logits ``[B, R, V]`` is the distribution of the *candidates* ``tokens[:, r]``. The rank of a token is 1
plus the number of tokens in front of it: those with a larger logit, and those with an equal logit and a smaller id. So
rank 1 is the token that greedy decoding takes. A temperature changes no rank. Of a token that top-k, top-p or min-p
remove, the rank says how far down it stands.

On a GPU a program counts for all candidates of one row and walks over the vocabulary in tiles, so that a step which is
traced has one launch more. It computes nothing but integers, of its own row alone. float64 takes the reference.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.checks import check_shapes
from specgraph.kernels.launch import block_size, contiguous, gdc_launch_dependents, gdc_wait, launch
from specgraph.kernels.ops import declare, not_float64, triton_or_reference

_TILE = 4096
"""The most logits that a program compares at a time."""


@dataclass(slots=True)
class Rank:
    """Logits of ``B`` sequences, and the tokens whose ranks are wanted.

    Attributes:
        logits: ``[B, R, V]`` of any float dtype. A NaN stands in front of no token.
        tokens: int64 ``[B, R, C]``, ids from 0 to ``V - 1``.
        num_ranked: int64 ``[B]``, how many rows have tokens whose ranks are wanted, from the first on. Others are not
            read.
    """

    logits: Tensor
    tokens: Tensor
    num_ranked: Tensor


def rank_reference(given: Rank) -> Tensor:
    """The definition of ``specgraph::rank``: int32 ``[B, R, C]``, 0 in rows whose ranks are not wanted."""
    logits, tokens = given.logits, given.tokens
    rows, vocab = logits.shape[1:]
    wanted = torch.arange(rows, device=logits.device) < given.num_ranked.unsqueeze(1)
    tokens = tokens.masked_fill(~wanted.unsqueeze(2), 0)
    own, every = logits.gather(2, tokens).unsqueeze(3), logits.unsqueeze(2)
    smaller = torch.arange(vocab, device=logits.device) < tokens.unsqueeze(3)
    in_front = ((every > own) | ((every == own) & smaller)).sum(3)
    return torch.where(wanted.unsqueeze(2), 1 + in_front, 0).int()


@triton.jit
def _rank_kernel(
    ranks, logits, tokens, num_ranked, VOCAB: tl.constexpr, CANDIDATES: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, PDL: tl.constexpr,
):
    """The candidates of one row. The grid is (R, B)."""
    gdc_wait(PDL)
    gdc_launch_dependents(PDL)
    row, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    line = batch * tl.num_programs(0) + row
    candidate = tl.arange(0, BLOCK)
    wanted = (candidate < CANDIDATES) & (row < tl.load(num_ranked + batch))
    token = tl.load(tokens + line * CANDIDATES + candidate, mask=wanted, other=0)
    own = tl.load(logits + line * VOCAB + token, mask=wanted, other=0.0).to(tl.float32)
    # ---- rank = 1 + the tokens with a larger logit + those with an equal one and a smaller id: [BLOCK, TILE] compared
    rank = wanted.to(tl.int32)
    if row < tl.load(num_ranked + batch):
        for first in range(0, VOCAB, TILE):
            entry = first + tl.arange(0, TILE)
            value = tl.load(logits + line * VOCAB + entry, mask=entry < VOCAB, other=-float("inf")).to(tl.float32)
            equal = (value[None, :] == own[:, None]) & (entry[None, :] < token[:, None])
            rank += tl.sum(((value[None, :] > own[:, None]) | equal).to(tl.int32), 1)
    tl.store(ranks + line * CANDIDATES + candidate, rank, mask=candidate < CANDIDATES)


def rank_triton(given: Rank) -> Tensor:
    """:class:`Rank` in one kernel, whose logits are not in float64."""
    ranks, vocab = _rank_fake(given), given.logits.shape[2]
    batch, rows, candidates = ranks.shape
    tile = block_size(vocab, _TILE)
    if candidates:
        launch(
            _rank_kernel, (rows, batch), ranks, *contiguous(given, "logits", "tokens", "num_ranked"), VOCAB=vocab,
            CANDIDATES=candidates, BLOCK=triton.next_power_of_2(candidates), TILE=tile, num_warps=max(1, tile // 512),
        )
    return ranks


def _rank_fake(given: Rank) -> Tensor:
    check_shapes(given, logits="B R V", tokens="B R C", num_ranked="B")
    return given.tokens.new_empty(given.tokens.shape, dtype=torch.int32)


RANK = declare(
    "rank", Rank, _rank_fake,
    triton_or_reference(rank_triton, rank_reference, covers=not_float64("logits"), moves_only=True),
)
