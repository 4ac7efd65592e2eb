"""DFlash2 heads for the tests: files in both layouts, and the published formula in plain PyTorch.

What the layers compute, with their convolutions, is the formula of :mod:`tests.drafters.dflash_formula`. The rest
shares nothing with specgraph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.checkpoints.layouts import HIDDEN, VOCAB, Written
from tests.drafters.dflash_formula import (
    BLOCK,
    WINDOW,
    Given,
    Seen,
    linear,
    sliding_keys,
    speculators,
    tensors,
    weights_of,
    z_lab,
)

RANK, TOP_K, GROUP = 12, 6, 8


@dataclass(frozen=True)
class Walked(Given):
    """A written head, and what the formula must know beyond its tensors."""

    top_k: int = TOP_K


def additions(taps: int = 2, group: int = GROUP, rank: int = RANK) -> dict[str, Tensor]:
    """Random tensors of a DFlash head with convolutions of so many taps and a selector of this rank; 0 for none."""
    shapes: dict[str, tuple[int, ...]] = {}
    for sublayer in [f"layers.{index}.{name}_conv" for index in (0, 1) for name in ("attention", "mlp") if taps]:
        shapes[f"{sublayer}.base_kernel"] = (2, taps, HIDDEN)
        shapes[f"{sublayer}.kernel_projection.weight"] = (2 * taps * HIDDEN // group, HIDDEN)
    if rank:
        shapes |= {f"candidate_selector.{name}_codebook": (VOCAB, rank) for name in ("predecessor", "successor")}
        shapes["candidate_selector.hidden_projection.weight"] = (rank, HIDDEN)
    generator = torch.Generator().manual_seed(6)
    return tensors() | {name: 0.5 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def dflash2(given: dict[str, Tensor], nested: dict[str, Any] | None = None, **changed: Any) -> Written:
    """A head as z-lab's files are, with the size of a block in ``dflash_config``."""
    own = {"block_size": BLOCK, "conv_kernel_size": 2, "conv_group_size": GROUP, "selector_rank": RANK,
           "selector_top_k": TOP_K, **(nested or {})}  # fmt: skip
    keys = {"architectures": ["DFlash2DraftModel"], "block_size": None, "is_causal": False}
    return z_lab(given, {key: value for key, value in own.items() if value is not None}, **{**keys, **changed})


def as_speculators(given: dict[str, Tensor], layer: dict[str, Any] | None = None, **changed: Any) -> Written:
    """A head in the layout of speculators."""
    keys: dict[str, Any] = {
        "architectures": ["DFlash2DraftModel"], "speculators_model_type": "dflash2", "conv_kernel_size": 2,
        "conv_group_size": GROUP, "selector_rank": RANK, "selector_top_k": TOP_K, "sliding_window_non_causal": True,
    }  # fmt: skip
    return speculators(given, layer, **{**keys, **changed})


SILENT = dict.fromkeys(("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"))
WALKED: dict[str, Walked] = {
    "z-lab": Walked(dflash2(additions())),
    "sliding": Walked(dflash2(additions(), **sliding_keys()), (Seen(WINDOW), Seen())),
    "selector alone": Walked(dflash2(additions(taps=0), SILENT), top_k=16),
    "convolutions alone": Walked(dflash2(additions(3, 16, rank=0), {**SILENT, "conv_kernel_size": 3}), top_k=VOCAB),
    "speculators": Walked(as_speculators(additions()), theta=500.0),
    "speculators, sliding, from the anchor": Walked(
        as_speculators(additions(3, 4), sliding_keys(), conv_kernel_size=3, conv_group_size=4, sample_from_anchor=True),
        (Seen(WINDOW, anchored=True), Seen()), 500.0, shifted=True,
    ),
}  # fmt: skip


@torch.no_grad()
def walked(name: str, rows: Tensor, before: Sequence[int]) -> Tensor:
    """Logits ``[N, Vd]`` of the first drafts of a block: those of the candidates, and -inf elsewhere.

    ``before`` are the tokens before these drafts, N of them, and ``rows`` all rows of the block.
    """
    given, weights = WALKED[name], weights_of(WALKED[name])
    found = []
    for token, row in zip(before, rows[not given.shifted :], strict=False):
        logits = linear(weights, "lm_head", row)
        if "candidate_selector.predecessor_codebook" in weights:
            gate = weights["candidate_selector.predecessor_codebook"][token]
            gate = gate * linear(weights, "candidate_selector.hidden_projection", row)
            scores = torch.full_like(logits, -math.inf)
            for candidate in logits.argsort(descending=True)[: given.top_k].tolist():
                pair = gate @ weights["candidate_selector.successor_codebook"][candidate]
                scores[candidate] = logits[candidate] + pair
            logits = scores
        found.append(logits)
    return torch.stack(found)
