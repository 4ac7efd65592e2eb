"""Refuses what a layer passes to a function that a hook takes the place of, if the hook does not know it."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from specgraph.errors import UnsupportedModelError

HARMLESS = frozenset({"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states",
                      "output_router_logits", "position_embeddings", "return_dict", "logits_to_keep"})  # fmt: skip
"""Arguments that models pass on to every layer, and that change nothing of what a layer computes."""


def refuse_unknown(who: str, what: str, given: Mapping[str, Any], harmless: Container[str] = HARMLESS) -> None:
    """Refuse arguments that are neither None nor ``harmless``; ``who`` passes them to its ``what``.

    Raises:
        UnsupportedModelError: names the arguments.
    """
    unknown = sorted(name for name, value in given.items() if value is not None and name not in harmless)
    if unknown:
        raise UnsupportedModelError(
            f"{who} passes {', '.join(unknown)} to its {what}, which specgraph does not know. It would be ignored, so "
            "the model is refused."
        )
