"""Ops of step graphs that change logits as a request asks for, before tokens are drawn from them."""

from __future__ import annotations

from typing import Any

import torch

from specgraph.kernels.processors import biases, forced, ngrams, penalties

PROCESSORS: dict[Any, tuple[str, ...]] = {
    torch.ops.specgraph.add_biases.default: ("bias_tokens", "bias_ends", "bias_values", "bias_until"),
    torch.ops.specgraph.penalise.default: penalties.PENALTIES,
    torch.ops.specgraph.ban_ngrams.default: ("no_repeat_ngram_size",),
    torch.ops.specgraph.force_tokens.default: ("forced_bos_token_id", "forced_eos_token_id"),
}
"""Every such op, in the order in which a step calls them, and those of its arguments that are options of a request. The
names of all arguments are those of inputs of the step. Where a request has none of the options, its step has no such
op."""

__all__ = ["PROCESSORS", "biases", "forced", "ngrams", "penalties"]
