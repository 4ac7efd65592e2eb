"""What the PyTorch and the Triton form of the noise must agree in, each value in both forms.

A Triton function reads a global only if it is a ``tl.constexpr``; those are the names that begin with ``TL_``.
:mod:`specgraph.kernels.sampling.sample` says what the values mean.
"""

from __future__ import annotations

import triton.language as tl

STREAM_TARGET = 0
"""Noise of the target's own samples, keyed by the absolute position of the token. Drafts of ``strict`` share it."""
STREAM_DRAFT = 1
"""Noise of the draft tokens of ``probabilistic`` and ``block``, keyed by the step and the draft's number in it."""
STREAM_ACCEPT = 2
"""Noise that decides whether drafts are accepted, keyed by the step and the draft's number in it."""
STREAM_RESIDUAL = 3
"""Noise of the token after the accepted prefix in ``probabilistic`` and ``block``, keyed by the step and the number of
the drafts accepted before it."""
STREAM_BITS = 8
"""The bits of the last counter word that hold the stream; those above hold the upper half of the key."""

PHILOX_ROUNDS = 7
"""The number of Philox rounds. With 10, the authors' choice with a margin, the scan of a row takes a fifth longer."""
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
"""What Philox multiplies the first and the third word of its counter by."""
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
"""What Philox adds to the two words of its key after every round."""

GREEDY_BELOW = 1e-30
"""Temperatures below this count as 0. Dividing by them could overflow, and only exact ties would show a difference."""

TL_STREAM_TARGET = tl.constexpr(STREAM_TARGET)
TL_STREAM_ACCEPT = tl.constexpr(STREAM_ACCEPT)
TL_STREAM_RESIDUAL = tl.constexpr(STREAM_RESIDUAL)
TL_STREAM_BITS = tl.constexpr(STREAM_BITS)
TL_PHILOX_ROUNDS = tl.constexpr(PHILOX_ROUNDS)
TL_MULTIPLIER_0, TL_MULTIPLIER_1 = (tl.constexpr(value) for value in MULTIPLIERS)
TL_KEY_STEP_0, TL_KEY_STEP_1 = (tl.constexpr(value) for value in KEY_STEPS)
TL_GREEDY_BELOW = tl.constexpr(GREEDY_BELOW)
