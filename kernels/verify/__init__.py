"""Verification of drafts: the definition and its kernels."""

from specgraph.kernels.verify.arguments import LOSSLESS_RULES as LOSSLESS_RULES
from specgraph.kernels.verify.arguments import Verified as Verified
from specgraph.kernels.verify.arguments import Verify as Verify
from specgraph.kernels.verify.pieces import accept as accept
from specgraph.kernels.verify.pieces import emit as emit
from specgraph.kernels.verify.pieces import invert_vocabulary as invert_vocabulary
from specgraph.kernels.verify.pieces import residual as residual
from specgraph.kernels.verify.pieces import sample_next as sample_next
from specgraph.kernels.verify.pieces import token_logprobs as token_logprobs
from specgraph.kernels.verify.verify import verify_reference as verify_reference
