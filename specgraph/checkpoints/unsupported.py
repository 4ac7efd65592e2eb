"""Recognises draft formats that no drafter here reads, so that the error can name the format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from specgraph.checkpoints.checkpoint import architectures
from specgraph.checkpoints.files import Files

NAMED = {
    "Eagle3DeepseekV2ForCausalLM": "an EAGLE-3 head with MLA attention",
    "DFlash": "a variant of DFlash",
    "DSpark": "a DSpark head",
    "Domino": "a Domino head",
    "LiLiCorr": "a LiLiCorr head",
    "MTP": "an MTP head",
}
"""Formats by what the name of one of their architectures contains."""


def name_unsupported(files: Files) -> str | None:
    """The unsupported format of the checkpoint in ``files``, such as ``an MLP speculator``; None if there is none."""
    declared = files.config.get("speculators_model_type")
    if declared is not None:
        return "an EAGLE-1 head in the layout of speculators" if declared == "eagle" else f"a {declared} head"
    if files.config.get("model_type") == "mlp_speculator":
        return "an MLP speculator"
    found = (f"{said} ({name})" for name in architectures(files.config) for part, said in NAMED.items() if part in name)
    return next(found, None) or _by_tensors(files.tensors)


def _by_tensors(names: Mapping[str, Any]) -> str | None:
    """The format that the names of the tensors show."""
    whole_model = any(re.match(r"(model|transformer|gpt_neox)\.", name) for name in names)
    if any(name.startswith("speculator.") for name in names):
        return "an MLP speculator"
    # A causal LM may have MTP layers beside its own layers; transformers does not load them.
    if not whole_model and any(re.search(r"^mtp(_layers)?\.|\.eh_proj\.|\.enorm\.", name) for name in names):
        return "an MTP head"
    return None
