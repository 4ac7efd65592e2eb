"""Times single kernels with the shapes of a target, and the functions of libraries that compute the same.

    python -m benchmarks.kernels target=llama-3-8b-shape [cache.prefill_chunk=512] [json=FILE] [plot=FILE]

``prompt_length`` is the length of the context, and ``steps`` are repetitions.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from benchmarks.case import Case, Place
from benchmarks.command import model_config_of, place_of, read_options
from benchmarks.recurrent import RecurrentCall, prompt_case, recurrent_calls, step_case
from benchmarks.sizes import Experts, Sizes
from specgraph.bench.config import BenchConfig
from specgraph.bench.report import Cell, Row, about_repeats, about_run, finish, gather, plot_ratios
from specgraph.bench.run import dtype_on
from specgraph.bench.timing import Call, measure_bandwidth, median_seconds
from specgraph.config.drafters import drafter_options
from specgraph.kernels import catalogue  # noqa: F401  (registers the ops)
from specgraph.kernels.ops import Op
from specgraph.kernels.step import ngram
from specgraph.kernels.step.suffix import SUFFIX_LOOKUP

BLOCK_SIZE = 16
ROTATED_BYTES = 2**28
"""How much memory the calls of one measurement read in all, as far as few calls suffice. It is several times the size
of an L2 cache, so that no call finds its weights there."""
MAX_COPIES = 64
LIBRARY_FORM = "library form"
"""The name in tables of PyTorch's functions for a linear and what lowering joins to it."""
AFTER_NORM = ("qkv", "delta_rule_in", "gate_up")
BEFORE_NORM = ("o", "delta_rule_out", "down")
"""The names of the linears (:attr:`~benchmarks.sizes.Sizes.linears`) that lowering joins with a norm."""
_VERIFIED = ((0.0, None), (0.8, None), (0.8, 0.9))
"""The pairs of temperature and top-p with which ``verify`` is timed."""


@triton.jit  # type: ignore[untyped-decorator]
def _maxima_kernel(rows, maxima, width, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute the maximum of one split of one row. The grid is (splits, rows)."""
    row, split = tl.program_id(1).to(tl.int64), tl.program_id(0)
    place = split * SPLIT + tl.arange(0, SPLIT)
    values = tl.load(rows + row * width + place, mask=place < width, other=-float("inf"))
    tl.store(maxima + row * tl.num_programs(0) + split, tl.max(values.to(tl.float32), 0))


def split_maxima(rows: Tensor, split: int, num_warps: int) -> Tensor:
    """The maxima ``[R, ceil(V / split)]`` of the splits of rows ``[R, V]``, in float32.

    Nothing that reads all logits can compute less.
    """
    count, width = rows.shape
    maxima = rows.new_empty((count, triton.cdiv(width, split)), dtype=torch.float32)
    _maxima_kernel[(maxima.shape[1], count)](rows, maxima, width, SPLIT=split, num_warps=num_warps)
    return maxima


def bench_kernels(
    sizes: Sizes, options: BenchConfig, device: torch.device, dtype: torch.dtype, bandwidth: float,
    recurrent: Sequence[RecurrentCall] = (),
) -> Iterator[Row]:  # fmt: skip
    """Measure every kernel at every shape, one row for each."""
    for case in cases(sizes, options, device, dtype, recurrent):
        yield measure(case, options, device, bandwidth)


def measure(case: Case, options: BenchConfig, device: torch.device, bandwidth: float) -> Row:
    """Time one case and the fastest of its libraries, which compute the same or a part of it.

    The row has the median time of a call, the bytes that it must read and write, the time that moving these takes at
    the measured bandwidth, and the ratio of the time to this limit. The library is None if there is none.
    """
    copies = min(MAX_COPIES, max(1, math.ceil(ROTATED_BYTES / case.bytes))) if device.type == "cuda" else 1
    made = [case.make() for _ in range(copies)]
    time_of = functools.partial(median_seconds, device, repeats=options.steps, warmup=options.warmup)
    ours = time_of([call for call, _ in made])
    libraries: dict[str, float] = {}
    for name in made[0][1]:
        with contextlib.suppress(RuntimeError):  # a library that does not support this case is left out
            libraries[name] = time_of([others[name] for _, others in made])
    best = min(libraries, key=libraries.__getitem__, default=None)
    limit = case.bytes / bandwidth
    library_us = None if best is None else 1e6 * libraries[best]
    return Row(
        f"{case.kernel}, {case.shape}",
        f"{1e6 * ours:.2f} us",
        {
            "kernel": Cell(case.kernel, "kernel"),
            "shape": Cell(case.shape, "shape"),
            "us": Cell(1e6 * ours, "us", ".2f"),
            "bytes": Cell(case.bytes, "bytes", ","),
            "limit_us": Cell(1e6 * limit, "limit us", ".2f"),
            "ratio": Cell(ours / limit, "us/limit", ".2f"),
            "library_us": Cell(library_us, "library us", ".2f"),
            "library": Cell(best, "library"),
        },
    )


def cases(
    sizes: Sizes, options: BenchConfig, device: torch.device, dtype: torch.dtype,
    recurrent: Sequence[RecurrentCall] = (),
) -> Iterator[Case]:  # fmt: skip
    """The cases that are measured.

    These are linears, experts and norms for each number of rows; attention, the ``recurrent`` calls of the target,
    verification and prompt lookup for each batch size and K; and a chunk of a prompt, which has ``cache.prefill_chunk``
    rows and follows the context.
    """
    shapes = [(batch, k + 1) for batch in options.batches for k in [0, *options.counts]]
    place, chunk, linears = Place(device, dtype), options.cache.prefill_chunk, sizes.linears
    decoded = {batch * width for batch, width in shapes}
    for rows in sorted({*decoded, chunk}):
        # Only the last rows of a chunk go through the vocabulary projection.
        named = {name: size for name, size in linears.items() if rows in decoded or name != "lm_head"}
        yield from (_linear(place, name, *size, rows) for name, size in named.items())
        yield from (_linear_after_norm(place, n, *linears[n], rows) for n in AFTER_NORM if n in linears)
        yield from (_linear_before_norm(place, n, *linears[n], rows) for n in BEFORE_NORM if n in linears)
        if sizes.experts:
            width = sizes.experts.intermediate
            yield _expert_linear(place, "gate_up", sizes.experts, sizes.hidden, 2 * width, rows)
            yield _expert_linear(place, "down", sizes.experts, width, sizes.hidden, rows)
        yield _norm(place, sizes.hidden, rows)
    for batch, width in [*shapes, (1, chunk)] if sizes.heads else []:
        yield _attention(place, sizes, batch, width, options.prompt_length)
    for call in recurrent:
        yield from (step_case(call, batch, width, device) for batch, width in shapes)
        yield prompt_case(call, chunk, device)
    for batch, width in shapes:
        if width > 1:
            yield from (_verify(place, sizes.vocab, batch, width, *how) for how in _VERIFIED)
            yield _record_tokens(place, batch, width + 1, options.prompt_length)
            yield _lookup(place, options, "ngram", ngram.NGRAM_LOOKUP, batch, width - 1)
            yield _lookup(place, options, "suffix", SUFFIX_LOOKUP, batch, width - 1)


def _linear(place: Place, name: str, inputs: int, outputs: int, rows: int) -> Case:
    """``[rows, inputs] @ [outputs, inputs]^T``, compared with PyTorch's linear, which is cuBLAS on a GPU."""

    def make() -> tuple[Call, dict[str, Call]]:
        x, weight = place.random(1, rows, inputs), place.random(outputs, inputs, scale=inputs**-0.5)
        return (
            lambda: torch.ops.specgraph.linear(x, weight),
            {LIBRARY_FORM: functools.partial(functional.linear, x, weight)},
        )

    moved = place.size(outputs * inputs, rows * inputs, rows * outputs)
    return Case("linear", f"{name} {outputs}x{inputs}, {rows} rows", moved, make)


def _linear_after_norm(place: Place, name: str, inputs: int, outputs: int, rows: int) -> Case:
    """qkv or gate/up as in a lowered step: the linear scales by the norm before it, and gate/up applies the gate."""
    gated = name == "gate_up"

    def make() -> tuple[Call, dict[str, Call]]:
        x, scale = place.random(1, rows, inputs), place.random(inputs)
        weight = place.random(outputs, inputs, scale=inputs**-0.5)

        def separate() -> Tensor:
            out = functional.linear(functional.rms_norm(x, (inputs,), scale, 1e-5), weight)
            gate, up = out.chunk(2, dim=-1)
            return functional.silu(gate) * up if gated else out

        weighted, sum_sq = torch.ops.specgraph.norm_parts(x, scale)
        options: dict[str, Any] = {"norm_eps": 1e-5, "activation": "silu_mul" if gated else "none"}
        ours = functools.partial(torch.ops.specgraph.linear, weighted, weight, sum_sq=sum_sq, **options)
        return ours, {LIBRARY_FORM: separate}

    width = outputs // 2 if gated else outputs
    moved = place.size(outputs * inputs, rows * inputs, rows * width)
    what = "norm, silu" if gated else "norm"
    return Case("linear", f"{name} with {what}, {outputs}x{inputs}, {rows} rows", moved, make)


def _linear_before_norm(place: Place, name: str, inputs: int, outputs: int, rows: int) -> Case:
    """o or down as in a lowered step: the linear adds the residual and computes the parts of the norm after it."""

    def make() -> tuple[Call, dict[str, Call]]:
        x, residual, scale = place.random(1, rows, inputs), place.random(1, rows, outputs), place.random(outputs)
        weight = place.random(outputs, inputs, scale=inputs**-0.5)

        def separate() -> Tensor:
            out = functional.linear(x, weight) + residual
            functional.rms_norm(out, (outputs,), scale, 1e-5)
            return out

        ours: Call = lambda: torch.ops.specgraph.linear_norm(x, weight, scale, None, residual)[0]  # noqa: E731
        return ours, {LIBRARY_FORM: separate}

    moved = place.size(outputs * inputs, rows * inputs, outputs, 3 * rows * outputs)
    return Case("linear", f"{name} with residual, next norm, {outputs}x{inputs}, {rows} rows", moved, make)


def _grouped_product(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """The rows ``x`` ``[S, I]`` times the experts ``ids`` of ``weight`` ``[E, O, I]``, by PyTorch's grouped product.

    That product wants the rows sorted by expert, so they are gathered before it and put back after it.
    """
    sorted_ids, order = ids.sort()
    every = torch.arange(weight.shape[0], device=x.device)
    ends = torch.searchsorted(sorted_ids, every, right=True, out_int32=True)
    product = functional.grouped_mm(x[order], weight.mT, offs=ends)
    return torch.empty_like(product).index_copy_(0, order, product)


def _expert_linear(place: Place, name: str, experts: Experts, inputs: int, outputs: int, rows: int) -> Case:
    """A product with the experts of each row, drawn with equal chances, compared with PyTorch's ``grouped_mm``."""
    drawn = torch.rand(rows, experts.count, generator=torch.Generator().manual_seed(0))
    chosen = drawn.topk(experts.per_token).indices.flatten()
    met, count = len(set(chosen.tolist())), len(chosen)

    def make() -> tuple[Call, dict[str, Call]]:
        x, ids = place.random(count, inputs), chosen.to(place.device)
        weight = place.random(experts.count, outputs, inputs, scale=inputs**-0.5)
        ours: Call = lambda: torch.ops.specgraph.expert_linear(x, weight, None, ids)  # noqa: E731
        return ours, {LIBRARY_FORM: functools.partial(_grouped_product, x, weight, ids)}

    moved = place.size(met * outputs * inputs, count * inputs, count * outputs)
    shape = f"{name} {outputs}x{inputs}, {rows} rows, {experts.per_token} of {experts.count} experts, {met} met"
    return Case("expert_linear", shape, moved, make)


def _norm(place: Place, width: int, rows: int) -> Case:
    def make() -> tuple[Call, dict[str, Call]]:
        x, weight = place.random(1, rows, width), place.random(width)
        libraries: dict[str, Call] = {"torch rms_norm": lambda: functional.rms_norm(x, (width,), weight, 1e-5)}
        flashinfer = _flashinfer(place)
        if flashinfer is not None:
            flat = x.view(rows, width)
            libraries["flashinfer"] = lambda: flashinfer.rmsnorm(flat, weight, 1e-5)
        return lambda: torch.ops.specgraph.rms_norm(x, weight, eps=1e-5), libraries

    return Case("rms_norm", f"{width} wide, {rows} rows", place.size(2 * rows * width, width), make)


def _attention(place: Place, sizes: Sizes, batch: int, rows: int, context: int) -> Case:
    """``rows`` new rows of each sequence after ``context`` cached ones. Libraries read dense keys and values."""
    length = context + rows
    heads, groups, dim = sizes.heads, sizes.kv_heads, sizes.head_dim

    def make() -> tuple[Call, dict[str, Call]]:
        q = place.random(batch, heads, rows, dim)
        k, v = (place.random(batch, groups, rows, dim) for _ in range(2))
        pages = -(-length // BLOCK_SIZE)
        caches = [place.random(batch * pages, BLOCK_SIZE, groups, dim) for _ in range(2)]
        table = torch.randperm(batch * pages, device=place.device).view(batch, pages)
        positions = torch.arange(context, length, device=place.device).expand(batch, -1).contiguous()
        slots = table.gather(1, positions // BLOCK_SIZE) * BLOCK_SIZE + positions % BLOCK_SIZE
        keys, values = (place.random(batch, groups, length, dim) for _ in range(2))
        seen = torch.arange(length, device=place.device) <= positions[:1, :, None]

        def ours() -> Tensor:
            out: Tensor = torch.ops.specgraph.paged_attention(
                q, k, v, *caches, slots, table, positions, scale=dim**-0.5
            )
            return out

        dense = functools.partial(functional.scaled_dot_product_attention, q, keys, values, enable_gqa=True)
        # PyTorch's faster kernels take no mask tensor. One row needs no mask, and several can be declared causal.
        libraries: dict[str, Call] = {"torch sdpa": dense if rows == 1 else functools.partial(dense, seen[:, None])}
        if rows > 1:
            libraries["torch sdpa, causal"] = functools.partial(dense, causal_lower_right(rows, length))
        flashinfer = _flashinfer(place)
        if flashinfer is not None and batch == 1:
            nhd = [x[0].transpose(0, 1).contiguous() for x in (q, keys, values)]
            libraries["flashinfer"] = lambda: flashinfer.single_prefill_with_kv_cache(*nhd, causal=True)
        return ours, libraries

    # The context and the queries are read, the new keys and values are read and written, and the output is written.
    moved = place.size(2 * batch * groups * (context + 2 * rows) * dim, 2 * batch * rows * heads * dim)
    return Case("paged_attention", f"batch {batch}, {rows} rows, context {context}", moved, make)


def _verify(place: Place, vocab: int, batch: int, rows: int, temperature: float, top_p: float | None) -> Case:
    """Verification of drafts that have no logits, compared with the fastest of several passes that only find maxima.

    Such a pass reads the same logits and computes the least that is possible.
    """

    def make() -> tuple[Call, dict[str, Call]]:
        logits = place.random(batch, rows, vocab, scale=2.0)
        drafts = logits.argmax(-1)[:, :-1].contiguous()  # likely tokens, so that some are accepted
        heat, seeds = place.full([batch], temperature, torch.float32), torch.arange(batch, device=place.device)
        kept = None if top_p is None else place.full([batch], top_p, torch.float32)
        positions = torch.arange(100, 100 + rows, device=place.device).expand(batch, -1).contiguous()
        num_rows, num_forced = place.full([batch], rows), place.full([batch], 0)

        def ours() -> Any:
            return torch.ops.specgraph.verify(
                logits, drafts, None, heat, seeds, positions, None, kept, None, num_rows, num_forced, None,
                rule="strict",
            )  # fmt: skip

        libraries: dict[str, Call] = {"torch amax": lambda: logits.amax(-1)}
        if place.device.type == "cuda":
            for split, warps in ((2048, 4), (4096, 4), (4096, 8), (8192, 8)):
                libraries[f"maxima of {split}, {warps} warps"] = functools.partial(
                    split_maxima, logits.view(-1, vocab), split, warps
                )
        return ours, libraries

    how = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    how += "" if top_p is None else f", top-p {top_p:g}"
    return Case(
        "verify", f"batch {batch}, K = {rows - 1}, {vocab} tokens, {how}", place.size(batch * rows * vocab), make
    )


def _record_tokens(place: Place, batch: int, count: int, context: int) -> Case:
    """Recording the tokens of a step after ``context`` tokens of history, compared with plain PyTorch."""

    def make() -> tuple[Call, dict[str, Call]]:
        history, num_rows = place.full([batch, context + count], 7), place.full([batch], count)
        tokens = torch.randint(1000, (batch, count), device=place.device)
        positions = torch.arange(context, context + count, device=place.device).repeat(batch, 1)
        given = (history, None, tokens, positions, num_rows)
        ours: Call = lambda: torch.ops.specgraph.record_tokens(*given)  # noqa: E731
        return ours, {"torch, separate": lambda: ngram.RECORD_TOKENS.form("reference")(*given)}

    # Tokens and positions are read and the history is written, 8 bytes each.
    return Case("record_tokens", f"batch {batch}, {count} tokens", 3 * 8 * batch * count, make)


def _lookup(place: Place, options: BenchConfig, kind: str, op: Op[..., Any], batch: int, k: int) -> Case:
    """A lookup in the history as the drafter ``kind`` makes it.

    As in text, a few positions in 1,000 hold the token that is looked up.
    """
    length, draft = options.prompt_length, drafter_options(replace(options.draft, kind=kind))
    keys = [field.name for field in op.fields][4:]  # behind the history, the rows, the length and K

    def make() -> tuple[Call, dict[str, Call]]:
        history = torch.randint(1000, (batch, length), device=place.device)
        given = (history, None, place.full([batch], length), k, *(getattr(draft, key) for key in keys))
        ours: Call = lambda: getattr(torch.ops.specgraph, op.name)(*given)  # noqa: E731
        return ours, {}

    return Case(op.name, f"batch {batch}, K = {k}, {length} tokens", 8 * batch * (length + k), make)


def _flashinfer(place: Place) -> Any:
    """FlashInfer, if it is installed and supports this device; else None."""
    if place.device.type != "cuda" or place.dtype not in (torch.bfloat16, torch.float16):
        return None
    try:
        return importlib.import_module("flashinfer")
    except ImportError:
        return None


def main(words: Sequence[str]) -> list[Row]:
    """Measure and print every kernel."""
    _, options = read_options(words, BenchConfig, {"what": "kernels"})
    config, (device, name) = model_config_of(options), place_of(options)
    dtype = dtype_on(name, device)
    recurrent, bandwidth = recurrent_calls(config, dtype), measure_bandwidth(device)
    rows = bench_kernels(Sizes.of(config), options, device, dtype, bandwidth, recurrent)
    found = gather(rows)
    finish(options, about_run(options, device, dtype, bandwidth) | about_repeats(options), found, plot_ratios)
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
