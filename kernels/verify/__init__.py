"""Verification of drafts: the definition, and its kernels."""

from specgraph.kernels.verify.verify import (
    LOSSLESS_RULES,
    accept,
    acceptance_chances,
    emit,
    invert_vocabulary,
    residual,
    sample_next,
    token_logprobs,
    verify_reference,
)

__all__ = [
    "LOSSLESS_RULES",
    "accept",
    "acceptance_chances",
    "emit",
    "invert_vocabulary",
    "residual",
    "sample_next",
    "token_logprobs",
    "verify_reference",
]
