"""Verification of drafts: the definition and its kernels."""

from specgraph.kernels.verify.arguments import LOSSLESS_RULES, Verified, Verify
from specgraph.kernels.verify.pieces import (
    accept,
    acceptance_chances,
    emit,
    invert_vocabulary,
    residual,
    sample_next,
    token_logprobs,
)
from specgraph.kernels.verify.verify import verify_reference

__all__ = [
    "LOSSLESS_RULES",
    "Verified",
    "Verify",
    "accept",
    "acceptance_chances",
    "emit",
    "invert_vocabulary",
    "residual",
    "sample_next",
    "token_logprobs",
    "verify_reference",
]
