"""DSpark heads for the tests: files in both layouts, and the published formula in plain PyTorch.

What the layers compute is the formula of :mod:`tests.drafters.dflash_formula`. The rest shares nothing with specgraph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.checkpoints.layouts import HIDDEN, VOCAB, Written, llama_keys
from tests.drafters.dflash_formula import (
    DRAFT_VOCAB,
    MASK,
    WINDOW,
    Given,
    Seen,
    linear,
    sliding_keys,
    speculators,
    tensors,
    weights_of,
)

RANK, BLOCK = 12, 7


@dataclass(frozen=True)
class Spark(Given):
    """A written head, and what the formula must know beyond its tensors."""

    kind: str = "vanilla"


def refinements(kind: str | None, confidence: int | None, draft_vocab: int = VOCAB) -> dict[str, Tensor]:
    """Random tensors of the Markov head, and of a confidence head that reads ``confidence`` numbers."""
    shapes: dict[str, tuple[int, ...]] = {}
    if kind is not None:
        shapes |= {"markov_head.markov_w1.weight": (VOCAB, RANK), "markov_head.markov_w2.weight": (draft_vocab, RANK)}
    if kind == "gated":
        shapes |= {"markov_head.gate_proj.weight": (RANK, HIDDEN + RANK), "markov_head.gate_proj.bias": (RANK,)}
    if kind == "rnn":
        shapes |= {"markov_head.joint_proj.weight": (3 * RANK, 2 * RANK + HIDDEN),
                   "markov_head.joint_proj.bias": (3 * RANK,)}  # fmt: skip
    if confidence is not None:
        shapes |= {"confidence_head.proj.weight": (1, confidence), "confidence_head.proj.bias": (1,)}
    generator = torch.Generator().manual_seed(6)
    return {name: 0.6 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def deepspec(given: dict[str, Tensor], kind: str | None = "vanilla", **changed: Any) -> Written:
    """A head as DeepSpec's files are: all options at the top level, and ids of layers whose outputs are meant."""
    keys = llama_keys(model_type="qwen3", num_hidden_layers=2, architectures=["Qwen3DSparkModel"], block_size=BLOCK,
                      num_target_layers=4, mask_token_id=MASK, target_layer_ids=[0, 2], num_anchors=512,
                      tie_word_embeddings=False)  # fmt: skip
    proj = given.get("confidence_head.proj.weight")
    keys |= {"markov_rank": RANK, "markov_head_type": kind} if kind else {"markov_rank": 0}
    keys |= {"enable_confidence_head": proj is not None}
    keys |= {} if proj is None else {"confidence_head_with_markov": proj.shape[1] > HIDDEN}
    return Written({key: value for key, value in {**keys, **changed}.items() if value is not None}, given)


def as_speculators(given: dict[str, Tensor], kind: str, layer: dict[str, Any] | None = None, **changed: Any) -> Written:
    """A head in the layout of speculators."""
    keys: dict[str, Any] = {
        "architectures": ["DSparkSpeculator"], "speculators_model_type": "dspark", "sample_from_anchor": True,
        "block_size": BLOCK, "markov_rank": RANK, "markov_head_type": kind, "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }  # fmt: skip
    return speculators(given, layer, **{**keys, **changed})


def _head(kind: str | None, confidence: int | None, **options: Any) -> dict[str, Tensor]:
    return tensors(**options) | refinements(kind, confidence, options.get("draft_vocab") or VOCAB)


SPARKS: dict[str, Spark] = {
    "deepspec": Spark(deepspec(_head("vanilla", HIDDEN + RANK)), shifted=True),
    "gated": Spark(
        deepspec(_head("gated", HIDDEN, draft_vocab=DRAFT_VOCAB), "gated", draft_vocab_size=DRAFT_VOCAB),
        shifted=True, kind="gated",
    ),
    "recurrent": Spark(deepspec(_head("rnn", None), "rnn"), shifted=True, kind="rnn"),
    "confidence alone": Spark(deepspec(_head(None, HIDDEN), None), shifted=True),
    "speculators": Spark(as_speculators(_head("vanilla", HIDDEN + RANK), "vanilla"), theta=500.0, shifted=True),
    "speculators, gated, sliding": Spark(
        as_speculators(_head("gated", HIDDEN + RANK, draft_vocab=DRAFT_VOCAB), "gated", sliding_keys(),
                       draft_vocab_size=DRAFT_VOCAB),
        (Seen(WINDOW, causal=True, anchored=True), Seen()), 500.0, shifted=True, kind="gated",
    ),
    "speculators, recurrent, not from the anchor": Spark(
        as_speculators(_head("rnn", HIDDEN + RANK), "rnn", sample_from_anchor=False), theta=500.0, kind="rnn",
    ),
}  # fmt: skip


@torch.no_grad()
def refined(name: str, rows: Tensor, before: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """Corrected logits ``[R, Vd]`` and estimated acceptance ``[R]`` of the first drafts of a block.

    ``before`` are the tokens before these drafts, R of them, and ``rows`` all rows of the block. Where the anchor's row
    predicts nothing, it still goes through the Markov head, with the anchor as the token before it.
    """
    given = SPARKS[name]
    idle = not given.shifted
    before = [before[0]] * idle + list(before)
    weights, rows = weights_of(given), rows[: len(before)]
    logits, inputs = linear(weights, "lm_head", rows), rows
    if "markov_head.markov_w1.weight" in weights:
        embedded = weights["markov_head.markov_w1.weight"][list(before)]
        logits = logits + linear(weights, "markov_head.markov_w2", _mixed(weights, given.kind, rows, embedded))
        if weights.get("confidence_head.proj.weight", rows).shape[1] > HIDDEN:
            inputs = torch.cat([rows, embedded], dim=1)
    if "confidence_head.proj.weight" not in weights:
        return logits[idle:], None
    return logits[idle:], 1 / (1 + torch.exp(-linear(weights, "confidence_head.proj", inputs)[idle:, 0]))


def _mixed(weights: dict[str, Tensor], kind: str, rows: Tensor, embedded: Tensor) -> Tensor:
    """What the second factor of the Markov head reads, ``[R, r]``."""
    if kind == "vanilla":
        return embedded
    if kind == "gated":
        gate = linear(weights, "markov_head.gate_proj", torch.cat([rows, embedded], dim=1))
        return embedded / (1 + torch.exp(-gate))
    state, found = torch.zeros(RANK, dtype=rows.dtype), []
    for row, own in zip(rows, embedded, strict=True):
        joint = linear(weights, "markov_head.joint_proj", torch.cat([state, own, row]))
        gate, candidate, out = joint.split(RANK)
        kept = 1 / (1 + torch.exp(-gate))
        state = kept * state + (1 - kept) * torch.tanh(candidate)
        found.append(torch.tanh(out))
    return torch.stack(found)


def without(written: Written, *names: str) -> Written:
    """The head without some of its tensors."""
    return replace(written, tensors={key: value for key, value in written.tensors.items() if key not in names})
