"""What the recurrent ops take: their arguments, shapes and dtypes, and what they are computed in."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

ACTIVATIONS = ("", "silu")
"""What may follow the convolution; the empty name stands for nothing."""


@dataclass(slots=True)
class CausalConv:
    """Convolve ``x`` ``[B, D, T]`` along its rows with ``weight`` ``[D, w]``: ``[B, D, T]`` in the dtype of ``x``.

    ``bias`` is ``[D]`` or None, and ``activation`` one of :data:`ACTIVATIONS`. It is computed in the dtype of
    ``weight``.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    _: KW_ONLY
    activation: str = ""


@dataclass(slots=True)
class CachedConv:
    """:class:`CausalConv` of new rows behind those that are cached.

    Attributes:
        inputs: ``[N, R, D]`` in the dtype of ``x``, the last inputs of every sequence, each at its position modulo
            ``R``; written in place.
        span: int64 ``[B, 5]``, see :class:`~specgraph.kernels.recurrent.span.RecurrentSpan`. The result of rows that
            are not real is zero.
    """

    x: Tensor
    weight: Tensor
    inputs: Tensor
    span: Tensor
    bias: Tensor | None = None
    _: KW_ONLY
    activation: str = ""


CHUNK = 16
"""Rows between two boundaries. A state is read in every step and written once in so many tokens."""
EPSILON = 1e-6
"""Added to the squared length of a vector that is brought to length 1, as transformers does."""


@dataclass(slots=True)
class GatedDeltaRule:
    """The gated delta rule over ``T`` rows, from a state of zero: ``[B, T, H, Dv]`` in the dtype of ``v``.

    Attributes:
        q, k: ``[B, T, Hk, Dk]`` of one dtype; each of these heads serves ``H / Hk`` heads of ``v``, which follow each
            other.
        v: ``[B, T, H, Dv]``.
        g: log decays, ``[B, T, H]``, or ``[B, T, H, Dk]`` for one of each row of the state.
        beta: ``[B, T, H]``, learning rates; None for a sum without corrections.
        scale: the factor on queries.
        normalise: whether queries and keys are brought to length 1.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None = None
    _: KW_ONLY
    scale: float
    normalise: bool = False


@dataclass(slots=True)
class CachedDeltaRule:
    """:class:`GatedDeltaRule` of new rows behind a state and the rows since it was written.

    Attributes:
        state: ``[N, H, Dk, Dv]``, of every sequence at its last settled boundary.
        chunk_k, chunk_delta, chunk_g, chunk_a: ``[N, R, Hk, Dk]``, ``[N, R, H, Dv]``, ``[N, R, H]`` (or
            ``[N, R, H, Dk]``, as ``g``) and ``[N, R, H, CHUNK]``: ``k``, ``delta``, ``g`` and the row of ``A`` of the
            rows since then, each at its position modulo ``R``. ``chunk_k`` is in the dtype of ``k``, all others are
            float32 or float64. They are written in place. Without ``beta``, ``chunk_a`` is not looked at.
        span: int64 ``[B, 5]``, see :class:`~specgraph.kernels.recurrent.span.RecurrentSpan`. The result of rows that
            are not real is zero.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    state: Tensor
    chunk_k: Tensor
    chunk_delta: Tensor
    chunk_g: Tensor
    chunk_a: Tensor
    span: Tensor
    beta: Tensor | None = None
    _: KW_ONLY
    scale: float
    normalise: bool = False


def exact(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the rule is computed, and its state kept."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(slots=True)
class SelectiveScan:
    """The scan over ``T`` rows, from a state of zero: ``[B, D, T]`` in the dtype of ``x``.

    Attributes:
        x, dt: ``[B, D, T]``, inputs and steps, float32 or float64.
        a: ``[D, N]``, decay rates.
        b, c: ``[B, N, T]``, where inputs enter the state, and how it is read.
    """

    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor


@dataclass(slots=True)
class CachedScan:
    """:class:`SelectiveScan` of new rows behind a state and the rows since it was written.

    Attributes:
        state: ``[M, D, N]``, of every sequence at its last settled boundary.
        steps, entered, places: ``[M, R, D]`` twice and ``[M, R, N]``: ``dt``, ``dt x`` and ``b`` of the rows since
            then, each at its position modulo ``R``. All four have the dtype of ``x``, and are written in place.
        span: int64 ``[B, 5]``, see :class:`~specgraph.kernels.recurrent.span.RecurrentSpan`. The result of rows that
            are not real is zero.
    """

    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    state: Tensor
    steps: Tensor
    entered: Tensor
    places: Tensor
    span: Tensor
