"""``process_logits`` of one row on a CPU, with the same bits and without a sort of the vocabulary.

Top-k, top-p and min-p keep all tokens from one log-weight on, the *floor* of the row. The floor of top-k is the k-th
largest log-weight, and that of min-p follows from the largest. Top-p needs the smallest set of most likely tokens that
holds its mass. Its tokens are among the k that top-k keeps, or, without top-k, nearly always among the
:data:`LIKELIEST` ones. The mass of all tokens is one sum in float64, which tells whether those hold enough. If they do
not, the row is sorted.

The definition, :func:`~specgraph.kernels.sampling.sample.process_logits`, adds up the same masses in another order.
Where a sum comes so close to the mass of top-p that rounding might decide (:data:`UNSURE`), the definition decides. It
also takes rows with a NaN or an infinite largest logit, and options that are out of range.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specgraph.kernels.sampling.constants import GREEDY_BELOW
from specgraph.kernels.sampling.sample import process_logits

LIKELIEST = (1024, 16384)
"""How many of the most likely tokens top-p looks at first, and then. Of 262,144 tokens they take 0.9 and 2.6 ms to find
on one core, and a sort takes 22."""
UNSURE = 1e-9
"""Masses that are closer than this count as equal. Of 2**20 probabilities, sums in float64 differ by less than 3e-10,
whatever the order."""
WIDE = 16384
"""Rows of fewer tokens may be cheaper together than one by one, since a row takes about a hundred small operations."""
_LARGEST = torch.finfo(torch.float32).max


def is_wide(logits: Tensor) -> bool:
    """Whether logits ``[..., V]`` are best processed row by row; those of float64 are left to the definition."""
    return logits.shape[-1] >= WIDE and logits.numel() > 0 and logits.dtype != torch.float64


def process_row(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    """Log-weights to sample from.

    Args:
        logits: ``[V]``, float32, bfloat16 or float16.
        temperature, top_k, top_p, min_p: ``[1]``, as for
            :func:`~specgraph.kernels.sampling.sample.process_logits`.

    Returns:
        float32 ``[V]``, a new tensor with the bits of ``process_logits``.
    """
    row = logits.to(torch.float32)
    if -math.inf < float(row.amax()) < math.inf:  # false for a NaN, too
        if float(temperature) < GREEDY_BELOW:
            return torch.full_like(row, -math.inf).index_fill_(0, row.argmax(), 0.0)
        scaled = (row / temperature.to(torch.float32)).clamp_(max=_LARGEST)
        floor = _floor(scaled, top_k, top_p, min_p)
        if floor is not None:
            return _remove_below(scaled, floor)
    return process_logits(logits.view(1, 1, -1), temperature, top_k, top_p, min_p).view(-1)


def process_rows(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    """:func:`process_row` of all rows ``[B, R, V]``, with options ``[B]``."""
    out = logits.new_empty(logits.shape, dtype=torch.float32)
    for b, rows in enumerate(logits.unbind(0)):
        options = row_options(b, temperature, top_k, top_p, min_p)
        for r, row in enumerate(rows.unbind(0)):
            out[b, r] = process_row(row, *options)
    return out


def row_options(
    b: int, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The options ``[1]`` of one sequence, of options ``[B]``."""
    top_k, top_p, min_p = (None if option is None else option[b : b + 1] for option in (top_k, top_p, min_p))
    return temperature[b : b + 1], top_k, top_p, min_p


def _remove_below(scaled: Tensor, floor: float) -> Tensor:
    """Write -inf over what is below the floor, which is one of these log-weights or between them."""
    if floor == -math.inf:
        return scaled
    if abs(floor) < 1e-30:  # the number below it might be flushed to 0
        return scaled.masked_fill_(scaled < floor, -math.inf)
    # A tenth of the time of a comparison and a masked fill: everything up to the next number below the floor.
    below = float(torch.nextafter(torch.tensor(floor), torch.tensor(-math.inf)))
    return torch.nn.functional.threshold(scaled, below, -math.inf, inplace=True)


def _floor(scaled: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None) -> float | None:
    """The smallest log-weight that is kept, -inf if all are; None where the definition has to decide."""
    largest = scaled.amax()
    if not math.isfinite(float(largest)):
        return None
    lowest = -math.inf if min_p is None else float(largest + min_p.double().log().to(scaled.dtype))
    count = 0 if top_k is None else int(top_k)
    kept = None
    if 0 < count < len(scaled):
        kept = _largest(scaled, count)
        lowest = max(lowest, float(kept[-1]))
    mass = 1.0 if top_p is None else float(top_p)
    if mass < 1:
        nucleus = _nucleus_floor(scaled, kept, mass)
        return None if nucleus is None else max(lowest, nucleus)
    return lowest if lowest == lowest and mass == mass else None


def _largest(scaled: Tensor, count: int) -> Tensor:
    """The ``count`` largest log-weights in falling order, and those behind them that equal the last one."""
    ordered = scaled.topk(count + 1).values
    if bool(ordered[count] < ordered[count - 1]):
        return ordered[:count]
    return scaled[scaled >= ordered[count - 1]].sort(descending=True).values


def _nucleus_floor(scaled: Tensor, kept: Tensor | None, mass: float) -> float | None:
    """The smallest log-weight of the fewest tokens that hold ``mass`` of ``kept``, or of all tokens."""
    if kept is not None:
        return _floor_among(kept, None, mass)
    total = scaled.double().sub_(scaled.amax()).exp_().sum()
    for count in (count for count in LIKELIEST if count < len(scaled)):
        ordered = scaled.topk(count).values
        held = ordered.double().sub_(ordered[0]).exp_().sum()
        if float(held / total) > mass + UNSURE:
            return _floor_among(ordered, total, mass)
    return _floor_among(scaled.sort(descending=True).values, total, mass)


def _floor_among(ordered: Tensor, total: Tensor | None, mass: float) -> float | None:
    """The floor of top-p, which is one of the log-weights ``ordered``; None if rounding might decide which.

    ``total`` is the sum of the weights of all tokens, in units of that of the first. None: that of ``ordered``.
    """
    weights = ordered.double().sub_(ordered[0]).exp_()
    # A token is kept if those before it hold less than the mass. The first one always is.
    before = weights.cumsum(0)[:-1] / (weights.sum() if total is None else total)
    if bool(((before - mass).abs() < UNSURE).any()):
        return None
    return float(ordered[(before < mass).sum()])
