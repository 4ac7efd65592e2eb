"""The passes of the pipeline: one file each. ``PASSES`` maps a configuration key to its class.

Beside them stand what a pass is (``base``), what runs them (``pipeline``) and what they did (``report``). What several
of them share is in ``common``. The passes that make the step for one kind of request are in
:mod:`specgraph.specialise`.
"""

from __future__ import annotations

from specgraph.passes.base import NearMiss, Pass, PassResult
from specgraph.passes.capture_cuda_graph import CaptureCudaGraph
from specgraph.passes.compile_remainder import CompileRemainder
from specgraph.passes.expose_features import ExposeFeatures
from specgraph.passes.few_rows import FewRows
from specgraph.passes.fuse_norm import FuseNorm
from specgraph.passes.fuse_pointwise import FusePointwise
from specgraph.passes.fuse_rotary_cache import FuseRotaryCache
from specgraph.passes.fuse_routing import FuseRouting
from specgraph.passes.insert_draft import InsertDraft
from specgraph.passes.insert_kv_cache import InsertKVCache
from specgraph.passes.insert_processors import InsertProcessors
from specgraph.passes.insert_recurrent_state import InsertRecurrentState
from specgraph.passes.insert_verify import InsertVerify
from specgraph.passes.lookup_first import LookupFirst
from specgraph.passes.lower_kernels import LowerKernels
from specgraph.passes.merge_linears import MergeLinears
from specgraph.passes.parallel_draft import ParallelDraft
from specgraph.passes.shard import Shard
from specgraph.passes.share_weights import ShareWeights

PASSES: dict[str, type[Pass]] = {
    cls.name: cls
    for cls in (
        ExposeFeatures, Shard, InsertKVCache, InsertRecurrentState, InsertDraft, ParallelDraft, LookupFirst,
        InsertVerify, InsertProcessors, ShareWeights, FuseNorm, FuseRouting, MergeLinears, FuseRotaryCache,
        LowerKernels, FusePointwise, FewRows, CompileRemainder, CaptureCudaGraph,
    )
}  # fmt: skip

__all__ = ["PASSES", "NearMiss", "Pass", "PassResult"]
