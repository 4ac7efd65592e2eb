"""A second, smaller causal LM with the target's tokenizer as the draft.

Source: Leviathan et al. 2023 (arXiv 2211.17192) and Chen et al. 2023 (arXiv 2302.01318).
"""

from __future__ import annotations

from specgraph.drafters.base import Drafter
from specgraph.tracing import TracedModel


def draft_model(traced: TracedModel, num_speculative_tokens: int) -> Drafter:
    """The drafter that runs a traced causal LM, token by token."""
    modules = {"draft_body": traced.body, "draft_head": traced.head}
    return Drafter("draft_model", "autoregressive", num_speculative_tokens, modules)
