"""Importing this file declares every op that specgraph has.

A file of ops declares its own when it is imported, and most readers import just the files that they need. Those that
ask what there is, such as benchmarks and tests of all ops, import this one first.
"""

import specgraph.kernels.attention.attention
import specgraph.kernels.attention.block
import specgraph.kernels.attention.rotary
import specgraph.kernels.linear.all_reduce
import specgraph.kernels.linear.block_conv
import specgraph.kernels.linear.candidates
import specgraph.kernels.linear.concat
import specgraph.kernels.linear.embedding
import specgraph.kernels.linear.experts
import specgraph.kernels.linear.gated_norm
import specgraph.kernels.linear.head_norms
import specgraph.kernels.linear.linear
import specgraph.kernels.linear.norm
import specgraph.kernels.linear.route
import specgraph.kernels.linear.shared_norm
import specgraph.kernels.packed.experts
import specgraph.kernels.packed.linear
import specgraph.kernels.pointwise.pointwise
import specgraph.kernels.processors
import specgraph.kernels.recurrent.conv
import specgraph.kernels.recurrent.delta_rule
import specgraph.kernels.recurrent.scan
import specgraph.kernels.recurrent.span
import specgraph.kernels.sampling.draft
import specgraph.kernels.step
import specgraph.kernels.step.block
import specgraph.kernels.step.results
import specgraph.kernels.verify
import specgraph.kernels.verify.rank
import specgraph.kernels.verify.score  # noqa: F401
