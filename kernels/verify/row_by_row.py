"""Verification of wide rows on a CPU, where only the rows that are needed are processed and little noise is drawn.

Under ``strict`` a row is processed and drawn from when the drafts before it are accepted, so the rows behind a wrong
draft cost nothing. The other rules compose the functions of :mod:`specgraph.kernels.verify.pieces` as the definition
does, with faster forms of two of them (:func:`~specgraph.kernels.sampling.kept.process_rows`, :func:`sample_next_row`).

Results have the bits of :func:`~specgraph.kernels.verify.verify.verify_reference`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.kernels.sampling.constants import STREAM_TARGET
from specgraph.kernels.sampling.draw import Noise, draw_row
from specgraph.kernels.sampling.kept import process_row, row_options
from specgraph.kernels.sampling.sample import clean_logits
from specgraph.kernels.step.tokens import bad_rows
from specgraph.kernels.verify.arguments import Verified, Verify, check
from specgraph.kernels.verify.host import Block, blocks, laid_out
from specgraph.kernels.verify.pieces import next_noise


class _OwnTokens:
    """The target's own tokens of one sequence, drawn when they are asked for."""

    def __init__(self, given: Verify, b: int, first: int) -> None:
        self.given, self.b, self.first = given, b, first
        self.options = row_options(b, given.temperature, given.top_k, given.top_p, given.min_p)
        self.processed: dict[int, Tensor] = {}

    def __getitem__(self, r: int) -> int:
        """The token of row ``r`` of those that have logits."""
        given, at = self.given, slice(self.b, self.b + 1)
        weights = process_row(given.logits[self.b, r], *self.options)
        if given.logprobs == "processed":
            self.processed[r] = weights
        key = given.positions[at, self.first + r : self.first + r + 1]
        return draw_row(weights, None if given.seeds is None else Noise(given.seeds[at], STREAM_TARGET, key))

    def logprob(self, r: int, token: int) -> Tensor:
        """The log-probability that is asked for, of a token in row ``r``."""
        if self.given.logprobs == "processed":
            source = self.processed[r]
        else:
            raw = self.given.logits if self.given.raw_logits is None else self.given.raw_logits
            source = clean_logits(raw[self.b, r])
        return source.log_softmax(-1)[token]


def verify_strict(given: Verify) -> Verified:
    """``specgraph::verify`` under ``strict``, for logits up to float32.

    Raises:
        ValueError: an argument has a wrong shape or dtype, or an option is out of range.
    """
    check(given)
    emitted: list[list[int]] = []
    width = 0 if given.logprobs == "none" else given.positions.shape[1]
    logprobs = given.logits.new_zeros((len(given.positions), width), dtype=torch.float32)
    for b, block in enumerate(blocks(given)):
        own = _OwnTokens(given, b, block.first)
        emitted.append(block.emitted(own.__getitem__))
        if width:
            _write_logprobs(logprobs[b], own, block, emitted[b])
    return laid_out(given, emitted, _bad_rows(given), logprobs)


def _write_logprobs(out: Tensor, own: _OwnTokens, block: Block, emitted: list[int]) -> None:
    for row in range(max(block.first, block.num_forced), len(emitted)):
        out[row] = own.logprob(row - block.first, emitted[row])


def _bad_rows(given: Verify) -> Tensor:
    """What :class:`~specgraph.kernels.verify.arguments.Verified` calls ``bad``.

    Logits whose largest are finite have nothing that is bad; to see that takes a twentieth of the time.
    """
    if bool(given.logits.amax(-1).isfinite().all()):
        return given.num_rows.new_zeros(len(given.num_rows), dtype=torch.int32)
    return bad_rows(given.logits, given.positions, given.num_rows, given.num_forced)


def sample_next_row(
    residual: Tensor, seeds: Tensor | None, positions: Tensor, num_accepted: Tensor, num_forced: Tensor, *, rule: str
) -> Tensor:
    """:func:`~specgraph.kernels.verify.pieces.sample_next`, one sequence after the other."""
    stream, key, number = next_noise(positions, num_accepted, num_forced, rule)
    tokens = []
    for b, weights in enumerate(residual.unbind(0)):
        at = slice(b, b + 1)
        noise = None if seeds is None else Noise(seeds[at], stream, key[at], None if number is None else number[at])
        tokens.append(draw_row(weights, noise))
    return positions.new_tensor(tokens)
