"""The functions from which step graphs are built, and the packing of a step's results."""

from specgraph.kernels.attention.packing import (
    needed_packed_rows,
    pack_rows,
    packed_places,
    take_packed_rows,
    unpack_rows,
)
from specgraph.kernels.step.drafting import (
    drafts_wanted,
    in_draft_vocabulary,
    in_target_vocabulary,
    last_accepted,
    last_position,
    real_rows,
    survival,
    where_surviving,
)
from specgraph.kernels.step.finalize import finalize_step
from specgraph.kernels.step.index import gather_state, scatter_state_, select_state
from specgraph.kernels.step.lookup import any_found, prefer_found, record_accepted_
from specgraph.kernels.step.ngram import ngram_lookup, record_tokens_
from specgraph.kernels.step.rerun import keep_rows_, next_module_tokens, rerun
from specgraph.kernels.step.rows import expand_draft_inputs, row_slots
from specgraph.kernels.step.step import (
    draft_tokens,
    for_host,
    keep_confidence_,
    keep_point_mass_,
    needed_rows,
    positions_and_next,
    propose_,
    row_positions,
    rows_before_last,
    take_rows,
    unsettled_rows,
)
from specgraph.kernels.step.suffix import suffix_lookup
from specgraph.kernels.step.tokens import advance_, bad_rows
from specgraph.kernels.step.tracing import drawn_ids, trace_columns, trace_tokens
from specgraph.kernels.step.writes import FINAL_WRITES, WRITES, writes

__all__ = [
    "FINAL_WRITES",
    "WRITES",
    "advance_",
    "any_found",
    "bad_rows",
    "draft_tokens",
    "drafts_wanted",
    "drawn_ids",
    "expand_draft_inputs",
    "finalize_step",
    "for_host",
    "gather_state",
    "in_draft_vocabulary",
    "in_target_vocabulary",
    "keep_confidence_",
    "keep_point_mass_",
    "keep_rows_",
    "last_accepted",
    "last_position",
    "needed_packed_rows",
    "needed_rows",
    "next_module_tokens",
    "ngram_lookup",
    "pack_rows",
    "packed_places",
    "positions_and_next",
    "prefer_found",
    "propose_",
    "real_rows",
    "record_accepted_",
    "record_tokens_",
    "rerun",
    "row_positions",
    "row_slots",
    "rows_before_last",
    "scatter_state_",
    "select_state",
    "suffix_lookup",
    "survival",
    "take_packed_rows",
    "take_rows",
    "trace_columns",
    "trace_tokens",
    "unpack_rows",
    "unsettled_rows",
    "where_surviving",
    "writes",
]
