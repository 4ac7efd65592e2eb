"""Functions of step graphs that say why drafts were accepted or not, for the steps of requests that ask for it."""

from __future__ import annotations

import torch
from torch import Tensor


def verified_drafts(window: Tensor, logits: Tensor) -> Tensor:
    """The drafts ``[B, R - 1]`` that the ``R`` rows of ``logits`` ``[B, R, V]`` verify, padding as 0.

    ``window`` ``[B, T]`` begins with the last token that was known. The rows are its first ones, if a sequence decodes.
    """
    return window[:, 1 : logits.shape[1]].clamp_min(0)


def num_verified(num_rows: Tensor, num_forced: Tensor, drafts: Tensor) -> Tensor:
    """How many of the ``drafts`` ``[B, D]`` a step verifies, int64 ``[B]``: none of a sequence whose prompt it runs."""
    return torch.where(num_forced == 0, num_rows - 1, 0).clamp(0, drafts.shape[1])


def emitted_tokens(emitted: Tensor, num_forced: Tensor, logits: Tensor) -> Tensor:
    """What the ``R`` rows of ``logits`` ``[B, R, V]`` have emitted, ``[B, R]``, padding as 0.

    ``emitted`` ``[B, T]`` begins with ``num_forced`` ``[B]`` known tokens. As for ``verify``, the first row of the
    logits is that of the first token which is not known, or an earlier one if fewer than ``R`` tokens follow there.
    """
    rows = logits.shape[1]
    if emitted.shape[1] > rows:
        first = num_forced.clamp(max=emitted.shape[1] - rows).unsqueeze(1)
        emitted = emitted.gather(1, first + torch.arange(rows, device=emitted.device))
    return emitted.clamp_min(0)


def num_emitted_rows(emitted: Tensor, num_emitted: Tensor, num_forced: Tensor, tokens: Tensor) -> Tensor:
    """How many of ``tokens`` ``[B, R]``, which are those of :func:`emitted_tokens`, are no padding: int64 ``[B]``."""
    rows = tokens.shape[1]
    return (num_emitted - num_forced.clamp(max=emitted.shape[1] - rows)).clamp(0, rows)


def last_logprob(logprobs: Tensor, count: Tensor) -> Tensor:
    """The last of the first ``count`` ``[B]`` columns of ``logprobs`` ``[B, R]``: ``[B, 1]``."""
    return logprobs.gather(1, (count - 1).clamp_min(0).unsqueeze(1))


def trace_temperature(temperature: Tensor) -> Tensor:
    """``temperature`` ``[B]``, with 1 for a greedy sequence: its point mass would say nothing about a draft."""
    return torch.where(temperature > 0, temperature, 1.0)


def draft_ids(tokens: Tensor, draft_to_target: Tensor) -> Tensor:
    """The ids in the draft's vocabulary of drawn ``tokens`` ``[B, R]``, whose ids are the target's.

    ``draft_to_target`` int64 ``[Vd]`` gives the target's id of every id of the draft.
    """
    return (tokens.unsqueeze(2) == draft_to_target).int().argmax(2)


def active_drafts(num_emitted: Tensor, drafts: Tensor) -> Tensor:
    """How many of ``drafts`` ``[B, R]`` were drawn, int64 ``[B]``: none of a sequence that emitted nothing."""
    return torch.where(num_emitted > 0, drafts.shape[1], 0)


def trace_columns(
    verified: Tensor, last: Tensor, drawn: list[Tensor], drawn_logprobs: list[Tensor], drafts: list[Tensor], *,
    count: int,
) -> Tensor:  # fmt: skip
    """What the host is told of a step, int32 ``[B, 3 * count + 1]``: numbers, and the bits of float32.

    The first ``count`` columns are the log-probabilities ``verified`` ``[B, D]`` of the drafts that the step verified,
    under the target. The next are the ``drafts`` (``[B, k]`` each) of the following step, -1 for none. Then come the
    log-probabilities that these were drawn with (``drawn_logprobs``, beside the tokens ``drawn``), NaN where a draft
    was not drawn. The last column is ``last`` ``[B, 1]``, that of the last token which the step emitted, under the
    target.
    """
    proposed = _padded(torch.cat(drafts, 1) if drafts else verified.new_empty(len(verified), 0), count, -1).long()
    tokens = _padded(torch.cat(drawn, 1) if drawn else proposed[:, :0], count, -2)
    logprobs = _padded(torch.cat(drawn_logprobs, 1) if drawn_logprobs else verified[:, :0], count, torch.nan)
    own = torch.cat([torch.where(tokens == proposed, logprobs, torch.nan), last], 1)
    floats = (_padded(verified, count, torch.nan), own)
    before, behind = (values.to(torch.float32).contiguous().view(torch.int32) for values in floats)
    return torch.cat([before, proposed.to(torch.int32), behind], 1)


def _padded(values: Tensor, count: int, fill: float) -> Tensor:
    """``values`` ``[B, n]`` with ``count`` columns."""
    return torch.nn.functional.pad(values[:, :count], (0, max(0, count - values.shape[1])), value=fill)
