"""Functions of step graphs that look the history up, and that choose between what they find and other drafts."""

from __future__ import annotations

import torch
from torch import Tensor

import specgraph.kernels.step.suffix  # noqa: F401  (declares the op)
from specgraph.kernels.step.step import catch_up_rows, writes


@writes("history", final=False)
def record_accepted_(
    history: Tensor, window: Tensor, emitted: Tensor, start: Tensor, num_emitted: Tensor, rows: Tensor
) -> None:
    """Write the tokens that a step accepted into ``history`` ``[N, S]``, whatever rows the drafter itself runs.

    These are the first token of ``window`` ``[b, T]``, at position ``start`` ``[b]``, and the ``num_emitted`` ``[b]``
    tokens of ``emitted`` ``[b, T]`` behind it; nothing where ``num_emitted`` is 0. ``rows`` ``[b]`` is the row of each
    sequence in ``history``, -1 for none.
    """
    tokens = torch.cat([window[:, :1], emitted], dim=1)
    (positions,) = torch.ops.specgraph.row_positions(start, tokens.shape[1], 1)
    torch.ops.specgraph.record_tokens(history, rows, tokens, positions, catch_up_rows(num_emitted))


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


def prefer_found(found: Tensor, *others: Tensor) -> Tensor:
    """The drafts ``found`` ``[b, K]`` of the sequences that have any, and the ``others`` ``[b, k]`` of the rest.

    ``others`` are one or several tensors with ``K`` columns in all.
    """
    return torch.where(found[:, :1] >= 0, found, torch.cat(others, dim=1))


def any_found(found: Tensor) -> Tensor:
    """Which sequences have drafts in ``found`` ``[b, K]``: bool ``[b]``."""
    return found[:, 0] >= 0
