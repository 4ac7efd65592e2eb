"""A block drafter on a GPU: its attention at published shapes, and a random head on tiny-math, bit for bit.

Tokens are those of plain decoding whatever a drafter proposes. So what it proposes is looked at, too: the bits of a
sequence's logits must not depend on the batch that it is in.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import specgraph
from specgraph import SpeculativeDecoder
from specgraph.bench.models import random_head
from specgraph.config.load import load_config
from specgraph.kernels.attention.paged import Tiling
from specgraph.kernels.state import buffers_of
from tests.gpu.capture import no_synchronisation
from tests.gpu.test_bitwise_gpu import MODELS, assert_same, plain, prompts, run
from tests.kernels.attention.test_block import Case, assert_near

SHAPE: dict[str, Any] = {
    "dtype": torch.bfloat16, "heads": 32, "groups": 8, "dim": 128, "value_dim": 128, "block_size": 16, "rotary": True,
}  # fmt: skip
DEFAULT = Tiling()


@pytest.mark.parametrize(
    ("starts", "rows", "changes", "options"),
    [
        ((128,), 4, {}, {}),
        ((2000, 700, 255, 256, 0), 8, {}, {}),
        ((1000, 5), 16, {}, {"causal": True}),
        ((1500, 20), 8, {}, {"window": 300}),
        ((1500, 20), 8, {}, {"window": 300, "causal": True, "anchored": True}),
        ((700, 3), 16, {"heads": 16, "groups": 16, "dim": 64, "value_dim": 64}, {}),
        ((300, 30), 8, {"heads": 8, "groups": 4, "dtype": torch.float32}, {}),
    ],
)
def test_a_block_equals_float64_at_published_shapes(
    starts: tuple[int, ...], rows: int, changes: Any, options: dict[str, Any]
) -> None:
    case = Case(starts, rows, **{**SHAPE, **changes})
    assert_near(case.run(tiling=DEFAULT, **options), case.expected(**options))


@pytest.mark.parametrize("options", [{}, {"window": 200}], ids=["full", "window"])
def test_blocks_of_every_batch_size_and_division_have_the_same_bits(options: dict[str, Any]) -> None:
    lengths = random.Random(0)
    case = Case(tuple(lengths.randrange(900) for _ in range(32)), 8, **SHAPE)
    wanted = case.run(tiling=DEFAULT, **options)
    for of in (0, 17, 31):
        assert torch.equal(case.run(tiling=DEFAULT, of=of, **options)[0], wanted[of]), of
    changes = (
        {"programs": 1},
        {"programs": 3},
        {"block_queries": 16, "programs": 8},
        {"block_queries": 32, "programs": 2},
    )
    for change in changes:
        assert torch.equal(case.run(tiling=dataclasses.replace(DEFAULT, **change), **options), wanted), change


def decoder(k: int, kind: str = "dflash") -> SpeculativeDecoder:
    model = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.bfloat16).cuda()
    config = {"draft": {"kind": kind, "num_speculative_tokens": k}, "debug": {"self_check": False}}
    return specgraph.compile_speculative(model, config, draft=random_head(model, load_config(config).draft))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("k", "count", "batch"), [(3, 50, 50), (7, 33, 33), (15, 16, 5), (1, 3, 1)])
def test_speculation_changes_no_bit(k: int, count: int, batch: int, temperature: float) -> None:
    assert_same(run(decoder(k), count, batch, temperature), plain(temperature))


@pytest.mark.parametrize(("k", "count", "batch"), [(3, 50, 50), (7, 16, 5)])
def test_speculation_with_candidates_changes_no_bit(k: int, count: int, batch: int) -> None:
    assert_same(run(decoder(k, "dflash2"), count, batch, 1.0), plain(1.0))


@torch.no_grad()
def _logits(compiled: SpeculativeDecoder, hidden: Tensor, lengths: Tensor, anchors: Tensor) -> Tensor:
    """Logits ``[B, K, V]`` of blocks behind contexts of ``lengths`` ``[B]`` rows of ``hidden`` ``[B, T, H]``."""
    program = compiled._program
    batch, width, k = hidden.shape[0], hidden.shape[1], program.drafter.num_speculative_tokens
    pages = -(-(width + k + 1) // program.block_size)
    specs, sizes = buffers_of(program.inputs["draft_caches"]), {"N": batch * pages, "B": batch}
    table = torch.arange(batch * pages, device="cuda").view(batch, pages)
    shared: dict[str, Any] = {"block_table": table, "caches": tuple(b.allocate(sizes, "cuda") for b in specs)}
    rows, limit = torch.arange(width, device="cuda").expand(batch, -1).contiguous(), torch.full_like(lengths, 10_000)
    program.modules["draft_context"](hidden=hidden, positions=rows, num_rows=lengths, max_length=limit, **shared)
    tokens = torch.cat([anchors.unsqueeze(1), torch.full((batch, k), 5, device="cuda")], 1)
    positions = lengths.unsqueeze(1) + torch.arange(k + 1, device="cuda")
    logits: Tensor = program.modules["draft"](tokens=tokens, positions=positions, **shared)
    return logits


@pytest.mark.parametrize("k", [3, 7, 15])
def test_what_a_sequence_drafts_does_not_depend_on_its_batch(k: int) -> None:
    compiled = decoder(k)
    torch.manual_seed(0)
    size = compiled.stages["trace"].target.hidden_size
    hidden = torch.randn(8, 600, size, device="cuda", dtype=torch.bfloat16)
    lengths, anchors = torch.tensor([0, 600, 3, 255, 256, 257, 64, 512], device="cuda"), torch.arange(8, device="cuda")
    together = _logits(compiled, hidden, lengths, anchors + 9)
    assert bool(together.isfinite().all()) and len(together.argmax(-1).unique()) > 1
    for row in range(8):
        own = slice(row, row + 1)
        alone = _logits(compiled, hidden[own, : max(1, int(lengths[row]))], lengths[own], anchors[own] + 9)
        assert torch.equal(alone[0], together[row]), row


def test_the_steady_loop_waits_for_nothing_but_its_results() -> None:
    compiled, some = decoder(7), prompts()[:4]
    expected = compiled.generate(some, max_new_tokens=32, eos_token_id=[]).new_tokens
    with no_synchronisation():
        found = compiled.generate(some, max_new_tokens=32, eos_token_id=[]).new_tokens
    assert all(map(torch.equal, found, expected))
