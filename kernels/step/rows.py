"""Rows of a step as ops of one launch each: their positions, their selection, mask rows behind them, and what follows
from the verified tokens. :mod:`specgraph.kernels.step` has the functions that step graphs call.

Written out in ATen these are 3 to 18 launches each, of 1.5 to 2 us, one after the other. Shapes and dtypes are those of
that module: ``B`` sequences, ``T`` rows per sequence, ids and counts int64. Nothing is computed but integers, and
floating-point rows are copied.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.launch import launch_options, supports_pdl
from specgraph.kernels.registration import register
from specgraph.kernels.sampling.sample import require

torch.library.define("specgraph::row_positions", "(Tensor start, int width, int count) -> Tensor[]")
torch.library.define("specgraph::take_rows", "(Tensor values, Tensor first, int count, bool together) -> Tensor")
torch.library.define(
    "specgraph::expand_rows",
    "(Tensor tokens, Tensor num_rows, Tensor? hidden, Tensor? mask_hidden, *, int mask_token_id, int count) -> "
    "(Tensor, Tensor, Tensor)",
)
torch.library.define(
    "specgraph::settle",
    "(Tensor tokens, Tensor window, Tensor start, Tensor num_forced, Tensor eos_ids, *, bool shifted, int vocab_size, "
    "int chain) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor[])",
)

_BLOCK = 1024


def row_positions_reference(start: Tensor, width: int, count: int) -> list[Tensor]:
    """``start + row + i`` ``[B, width]`` for every ``i`` below ``count``, from ``start`` ``[B]``."""
    positions = start.unsqueeze(1) + torch.arange(width, device=start.device)
    return [positions + i if i else positions for i in range(count)]


def take_rows_reference(values: Tensor, first: Tensor, count: int, together: bool) -> Tensor:
    """``count`` rows of ``values`` ``[B, T, H]`` from row ``first`` ``[B]`` on: ``[B, count, H]``.

    Those outside of the block become its first or last row, each by itself; with ``together``, which needs
    ``count <= T``, all of them move until the last one is inside.
    """
    length = values.shape[1]
    first = first.clamp(max=length - count) if together else first
    index = (first.unsqueeze(1) + torch.arange(count, device=values.device)).clamp(0, length - 1)
    return values.gather(1, index.unsqueeze(2).expand(-1, -1, values.shape[2]))


def expand_rows_reference(
    tokens: Tensor, num_rows: Tensor, hidden: Tensor | None, mask_hidden: Tensor | None, *, mask_token_id: int,
    count: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``expand_draft_inputs`` in plain PyTorch; the hidden states are empty where there are none."""
    row = torch.arange(tokens.shape[1] + count, device=tokens.device)
    end = num_rows.unsqueeze(1)
    masked = (row >= end) & (row < end + count)
    tokens = torch.where(masked, mask_token_id, torch.nn.functional.pad(tokens, (0, count)))
    rows = torch.where(num_rows > 0, num_rows + count, 0)
    if hidden is None or mask_hidden is None:
        return tokens, rows, torch.empty(0, device=tokens.device)
    padded = torch.nn.functional.pad(hidden, (0, 0, 0, count))
    return tokens, rows, torch.where(masked.unsqueeze(2), mask_hidden.to(hidden.dtype), padded)


Settled = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor]]


def settle_reference(
    tokens: Tensor, window: Tensor, start: Tensor, num_forced: Tensor, eos_ids: Tensor, *, shifted: bool,
    vocab_size: int, chain: int,
) -> Settled:  # fmt: skip
    """What follows from the verified ``tokens`` ``[B, T]``, for the next step and for the drafter.

    Args:
        tokens: padded with -1.
        window: ``[B, T]``, what the target has run.
        start: ``[B]``, the position of its first row.
        num_forced: ``[B]``, how many of the tokens were given.
        eos_ids: ``[E]``, padded with -1.
        shifted: whether the drafter's row ``t`` takes token ``t + 1``; else it takes the window's first token, too.
        vocab_size: the drafter's, into which padding is clamped.
        chain: how many positions behind the accepted tokens are wanted.

    Returns:
        - the emitted tokens ``[B, T]``: everything after the first unforced EOS is -1
        - their number ``n`` ``[B]``
        - the drafter's rows ``[B, T]`` if shifted, else ``[B, T + 1]``
        - their positions, from ``start`` on
        - how many of them are real ``[B]``: ``n`` if shifted, else ``n + 1``, or 0 where nothing is emitted
        - ``n - 1`` ``[B]``, the last row of a shifted drafter
        - ``start + n + 1`` ``[B]``, the number of accepted tokens
        - ``start + n + i`` ``[B, 1]`` for every ``i`` below ``chain``
    """
    emitted = cut_reference(tokens, num_forced, eos_ids)
    count = (emitted >= 0).sum(1)
    rows = (emitted if shifted else torch.cat([window[:, :1], emitted], 1)).clamp(0, vocab_size - 1)
    places = row_positions_reference(start, rows.shape[1], 1)[0]
    real = count.clone() if shifted else torch.where(count > 0, count + 1, 0)
    ahead = row_positions_reference(start + count, 1, chain)
    return emitted, count, rows, places, real, count - 1, start + count + 1, ahead


def cut_reference(emitted: Tensor, num_forced: Tensor, eos_ids: Tensor) -> Tensor:
    """``emitted`` ``[B, T]`` with everything after the first unforced EOS replaced by -1."""
    row = torch.arange(emitted.shape[1], device=emitted.device)
    ends = among(emitted, eos_ids) & (emitted >= 0) & (row >= num_forced.unsqueeze(1))
    after = ends.long().cumsum(1) - ends.long()
    return emitted.masked_fill(after > 0, -1)


def among(tokens: Tensor, ids: Tensor) -> Tensor:
    """Which ``tokens`` ``[...]`` are among ``ids`` ``[E]``. ``torch.isin`` sorts from ten ids on, and waits for it."""
    return (tokens.unsqueeze(-1) == ids).any(-1)


@triton.jit
def _row_positions_kernel(positions, start, width, COUNT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(start + b) + row
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    for index in tl.static_range(COUNT):
        tl.store(positions[index] + b * width + row, position + index, mask=row < width)


@triton.jit
def _take_rows_kernel(
    taken, values, first, count, length, width, outer, inner, TOGETHER: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    b, r = (tl.program_id(0) // count).to(tl.int64), tl.program_id(0) % count
    begin = tl.load(first + b)
    if TOGETHER:
        begin = tl.minimum(begin, length - count)
    row = tl.minimum(tl.maximum(begin + r, 0), length - 1)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values + b * outer + row * inner + column, mask=column < width)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(taken + tl.program_id(0).to(tl.int64) * width + column, value, mask=column < width)


@triton.jit
def _expand_rows_kernel(
    out_tokens, out_rows, out_hidden, tokens, num_rows, hidden, mask_hidden, length, width, outer, inner, mask_token,
    COUNT: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    total = length + COUNT
    b, row = (tl.program_id(0) // total).to(tl.int64), tl.program_id(0) % total
    end = tl.load(num_rows + b)
    masked = (row >= end) & (row < end + COUNT)
    token = tl.load(tokens + b * length + row, mask=row < length, other=0)
    place = tl.program_id(0).to(tl.int64)
    if HIDDEN:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        own = tl.load(hidden + b * outer + row * inner + column, mask=inside & (row < length), other=0.0)
        mask = tl.load(mask_hidden + column, mask=inside, other=0.0).to(own.dtype)
        tl.store(out_hidden + place * width + column, tl.where(masked, mask, own), mask=inside)
    if tl.program_id(1) == 0:
        tl.store(out_tokens + place, tl.where(masked, mask_token, token))
        tl.store(out_rows + b, tl.where(end > 0, end + COUNT, 0), mask=row == 0)


@triton.jit
def cut_row(token, row, num_forced, eos_ids, NUM_EOS: tl.constexpr, BLOCK: tl.constexpr):
    """The tokens ``[BLOCK]`` of one sequence, those after the first unforced EOS replaced by -1."""
    first = tl.full((BLOCK,), BLOCK, tl.int32)
    for index in range(NUM_EOS):
        first = tl.where(token == tl.load(eos_ids + index), row, first)
    unforced = (token >= 0) & (row >= num_forced)
    end = tl.min(tl.where(unforced, first, BLOCK), axis=0)
    return tl.where(row > end, -1, token)


@triton.jit
def _settle_kernel(
    emitted, num_emitted, rows, positions, num_rows, last, accepted, ahead, tokens, window, start, num_forced, eos_ids,
    width, window_width, vocab, NUM_EOS: tl.constexpr, SHIFTED: tl.constexpr, BLOCK: tl.constexpr, CHAIN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0)
    row = tl.arange(0, BLOCK)
    inside = row < width
    token = tl.load(tokens + b * width + row, mask=inside, other=-1)
    token = cut_row(token, row, tl.load(num_forced + b), eos_ids, NUM_EOS, BLOCK)
    count = tl.sum((token >= 0).to(tl.int64), axis=0)
    begin = tl.load(start + b)
    known = tl.minimum(tl.maximum(token, 0), vocab - 1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(emitted + b * width + row, token, mask=inside)
    tl.store(num_emitted + b, count)
    if SHIFTED:
        tl.store(rows + b * width + row, known, mask=inside)
        tl.store(positions + b * width + row, begin + row, mask=inside)
        tl.store(num_rows + b, count)
    else:
        leading = tl.load(window + b * window_width)
        tl.store(rows + b * (width + 1), tl.minimum(tl.maximum(leading, 0), vocab - 1))
        tl.store(rows + b * (width + 1) + 1 + row, known, mask=inside)
        tl.store(positions + b * (width + 1) + row, begin + row, mask=row <= width)
        tl.store(num_rows + b, tl.where(count > 0, count + 1, 0))
    tl.store(last + b, count - 1)
    tl.store(accepted + b, begin + count + 1)
    for index in tl.static_range(CHAIN):
        tl.store(ahead[index] + b, begin + count + index)


def _row_positions(start: Tensor, width: int, count: int) -> list[Tensor]:
    """:func:`row_positions_reference` in one kernel."""
    batch = start.shape[0]
    positions = _row_positions_fake(start, width, count)
    if batch * width * count == 0:
        return positions
    block, pdl = min(triton.next_power_of_2(width), 256), supports_pdl(start.device)
    _row_positions_kernel[(batch, triton.cdiv(width, block))](
        tuple(positions), start.contiguous(), width, COUNT=count, BLOCK=block, PDL=pdl, num_warps=1,
        **launch_options(pdl),
    )  # fmt: skip
    return positions


def _take_rows(values: Tensor, first: Tensor, count: int, together: bool) -> Tensor:
    """:func:`take_rows_reference` in one kernel."""
    batch, length, width = values.shape
    taken = values.new_empty(batch, count, width)
    if taken.numel() == 0:
        return taken
    values = values if values.stride(2) == 1 else values.contiguous()
    block, pdl = min(triton.next_power_of_2(width), _BLOCK), supports_pdl(values.device)
    _take_rows_kernel[(batch * count, triton.cdiv(width, block))](
        taken, values, first.contiguous(), count, length, width, values.stride(0), values.stride(1), TOGETHER=together,
        BLOCK=block, PDL=pdl, num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return taken


def _expand_rows(
    tokens: Tensor, num_rows: Tensor, hidden: Tensor | None, mask_hidden: Tensor | None, *, mask_token_id: int,
    count: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """:func:`expand_rows_reference` in one kernel."""
    outputs = _expand_rows_fake(tokens, num_rows, hidden, mask_hidden, mask_token_id=mask_token_id, count=count)
    batch, length = tokens.shape
    if outputs[0].numel() == 0:
        outputs[1].zero_()
        return outputs
    both = hidden is not None and mask_hidden is not None
    if hidden is None or mask_hidden is None:
        hidden = mask_hidden = outputs[2]
        width, outer, inner = 1, 0, 0
    else:
        hidden = hidden if hidden.stride(2) == 1 else hidden.contiguous()
        width, outer, inner = hidden.shape[2], hidden.stride(0), hidden.stride(1)
    block, pdl = min(triton.next_power_of_2(width), _BLOCK), supports_pdl(tokens.device)
    _expand_rows_kernel[(batch * (length + count), triton.cdiv(width, block))](
        *outputs, tokens.contiguous(), num_rows.contiguous(), hidden, mask_hidden.contiguous(), length, width, outer,
        inner, mask_token_id, COUNT=count, HIDDEN=both, BLOCK=block, PDL=pdl, num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return outputs


def _settle(
    tokens: Tensor, window: Tensor, start: Tensor, num_forced: Tensor, eos_ids: Tensor, *, shifted: bool,
    vocab_size: int, chain: int,
) -> Settled:  # fmt: skip
    """:func:`settle_reference` in one kernel."""
    options = {"shifted": shifted, "vocab_size": vocab_size, "chain": chain}
    outputs = _settle_fake(tokens, window, start, num_forced, eos_ids, **options)  # type: ignore[arg-type]
    batch, width = tokens.shape
    if tokens.numel() == 0:
        return settle_reference(tokens, window, start, num_forced, eos_ids, **options)  # type: ignore[arg-type]
    read = (tensor.contiguous() for tensor in (tokens, window, start, num_forced, eos_ids))
    pdl = supports_pdl(tokens.device)
    _settle_kernel[(batch,)](
        *outputs[:-1], tuple(outputs[-1]), *read, width, window.shape[1], vocab_size, NUM_EOS=eos_ids.shape[0],
        SHIFTED=shifted, BLOCK=triton.next_power_of_2(width + 1), CHAIN=chain, PDL=pdl,
        num_warps=1 if width < 256 else 4, **launch_options(pdl),
    )  # fmt: skip
    return outputs


def _row_positions_fake(start: Tensor, width: int, count: int) -> list[Tensor]:
    require(start.dim() == 1, lambda: f"start must be [B], not {start.dim()}-d")
    return [start.new_empty(start.shape[0], width) for _ in range(count)]


def _take_rows_fake(values: Tensor, first: Tensor, count: int, together: bool) -> Tensor:
    require(values.dim() == 3, lambda: "values must be [B, T, H]")
    check_batch("first", first, values.shape[0])
    require(not together or count <= values.shape[1], lambda: f"there are no {count} rows together in the block")
    return values.new_empty(values.shape[0], count, values.shape[2])


def _expand_rows_fake(
    tokens: Tensor, num_rows: Tensor, hidden: Tensor | None, mask_hidden: Tensor | None, *, mask_token_id: int,
    count: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    batch, length = tokens.shape
    check_batch("num_rows", num_rows, batch)
    out = tokens.new_empty(batch, length + count)
    if hidden is None or mask_hidden is None:
        return out, num_rows.new_empty(batch), torch.empty(0, device=tokens.device)
    require(
        hidden.dim() == 3 and mask_hidden.shape == hidden.shape[2:], lambda: "hidden must be [B, T, H], mask_hidden [H]"
    )
    return out, num_rows.new_empty(batch), hidden.new_empty(batch, length + count, hidden.shape[2])


def _settle_fake(
    tokens: Tensor, window: Tensor, start: Tensor, num_forced: Tensor, eos_ids: Tensor, *, shifted: bool,
    vocab_size: int, chain: int,
) -> Settled:  # fmt: skip
    require(tokens.dim() == 2 and eos_ids.dim() == 1, lambda: "tokens must be [B, T], eos_ids [E]")
    batch, width = tokens.shape
    for name, values in (("window", window), ("start", start), ("num_forced", num_forced)):
        check_batch(name, values, batch)
    wide = (batch, width if shifted else width + 1)
    shapes = ((batch, width), (batch,), wide, wide, (batch,), (batch,), (batch,))
    ahead = [tokens.new_empty(batch, 1) for _ in range(chain)]
    return *(tokens.new_empty(shape) for shape in shapes), ahead  # type: ignore[return-value]


def check_batch(name: str, values: Tensor, batch: int) -> None:
    """Raise ``ValueError`` unless ``values`` has a row for each sequence."""
    require(values.shape[0] == batch, lambda: f"{name} must have one row per sequence, {batch}, not {values.shape[0]}")


register("row_positions", cpu=row_positions_reference, cuda=_row_positions, fake=_row_positions_fake)
register("take_rows", cpu=take_rows_reference, cuda=_take_rows, fake=_take_rows_fake)
register("expand_rows", cpu=expand_rows_reference, cuda=_expand_rows, fake=_expand_rows_fake)
register("settle", cpu=settle_reference, cuda=_settle, fake=_settle_fake)
