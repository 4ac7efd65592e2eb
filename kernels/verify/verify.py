"""``specgraph::verify``: which draft tokens the target accepts, and the token that follows them.

The op is the composition of plain functions::

    processed = process_logits(target_logits, temperature, top_k, top_p, min_p)
    count     = accept(processed, draft_tokens, draft_logits, seeds, positions, num_rows, num_forced, rule=...)
    weights   = residual(processed, draft_tokens, draft_logits, count, num_forced, num_rows, rule=...)
    token     = sample_next(weights, seeds, positions, count, num_forced, rule=...)
    emitted, num_emitted, accepted_rows = emit(draft_tokens, count, token, num_rows, num_forced)

A block has ``K + 1`` rows. Row ``r`` gives the distribution of one token, the one that ``draft_tokens[:, r]`` guesses.

- ``num_rows`` ``[B]``: rows beyond it are padding; 0 is an inactive sequence, which emits nothing.
- ``num_forced`` ``[B]``, at most K: the first tokens that are known already (a prompt's). They are accepted as they
  are. Drafts after them are verified and one more token follows, unless ``num_forced == num_rows``.
- Target logits may come for ``R <= K + 1`` rows only, from row ``min(num_forced, K + 1 - R)`` on, so that a wide
  prompt chunk needs no logits for tokens that are known. Drafts beyond these rows are not accepted.
- Draft logits may come for the first ``Kd < K`` drafts only. The others are point masses, and so are all drafts of a
  sequence in ``point_mass`` ``[B]``, whose draft logits are not looked at. Where ``Kd > K``, because a step verifies
  fewer drafts than the state has room for, nothing is read of those beyond K.
- Draft logits are state of a drafter. ``draft_rows`` ``[B]`` names the row of it that belongs to each sequence.

Rules
    strict: a draft is accepted if it is the target's own sample at its position (Gumbel-max with noise keyed by
        position). The output is the sequence that plain sampling gives, whatever the drafts are.
    probabilistic: accept with probability ``min(1, p/q)``, then sample the normalised ``max(p - q, 0)``. Leviathan et
        al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318.
    block: verify the whole block jointly. Sun et al. 2024, arXiv 2403.10444, Algorithm 2. Accepts at least as many
        tokens as ``probabilistic`` in expectation.
    typical: accept while ``p(x) > min(threshold, alpha * exp(-entropy))``. Lossy. Medusa, arXiv 2401.10774.
    synthetic: accept every draft with a given probability. Lossy, for benchmarks.

Noise other than the target's own is keyed by the position that the first row which is not forced emits, and by the row
counted from there. So forced rows change nothing behind them, and no token depends on how its prompt was cut.

The op also says which sequences have a NaN among the logits they need, or a row of -inf, which has no token
(:func:`~specgraph.kernels.step.bad_rows`). On a GPU it runs in Triton (:mod:`specgraph.kernels.verify.verify_triton`),
except for float64, which is the reference's. On a CPU at temperature 0 it is a loop
(:mod:`specgraph.kernels.verify.greedy`), and wide rows are verified one by one
(:mod:`specgraph.kernels.verify.row_by_row`). :mod:`specgraph.kernels.verify.pieces` has the functions,
:mod:`specgraph.kernels.verify.arguments` what the op takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specgraph.kernels.ops import declare, triton_or_reference
from specgraph.kernels.sampling.kept import is_wide, process_rows
from specgraph.kernels.sampling.sample import process_logits
from specgraph.kernels.step.index import select_state
from specgraph.kernels.step.tokens import bad_rows
from specgraph.kernels.verify.arguments import Verified, Verify, check
from specgraph.kernels.verify.greedy import is_greedy, verify_greedy
from specgraph.kernels.verify.pieces import accept, emit, residual, sample_next, token_logprobs
from specgraph.kernels.verify.row_by_row import sample_next_row, verify_strict
from specgraph.kernels.verify.verify_triton import covers, verify_triton


def verify_reference(given: Verify) -> Verified:
    """Verify drafts and draw the token after the accepted prefix: the definition of ``specgraph::verify``.

    Raises:
        ValueError: an argument has a wrong shape or dtype, or an option is out of range.
    """
    return _composed(given, process_logits, sample_next)


def _composed(given: Verify, process: Callable[..., Tensor], draw_next: Callable[..., Tensor]) -> Verified:
    """The composition of the module's docstring, of ``process_logits``, ``sample_next`` or what equals them."""
    check(given)
    logits, rule, rows = given.logits, given.rule, (given.num_rows, given.num_forced)
    draft_logits, point_mass = given.draft_logits, given.point_mass
    if draft_logits is not None and given.draft_rows is not None:
        draft_logits = select_state(draft_logits, given.draft_rows)
        missing = given.draft_rows < 0
        point_mass = missing if point_mass is None else point_mass | missing
    drafts, noise = (given.draft_tokens, draft_logits), (given.seeds, given.positions)
    drawn: dict[str, Any] = {"target_to_draft": given.target_to_draft, "point_mass": point_mass}
    processed = process(logits, given.temperature, given.top_k, given.top_p, given.min_p)
    num_accepted = accept(
        processed, *drafts, *noise, *rows, rule=rule, **drawn, posterior_threshold=given.posterior_threshold,
        posterior_alpha=given.posterior_alpha, acceptance_rate=given.acceptance_rate,
        odd_acceptance_rate=given.odd_acceptance_rate,
    )
    weights = residual(processed, *drafts, num_accepted, given.num_forced, given.num_rows, rule=rule, **drawn)
    token = draw_next(weights, *noise, num_accepted, given.num_forced, rule=rule)
    emitted, num_emitted, accepted_rows = emit(given.draft_tokens, num_accepted, token, *rows)
    raw_logits = logits if given.raw_logits is None else given.raw_logits
    logprobs = token_logprobs(raw_logits, processed, emitted, given.num_forced, logprobs=given.logprobs)
    bad = bad_rows(logits, given.positions, *rows)
    return Verified(emitted, num_emitted, accepted_rows, logprobs, bad)


def verify_cpu(given: Verify) -> Verified:
    """:func:`verify_reference` for CPUs, at temperature 0 or with wide rows."""
    found = verify_greedy(given) if is_greedy(given) else None
    if found is not None:
        return found
    if not is_wide(given.logits):
        return verify_reference(given)
    return verify_strict(given) if given.rule == "strict" else _composed(given, process_rows, sample_next_row)


def covers_cpu(given: Verify) -> bool:
    """Whether :func:`verify_cpu` knows something better than the definition."""
    return is_greedy(given) or is_wide(given.logits)


def _verify_fake(given: Verify) -> Verified:
    check(given)
    logits, positions = given.logits, given.positions
    batch, width = positions.shape
    emitted, accepted_rows = (positions.new_empty((batch, width)) for _ in range(2))
    num_emitted = positions.new_empty((batch,))
    logprobs = logits.new_empty((batch, 0 if given.logprobs == "none" else width), dtype=torch.float32)
    return Verified(emitted, num_emitted, accepted_rows, logprobs, logits.new_empty(batch, dtype=torch.int32))


VERIFY = declare(
    "verify", Verify, _verify_fake,
    triton_or_reference(verify_triton, verify_reference, covers=covers, cpu=verify_cpu, cpu_covers=covers_cpu),
)
