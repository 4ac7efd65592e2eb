"""The definition of verification with arguments that may be left out, for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specgraph.kernels.verify import Verified, Verify, verify_reference
from specgraph.kernels.verify.pieces import locate_rows, row_chances


def verified(
    logits: Tensor, draft_tokens: Tensor, draft_logits: Tensor | None = None, *, positions: Tensor,
    num_rows: Tensor | None = None, num_forced: Tensor | None = None, **options: Any,
) -> Verified:  # fmt: skip
    """``verify_reference``; all rows are real and none is forced unless that is given, and no option is on."""
    absent: dict[str, Any] = dict.fromkeys(("top_k", "top_p", "min_p", "target_to_draft"))
    if num_rows is None:
        num_rows = positions.new_full(positions.shape[:1], positions.shape[-1])
    if num_forced is None:
        num_forced = torch.zeros_like(num_rows)
    given = {**absent, **options, "positions": positions, "num_rows": num_rows, "num_forced": num_forced}
    return verify_reference(Verify(logits, draft_tokens, draft_logits, **given))


def acceptance_chances(
    processed: Tensor, draft_tokens: Tensor, draft_logits: Tensor | None, num_rows: Tensor, num_forced: Tensor, *,
    rule: str, target_to_draft: Tensor | None = None, point_mass: Tensor | None = None,
    posterior_threshold: float = 0.09, posterior_alpha: float = 0.3, acceptance_rate: float = 0.7,
) -> Tensor:  # fmt: skip
    """The probabilities ``[B, R]`` with which ``accept`` compares its uniforms; 0 where no draft is verified."""
    rows = locate_rows(processed, draft_tokens, num_rows, num_forced)
    options = (rule, target_to_draft, point_mass, posterior_threshold, posterior_alpha, acceptance_rate)
    return row_chances(processed, draft_logits, rows, *options).masked_fill(~rows.live, 0.0)
