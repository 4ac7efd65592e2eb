"""Functions of step graphs for what changes the logits that drafts are drawn from, and for what they say of drafts."""

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


def drafts_wanted(
    window: Tensor, start: Tensor, num_rows: Tensor, num_forced: Tensor, emitted: Tensor, num_emitted: Tensor,
    max_length: Tensor, eos_ids: Tensor, max_context: int | None = None,
) -> Tensor:
    """The most drafts ``[B]`` that the next step can verify of each sequence, as :func:`advance_` limits them.

    There are none, and the number may be below 0, for a sequence that has met an EOS, that has no room for more than
    one token, that emitted nothing, whose prompt goes on, or that has more than ``max_context`` tokens.
    """
    ended = (last_accepted(window, emitted, num_emitted) == eos_ids).any(1)
    inside = (num_emitted > 0) & (num_forced < num_rows) & ~ended
    if max_context is not None:
        inside = inside & (start + num_emitted < max_context)
    return torch.where(inside, max_length - start - num_emitted - 2, 0)


def survival(logits: Tensor, wanted: Tensor, before: Tensor | None, *, row: int, least: float) -> Tensor:
    """The probability ``[B]``, as the drafter sees it, that draft number ``row`` and all in front of it are accepted.

    ``logits`` ``[B, 1, Vd]`` are those of the draft, whose own probability is taken to be the largest one, and
    ``before`` ``[B]`` is the survival of the draft in front of it. The result is 0, which means that no draft follows,
    below ``least`` and where no more than the drafts so far are ``wanted`` ``[B]``.
    """
    exact = logits[:, 0].to(torch.promote_types(logits.dtype, torch.float32))
    alone = (exact.amax(-1) - exact.logsumexp(-1)).exp()
    together = alone if before is None else alone * before
    return torch.where((together >= least) & (wanted > row + 1), together, 0.0)


def where_surviving(token: Tensor, before: Tensor) -> Tensor:
    """The draft ``token`` ``[B, 1]``, or -1, no draft, where the survival ``before`` it ``[B]`` is 0."""
    return torch.where(before.unsqueeze(1) > 0, token, -1)


def real_rows(values: Tensor, num_rows: Tensor) -> Tensor:
    """``values`` ``[B, T]`` without the columns behind the longest of ``num_rows`` ``[B]``.

    The shape depends on values, so this is only for steps that run call by call.
    """
    return values[:, : max(1, int(num_rows.max()))]
