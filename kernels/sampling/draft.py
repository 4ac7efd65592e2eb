"""``specgraph::sample_draft``: draw the drafts of a step.

:mod:`specgraph.kernels.sampling.sample` defines the noise and the processing of logits. On a GPU the op runs in Triton
(:mod:`specgraph.kernels.sampling.draft_triton`), except for float64, which is the reference's. On a CPU, at temperature
0, the largest logits are the drafts. Otherwise wide rows are taken one by one: :mod:`specgraph.kernels.sampling.kept`
processes one without a sort, and :mod:`specgraph.kernels.sampling.draw` draws from it with little noise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.kernels.checks import check_shapes
from specgraph.kernels.ops import declare, not_float64, triton_or_reference
from specgraph.kernels.sampling.arguments import SampleDraft
from specgraph.kernels.sampling.constants import STREAM_DRAFT, STREAM_TARGET
from specgraph.kernels.sampling.draft_triton import sample_draft_triton
from specgraph.kernels.sampling.draw import Noise, draw_row
from specgraph.kernels.sampling.greedy import greedy_tokens, is_greedy
from specgraph.kernels.sampling.kept import is_wide, process_row, row_options
from specgraph.kernels.sampling.sample import SHARED_NOISE_RULES, check_rule, process_logits, sample


def _masked(given: SampleDraft) -> Tensor:
    """The logits, with -inf for ids that the target does not have."""
    logits, ids, limit = given.logits, given.draft_to_target, given.target_vocab_size
    if limit is None or (ids is None and limit >= logits.shape[-1]):
        return logits
    targets = torch.arange(logits.shape[-1], device=logits.device) if ids is None else ids
    return logits.masked_fill(targets >= limit, -torch.inf)


def _noise_keys(given: SampleDraft) -> tuple[int, Tensor, Tensor | None]:
    """The stream of the rule's noise, and the key and the row of each draft, int64 ``[B, R]``; no row is row 0."""
    shape = given.logits.shape[:2]
    number = (given.row + torch.arange(shape[1], device=given.key.device)).expand(shape)
    start = given.key.unsqueeze(1).expand(shape)
    return (STREAM_TARGET, start + number, None) if given.rule in SHARED_NOISE_RULES else (STREAM_DRAFT, start, number)


def sample_draft_reference(given: SampleDraft) -> tuple[Tensor, Tensor]:
    """:class:`~specgraph.kernels.sampling.arguments.SampleDraft` in plain PyTorch."""
    check_rule(given.rule)
    processed = process_logits(_masked(given), given.temperature, given.top_k, given.top_p, given.min_p)
    stream, key, number = _noise_keys(given)
    token = sample(processed, given.seeds, key, number, stream, given.draft_to_target)
    token = token if given.draft_to_target is None else given.draft_to_target[token]
    return token, processed if given.return_processed else processed.new_empty((*token.shape, 0))


def sample_draft_cpu(given: SampleDraft) -> tuple[Tensor, Tensor]:
    """:func:`sample_draft_reference` on a CPU: all rows together where nothing is drawn or kept, or else one by one."""
    check_rule(given.rule)
    logits, ids = _masked(given), given.draft_to_target
    token = greedy_tokens(logits) if _is_greedy(given) else None
    if token is not None:
        exact = torch.promote_types(logits.dtype, torch.float32)
        return token if ids is None else ids[token], logits.new_empty((*token.shape, 0), dtype=exact)
    return _row_by_row(given, logits) if is_wide(logits) else sample_draft_reference(given)


def _row_by_row(given: SampleDraft, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Process and draw each row; ``logits`` are -inf where the target does not have a token."""
    stream, key, number = _noise_keys(given)
    token, processed = key.new_empty(key.shape), _sample_draft_fake(given)[1]
    for b in range(token.shape[0]):
        at, options = slice(b, b + 1), row_options(b, given.temperature, given.top_k, given.top_p, given.min_p)
        for r in range(token.shape[1]):
            weights = process_row(logits[b, r], *options)
            row = None if number is None else number[at, r : r + 1]
            noise = None if given.seeds is None else Noise(given.seeds[at], stream, key[at, r : r + 1], row)
            token[b, r] = draw_row(weights, noise, given.draft_to_target)
            if given.return_processed:
                processed[b, r] = weights
    return token if given.draft_to_target is None else given.draft_to_target[token], processed


def _is_greedy(given: SampleDraft) -> bool:
    return not given.return_processed and is_greedy(given.logits, given.temperature, given.seeds)


def _covers_cpu(given: SampleDraft) -> bool:
    return _is_greedy(given) or is_wide(given.logits)


def _sample_draft_triton(given: SampleDraft, **tuning: int | None) -> tuple[Tensor, Tensor]:
    check_rule(given.rule)
    shared = given.rule in SHARED_NOISE_RULES
    return sample_draft_triton(given, shared=shared, stream=STREAM_TARGET if shared else STREAM_DRAFT, **tuning)  # type: ignore[arg-type]


def _sample_draft_fake(given: SampleDraft) -> tuple[Tensor, Tensor]:
    check_rule(given.rule)
    check_shapes(given, logits="B R Vd", key="B", draft_to_target="Vd")
    logits, key = given.logits, given.key
    batch, rows, vocab = logits.shape
    kept, exact = vocab if given.return_processed else 0, torch.promote_types(logits.dtype, torch.float32)
    return key.new_empty((batch, rows)), logits.new_empty((batch, rows, kept), dtype=exact)


sample_draft = declare(
    "sample_draft", SampleDraft, _sample_draft_fake,
    triton_or_reference(
        _sample_draft_triton, sample_draft_reference, covers=not_float64("logits"), cpu=sample_draft_cpu,
        cpu_covers=_covers_cpu,
    ),
).function
