"""Functions of step graphs that look the history up, and that choose between what they find and other drafts."""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.kernels.state import SEPARATOR
from specgraph.kernels.step.ngram import record_tokens_
from specgraph.kernels.step.step import row_positions
from specgraph.kernels.step.writes import writes


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
    count = torch.where(num_emitted > 0, num_emitted + 1, 0)
    record_tokens_(history, rows, tokens, row_positions(start, tokens), count)


def prefer_found(found: Tensor, *others: Tensor, last: Tensor | None = None, max_context: int = 0) -> Tensor:
    """The drafts ``found`` ``[b, K]`` of the sequences that have any, and the ``others`` ``[b, k]`` of the rest.

    ``others`` are one or several tensors with ``K`` columns in all. If ``last`` ``[b]`` gives the positions of the last
    tokens, a sequence of more than ``max_context`` tokens has no drafts but those that were found.
    """
    chosen = found[:, :1] >= 0
    if last is not None:
        chosen = chosen | (last >= max_context).unsqueeze(1)
    return torch.where(chosen, found, torch.cat(others, dim=1))


def behind_earlier(earlier: Tensor, history: Tensor, rows: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """The accepted tokens of each sequence behind those of ``earlier`` outputs ``[E]``, and how many both are.

    ``rows`` ``[b]`` is the row of each sequence in ``history`` ``[N, S]``, where it has ``length`` ``[b]`` tokens; -1
    for no sequence, which has none at all. Returns ``[b, E + S]`` and ``[b]``.
    """
    texts = torch.cat([earlier.expand(len(rows), -1), history[rows.clamp_min(0)]], dim=1)
    return texts, torch.where(rows >= 0, length + len(earlier), 0)


def until_separator(drafts: Tensor) -> Tensor:
    """The drafts ``[b, K]`` in front of the end of an earlier output."""
    return torch.where((drafts == SEPARATOR).cumsum(1) > 0, -1, drafts)


def any_found(found: Tensor) -> Tensor:
    """Which sequences have drafts in ``found`` ``[b, K]``: bool ``[b]``."""
    return found[:, 0] >= 0
