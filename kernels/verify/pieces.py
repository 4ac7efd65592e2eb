"""The functions that verification is made of; :mod:`specgraph.kernels.verify.verify` says what the rules are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specgraph.kernels.checks import require
from specgraph.kernels.sampling.constants import STREAM_ACCEPT, STREAM_RESIDUAL, STREAM_TARGET
from specgraph.kernels.sampling.sample import STEP_NOISE_RULES, check_rule, clean_logits, sample, uniform
from specgraph.kernels.verify.arguments import check_logprobs


@dataclass(frozen=True)
class _Rows:
    """The rows that have target logits, and their place in the block.

    Attributes:
        row: int64 ``[B, R]``: the index of each row in the block.
        forced: int64 ``[B]``: how many tokens are accepted without being verified.
        draft: int64 ``[B, R]``: the draft token that each row verifies, clamped into the vocabulary.
        live: bool ``[B, R]``: whether that draft has to be verified. It must be valid and not forced, and so must all
            drafts between the forced tokens and it.
    """

    row: Tensor
    forced: Tensor
    draft: Tensor
    live: Tensor

    def last(self, num_accepted: Tensor) -> Tensor:
        """The index ``[B, 1]``, among these rows, of the row that gives the token after the accepted prefix."""
        return (num_accepted.unsqueeze(1) - self.row[:, :1]).clamp(0, self.row.shape[1] - 1)


def invert_vocabulary(draft_to_target: Tensor, vocab: int) -> Tensor:
    """The draft id of every target id, int32 ``[V]``, with -1 where there is none. Ids beyond the target's are dropped.

    Raises:
        ValueError: two draft ids mean the same target id, which would get the probability of only one of them.
    """
    inside = draft_to_target[draft_to_target < vocab]
    repeated = len(inside) - len(set(inside.tolist()))
    require(repeated == 0, lambda: f"draft_to_target names {repeated} target ids twice; every draft id needs its own.")
    ids = torch.arange(len(draft_to_target), dtype=torch.int32, device=draft_to_target.device)
    own = torch.full((vocab + 1,), -1, dtype=torch.int32, device=draft_to_target.device)
    return own.scatter_(0, draft_to_target.clamp(max=vocab), ids)[:vocab]


def _logit_rows(width: int, count: int, num_forced: Tensor) -> Tensor:
    """The index ``[B, R]``, in a block of ``width`` rows, of each of the ``count`` rows of logits."""
    return num_forced.clamp(max=width - count).unsqueeze(1) + torch.arange(count, device=num_forced.device)


def step_noise(positions: Tensor, num_forced: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """The key of the step's noise, and the number within it of each ``row`` ``[B, R]`` of the block, both ``[B, R]``.

    The key is the position that the first row which is not forced emits, and numbers count from that row
    (:data:`~specgraph.kernels.sampling.sample.STEP_NOISE_RULES` says why). Forced rows have negative numbers, and
    nothing is drawn for them.
    """
    first = num_forced.clamp(max=positions.shape[1] - 1).unsqueeze(1)
    return positions.gather(1, first).expand_as(row), row - first


def locate_rows(processed: Tensor, draft_tokens: Tensor, num_rows: Tensor, num_forced: Tensor) -> _Rows:
    """The rows of ``processed`` ``[B, R, V]``, with the drafts that they verify."""
    count, vocab = processed.shape[1:]
    drafts = draft_tokens.shape[1]
    row = _logit_rows(drafts + 1, count, num_forced)
    forced = torch.minimum(num_forced, num_rows).clamp(max=drafts).unsqueeze(1)
    draft = torch.nn.functional.pad(draft_tokens.long(), (0, 1), value=-1).gather(1, row)
    # The last row of logits verifies no draft, because no row would give the token that follows it.
    valid_draft = (row < num_rows.unsqueeze(1) - 1) & (row < row[:, -1:]) & (draft >= 0) & (draft < vocab)
    live = (valid_draft | (row < forced)).long().cumprod(1).bool() & (row >= forced)
    return _Rows(row, forced.squeeze(1), draft.clamp(0, vocab - 1), live)


def _draft_probs(
    draft_logits: Tensor | None, row: Tensor, draft: Tensor, like: Tensor, target_to_draft: Tensor | None,
    point_mass: Tensor | None,
) -> Tensor:
    """What each draft was drawn from, ``[B, R, V]`` over target ids.

    Drafts that have no logits are point masses, and so are all of a sequence in ``point_mass`` ``[B]``. Target ids
    outside the draft's vocabulary have probability 0, and so have draft ids outside the target's.
    """
    ids = torch.arange(like.shape[-1], device=draft.device)
    point = (draft.unsqueeze(-1) == ids).to(like.dtype)
    if draft_logits is None or draft_logits.shape[1] == 0:
        return point
    index = row.clamp(max=draft_logits.shape[1] - 1).unsqueeze(-1).expand(-1, -1, draft_logits.shape[2])
    probs = draft_logits.to(like.dtype).gather(1, index).softmax(-1)
    drawn = row < draft_logits.shape[1]
    drawn = drawn if point_mass is None else drawn & ~point_mass.unsqueeze(1)
    return torch.where(drawn.unsqueeze(-1), _in_target_vocab(probs, target_to_draft, like.shape[-1]), point)


def _in_target_vocab(probs: Tensor, target_to_draft: Tensor | None, vocab: int) -> Tensor:
    """Map probabilities ``[B, R, Vd]`` to ``vocab`` target ids, and drop ids beyond them."""
    if target_to_draft is None:
        return torch.nn.functional.pad(probs, (0, vocab - probs.shape[-1]))
    own = target_to_draft.long().expand(*probs.shape[:2], vocab)
    return torch.where(own >= 0, probs.gather(-1, own.clamp_min(0)), 0.0)


def _at(probs: Tensor, token: Tensor) -> Tensor:
    return probs.gather(-1, token.unsqueeze(-1)).squeeze(-1)


def _block_weights(target: Tensor, draft: Tensor, live: Tensor) -> Tensor:
    """``p_0 .. p_R`` of Algorithm 2, ``[B, R + 1]``: ``p_0 = 1``, ``p_i = min(1, p_{i-1} * target_i / draft_i)``.

    ``target`` and ``draft`` ``[B, R]`` are the two models' probabilities of the draft tokens. Rows that are not live do
    not change the weight, so the chain starts after forced rows.
    """
    weights = [torch.ones_like(target[:, 0])]
    for p, q, verified in zip(target.unbind(1), draft.unbind(1), live.unbind(1), strict=True):
        scaled = weights[-1] * p
        ratio = scaled / q.clamp_min(torch.finfo(q.dtype).tiny)
        step = torch.where((scaled >= q) & (p > 0), torch.ones_like(p), ratio.clamp(max=1.0))
        weights.append(torch.where(verified, step, weights[-1]))
    return torch.stack(weights, dim=1)


def _block_chances(target_probs: Tensor, draft_probs: Tensor, rows: _Rows) -> Tensor:
    """``h_1 .. h_R`` of Algorithm 2: the chance that the prefix ending with each draft is accepted if it is tried."""
    weights = _block_weights(_at(target_probs, rows.draft), _at(draft_probs, rows.draft), rows.live)
    before, after = weights[:, :-1], weights[:, 1:]
    excess = (before.unsqueeze(-1) * target_probs - draft_probs).clamp_min(0).sum(-1)[:, 1:]
    total = excess + (1 - after[:, :-1])
    tiny = torch.finfo(total.dtype).tiny
    # 0 / 0 means that nothing can be rejected any more, since target and draft agree and the weight is 1.
    share = torch.where(total > 0, excess / total.clamp_min(tiny), torch.ones_like(total))
    inner = torch.where(rows.live[:, 1:], share, after[:, :-1])
    return torch.cat([inner, after[:, -1:]], dim=1)


def _typical_chances(target_probs: Tensor, token: Tensor, threshold: float, alpha: float) -> Tensor:
    entropy = torch.special.entr(target_probs).sum(-1)
    bound = (alpha * torch.exp(-entropy)).clamp(max=threshold)
    return (_at(target_probs, token) > bound).to(target_probs.dtype)


def row_chances(
    processed: Tensor, draft_logits: Tensor | None, rows: _Rows, rule: str, target_to_draft: Tensor | None,
    point_mass: Tensor | None, posterior_threshold: float, posterior_alpha: float,
    acceptance_rate: float | Tensor,
) -> Tensor:
    """The probabilities ``[B, R]`` with which :func:`accept` compares its uniforms, one per row of logits.

    For ``block`` they are the chances of the prefixes, of which the longest accepted one wins. For other rules they are
    the chances of each draft, given that those before it are accepted. ``strict`` draws no uniforms and has no chances.
    """
    if rule == "synthetic":
        return torch.zeros_like(processed[..., 0]) + acceptance_rate
    probs = processed.softmax(-1)
    if rule == "typical":
        return _typical_chances(probs, rows.draft, posterior_threshold, posterior_alpha)
    draft_probs = _draft_probs(draft_logits, rows.row, rows.draft, probs, target_to_draft, point_mass)
    if rule == "block":
        return _block_chances(probs, draft_probs, rows)
    p, q = _at(probs, rows.draft), _at(draft_probs, rows.draft)
    ratio = p / q.clamp_min(torch.finfo(q.dtype).tiny)
    return torch.where((p >= q) & (p > 0), torch.ones_like(p), ratio.clamp(max=1.0))


def accept(
    processed: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    seeds: Tensor | None,
    positions: Tensor,
    num_rows: Tensor,
    num_forced: Tensor,
    *,
    rule: str,
    target_to_draft: Tensor | None = None,
    point_mass: Tensor | None = None,
    posterior_threshold: float = 0.09,
    posterior_alpha: float = 0.3,
    acceptance_rate: float = 0.7,
    odd_acceptance_rate: float | None = None,
) -> Tensor:
    """How many of the draft tokens of each sequence are accepted, forced ones included.

    Args:
        processed: ``[B, R, V]`` log-weights of the target, ``1 <= R <= K + 1``.
        draft_tokens: int ``[B, K]`` target ids; -1 or an id that the target does not have ends the prefix.
        draft_logits: ``[B, Kd, Vd]`` log-weights the drafts were drawn from, or None for point masses.
        seeds: int64 ``[B]``; None draws nothing, for batches at temperature 0.
        positions: int64 ``[B, K + 1]``, the absolute position of the token each row gives.
        num_rows, num_forced: int64 ``[B]``, see the module.
        rule: one of ``RULES``.
        target_to_draft: int ``[V]`` as :func:`invert_vocabulary` makes it; None: ids mean the same.
        point_mass: bool ``[B]``, sequences whose drafts are point masses whatever ``draft_logits`` holds; None: none.
        posterior_threshold, posterior_alpha: the bounds of ``typical``.
        acceptance_rate: the probability of ``synthetic``; ``odd_acceptance_rate`` that of sequences with an odd seed.

    Returns:
        int64 ``[B]`` in ``[0, K]``.

    Raises:
        ValueError: the rule does not exist.
    """
    check_rule(rule)
    rows = locate_rows(processed, draft_tokens, num_rows, num_forced)
    if rule == "strict":
        good = sample(processed, seeds, positions.gather(1, rows.row)) == rows.draft
    else:
        rate: float | Tensor = acceptance_rate
        if odd_acceptance_rate is not None and seeds is not None:
            rate = processed.new_tensor([acceptance_rate, odd_acceptance_rate])[seeds % 2].unsqueeze(1)
        chances = row_chances(
            processed, draft_logits, rows, rule, target_to_draft, point_mass, posterior_threshold, posterior_alpha, rate
        )
        good = uniform(seeds, STREAM_ACCEPT, *step_noise(positions, num_forced, rows.row)) < chances
    if rule == "block":
        length = rows.row - rows.forced.unsqueeze(1) + 1
        return rows.forced + torch.where(good & rows.live, length, 0).amax(1)
    prefix = (good & rows.live | (rows.row < rows.forced.unsqueeze(1))).long().cumprod(1)
    return rows.forced + (prefix * rows.live).sum(1)


def residual(
    processed: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    num_accepted: Tensor,
    num_forced: Tensor,
    num_rows: Tensor,
    *,
    rule: str,
    target_to_draft: Tensor | None = None,
    point_mass: Tensor | None = None,
) -> Tensor:
    """The log-weights of the token after the accepted prefix.

    After a rejected draft this is the logarithm of ``max(w * p - q, 0)``, with ``w = 1`` for ``probabilistic`` and
    ``w = p_i`` of Algorithm 2 for ``block``. If no draft was rejected, with another rule, or if rounding has left
    nothing of the difference, it is the target's own distribution. Nothing is normalised, so nothing is divided by
    zero.

    Takes the arguments of :func:`accept`, and its result ``num_accepted`` int64 ``[B]``.

    Returns:
        ``[B, V]`` in ``processed``'s dtype.

    Raises:
        ValueError: the rule does not exist.
    """
    check_rule(rule)
    rows = locate_rows(processed, draft_tokens, num_rows, num_forced)
    last = rows.last(num_accepted)
    own = processed.gather(1, last.unsqueeze(-1).expand(-1, -1, processed.shape[-1]))
    if rule not in STEP_NOISE_RULES:
        return own.squeeze(1)
    here = (rows.row.gather(1, last), rows.draft.gather(1, last))
    draft_probs = _draft_probs(draft_logits, *here, own, target_to_draft, point_mass)
    weight: Tensor | float = 1.0
    if rule == "block":
        probs = processed.softmax(-1)
        every = _draft_probs(draft_logits, rows.row, rows.draft, probs, target_to_draft, point_mass)
        chain = _block_weights(_at(probs, rows.draft), _at(every, rows.draft), rows.live)
        weight = chain.gather(1, last).unsqueeze(-1)
    excess = (weight * own.softmax(-1) - draft_probs).clamp_min(0)
    use_own = ~rows.live.gather(1, last) | (excess.sum(-1) <= 0)
    return torch.where(use_own.unsqueeze(-1), own, excess.log()).squeeze(1)


def next_noise(
    positions: Tensor, num_accepted: Tensor, num_forced: Tensor, rule: str
) -> tuple[int, Tensor, Tensor | None]:
    """The stream, the key int64 ``[B, 1]`` and the row int64 ``[B, 1]`` of the noise of :func:`sample_next`; no row is
    row 0."""
    row = num_accepted.clamp(max=positions.shape[1] - 1).unsqueeze(1)
    if rule in STEP_NOISE_RULES:
        return (STREAM_RESIDUAL, *step_noise(positions, num_forced, row))
    return STREAM_TARGET, positions.gather(1, row), None


def sample_next(
    residual: Tensor, seeds: Tensor | None, positions: Tensor, num_accepted: Tensor, num_forced: Tensor, *, rule: str
) -> Tensor:
    """Draw the token after the accepted prefix.

    ``probabilistic`` and ``block`` have a stream of their own for it, keyed as :func:`step_noise` says. The other rules
    use the target's noise at the token's position, so that ``strict`` gives the target's own sample.

    Args:
        residual: ``[B, V]``: log-weights.
        seeds, positions, num_forced: as for :func:`accept`.
        num_accepted: int64 ``[B]``: the result of :func:`accept`.
        rule: one of ``RULES``.

    Returns:
        int64 ``[B]`` in ``[0, V)``.

    Raises:
        ValueError: the rule does not exist.
    """
    check_rule(rule)
    stream, key, number = next_noise(positions, num_accepted, num_forced, rule)
    return sample(residual.unsqueeze(1), seeds, key, number, stream).squeeze(1)


def emit(
    draft_tokens: Tensor, num_accepted: Tensor, token: Tensor, num_rows: Tensor, num_forced: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Lay out the accepted drafts and the token after them, and the rows that gave them.

    Args:
        draft_tokens: int ``[B, K]``.
        num_accepted, token, num_rows, num_forced: int64 ``[B]``. The token is left out where
            ``num_forced >= num_rows``: it is known already, or the sequence is inactive.

    Returns:
        The emitted tokens, int64 ``[B, K + 1]`` padded with -1, their number, int64 ``[B]``, and the row of the block
        that gave each of them, int64 ``[B, K + 1]`` padded with -1: of a chain of drafts the first rows, in order.
    """
    padded = torch.nn.functional.pad(draft_tokens.long(), (0, 1), value=-1)
    column = torch.arange(padded.shape[1], device=padded.device)
    count, more = num_accepted.unsqueeze(1), (num_forced < num_rows).unsqueeze(1)
    emitted = torch.where(column < count, padded, -1)
    emitted = torch.where((column == count) & more, token.unsqueeze(1), emitted)
    num_emitted = num_accepted + more.squeeze(1)
    return emitted, num_emitted, torch.where(column < num_emitted.unsqueeze(1), column, -1)


def token_logprobs(logits: Tensor, processed: Tensor, emitted: Tensor, num_forced: Tensor, *, logprobs: str) -> Tensor:
    """The log-probabilities of the emitted tokens that were not forced.

    Args:
        logits: ``[B, R, V]``: the target's raw logits.
        processed: ``[B, R, V]``: the same after :func:`~specgraph.kernels.sampling.sample.process_logits`.
        emitted: int64 ``[B, K + 1]`` padded with -1.
        num_forced: int64 ``[B]``.
        logprobs: ``raw`` for log-probabilities of the raw logits, ``processed`` for those of the processed logits, or
            ``none``.

    Returns:
        float32 ``[B, K + 1]``, with 0 for forced tokens and padding; ``[B, 0]`` for ``none``.

    Raises:
        ValueError: ``logprobs`` has another value.
    """
    check_logprobs(logprobs)
    if logprobs == "none":
        return logits.new_empty((logits.shape[0], 0), dtype=torch.float32)
    source = clean_logits(logits) if logprobs == "raw" else processed
    row = _logit_rows(emitted.shape[1], logits.shape[1], num_forced)
    token = emitted.gather(1, row)
    wanted = (token >= 0) & (row >= num_forced.unsqueeze(1))
    values = _at(source.log_softmax(-1), token.clamp_min(0)).masked_fill(~wanted, 0.0)
    return torch.zeros_like(emitted, dtype=torch.float32).scatter(1, row, values.to(torch.float32))
