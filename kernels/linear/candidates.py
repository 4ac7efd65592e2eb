"""``specgraph::score_candidates``: the logits of a few candidates, corrected by the token before them.

A candidate ``c`` of a row with the logit ``u`` and the gates ``g``, behind the token ``a``, gets the logit
``u + sum over i of A[a, i] * g[i] * B[c, i]``, and every token that is no candidate gets -inf. ``A`` and ``B`` embed
the tokens. Sums are in float32, or float64 for what is in it. The order of a sum follows from its length alone, so a
row has the same bits beside any others.

Source: the candidate selector of DFlash 2 (z-lab and Inco AI, 2026).
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.checks import check_shapes
from specgraph.kernels.launch import block_size, contiguous, gdc_launch_dependents, gdc_wait, launch
from specgraph.kernels.ops import declare, not_float64, triton_or_reference


@dataclass(slots=True)
class ScoreCandidates:
    """Logits ``[B, R, Vd]``, float32 or float64, of rows that have ``k`` candidates each.

    Attributes:
        predecessor: ``A``, ``[V, r]``.
        successor: ``B``, ``[V, r]``.
        tokens: int64 ``[B, R]`` in ``[0, V)``, the token before each row.
        candidates: int64 ``[B, R, k]`` in ``[0, Vd)``, different ones in a row.
        unary: ``[B, R, k]``, their logits.
        gates: ``[B, R, r]``.
        vocab_size: ``Vd``, at most ``V``.
    """

    predecessor: Tensor
    successor: Tensor
    tokens: Tensor
    candidates: Tensor
    unary: Tensor
    gates: Tensor
    _: KW_ONLY
    vocab_size: int


def score_candidates_reference(given: ScoreCandidates) -> Tensor:
    """:class:`ScoreCandidates` in plain PyTorch."""
    out = _score_candidates_fake(given).fill_(-torch.inf)
    exact = out.dtype
    before = given.predecessor[given.tokens].to(exact) * given.gates.to(exact)
    added = (before.unsqueeze(2) * given.successor[given.candidates].to(exact)).sum(-1)
    return out.scatter_(2, given.candidates, given.unary.to(exact) + added)


@triton.jit
def _score_candidates_kernel(
    out, predecessor, successor, tokens, candidates, unary, gates, vocab,
    COUNT: tl.constexpr, RANK: tl.constexpr, COUNT_2: tl.constexpr, RANK_2: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some tokens of one row. The grid is (B * R, blocks of tokens)."""
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    # ---- out = -inf: [BLOCK]
    token = first + tl.arange(0, BLOCK)
    tl.store(out + row * vocab + token, -float("inf"), mask=token < vocab)
    tl.debug_barrier()  # other threads of this program have stored where the candidates go
    # ---- out[c] = u_c + sum over i of A[a, i] g[i] B[c, i], for the candidates c among these tokens: [COUNT_2]
    c, i = tl.arange(0, COUNT_2), tl.arange(0, RANK_2)
    candidate = tl.load(candidates + row * COUNT + c, mask=c < COUNT, other=-1)
    own = (candidate >= first) & (candidate < first + BLOCK)
    a = tl.load(predecessor + tl.load(tokens + row) * RANK + i, mask=i < RANK, other=0).to(tl.float32)
    before = a * tl.load(gates + row * RANK + i, mask=i < RANK, other=0).to(tl.float32)
    inside = own[:, None] & (i < RANK)[None, :]
    b = tl.load(successor + candidate[:, None] * RANK + i[None, :], mask=inside, other=0).to(tl.float32)
    score = tl.load(unary + row * COUNT + c, mask=own, other=0).to(tl.float32) + tl.sum(before[None, :] * b, 1)
    tl.store(out + row * vocab + candidate, score, mask=own)


def score_candidates_triton(given: ScoreCandidates) -> Tensor:
    """:class:`ScoreCandidates` in one launch."""
    out, count, rank = _score_candidates_fake(given), given.candidates.shape[2], given.gates.shape[2]
    operands = contiguous(given, "predecessor", "successor", "tokens", "candidates", "unary", "gates")
    block = block_size(given.vocab_size, 4096)
    launch(
        _score_candidates_kernel, (given.tokens.numel(), triton.cdiv(given.vocab_size, block)), out, *operands,
        given.vocab_size, COUNT=count, RANK=rank, COUNT_2=triton.next_power_of_2(count),
        RANK_2=triton.next_power_of_2(rank), BLOCK=block, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _score_candidates_fake(given: ScoreCandidates) -> Tensor:
    check_shapes(given, predecessor="V r", successor="V r", tokens="B R", candidates="B R k", unary="B R k",
                 gates="B R r")  # fmt: skip
    exact = torch.promote_types(given.unary.dtype, torch.float32)
    return given.unary.new_empty((*given.tokens.shape, given.vocab_size), dtype=exact)


score_candidates = declare(
    "score_candidates", ScoreCandidates, _score_candidates_fake,
    triton_or_reference(score_candidates_triton, score_candidates_reference, covers=not_float64("unary")),
).function
