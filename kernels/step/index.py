"""The row index: a step runs any subset of the sequences whose state is kept.

``rows`` is int64 ``[b]`` and names the row of the state that belongs to each of the ``b`` sequences of a call, all
different; -1 marks an entry that is no sequence. What a step keeps for each sequence is reached in one of two ways:

- Small buffers are gathered at the head of the step (``specgraph::gather_state``) and scattered at its end
  (``specgraph::scatter_state``), each in a single launch. In between, the step computes with ``[b, ...]`` tensors.
- Large buffers (:attr:`~specgraph.kernels.state.Buffer.indexed`) stay where they are. The ops that read or write them
  take ``rows``. Such are the token history of prompt lookup, and the logits that drafts were drawn from, which
  ``specgraph::store_drafted`` writes and ``specgraph::verify`` reads.

An entry of -1 gathers the values of a fresh buffer, whose ``num_rows`` of 0 makes it inactive, and scatters nothing. So
a CUDA graph is captured for a number of sequences and serves every set of at most that many.

Cost. All buffers of a sequence together are a few hundred bytes, and a block table of 8,192 pages adds 64 KB. The
latency of one launch (1.5 to 2 us) decides, which is why there is one for all buffers. A program copies one sequence.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.checks import check_shapes, require
from specgraph.kernels.launch import block_size, contiguous, gdc_launch_dependents, gdc_wait, launch
from specgraph.kernels.ops import declare, triton_or_reference
from specgraph.kernels.step.writes import writes

_MOST_AT_ONCE = 1024
"""Elements of a buffer that a program copies at a time."""


@dataclass(slots=True)
class GatherState:
    """The rows ``[b, ...]`` of several buffers that belong to the sequences of a call, from one launch.

    Attributes:
        rows: int64 ``[b]``, -1 for no sequence.
        buffers: tensors ``[N, ...]`` of any dtypes.
        fills: for each buffer, what its elements are where there is no sequence.
    """

    rows: Tensor
    buffers: list[Tensor]
    fills: list[float]


@dataclass(slots=True)
class ScatterState:
    """Write ``values`` ``[b, ...]`` to the rows ``rows`` ``[b]`` of their buffers ``[N, ...]``; -1 writes nothing."""

    rows: Tensor
    buffers: list[Tensor]
    values: list[Tensor]


@dataclass(slots=True)
class StoreDrafted:
    """Keep the log-weights that drafts were drawn from, for the verification in the next step.

    Attributes:
        draft_logits: ``[N, K, Vd]``, of which ``[rows[b], first : first + R]`` is written.
        drafted: ``[b, R, Vd]``.
        rows: int64 ``[b]``, the row of ``draft_logits`` of each sequence, -1 for none; None: sequence b has row b.
        num_emitted: int64 ``[b]``. A sequence that emitted nothing keeps what it had.
        first: the number of the first draft.
    """

    draft_logits: Tensor
    drafted: Tensor
    rows: Tensor | None
    num_emitted: Tensor
    first: int


def select_state(buffer: Tensor, rows: Tensor) -> Tensor:
    """The rows ``[b, ...]`` of ``buffer`` ``[N, ...]`` that ``rows`` ``[b]`` names; -1 gives a row not to be used."""
    return buffer.index_select(0, rows.clamp_min(0))


def gather_state_reference(given: GatherState) -> list[Tensor]:
    """:class:`GatherState` in plain PyTorch."""
    none = given.rows < 0
    parts = [(select_state(buffer, given.rows), fill) for buffer, fill in _pairs(given)]
    return [own.masked_fill(_beside(none, own), fill) for own, fill in parts]


def scatter_state_reference(given: ScatterState) -> None:
    """:class:`ScatterState` in plain PyTorch, which never reads a value on the host."""
    rows = given.rows
    for buffer, values in zip(given.buffers, given.values, strict=True):
        # Entries without a row go to one row more, which is then left out.
        source = rows.new_full((len(buffer) + 1,), -1)
        source[torch.where(rows >= 0, rows, len(buffer))] = torch.arange(len(rows), device=rows.device)
        source = source[:-1]
        if len(rows):
            buffer.copy_(torch.where(_beside(source >= 0, buffer), select_state(values, source), buffer))


def store_drafted_reference(given: StoreDrafted) -> None:
    """:class:`StoreDrafted` in plain PyTorch."""
    batch, count, _ = given.drafted.shape
    rows = torch.arange(batch, device=given.drafted.device) if given.rows is None else given.rows
    kept = given.draft_logits[:, given.first : given.first + count]
    active = torch.where(given.num_emitted > 0, rows, -1)
    scatter_state_reference(ScatterState(active, [kept], [given.drafted.to(kept.dtype)]))


def gather_state_cpu(given: GatherState) -> list[Tensor]:
    """:class:`GatherState` where looking at a value costs nothing: without a -1 there is nothing to fill."""
    if bool((given.rows >= 0).all()):
        return [buffer.index_select(0, given.rows) for buffer in given.buffers]
    return gather_state_reference(given)


def scatter_state_cpu(given: ScatterState) -> None:
    """:class:`ScatterState` on the real rows alone."""
    real = given.rows >= 0
    whole = bool(real.all())
    rows = given.rows if whole else given.rows[real]
    for buffer, values in zip(given.buffers, given.values, strict=True):
        buffer.index_copy_(0, rows, values if whole else values[real])


def store_drafted_cpu(given: StoreDrafted) -> None:
    """:class:`StoreDrafted` on the active sequences alone."""
    drafted, active = given.drafted, given.num_emitted > 0
    rows = torch.arange(len(drafted), device=drafted.device) if given.rows is None else given.rows
    active = active & (rows >= 0)
    kept = given.draft_logits[:, given.first : given.first + drafted.shape[1]]
    kept.index_copy_(0, rows[active], drafted[active].to(kept.dtype))


def _pairs(given: GatherState) -> list[tuple[Tensor, float]]:
    """Each buffer with its fill, as a number of the buffer's kind."""
    pairs = zip(given.buffers, given.fills, strict=True)
    return [(buffer, fill if buffer.is_floating_point() else int(fill)) for buffer, fill in pairs]


def _beside(condition: Tensor, values: Tensor) -> Tensor:
    """``condition`` ``[b]`` with as many dimensions as ``values`` ``[b, ...]``."""
    return condition.view(-1, *[1] * (values.dim() - 1))


@triton.jit
def _gather_kernel(
    gathered, buffers, rows, FILLS: tl.constexpr, WIDTHS: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr
):
    """Every buffer's row of one sequence."""
    gdc_wait(PDL)
    b = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + b)
    gdc_launch_dependents(PDL)
    # ---- gathered_i[b] = buffers_i[row], or its fill where there is no row: [BLOCKS[i]] at a time
    for index in tl.static_range(len(WIDTHS)):
        for first in range(0, WIDTHS[index], BLOCKS[index]):
            column = first + tl.arange(0, BLOCKS[index])
            inside = column < WIDTHS[index]
            own = tl.load(buffers[index] + row * WIDTHS[index] + column, mask=inside & (row >= 0), other=FILLS[index])
            tl.store(gathered[index] + b * WIDTHS[index] + column, own, mask=inside)


@triton.jit
def _scatter_kernel(buffers, values, rows, WIDTHS: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr):
    """Every value's row of one sequence."""
    gdc_wait(PDL)
    b = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + b)
    gdc_launch_dependents(PDL)
    # ---- buffers_i[row] = values_i[b] where there is a row: [BLOCKS[i]] at a time
    for index in tl.static_range(len(WIDTHS)):
        for first in range(0, WIDTHS[index], BLOCKS[index]):
            column = first + tl.arange(0, BLOCKS[index])
            inside = column < WIDTHS[index]
            own = tl.load(values[index] + b * WIDTHS[index] + column, mask=inside)
            tl.store(buffers[index] + row * WIDTHS[index] + column, own, mask=inside & (row >= 0))


@triton.jit
def _store_drafted_kernel(
    draft_logits, drafted, rows, num_emitted, count, width, outer, inner, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """A block of one draft's log-weights; grid (b * R, blocks)."""
    gdc_wait(PDL)
    line = tl.program_id(0).to(tl.int64)
    b = line // count
    row = b
    if rows is not None:
        row = tl.load(rows + b)
    # ---- draft_logits[row, first + line % count] = drafted[line], of sequences that emitted something: [BLOCK]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = (column < width) & (row >= 0) & (tl.load(num_emitted + b) > 0)
    value = tl.load(drafted + line * width + column, mask=real)
    gdc_launch_dependents(PDL)
    place = draft_logits + row * outer + (line % count) * inner
    tl.store(place + column, value.to(draft_logits.dtype.element_ty), mask=real)


def _widths(tensors: list[Tensor]) -> tuple[int, ...]:
    """Elements in a row of each tensor."""
    return tuple(tensor[0].numel() if len(tensor) else 0 for tensor in tensors)


def gather_state_triton(given: GatherState) -> list[Tensor]:
    """:class:`GatherState` in one kernel."""
    gathered, widths = _gather_state_fake(given), _widths(given.buffers)
    if any(widths):
        launch(
            _gather_kernel, (len(given.rows),), tuple(gathered), tuple(buffer.contiguous() for buffer in given.buffers),
            given.rows.contiguous(), FILLS=tuple(fill for _, fill in _pairs(given)), WIDTHS=widths,
            BLOCKS=tuple(block_size(width, _MOST_AT_ONCE) for width in widths), num_warps=1,
        )
    return gathered


def scatter_state_triton(given: ScatterState) -> None:
    """:class:`ScatterState` in one kernel."""
    widths = _widths(given.buffers)
    if any(widths):
        launch(
            _scatter_kernel, (len(given.rows),), tuple(given.buffers),
            tuple(value.contiguous() for value in given.values), given.rows.contiguous(), WIDTHS=widths,
            BLOCKS=tuple(block_size(width, _MOST_AT_ONCE) for width in widths), num_warps=1,
        )


def store_drafted_triton(given: StoreDrafted) -> None:
    """:class:`StoreDrafted` in one kernel."""
    kept, drafted = given.draft_logits[:, given.first :], given.drafted.contiguous()
    batch, count, width = drafted.shape
    block = block_size(width, _MOST_AT_ONCE)
    launch(
        _store_drafted_kernel, (batch * count, triton.cdiv(width, block)), kept, drafted,
        *contiguous(given, "rows", "num_emitted"), count, width, kept.stride(0), kept.stride(1), BLOCK=block,
        num_warps=4,
    )


def _scatter_covers(given: ScatterState) -> bool:
    """The kernel writes where the buffers lie; other strides and a change of dtype are the reference's."""
    pairs = zip(given.buffers, given.values, strict=True)
    return all(buffer.is_contiguous() and buffer.dtype == value.dtype for buffer, value in pairs)


def _store_covers(given: StoreDrafted) -> bool:
    return given.draft_logits.stride(2) == 1


def _gather_state_fake(given: GatherState) -> list[Tensor]:
    check_shapes(given, rows="b")
    rows, buffers, fills = given.rows, given.buffers, given.fills
    require(len(buffers) == len(fills), lambda: f"there are {len(buffers)} buffers and {len(fills)} fills")
    return [buffer.new_empty(rows.shape[0], *buffer.shape[1:]) for buffer in buffers]


def _scatter_state_fake(given: ScatterState) -> None:
    check_shapes(given, rows="b")
    rows, buffers, values = given.rows, given.buffers, given.values
    require(len(buffers) == len(values), lambda: f"there are {len(buffers)} buffers and {len(values)} values")
    for buffer, value in zip(buffers, values, strict=True):
        _check_shape(value, (rows.shape[0], *buffer.shape[1:]))


def _check_shape(value: Tensor, wanted: tuple[int, ...]) -> None:
    require(value.shape == wanted, lambda: f"a value must be {[*wanted]}, not {[*value.shape]}")


def _store_drafted_fake(given: StoreDrafted) -> None:
    kept, drafted = given.draft_logits, given.drafted
    first = "B" if given.rows is None else "N"
    check_shapes(given, drafted="B R Vd", draft_logits=f"{first} K Vd", rows="B", num_emitted="B")
    last = given.first + drafted.shape[1]
    require(last <= kept.shape[1], lambda: f"there are {kept.shape[1]} drafts, and these are the first {last}")


gather_state = declare(
    "gather_state", GatherState, _gather_state_fake,
    triton_or_reference(gather_state_triton, gather_state_reference, moves_only=True, cpu=gather_state_cpu),
).function
SCATTER_STATE = declare(
    "scatter_state", ScatterState, _scatter_state_fake,
    triton_or_reference(
        scatter_state_triton, scatter_state_reference, covers=_scatter_covers, moves_only=True, cpu=scatter_state_cpu,
    ),
    mutates=("buffers",),
)
scatter_state_ = writes(*SCATTER_STATE.mutates)(SCATTER_STATE.function)
STORE_DRAFTED = declare(
    "store_drafted", StoreDrafted, _store_drafted_fake,
    triton_or_reference(
        store_drafted_triton, store_drafted_reference, covers=_store_covers, moves_only=True, cpu=store_drafted_cpu,
    ),
    mutates=("draft_logits",),
)
store_drafted_ = writes(*STORE_DRAFTED.mutates)(STORE_DRAFTED.function)
