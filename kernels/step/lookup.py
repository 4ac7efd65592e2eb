"""Functions of step graphs that propose what they find in the history, or choose between that and drawn drafts."""

from __future__ import annotations

import torch
from torch import Tensor

import specgraph.kernels.step.suffix  # noqa: F401  (declares the op)


def lookup_suffixes(
    history: Tensor, rows: Tensor, length: Tensor, *, num_speculative_tokens: int, max_match: int, min_match: int,
    max_spec_factor: float, max_spec_offset: float, min_token_prob: float,
) -> Tensor:  # fmt: skip
    """Drafts ``[b, K]``: the most frequent continuation of the end of each sequence, while it is probable; -1 for none.

    ``history`` ``[N, S]`` holds accepted tokens, ``rows`` ``[b]`` names the row of each sequence in it, and ``length``
    ``[b]`` is the number of tokens there. :class:`~specgraph.kernels.step.suffix.SuffixLookup` has the definition.
    """
    drafts: Tensor = torch.ops.specgraph.suffix_lookup(
        history, rows, length, num_speculative_tokens, max_match, min_match, max_spec_factor, max_spec_offset,
        min_token_prob,
    )  # fmt: skip
    return drafts


def prefer_found(found: Tensor, *drawn: Tensor) -> Tensor:
    """The drafts ``found`` ``[b, K]`` of the sequences that have any, and the ``drawn`` ones ``[b, k]`` of the others.

    ``drawn`` are one or several tensors with ``K`` columns in all.
    """
    return torch.where(found[:, :1] >= 0, found, torch.cat(drawn, dim=1))


def any_found(found: Tensor) -> Tensor:
    """Which sequences have drafts in ``found`` ``[b, K]``: bool ``[b]``."""
    return found[:, 0] >= 0
