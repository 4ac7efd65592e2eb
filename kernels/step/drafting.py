"""Functions of step graphs for what changes the logits that drafts are drawn from."""

from __future__ import annotations

import torch
from torch import Tensor


def last_accepted(window: Tensor, emitted: Tensor, num_emitted: Tensor) -> Tensor:
    """The last token ``[B, 1]`` of each sequence after a step.

    That is the last of the ``num_emitted`` ``[B]`` tokens of ``emitted`` ``[B, T]``, or the first one of ``window``
    ``[B, T]`` where there are none.
    """
    return torch.cat([window[:, :1], emitted], dim=1).gather(1, num_emitted.unsqueeze(1))


def last_position(start: Tensor, num_emitted: Tensor) -> Tensor:
    """The position ``[B]`` of :func:`last_accepted`, where the window began at ``start`` ``[B]``."""
    return start + num_emitted


def in_target_vocabulary(logits: Tensor, draft_to_target: Tensor, target_vocab_size: int) -> Tensor:
    """Logits ``[B, R, V + 1]`` by target id, from ``[B, R, Vd]`` by draft id; minus infinity for all other ids.

    ``draft_to_target`` int64 ``[Vd]`` gives the target id of every draft id. Those past the vocabulary, which are never
    drawn, share the last column.
    """
    ids = draft_to_target.clamp(max=target_vocab_size)
    every = logits.new_full((*logits.shape[:2], target_vocab_size + 1), -torch.inf)
    return every.index_copy(2, ids, logits)


def in_draft_vocabulary(logits: Tensor, draft_to_target: Tensor, target_vocab_size: int) -> Tensor:
    """The way back from :func:`in_target_vocabulary`: ``[B, R, V + 1]`` to ``[B, R, Vd]``."""
    return logits.index_select(2, draft_to_target.clamp(max=target_vocab_size))
