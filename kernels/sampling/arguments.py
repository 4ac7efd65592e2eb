"""What ``specgraph::sample_draft`` takes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class SampleDraft:
    """Drafts to be drawn, as :func:`specgraph.kernels.sampling.draft.sample_draft` describes them."""

    logits: Tensor
    temperature: Tensor
    seeds: Tensor | None
    key: Tensor
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    draft_to_target: Tensor | None
    row: int
    rule: str
    target_vocab_size: int | None
    return_processed: bool
