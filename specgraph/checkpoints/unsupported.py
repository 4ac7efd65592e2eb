"""Recognises draft formats that no drafter here reads, so that the error can name the format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from specgraph.checkpoints.checkpoint import architectures
from specgraph.checkpoints.files import Files


def name_unsupported(files: Files) -> str | None:
    """The unsupported format of the checkpoint in ``files``, such as ``an MLP speculator``; None if there is none."""
    return _declared(files.config) or _named(files.tensors)


def _declared(config: Mapping[str, Any]) -> str | None:
    """The format that the configuration names."""
    declared = config.get("speculators_model_type")
    if declared == "eagle":
        return "an EAGLE-1 head in the layout of speculators"
    if declared is not None:
        return f"a {declared} head"
    if config.get("model_type") == "mlp_speculator":
        return "an MLP speculator"
    for name in architectures(config):
        if name == "Eagle3DeepseekV2ForCausalLM":
            return f"an EAGLE-3 head with MLA attention ({name})"
        for part, words in (("DFlash", "a variant of DFlash"), ("DSpark", "a DSpark head"), ("MTP", "an MTP head")):
            if part in name:
                return f"{words} ({name})"
    return None


def _named(names: Mapping[str, Any]) -> str | None:
    """The format that the names of the tensors show."""
    whole_model = any(re.match(r"(model|transformer|gpt_neox)\.", name) for name in names)
    if any(name.startswith("speculator.") for name in names):
        return "an MLP speculator"
    # A causal LM may have MTP layers beside its own layers; transformers does not load them.
    if not whole_model and any(re.search(r"^mtp(_layers)?\.|\.eh_proj\.|\.enorm\.", name) for name in names):
        return "an MTP head"
    return None
