"""A second, smaller causal LM with the target's tokenizer as the draft.

Source: Leviathan et al. 2023 (arXiv 2211.17192) and Chen et al. 2023 (arXiv 2302.01318). With a mask token it can draft
in parallel: PARD, An et al. 2025 (arXiv 2504.18583).
"""

from __future__ import annotations

from specgraph.drafters.base import Drafter, Mask
from specgraph.frontend.tracing import TracedModel


def draft_model(
    traced: TracedModel, num_speculative_tokens: int, mask_token_id: int | None = None, parallel: bool = False
) -> Drafter:
    """The drafter that runs a traced causal LM: token by token, or all drafts at once behind mask tokens."""
    modules = {"draft_body": traced.body, "draft_head": traced.head}
    mask = None if mask_token_id is None else Mask(mask_token_id)
    return Drafter("draft_model", "autoregressive", num_speculative_tokens, modules, traced.info, mask=mask,
                   parallel=parallel)  # fmt: skip
